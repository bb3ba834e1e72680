package user

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/refs"

	"github.com/vhostd/vhostd/internal/testmain"
)

// Addresses of the test's host.
const (
	live4 = "192.0.2.1"
	live6 = "2001:db8::1"
	// Nothing answers behind these: packets vanish, or the host knows no way.
	silent4, silent6       = "100.64.0.99", "2001:db8:64::99"
	unreached4, unreached6 = "203.0.113.9", "2001:db8:dead::9"
)

// inSpace marks the process that runs in the network namespace of the tests.
const inSpace = "VHOSTD_TEST_USER_SPACE"

// TestMain runs the tests in a process of their own with a network namespace of its own: the host of the networks under test. Any thread
// may make sockets there.
func TestMain(m *testing.M) {
	flag.Parse()
	worker := flag.Lookup("test.fuzzworker")
	switch {
	case worker != nil && worker.Value.String() == "true":
		os.Exit(m.Run()) // fuzzing makes no sockets, and the processes speak over inherited pipes
	case os.Getenv(inSpace) == "":
		os.Exit(enterSpace())
	}
	if long() {
		// Flows and their servers have two each. Who may not raise the limit has fewer flows, and TestIdleFlows says how many.
		_ = unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1 << 16, Max: 1 << 16})
	}
	if err := makeHost(); err != nil {
		fmt.Fprintln(os.Stderr, "the host of the tests:", err)
		os.Exit(1)
	}
	refs.SetLeakMode(refs.LeaksPanic)
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("vhostd-arena"), testmain.Goroutines(), leakedPackets))
}

// leakedPackets is the stack's own check of its reference counts.
func leakedPackets() error {
	runtime.GC()
	refs.DoLeakCheck() // panics with what has leaked
	return nil
}

// long says whether the sizes of the cases themselves are wanted instead of small ones.
func long() bool { return os.Getenv("VHOSTD_LONG") == "1" }

// sized is the size of a case: short in every run, full with VHOSTD_LONG=1.
func sized[T any](short, full T) T {
	if long() {
		return full
	}
	return short
}

func enterSpace() int {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), inSpace+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	if os.Geteuid() != 0 {
		cmd.SysProcAttr.Cloneflags |= unix.CLONE_NEWUSER
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Geteuid(), Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: os.Getegid(), Size: 1}}
	}
	runtime.LockOSThread() // whose end would kill the child
	err := cmd.Run()
	var status *exec.ExitError
	switch {
	case errors.As(err, &status):
		return status.ExitCode()
	case err != nil:
		fmt.Fprintln(os.Stderr, "no network namespace for the tests:", err)
		return 1
	}
	return 0
}

// makeHost gives the namespace its addresses and routes.
func makeHost() error {
	if err := os.WriteFile("/proc/sys/net/ipv4/ping_group_range", []byte("0 2147483647"), 0); err != nil {
		return err
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	void := &netlink.Tuntap{LinkAttrs: netlink.LinkAttrs{Name: "void"}, Mode: netlink.TUNTAP_MODE_TUN} // without a reader
	if err := netlink.LinkAdd(void); err != nil {
		return err
	}
	for link, addrs := range map[netlink.Link][]string{
		lo:   {live4 + "/32", live6 + "/128"},
		void: {"100.64.0.1/24", "2001:db8:64::1/64"},
	} {
		if err := netlink.LinkSetUp(link); err != nil {
			return err
		}
		for _, text := range addrs {
			a, err := netlink.ParseAddr(text)
			if err != nil {
				return err
			}
			a.Flags = unix.IFA_F_NODAD
			if a.IP.To4() != nil {
				a.Flags = 0
			}
			if err := netlink.AddrAdd(link, a); err != nil {
				return fmt.Errorf("%s: %w", text, err)
			}
		}
	}
	for _, text := range []string{unreached4 + "/32", unreached6 + "/128"} {
		_, dst, err := net.ParseCIDR(text)
		if err != nil {
			return err
		}
		route := &netlink.Route{Dst: dst, Type: unix.RTN_UNREACHABLE}
		if dst.IP.To4() == nil {
			route.LinkIndex = lo.Attrs().Index
		}
		if err := netlink.RouteAdd(route); err != nil {
			return fmt.Errorf("%s: %w", text, err)
		}
	}
	return nil
}
