package tap

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/port/porttest"
)

func TestPersistentTap(t *testing.T) {
	s := newSpace(t)
	must(t, s.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}))
	for _, queues := range []int{1, 3} {
		opts := Options{Name: "keep" + strconv.Itoa(queues), Queues: queues, Persist: true, Bridge: "br0", MTU: 2000, Owner: "root", Group: "4"}
		p, err := s.newTap(opts)
		must(t, err)
		must(t, p.Close())
		before := s.find(t, opts.Name)
		if tap := before.(*netlink.Tuntap); tap.Owner != 0 || tap.Group != 4 || tap.NonPersist {
			t.Errorf("kept as %+v", tap)
		}
		again := s.tap(t, Options{Name: opts.Name, Queues: queues})
		after := s.find(t, opts.Name)
		if before.Attrs().Index != after.Attrs().Index || after.Attrs().MasterIndex == 0 || again.MTU() != 2000 {
			t.Errorf("attached as %+v, was %+v", after.Attrs(), before.Attrs())
		}
	}
}

// crashed is the environment variable that makes the test binary a daemon with three taps and a child, to be killed.
const crashed = "VHOSTD_TEST_CRASH"

func TestTAP05Crash(t *testing.T) {
	if os.Getenv(crashed) != "" {
		runUntilKilled(t)
		return
	}
	s := newSpace(t)
	for range 3 {
		child := startDaemon(t, s)
		for _, name := range []string{"lost1", "lost2", "kept"} {
			if !s.exists(name) {
				t.Fatalf("%s was not created", name)
			}
		}
		if _, err := s.newTap(Options{Name: "kept"}); !errors.Is(err, unix.EBUSY) {
			t.Errorf("the daemon's tap is busy: %v", err)
		}
		must(t, child.Process.Kill())
		_ = child.Wait() // "signal: killed"
		// The daemon's own child is still alive and must not keep the taps.
		if !porttest.Eventually(func() bool { return !s.exists("lost1") && !s.exists("lost2") }) {
			t.Fatal("a tap that is not persistent was left")
		}
		if !s.exists("kept") {
			t.Fatal("the persistent tap is gone")
		}
	}
	s.tap(t, Options{Name: "kept"})
	s.tap(t, Options{Name: "lost1"})
}

// startDaemon runs runUntilKilled in the namespace and returns when its taps exist.
func startDaemon(t *testing.T, s *space) *exec.Cmd {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^TestTAP05Crash$")
	cmd.Env = append(os.Environ(), crashed+"=1")
	out, err := cmd.StdoutPipe()
	must(t, err)
	s.do(t, cmd.Start) // the child starts in the namespace of the thread that starts it
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		var pid int
		if _, err := fmt.Sscanf(lines.Text(), "ready %d", &pid); err == nil {
			t.Cleanup(func() { _ = unix.Kill(pid, unix.SIGKILL) })
			return cmd
		}
		t.Log(lines.Text())
	}
	t.Fatal("the daemon did not start")
	return nil
}

func runUntilKilled(t *testing.T) {
	for _, opts := range []Options{{Name: "lost1"}, {Name: "lost2", Queues: 3}, {Name: "kept", Persist: true}} {
		if _, err := New(opts); err != nil {
			t.Fatal(err)
		}
	}
	sleeper := exec.Command("sleep", "60")
	must(t, sleeper.Start())
	fmt.Printf("ready %d\n", sleeper.Process.Pid)
	_ = sleeper.Wait()
}
