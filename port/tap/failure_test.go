package tap

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

// logbook collects log lines.
type logbook struct {
	mu    sync.Mutex
	lines bytes.Buffer
}

func (l *logbook) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lines.Write(b)
}

func (l *logbook) count(text string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.lines.String(), text)
}

func (l *logbook) logger() *slog.Logger { return slog.New(slog.NewTextHandler(l, nil)) }

// bench is a tap with an open queue and its host.
type bench struct {
	*testing.T
	*space
	rig *porttest.Rig
	p   *Port
	q   port.Queue
	h   *host
	log *logbook
}

func newBench(t *testing.T, opts Options) *bench {
	b := &bench{T: t, space: newSpace(t), rig: porttest.NewRig(t), log: &logbook{}}
	opts.Logger = b.log.logger()
	b.p = b.tap(t, opts)
	b.q = b.rig.Open(t, b.p, 0)
	b.h = b.host(t, b.p.Name(), false)
	return b
}

// sends reports whether a frame that the guest sends reaches the host.
func (b *bench) sends() bool {
	b.Helper()
	frame := porttest.Frame(60, 9)
	b.flood(frame, 1)
	return bytes.Equal(b.h.recv(b), frame)
}

func (b *bench) flood(frame []byte, n int) {
	b.Helper()
	for range n {
		if b.q.Send([]packet.Packet{b.rig.Packet(b, frame, 0)}) != 1 {
			b.Fatal("Send refused a frame")
		}
	}
}

func (b *bench) drops(reason string) int { return int(porttest.DropCount(b.q, reason)) }

func TestTAP01Down(t *testing.T) {
	b := newBench(t, Options{})
	link := b.find(t, b.p.Name())
	for round := range 3 {
		if !b.sends() {
			t.Fatal("no traffic while the tap is up")
		}
		must(t, b.LinkSetDown(link))
		b.flood(porttest.Frame(60, 0), 200)
		if got := b.drops("tap_down"); got != 200*(round+1) {
			t.Errorf("%d frames counted", got)
		}
		if st := b.p.Status(); st.Up || !strings.Contains(st.Detail, "down") {
			t.Errorf("status %+v", st)
		}
		var pkts [1]packet.Packet
		if b.q.Recv(pkts[:]) != 0 || b.q.Arm() {
			t.Error("a tap that is down has frames")
		}
		must(t, b.LinkSetUp(link))
		if st := b.p.Status(); !st.Up {
			t.Errorf("status %+v", st)
		}
	}
	if !b.sends() {
		t.Error("no traffic after the tap came up")
	}
	b.p.events.wait()
	if down, up := b.log.count("tap is down"), b.log.count("up again"); down != 1 || up != 1 {
		t.Errorf("%d lines about down and %d about up, want one each", down, up)
	}
}

func TestTAP01BadHeader(t *testing.T) {
	b := newBench(t, Options{})
	for _, hdr := range []virtio.NetHdr{
		{HdrLen: 100},
		{Flags: virtio.HdrFNeedsCsum, CsumStart: 60, CsumOffset: 60},
		{GSOType: 0x7f, GSOSize: 100},
		{GSOType: virtio.GSOTCPv4, GSOSize: 0},
	} {
		before := b.drops("bad_header")
		pkt := b.rig.Packet(t, porttest.Frame(60, 0), 0)
		pkt.Hdr = hdr
		b.q.Send([]packet.Packet{pkt})
		if got := b.drops("bad_header") - before; got != 1 {
			t.Errorf("%+v: %d counted", hdr, got)
		}
		if !b.sends() {
			t.Errorf("%+v: the next frame was lost", hdr)
		}
	}
}

func TestTAP01Deleted(t *testing.T) {
	for _, queues := range []int{1, 2} {
		b := newBench(t, Options{Queues: queues})
		other := newBench(t, Options{})
		must(t, b.LinkDel(b.find(t, b.p.Name())))
		var pkts [8]packet.Packet
		for range 100 {
			if b.q.Recv(pkts[:]) != 0 || b.q.Arm() {
				t.Fatal("a deleted tap has frames")
			}
		}
		b.flood(porttest.Frame(60, 0), 100)
		if got := b.drops("tap_deleted"); got != 100 {
			t.Errorf("%d frames counted", got)
		}
		if st := b.p.Status(); st.Up || !strings.Contains(st.Detail, "deleted") {
			t.Errorf("status %+v", st)
		}
		for _, f := range []virtio.Features{every, 0} {
			if err := b.p.Configure(f); err != nil {
				t.Errorf("Configure: %v", err)
			}
		}
		if err := b.p.SetMTU(2000); err == nil {
			t.Error("SetMTU succeeded")
		}
		must(t, b.q.(port.Enabler).SetEnabled(false))
		must(t, b.q.Close())
		if _, err := b.p.OpenQueue(0, b.rig.Resources()); queues > 1 && err == nil {
			t.Error("OpenQueue succeeded")
		}
		b.p.events.wait()
		if got := b.log.count("was deleted"); got != 1 {
			t.Errorf("%d lines about it, want one", got)
		}
		if !other.sends() {
			t.Error("another tap was affected")
		}
	}
}

