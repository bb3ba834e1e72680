package daemon

import (
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/internal/unixsock"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtionet"
)

func (r *rig) client(name, network string) config.GuestSpec {
	spec := r.spec(name, network)
	spec.Client = true
	return spec
}

// TestClientDialsAgain is RCN-03: the socket is absent, appears, goes and appears again.
func TestClientDialsAgain(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	if err := r.daemon.Add(r.client("vm1", "echo"), Source{}); err != nil {
		t.Fatal(err)
	}
	if g := r.guest("vm1"); g.State != StateConnecting {
		t.Errorf("state = %s, want %s", g.State, StateConnecting)
	}
	time.Sleep(300 * time.Millisecond) // several attempts fail
	for range 3 {
		l, err := frontend.Listen(r.path("vm1"))
		if err != nil {
			t.Fatal(err)
		}
		conn, err := l.Accept(2 * time.Second)
		if err != nil {
			t.Fatalf("not connected within two seconds: %v", err)
		}
		c := frontend.NewClient(conn, frontend.Options{})
		if err := c.Negotiate(); err != nil {
			t.Fatal(err)
		}
		if err := c.SetMemory(newMemory(t)); err != nil {
			t.Fatal(err)
		}
		echo(t, c)
		c.Close()
		l.Close()
		time.Sleep(100 * time.Millisecond)
	}
	if n := r.log.count("waiting for the front-end's socket"); n > 4 {
		t.Errorf("%d lines about waiting, want one for each time it began", n)
	}
	if err := r.daemon.Remove("vm1"); err != nil {
		t.Fatal(err)
	}
	l, err := frontend.Listen(r.path("vm1"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if conn, err := l.Accept(1500 * time.Millisecond); err == nil {
		conn.Close()
		t.Error("a removed guest dials")
	}
}

// TestClientDoesNotSpin: a peer that accepts and closes at once is not dialed in a busy loop.
func TestClientDoesNotSpin(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	l, err := frontend.Listen(r.path("vm1"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := r.daemon.Add(r.client("vm1", "null"), Source{}); err != nil {
		t.Fatal(err)
	}
	dials := 0
	for end := time.Now().Add(time.Second); time.Now().Before(end); {
		if conn, err := l.Accept(time.Until(end)); err == nil {
			dials++
			conn.Close()
		}
	}
	if dials > 12 {
		t.Errorf("%d dials in a second", dials)
	}
}

func TestSourceFromFD(t *testing.T) {
	if _, _, err := SourceFromFD(999); err == nil || !strings.Contains(err.Error(), "999 is not open") {
		t.Errorf("closed descriptor: %v", err)
	}
	f, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, _, err := SourceFromFD(int(f.Fd())); err == nil || !strings.Contains(err.Error(), "is not a socket") {
		t.Errorf("file: %v", err)
	}
	udp, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := SourceFromFD(udp); err == nil || !strings.Contains(err.Error(), "wanted a Unix stream socket") {
		t.Errorf("UDP: %v", err)
	}
}

// TestInheritedConnection serves one end of a socket pair, once.
func TestInheritedConnection(t *testing.T) {
	r := newRig(t)
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	from, _, err := SourceFromFD(fds[0])
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	from.Ended = func(err error) { ended <- err }
	if err := r.daemon.Add(r.spec("vm1", "echo"), from); err != nil {
		t.Fatal(err)
	}
	other := os.NewFile(uintptr(fds[1]), "peer")
	conn, err := net.FileConn(other)
	other.Close()
	if err != nil {
		t.Fatal(err)
	}
	c := frontend.NewClient(frontend.NewConn(conn.(*net.UnixConn)), frontend.Options{})
	if err := c.Negotiate(); err != nil {
		t.Fatal(err)
	}
	if err := c.SetMemory(newMemory(t)); err != nil {
		t.Fatal(err)
	}
	echo(t, c)
	c.Close()
	select {
	case err := <-ended:
		if err != nil {
			t.Errorf("ended with %v", err)
		}
	case <-time.After(2 * time.Second):
		t.Error("the end was not reported")
	}
}

// TestInheritedListener serves on a socket that somebody else made and leaves its file alone.
func TestInheritedListener(t *testing.T) {
	r := newRig(t)
	path := filepath.Join(r.dir, "vm1.sock")
	manager, err := unixsock.Listen(path, unixsock.Options{Mode: 0o600, UID: -1, GID: -1})
	if err != nil {
		t.Fatal(err)
	}
	defer manager.Close()
	f, err := manager.File()
	if err != nil {
		t.Fatal(err)
	}
	l, err := unixsock.FromFile(f)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.daemon.Add(r.spec("vm1", "echo"), Source{Listener: l}); err != nil {
		t.Fatal(err)
	}
	echo(t, r.connect("vm1"))
	if err := r.daemon.Remove("vm1"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the service manager's socket file is gone: %v", err)
	}
}

// downPort is a network that does not work.
type downPort struct{ port.Port }

func (downPort) Status() port.Status { return port.Status{Detail: "cable pulled"} }

// TestProblems is OPS-06: what does not work is named.
func TestProblems(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.add("vm1", "null")
	if p := r.daemon.Problems(); len(p) != 0 || !r.daemon.WorkersAlive() {
		t.Errorf("problems of a healthy daemon: %v", p)
	}
	g := r.daemon.list()[0]
	g.mu.Lock()
	g.port = downPort{g.port}
	g.mu.Unlock()
	if p := r.daemon.Problems(); len(p) != 1 || p[0] != "guest vm1: network null is down: cable pulled" {
		t.Errorf("problems = %v", p)
	}
	eventually(t, "one line about the network", func() bool { return r.log.count("network is down") == 1 })
	r.daemon.opts.Workers[0].Close()
	if p := r.daemon.Problems(); len(p) != 2 || !strings.Contains(p[0], "worker0") || r.daemon.WorkersAlive() {
		t.Errorf("problems = %v", p)
	}
	if s := r.daemon.Status(); s.Healthy || s.Workers[0].Error == "" {
		t.Errorf("status = %+v", s)
	}
}

// TestPrivateMemory is MEM-06: kicks come, nothing ever becomes available.
func TestPrivateMemory(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.add("vm1", "echo")
	c := r.connect("vm1")
	p, err := c.StartPair(0)
	if err != nil {
		t.Fatal(err)
	}
	for range 60 {
		if err := p.TX.Kick(); err != nil {
			t.Fatal(err)
		}
		if r.log.count("share=on") > 0 {
			break
		}
		time.Sleep(100 * time.Millisecond)
	}
	time.Sleep(1200 * time.Millisecond)
	if n := r.log.count("share=on"); n != 1 {
		t.Errorf("%d warnings, want 1:\n%s", n, r.log.b.String())
	}
}

func TestStillness(t *testing.T) {
	rings := func(kicks uint64, avail, last uint16, started bool) virtionet.DeviceStats {
		return virtionet.DeviceStats{Rings: []virtionet.RingStats{
			{Index: 0, Started: started, Kicks: kicks, AvailIdx: avail, LastAvail: last},
			{Index: 1, Started: started},
		}}
	}
	for _, tc := range []struct {
		name  string
		looks []virtionet.DeviceStats // one a second
		want  verdict
	}{
		{"not started", []virtionet.DeviceStats{rings(9, 0, 0, false), rings(10, 0, 0, false)}, unknown},
		{"kicked by the front-end at the start only", repeat(rings(1, 0, 0, true), 9), unknown},
		{"receive buffers are there", []virtionet.DeviceStats{rings(0, 0, 0, true), rings(1, 256, 0, true)}, moving},
		{"goes on after a reconnect", []virtionet.DeviceStats{rings(1, 300, 300, true)}, moving},
		{"kicks and nothing", append([]virtionet.DeviceStats{rings(0, 0, 0, true)}, repeat(rings(2, 0, 0, true), 4)...), stuck},
		{"kicks and nothing yet", append([]virtionet.DeviceStats{rings(0, 0, 0, true)}, repeat(rings(2, 0, 0, true), 3)...), unknown},
	} {
		var s stillness
		var got verdict
		now := time.Now()
		for _, look := range tc.looks {
			got = s.judge(look, now)
			now = now.Add(time.Second)
		}
		if got != tc.want {
			t.Errorf("%s: verdict %d, want %d", tc.name, got, tc.want)
		}
	}
}

func repeat(s virtionet.DeviceStats, n int) []virtionet.DeviceStats {
	all := make([]virtionet.DeviceStats, n)
	for i := range all {
		all[i] = s
	}
	return all
}
