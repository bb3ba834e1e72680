package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
)

const (
	tapName  = "tap0"
	hostIP   = "10.77.0.1"
	guestIP  = "10.77.0.2"
	hostCIDR = hostIP + "/24"
	slow     = 2 * time.Minute // for a transfer on a machine that is busy with other tests
)

var shared struct {
	folder string
	image  func() (rig.Image, error)
}

func TestMain(m *testing.M) {
	folder, err := os.MkdirTemp("", "vhostd-it")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	shared.folder = folder
	shared.image = sync.OnceValues(func() (rig.Image, error) { return rig.BuildImage(folder) })
	code := testmain.Run(m)
	os.RemoveAll(folder)
	os.Exit(code)
}

// env is a namespace with a daemon in it and at most one guest at a time.
type env struct {
	t      *testing.T
	folder string
	mtu    int
	ns     *rig.Namespace
	daemon *rig.Daemon
	flags  []string
}

// newEnv starts vhostd with a tap of the given MTU in a namespace of its own.
func newEnv(t *testing.T, mtu int, flags ...string) *env {
	t.Helper()
	testmain.NeedTun(t)
	folder, err := os.MkdirTemp(shared.folder, "env")
	if err != nil {
		t.Fatal(err)
	}
	ns, err := rig.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ns.Close)
	e := &env{t: t, folder: folder, mtu: mtu, ns: ns, flags: append([]string{"--mtu", fmt.Sprint(mtu)}, flags...)}
	e.startDaemon()
	t.Cleanup(func() {
		e.daemon.Kill()
		if t.Failed() {
			t.Logf("output of vhostd:\n%s", e.daemon.Output())
		}
	})
	return e
}

// startDaemon starts vhostd, again on the same socket, and configures its tap.
func (e *env) startDaemon() {
	e.t.Helper()
	var err error
	if e.daemon, err = rig.StartDaemon(e.ns, e.folder, "tap,name="+tapName, e.flags...); err != nil {
		e.t.Fatal(err)
	}
	if err := e.ns.ConfigureTap(tapName, hostCIDR, e.mtu, 5*time.Second); err != nil {
		e.t.Fatalf("%v; output of vhostd:\n%s", err, e.daemon.Output())
	}
}

// stopDaemon stops vhostd in order and checks that nothing is left.
func (e *env) stopDaemon() {
	e.t.Helper()
	if err := e.daemon.Stop(); err != nil {
		e.t.Error(err)
	}
	if e.ns.HasLink(tapName) {
		e.t.Errorf("vhostd left the tap %s behind", tapName)
	}
}

// startVM starts a guest without waiting for its boot.
func (e *env) startVM(t *testing.T, cfg rig.VMConfig) *rig.VM {
	t.Helper()
	image, err := shared.image()
	if err != nil {
		testmain.Skip(t, "%v", err)
	}
	cfg.Socket = e.daemon.Socket
	vm, err := rig.StartVM(e.folder, image, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		vm.Close()
		if t.Failed() {
			t.Logf("console:\n%s", vm.Output())
		}
	})
	return vm
}

// boot starts a guest and sets its interface up.
func (e *env) boot(t *testing.T, cfg rig.VMConfig) rig.Ends {
	t.Helper()
	ends := rig.Ends{NS: e.ns, VM: e.startVM(t, cfg), HostIP: hostIP, GuestIP: guestIP}
	waitBoot(t, ends)
	return ends
}

// waitBoot waits for a boot, also a second one, and sets the interface up.
func waitBoot(t *testing.T, ends rig.Ends) guest.Link {
	t.Helper()
	start := time.Now()
	event, err := ends.VM.Boot()
	if err != nil {
		t.Fatal(err)
	}
	link, err := ends.VM.SetUp(guestIP + "/24")
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("guest with %s booted in %.1f s", event.Kernel, time.Since(start).Seconds())
	return link
}

// openFiles is the number of descriptors of a process, mappings the number of its mapped guest memory files.
func processUse(t *testing.T, pid int) (openFiles, mappings int) {
	t.Helper()
	folder := filepath.Join("/proc", fmt.Sprint(pid))
	files, err := os.ReadDir(filepath.Join(folder, "fd"))
	if err != nil {
		t.Fatal(err)
	}
	maps, err := os.ReadFile(filepath.Join(folder, "maps"))
	if err != nil {
		t.Fatal(err)
	}
	return len(files), countMemfd(string(maps))
}
