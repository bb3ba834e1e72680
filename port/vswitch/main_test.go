package vswitch

import (
	"bytes"
	"encoding/binary"
	"net"
	"os"
	"testing"
	"time"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("vhostd-arena"), testmain.Goroutines()))
}

// segment is a switch with a clock that the test moves.
type segment struct {
	*Switch
	rig *porttest.Rig
	now int64
}

func newSegment(t testing.TB, opts Options) *segment {
	t.Helper()
	s, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	g := &segment{Switch: s, rig: porttest.NewRig(t), now: 1}
	s.clock = func() int64 { return g.now }
	return g
}

// wait lets time pass.
func (g *segment) wait(d time.Duration) { g.now += d.Milliseconds() }

// guest is a port with its open queues, each as if on a worker of its own.
type guest struct {
	*Port
	g      *segment
	t      testing.TB
	queues []port.Queue
	owners []pagemem.OwnerID
}

// guest adds one; the test's end removes it.
func (g *segment) guest(t testing.TB, pairs int, opts PortOptions) *guest {
	t.Helper()
	p, err := g.NewPort(opts)
	if err != nil {
		t.Fatal(err)
	}
	s := &guest{Port: p, g: g, t: t}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	s.connect(pairs)
	return s
}

// connect opens the queues, as a front-end that connects does.
func (s *guest) connect(pairs int) {
	s.t.Helper()
	s.queues, s.owners = nil, nil
	for i := range pairs {
		owner := pagemem.NewOwnerID()
		q, err := s.OpenQueue(i, port.Resources{Arena: s.g.rig.Arena, Owner: owner})
		if err != nil {
			s.t.Fatal(err)
		}
		s.queues, s.owners = append(s.queues, q), append(s.owners, owner)
	}
}

// disconnect closes them.
func (s *guest) disconnect() {
	s.t.Helper()
	for _, q := range s.queues {
		if err := q.Close(); err != nil {
			s.t.Error(err)
		}
	}
	s.queues = nil
}

// send sends frames on pair 0.
func (s *guest) send(frames ...[]byte) {
	s.t.Helper()
	pkts := s.packets(frames...)
	if n := s.queues[0].Send(pkts); n != len(pkts) {
		s.t.Fatalf("Send = %d of %d", n, len(pkts))
	}
}

func (s *guest) packets(frames ...[]byte) (pkts []packet.Packet) {
	s.t.Helper()
	for _, f := range frames {
		pkts = append(pkts, s.g.rig.Packet(s.t, f, 0))
	}
	return pkts
}

// received takes what waits, queue after queue.
func (s *guest) received() (frames [][]byte) {
	for i := range s.queues {
		frames = append(frames, s.receivedOn(i)...)
	}
	return frames
}

func (s *guest) receivedOn(i int) (frames [][]byte) {
	var pkts [8]packet.Packet
	for n := s.queues[i].Recv(pkts[:]); n > 0; n = s.queues[i].Recv(pkts[:]) {
		for j := range pkts[:n] {
			frames = append(frames, porttest.Bytes(&pkts[j]))
		}
		packet.Release(s.g.rig.Arena, pkts[:n], s.owners[i])
	}
	return frames
}

// wants demands these frames and no others.
func (s *guest) wants(what string, frames ...[]byte) {
	s.t.Helper()
	got := s.received()
	if len(got) != len(frames) {
		s.t.Errorf("%s: %d frames, want %d", what, len(got), len(frames))
		return
	}
	for i := range got {
		if !bytes.Equal(got[i], frames[i]) {
			s.t.Errorf("%s: frame %d is\n% x, want\n% x", what, i, got[i], frames[i])
		}
	}
}

func (s *guest) lost(why string) (n uint64) {
	for _, q := range s.queues {
		n += porttest.DropCount(q, why)
	}
	return n
}

// mac is the address of station n.
func mac(n int) net.HardwareAddr { return net.HardwareAddr{2, 0, 0, 0, byte(n >> 8), byte(n)} }

var (
	broadcast = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	multicast = net.HardwareAddr{0x33, 0x33, 0xff, 0, 0, 1} // of neighbor solicitations
)

// frame is one of the local experimental EtherType.
func frame(dst, src net.HardwareAddr) []byte {
	b := make([]byte, 60)
	copy(b, dst)
	copy(b[6:], src)
	binary.BigEndian.PutUint16(b[12:], 0x88b5)
	return b
}

// udp is a datagram of a flow.
func udp(dst, src net.HardwareAddr, flow int) []byte {
	b := frame(dst, src)
	binary.BigEndian.PutUint16(b[12:], etherTypeIPv4)
	ip := b[virtio.EthernetHdrLen:]
	ip[0], ip[9] = 0x45, protoUDP
	copy(ip[12:], []byte{10, 0, 0, 1, 10, 0, 0, 2})
	binary.BigEndian.PutUint16(ip[20:], uint16(flow))
	return b
}

// tagged adds a VLAN tag.
func tagged(b []byte, etherType, id uint16) []byte {
	tag := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, etherType), id)
	return append(append(bytes.Clone(b[:12]), tag...), b[12:]...)
}
