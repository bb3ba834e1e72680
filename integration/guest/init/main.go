// Command init is the only program of a test guest: it runs as process 1, loads the virtio modules and serves package guest's
// commands on a virtio-serial port. It never ends; a failure is printed on the console and the guest is powered off.
package main

import (
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/guest"
)

func main() {
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "init: this is a guest's init, it does nothing on a running system")
		os.Exit(2)
	}
	err := run()
	fmt.Println("init:", err)
	time.Sleep(time.Second) // the console is a serial line
	fmt.Println("init: power off:", unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF))
}

func run() error {
	if err := mountAll(); err != nil {
		return err
	}
	missing := loadModules()
	port, err := openPort(guest.Port, 20*time.Second)
	if err != nil {
		return fmt.Errorf("%w (modules: %s)", err, missing)
	}
	if err := setLoopbackUp(); err != nil {
		return err
	}
	return serve(port, missing)
}

func mountAll() error {
	mounts := []struct{ kind, folder, options string }{
		{"devtmpfs", "/dev", ""},
		{"proc", "/proc", ""},
		{"sysfs", "/sys", ""},
		{"tmpfs", "/tmp", "size=4g"}, // memory may be plugged in
	}
	for _, m := range mounts {
		if err := unix.Mount(m.kind, m.folder, m.kind, 0, m.options); err != nil {
			return fmt.Errorf("mount %s: %w", m.folder, err)
		}
	}
	return nil
}
