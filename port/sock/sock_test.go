package sock

import (
	"bytes"
	"errors"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("vhostd-arena"), testmain.Goroutines()))
}

var quiet = slog.New(slog.DiscardHandler)

// link is a port with its peer.
type link struct {
	*Port
	peer *net.UnixConn
	path string
}

func newPort(t testing.TB, o Options) *Port {
	t.Helper()
	if o.Path == "" {
		o.Path = filepath.Join(t.TempDir(), "net")
	}
	o.Logger = quiet
	p, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func dialPeer(t testing.TB, p *Port) *net.UnixConn {
	t.Helper()
	c, err := net.DialUnix("unixpacket", nil, &net.UnixAddr{Name: p.opts.Path, Net: "unixpacket"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// newLink makes a port to which the peer has connected, or which has connected to the peer.
func newLink(t testing.TB, connect bool) *link {
	t.Helper()
	path := filepath.Join(t.TempDir(), "net")
	l := &link{path: path}
	if connect {
		listener, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { listener.Close() })
		l.Port = newPort(t, Options{Path: path, Connect: true})
		if l.peer, err = listener.AcceptUnix(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.peer.Close() })
	} else {
		l.Port = newPort(t, Options{Path: path})
		l.peer = dialPeer(t, l.Port)
	}
	l.up(t)
	return l
}

func (l *link) up(t testing.TB) {
	t.Helper()
	if !porttest.Eventually(func() bool { return l.Status().Up }) {
		t.Fatalf("no connection: %+v", l.Status())
	}
}

func (l *link) recv(t testing.TB) []byte {
	t.Helper()
	buf := make([]byte, 1<<17)
	_ = l.peer.SetReadDeadline(time.Now().Add(5 * time.Second))
	n, err := l.peer.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return buf[:n]
}

func TestConformance(t *testing.T) {
	for name, connect := range map[string]bool{"listen": false, "connect": true} {
		t.Run(name, func(t *testing.T) {
			var now *link
			porttest.Run(t, porttest.Config{
				New: func(t testing.TB) port.Port { now = newLink(t, connect); return now.Port },
				Inject: func(t testing.TB, _ port.Port, frame []byte) {
					if _, err := now.peer.Write(frame); err != nil {
						t.Fatal(err)
					}
				},
			})
		})
	}
}

// TestConformanceWithoutPeer: frames go nowhere and are counted.
func TestConformanceWithoutPeer(t *testing.T) {
	rig := porttest.NewRig(t)
	p := newPort(t, Options{})
	if st := p.Status(); st.Up || st.Detail == "" {
		t.Errorf("status without a peer: %+v", st)
	}
	if err := p.Announce([6]byte{2}); err != nil {
		t.Error(err)
	}
	for i := range 2 {
		q := rig.Open(t, p, i)
		if n := q.Send([]packet.Packet{rig.Packet(t, porttest.Frame(60, 1), 0)}); n != 1 || porttest.DropCount(q, "no_peer") != 1 {
			t.Errorf("queue %d: sent %d, %d drops", i, n, porttest.DropCount(q, "no_peer"))
		}
		if q.Arm() {
			t.Error("a worker is kept awake by nobody")
		}
	}
}

func TestBothWays(t *testing.T) {
	rig := porttest.NewRig(t)
	l := newLink(t, false)
	queues := []port.Queue{rig.Open(t, l, 0), rig.Open(t, l, 1)}
	for _, size := range []int{14, 60, 1514, 4096, 4097, virtio.MaxFrame} {
		for i, q := range queues {
			frame := porttest.Frame(size, byte(i))
			if n := q.Send([]packet.Packet{rig.Packet(t, frame, 0)}); n != 1 {
				t.Fatalf("Send = %d", n)
			}
			if got := l.recv(t); !bytes.Equal(got, frame) {
				t.Errorf("queue %d, %d bytes: the peer received %d bytes, which differ", i, size, len(got))
			}
		}
	}
	if queues[1].ReadyFD() != -1 {
		t.Error("a queue that only sends has something to wait for")
	}
}

// TestHostilePeer sends what is no frame: nothing of it reaches the guest, and the frame behind it does.
func TestHostilePeer(t *testing.T) {
	rig := porttest.NewRig(t)
	l := newLink(t, false)
	q := rig.Open(t, l, 0)
	fd, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	files := testmain.Files()
	for name, send := range map[string]func() error{
		"empty":     func() error { _, err := l.peer.Write(nil); return err },
		"short":     func() error { _, err := l.peer.Write(make([]byte, 13)); return err },
		"long":      func() error { _, err := l.peer.Write(make([]byte, virtio.MaxFrame+1)); return err },
		"very long": func() error { _, err := l.peer.Write(make([]byte, 120_000)); return err },
		"descriptors": func() error {
			_, _, err := l.peer.WriteMsgUnix(make([]byte, 13), unix.UnixRights(fd, fd, fd), nil)
			return err
		},
	} {
		before := porttest.DropCount(q, "")
		frame := porttest.Frame(60, 9)
		if err := send(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if _, err := l.peer.Write(frame); err != nil {
			t.Fatal(err)
		}
		if got := rig.Recv(t, q, 1); len(got) != 1 || !bytes.Equal(got[0], frame) {
			t.Errorf("%s: the frame behind it did not come: %d frames", name, len(got))
		}
		if n := porttest.DropCount(q, "") - before; n != 1 {
			t.Errorf("%s: %d drops counted, want 1", name, n)
		}
	}
	if err := files(); err != nil {
		t.Error(err)
	}
}

// TestPeersComeAndGo: one at a time, each served as the first, and what one sent before it left arrives.
func TestPeersComeAndGo(t *testing.T) {
	rig := porttest.NewRig(t)
	l := newLink(t, false)
	queues := []port.Queue{rig.Open(t, l, 0), rig.Open(t, l, 1)}
	ready := queues[0].ReadyFD()
	for round := range 5 {
		second := dialPeer(t, l.Port)
		_ = second.SetReadDeadline(time.Now().Add(5 * time.Second))
		if n, err := second.Read(make([]byte, 10)); n != 0 || err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("a second peer was not sent away: %d %v", n, err)
		}
		for queues[0].Arm() {
			queues[0].Recv(make([]packet.Packet, 1))
		}
		frame := porttest.Frame(100, byte(round))
		if _, err := l.peer.Write(frame); err != nil {
			t.Fatal(err)
		}
		l.peer.Close()
		if !porttest.Readable(ready, 5*time.Second) || queues[0].ReadyFD() != ready {
			t.Fatal("nothing tells of the frame")
		}
		if got := rig.Recv(t, queues[0], 1); len(got) != 1 || !bytes.Equal(got[0], frame) {
			t.Fatalf("the last frame of a peer was lost")
		}
		for i, q := range queues {
			q.Send([]packet.Packet{rig.Packet(t, frame, 0)})
			if porttest.DropCount(q, "no_peer") != uint64(round+1) {
				t.Errorf("queue %d: a frame for a peer that is gone is not counted", i)
			}
		}
		if l.Status().Up {
			t.Error("the port is up without a peer")
		}
		l.peer = dialPeer(t, l.Port)
		l.up(t)
		for i, q := range queues {
			frame := porttest.Frame(80, byte(i))
			q.Send([]packet.Packet{rig.Packet(t, frame, 0)})
			if got := l.recv(t); !bytes.Equal(got, frame) {
				t.Fatal("the next peer received something else")
			}
		}
	}
}

// TestBackPressure: a peer that does not read loses nothing.
func TestBackPressure(t *testing.T) {
	rig := porttest.NewRig(t)
	l := newLink(t, false)
	q := rig.Open(t, l, 0)
	sent := 0
	for refused := false; !refused && sent < 10_000; {
		pkts := []packet.Packet{rig.Packet(t, porttest.Frame(60, byte(sent)), 0)}
		if refused = q.Send(pkts) == 0; refused {
			rig.Release(pkts)
		} else {
			sent++
		}
	}
	if sent == 0 || sent == 10_000 {
		t.Fatalf("%d frames taken", sent)
	}
	for i := range sent {
		if got := l.recv(t); !bytes.Equal(got, porttest.Frame(60, byte(i))) {
			t.Fatalf("frame %d of %d is another one", i, sent)
		}
	}
	if n := porttest.DropCount(q, ""); n != 0 {
		t.Errorf("%d drops", n)
	}
}

func TestAnnounce(t *testing.T) {
	l := newLink(t, false)
	mac := [6]byte{2, 0, 0, 0, 0, 7}
	if err := l.Announce(mac); err != nil {
		t.Fatal(err)
	}
	if want := port.RARP(mac); !bytes.Equal(l.recv(t), want[:]) {
		t.Error("no announcement")
	}
}

func TestOptions(t *testing.T) {
	dir := t.TempDir()
	for _, o := range []Options{{}, {Path: "@x"}, {Path: "/" + string(bytes.Repeat([]byte{'x'}, 110))}, {Path: "/x", Mode: 0o1777}} {
		if _, err := New(o); err == nil {
			t.Errorf("%+v is accepted", o)
		}
	}
	if _, err := New(Options{Path: filepath.Join(dir, "no", "net")}); err == nil {
		t.Error("a directory that does not exist is accepted")
	}
	p := newPort(t, Options{Path: filepath.Join(dir, "net"), Mode: 0o660})
	if fi, err := os.Stat(p.opts.Path); err != nil || fi.Mode().Perm() != 0o660 {
		t.Errorf("%v %v", fi, err)
	}
	if _, err := New(Options{Path: p.opts.Path}); err == nil {
		t.Error("two ports on one path")
	}
	p.Close()
	if _, err := os.Stat(p.opts.Path); !os.IsNotExist(err) {
		t.Error("the socket is left behind")
	}
}
