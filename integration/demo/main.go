// Command demo shows vhostd at work: it boots a Linux guest under QEMU whose network is a tap behind vhostd, pings, moves data both
// ways, prints the daemon's counters and removes everything again. `make demo` runs it; it needs root.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
)

const (
	hostIP   = "10.77.0.1"
	guestIP  = "10.77.0.2"
	mtu      = 9000
	mebibyte = 1 << 20
)

func main() {
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "demo: needs root, for a network namespace and a tap in it")
		os.Exit(2)
	}
	folder, err := os.MkdirTemp("", "vhostd-demo")
	if err != nil {
		fail(folder, err)
	}
	// The children die with this process; only the folder would stay.
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, os.Interrupt, syscall.SIGTERM)
	go func() {
		<-interrupts
		fail(folder, fmt.Errorf("interrupted"))
	}()
	start := time.Now()
	if err := show(folder); err != nil {
		fail(folder, err)
	}
	os.RemoveAll(folder)
	fmt.Printf("\nEverything is stopped and removed again, after %.0f s.\n", time.Since(start).Seconds())
}

func fail(folder string, err error) {
	os.RemoveAll(folder)
	fmt.Fprintln(os.Stderr, "demo:", err)
	os.Exit(1)
}

func show(folder string) error {
	ns, err := rig.NewNamespace()
	if err != nil {
		return err
	}
	defer ns.Close()
	fmt.Println("Packing a guest: Debian's kernel and a small init of our own.")
	image, err := rig.BuildImage(folder)
	if err != nil {
		return err
	}
	daemon, err := rig.StartDaemon(ns, folder, "tap,name=tap0", "--mtu", fmt.Sprint(mtu))
	if err != nil {
		return err
	}
	defer daemon.Kill()
	if err := ns.ConfigureTap("tap0", hostIP+"/24", mtu, 5*time.Second); err != nil {
		return err
	}
	fmt.Printf("vhostd runs in a network namespace of its own (pid %d), with tap0 as %s.\n", daemon.PID(), hostIP)
	ends, err := bootGuest(folder, ns, image, daemon.Socket)
	if err != nil {
		return err
	}
	defer ends.VM.Close()
	if err := traffic(ends); err != nil {
		return err
	}
	if err := counters(daemon); err != nil {
		return err
	}
	if err := ends.VM.Quit(); err != nil {
		return err
	}
	return daemon.Stop()
}

// bootGuest starts QEMU and shows the time that passes until the guest answers.
func bootGuest(folder string, ns *rig.Namespace, image rig.Image, socket string) (rig.Ends, error) {
	vm, err := rig.StartVM(folder, image, rig.VMConfig{Socket: socket, Device: fmt.Sprintf("host_mtu=%d", mtu)})
	ends := rig.Ends{NS: ns, VM: vm, HostIP: hostIP, GuestIP: guestIP}
	if err != nil {
		return ends, err
	}
	fmt.Printf("QEMU runs (pid %d) and is connected to %s. The guest boots, emulated ", vm.PID(), socket)
	quit := make(chan struct{})
	go func() {
		for {
			select {
			case <-quit:
				return
			case <-time.After(time.Second):
				fmt.Print(".")
			}
		}
	}()
	event, err := vm.Boot()
	close(quit)
	fmt.Println()
	if err != nil {
		return ends, err
	}
	link, err := vm.SetUp(guestIP + "/24")
	if err != nil {
		return ends, err
	}
	fmt.Printf("Linux %s is up after %.1f s: eth0 %s, address %s, MTU %d, link up: %v.\n\n", event.Kernel, event.Uptime, link.MAC, guestIP, link.MTU, link.Carrier)
	return ends, nil
}

func traffic(ends rig.Ends) error {
	for _, size := range []int{56, 1472, 8972} {
		ping, err := ends.Ping(size, 5)
		if err != nil {
			return err
		}
		if ping.Received != ping.Sent {
			return fmt.Errorf("ping with %d bytes: %d of %d answers", size, ping.Received, ping.Sent)
		}
		fmt.Printf("ping %4d bytes      %d of %d answered, %v on average\n", size, ping.Received, ping.Sent, ping.MeanRTT.Round(time.Microsecond))
	}
	for _, toGuest := range []bool{false, true} {
		const bytes = 64 * mebibyte
		sent, received, err := ends.Stream(bytes, 1, toGuest, time.Minute)
		if err != nil {
			return err
		}
		if sent.SHA256 != received.SHA256 || received.Bytes != bytes {
			return fmt.Errorf("TCP: sent %+v, received %+v", sent, received)
		}
		direction := "guest to host"
		if toGuest {
			direction = "host to guest"
		}
		fmt.Printf("TCP %s   64 MiB in %.1f s, %.0f Mbit/s, SHA-256 equal\n", direction, received.Took.Seconds(), guest.Rate(bytes, received.Took))
	}
	fmt.Println("(The emulated processor, making and digesting the bytes, is what limits these.)")
	return nil
}

// counters prints what the command line shows of the daemon.
func counters(daemon *rig.Daemon) error {
	binary, err := rig.Binary()
	if err != nil {
		return err
	}
	args := []string{"stats", "--control", daemon.Control}
	fmt.Printf("\n$ vhostd %s\n", strings.Join(args, " "))
	table, err := exec.Command(binary, args...).CombinedOutput()
	fmt.Print(string(table))
	return err
}