// TestTAP01DeletedWhileDisabled deletes a tap whose queue is detached.
func TestTAP01DeletedWhileDisabled(t *testing.T) {
	b := newBench(t, Options{Queues: 2})
	e := b.q.(port.Enabler)
	must(t, e.SetEnabled(false))
	must(t, b.LinkDel(b.find(t, b.p.Name())))
	must(t, e.SetEnabled(true))
	if st := b.p.Status(); st.Up || !strings.Contains(st.Detail, "deleted") {
		t.Errorf("status %+v", st)
	}
}

func TestTAP01Moved(t *testing.T) {
	b := newBench(t, Options{})
	away := newSpace(t)
	must(t, b.LinkSetNsFd(b.find(t, b.p.Name()), int(away.ns)))
	must(t, away.LinkSetUp(away.find(t, b.p.Name())))
	b.h = away.host(t, b.p.Name(), false)
	if !b.sends() {
		t.Error("no traffic after the tap moved")
	}
	frame := porttest.Frame(60, 3)
	b.h.send(t, frame)
	if got := b.rig.Recv(t, b.q, 1); len(got) != 1 || !bytes.Equal(got[0], frame) {
		t.Error("no traffic towards the guest after the tap moved")
	}
	if st := b.p.Status(); !st.Up || !strings.Contains(st.Detail, "namespace") {
		t.Errorf("status %+v", st)
	}
}

func TestErrorsNameCauseAndRemedy(t *testing.T) {
	s := newSpace(t)
	must(t, s.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}))
	busy := s.tap(t, Options{Name: "busy1"})
	s.tap(t, Options{Name: "busy2", Queues: 2})
	one, err := s.newTap(Options{Name: "one", Persist: true})
	must(t, err)
	must(t, one.Close())
	for _, tc := range []struct {
		opts Options
		want string
	}{
		{Options{Bridge: "br7"}, "no bridge br7: make it with 'ip link add br7 type bridge'"},
		{Options{Bridge: "busy1"}, "busy1 is not a bridge but of kind tuntap"},
		{Options{Name: "br0"}, "of kind bridge that is not a tap"},
		{Options{Name: "busy1"}, "another guest or another process uses the tap"},
		{Options{Name: "busy2"}, "another guest or another process uses the tap"},
		{Options{Name: "busy2", Queues: 2}, "another guest or another process uses the tap"},
		{Options{Name: "name-is-too-long"}, "name="},
	} {
		_, err := s.newTap(tc.opts)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%+v: error %v, want it to contain %q", tc.opts, err, tc.want)
		}
	}
	if st := busy.Status(); !st.Up {
		t.Errorf("the busy tap was disturbed: %+v", st)
	}
	if s.exists("vhostd0") {
		t.Error("a failed New left an interface")
	}
}

// TestWithoutPermission makes taps on a thread without CAP_NET_ADMIN.
func TestWithoutPermission(t *testing.T) {
	s := newSpace(t)
	ready, err := s.newTap(Options{Name: "ready", Persist: true})
	must(t, err)
	must(t, ready.Close())
	s.do(t, func() error {
		if err := dropNetAdmin(); err != nil {
			return err
		}
		if _, err := New(Options{}); !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
			t.Errorf("create: %v", err)
		}
		p, err := New(Options{Name: "ready"})
		if err != nil {
			t.Errorf("attach to a prepared tap: %v", err)
			return nil
		}
		if err := p.SetMTU(2000); !errors.Is(err, unix.EPERM) || !strings.Contains(err.Error(), "CAP_NET_ADMIN") {
			t.Errorf("SetMTU: %v", err)
		}
		return p.Close()
	})
}

// dropNetAdmin takes the capability from the calling thread only.
func dropNetAdmin() error {
	hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		return err
	}
	data[0].Effective &^= 1 << unix.CAP_NET_ADMIN
	return unix.Capset(&hdr, &data[0])
}
