package porttest

import (
	"bytes"
	"errors"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
)

func testSend(t *testing.T, s *subject) {
	q := s.open(t)
	for _, size := range sizes {
		frame := Frame(size, 1)
		pkts := []packet.Packet{s.rig.Packet(t, frame, 0)}
		before := DropCount(q, "")
		if n := q.Send(pkts); n != 1 {
			t.Fatalf("%d bytes: Send = %d, want 1: there is nothing to wait for", size, n)
		}
		dropped := DropCount(q, "") - before
		if s.Returns == nil {
			continue
		}
		got := s.rig.Recv(t, q, 1-int(dropped))
		if dropped == 0 && (len(got) != 1 || !bytes.Equal(got[0], s.Returns(frame))) {
			t.Errorf("%d bytes: not counted as dropped and not returned as sent", size)
		}
		if dropped != 0 && size >= virtio.EthernetHdrLen {
			t.Errorf("%d bytes: a good frame was dropped", size)
		}
	}
}

// testPieces sends frames whose headers lie in several fragments.
func testPieces(t *testing.T, s *subject) {
	q := s.open(t)
	for _, piece := range []int{4, 6, 7, 12, 13} {
		frame := Frame(64, byte(piece))
		pkts := []packet.Packet{s.rig.Packet(t, frame, piece)}
		if q.Send(pkts) != 1 {
			t.Fatalf("pieces of %d: not sent", piece)
		}
		if s.Returns == nil {
			continue
		}
		if got := s.rig.Recv(t, q, 1); len(got) != 1 || !bytes.Equal(got[0], s.Returns(frame)) {
			t.Errorf("pieces of %d: frame came back changed", piece)
		}
	}
}

// testBackPressure sends without receiving. Whatever the port does not take must still be whole.
func testBackPressure(t *testing.T, s *subject) {
	q := s.open(t)
	frame := Frame(60, 2)
	accepted := 0
	for range 40 {
		pkts := s.batch(t, frame)
		n := q.Send(pkts)
		if n < 0 || n > len(pkts) {
			t.Fatalf("Send = %d of %d", n, len(pkts))
		}
		accepted += n
		for i := range pkts[n:] {
			if got := Bytes(&pkts[n+i]); !bytes.Equal(got, frame) {
				t.Fatal("a refused frame was changed")
			}
		}
		s.rig.Release(pkts[n:])
	}
	if s.Returns == nil {
		return
	}
	if got := s.rig.Recv(t, q, accepted); len(got) != accepted {
		t.Errorf("%d frames accepted, %d returned", accepted, len(got))
	}
	pkts := s.batch(t, frame)
	if n := q.Send(pkts); n != len(pkts) {
		t.Errorf("after the backlog was emptied Send = %d of %d", n, len(pkts))
	}
}

func (s *subject) batch(t *testing.T, frame []byte) []packet.Packet {
	t.Helper()
	pkts := make([]packet.Packet, port.MaxBatch)
	for i := range pkts {
		pkts[i] = s.rig.Packet(t, frame, 0)
	}
	return pkts
}

func testReceive(t *testing.T, s *subject) {
	if !s.Generates {
		t.Skip("not applicable: this port sends nothing by itself")
	}
	q := s.open(t)
	pkts := make([]packet.Packet, 3*port.MaxBatch)
	for i := range pkts {
		pkts[i] = packet.Packet{Hdr: virtio.NetHdr{Flags: 0xff, GSOType: 0xff, GSOSize: 0xffff}, Len: 1 << 30, NFrag: 0, Flags: 0xff}
	}
	total := 0
	if !Eventually(func() bool {
		n := q.Recv(pkts)
		if n > port.MaxBatch {
			t.Fatalf("Recv = %d, more than a batch", n)
		}
		for i := range pkts[:n] {
			checkPacket(t, &pkts[i])
		}
		s.rig.Release(pkts[:n])
		total += n
		return total >= 2*port.MaxBatch
	}) {
		t.Errorf("only %d frames came", total)
	}
}

func checkPacket(t testing.TB, p *packet.Packet) {
	t.Helper()
	switch {
	case !p.LenCheck():
		t.Fatalf("malformed packet: length %d, %d fragments", p.Len, p.NFrag)
	case p.Len < virtio.EthernetHdrLen || p.Len > virtio.MaxFrame:
		t.Fatalf("packet of %d bytes", p.Len)
	case p.Flags != 0:
		t.Fatalf("packet with flags %#x of another holder", p.Flags)
	case p.Hdr.NumBuffers != 0:
		t.Fatalf("packet with num_buffers %d", p.Hdr.NumBuffers)
	}
}

// testArm checks that a worker that sleeps when Arm allows it, until ReadyFD wakes it, misses nothing.
func testArm(t *testing.T, s *subject) {
	q := s.open(t)
	frame := Frame(60, 3)
	switch {
	case s.Generates:
		for range 3 {
			if !s.awake(q) {
				t.Fatal("neither Arm nor ReadyFD tells of the frames")
			}
			if len(s.rig.Recv(t, q, 1)) != 1 {
				t.Fatal("nothing to receive")
			}
		}
	case s.Returns != nil:
		if q.Arm() {
			t.Error("Arm is true before anything was sent")
		}
		q.Send([]packet.Packet{s.rig.Packet(t, frame, 0)})
		if !s.awake(q) {
			t.Error("Arm is false while a frame waits")
		}
		s.rig.Recv(t, q, 1)
		if q.Arm() {
			t.Error("Arm is true although everything was received")
		}
	case s.Inject == nil:
		q.Send([]packet.Packet{s.rig.Packet(t, frame, 0)})
		if q.Arm() || q.ReadyFD() != -1 {
			t.Error("a port that never has a frame wakes its worker")
		}
	}
}

// awake says whether a worker that arms and sleeps is woken.
func (s *subject) awake(q port.Queue) bool {
	return q.Arm() || q.ReadyFD() >= 0 && Readable(q.ReadyFD(), settle)
}

// Readable says whether fd becomes readable within wait.
func Readable(fd int, wait time.Duration) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(fds, int(wait.Milliseconds()))
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return n == 1
	}
}

func testInject(t *testing.T, s *subject) {
	if s.Inject == nil {
		t.Skip("not applicable: this port's network cannot be reached from a test")
	}
	longest := s.MaxInject
	if longest == 0 {
		longest = virtio.MaxFrame
	}
	q := s.open(t)
	var none [1]packet.Packet
	for _, size := range sizes {
		if size < virtio.EthernetHdrLen || size > longest {
			continue
		}
		for q.Recv(none[:]) > 0 {
			s.rig.Release(none[:])
		}
		if q.Arm() {
			t.Fatalf("%d bytes: Arm is true although nothing is there", size)
		}
		frame := Frame(size, 4)
		s.Inject(t, s.port, frame)
		if !s.awake(q) {
			t.Fatalf("%d bytes: nothing tells of the frame", size)
		}
		if got := s.rig.Recv(t, q, 1); len(got) != 1 || !bytes.Equal(got[0], frame) {
			t.Errorf("%d bytes: received %d frames, want the one that was sent", size, len(got))
		}
	}
}
