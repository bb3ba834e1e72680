package uplink

import (
	"bytes"
	"log/slog"
	"os"
	"testing"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/port/vswitch"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/worker"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("vhostd-arena"), testmain.Goroutines()))
}

func newWorker(t *testing.T) *worker.Loop {
	t.Helper()
	w, err := worker.New(worker.Options{Name: "w", CPU: -1, Wake: worker.Block, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

// island is a switch with one guest.
func island(t *testing.T, rig *porttest.Rig) (*vswitch.Switch, port.Queue) {
	t.Helper()
	s, err := vswitch.New(vswitch.Options{})
	if err != nil {
		t.Fatal(err)
	}
	p, err := s.NewPort(vswitch.PortOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	q, err := p.OpenQueue(0, port.Resources{Arena: rig.Arena, Owner: pagemem.NewOwnerID()})
	if err != nil {
		t.Fatal(err)
	}
	return s, q
}

// limited is a port whose network can be sent less.
type limited struct {
	port.Port
	features virtio.Features
}

func (l limited) Features() virtio.Features { return l.features }
func (l limited) Configure(acked virtio.Features) error {
	return port.CheckOffloads("limited", l.features, acked)
}

// join wires the switches to each other; b's side offers the features.
func join(t *testing.T, rig *porttest.Rig, a, b *vswitch.Switch, features virtio.Features, pairs int) *Cable {
	t.Helper()
	outer, err := b.NewPort(vswitch.PortOptions{})
	if err != nil {
		t.Fatal(err)
	}
	inner, err := a.NewPort(vswitch.PortOptions{Uplink: outer})
	if err != nil {
		t.Fatal(err)
	}
	c, err := Connect(inner, limited{outer, features}, Options{Arena: rig.Arena, Workers: []*worker.Loop{newWorker(t), newWorker(t)}, First: 1, Pairs: pairs})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for range 2 {
			if err := c.Close(); err != nil {
				t.Error(err)
			}
		}
		inner.Close()
		outer.Close()
	})
	return c
}

// TestCable: frames pass in both directions, with their marks, and those on the way are released at the end.
func TestCable(t *testing.T) {
	rig := porttest.NewRig(t)
	left, a := island(t, rig)
	right, b := island(t, rig)
	join(t, rig, left, right, (&vswitch.Port{}).Features(), 3)
	hdr := virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: 34, CsumOffset: 16}
	for seed := range byte(100) {
		for _, way := range []struct{ from, to port.Queue }{{a, b}, {b, a}} {
			frame := porttest.Frame(60+int(seed)*50, seed)
			frame[10] = seed + 1 // a source of its own
			pkts := []packet.Packet{rig.Packet(t, frame, 0)}
			pkts[0].Hdr = hdr
			way.from.Send(pkts)
			var got [1]packet.Packet
			if !porttest.Eventually(func() bool { return way.to.Recv(got[:]) == 1 }) {
				t.Fatalf("frame %d did not arrive", seed)
			}
			if got[0].Hdr != hdr || !bytes.Equal(porttest.Bytes(&got[0]), frame) {
				t.Errorf("frame %d arrived as another one", seed)
			}
			rig.Release(got[:])
		}
	}
	for seed := range byte(50) {
		a.Send([]packet.Packet{rig.Packet(t, porttest.Frame(100, seed), 0)})
	}
}

// TestFinishesWhatTheOtherSideLacks: a checksum is completed on the way to a network without the offload; marks that make no sense there
// are lost and counted.
func TestFinishesWhatTheOtherSideLacks(t *testing.T) {
	rig := porttest.NewRig(t)
	left, a := island(t, rig)
	right, b := island(t, rig)
	c := join(t, rig, left, right, 0, 1)
	frame := []byte{
		2, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0, 1, 8, 0, // Ethernet
		0x45, 0, 0, 30, 0, 1, 0, 0, 64, 17, 0x66, 0xcd, 10, 0, 0, 1, 10, 0, 0, 2, // IPv4
		0x03, 0xe8, 0x07, 0xd0, 0, 10, 0x14, 0x1e, 0xe0, 0x1f, // UDP with the sum over the pseudo header
	}
	pkts := []packet.Packet{rig.Packet(t, frame, 0), rig.Packet(t, frame, 0)}
	pkts[0].Hdr = virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: 40, CsumOffset: 60}
	pkts[1].Hdr = virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: 34, CsumOffset: 6}
	a.Send(pkts)
	got := rig.Recv(t, b, 1)
	if len(got) != 1 || bytes.Equal(got[0], frame) || !bytes.Equal(got[0][42:], frame[42:]) || !bytes.Equal(got[0][:40], frame[:40]) {
		t.Fatalf("received % x, want the frame with its checksum completed", got)
	}
	var sum uint32
	for i := 26; i < len(frame); i += 2 { // addresses, UDP
		sum += uint32(got[0][i])<<8 | uint32(got[0][i+1])
	}
	for sum += 17 + 10; sum > 0xffff; {
		sum = sum>>16 + sum&0xffff
	}
	if sum != 0xffff {
		t.Errorf("the checksum is wrong: the sum is %#x", sum)
	}
	lost := uint64(0)
	c.Drops(func(reason string, n uint64) {
		if reason == "unfinishable" {
			lost += n
		}
	})
	if lost != 1 {
		t.Errorf("%d frames lost as unfinishable, want 1", lost)
	}
}

// TestConnectFails: nothing is left open when one of the ports cannot serve.
func TestConnectFails(t *testing.T) {
	rig := porttest.NewRig(t)
	left, _ := island(t, rig)
	right, _ := island(t, rig)
	a, err := left.NewPort(vswitch.PortOptions{})
	if err != nil {
		t.Fatal(err)
	}
	b, err := right.NewPort(vswitch.PortOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if err := b.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := Connect(a, b, Options{Arena: rig.Arena, Workers: []*worker.Loop{newWorker(t)}, Pairs: 2}); err == nil {
		t.Error("a closed port was connected")
	}
	if _, err := Connect(a, limited{a, virtio.FNetMTU}, Options{Arena: rig.Arena, Workers: []*worker.Loop{newWorker(t)}, Pairs: 1}); err == nil {
		t.Error("a port was connected to itself")
	}
}
