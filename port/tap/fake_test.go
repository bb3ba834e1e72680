package tap

import (
	"bytes"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/internal/stock"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

// every is what a guest with all receive offloads accepts.
const every = virtio.FNetGuestCSum | virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6 | virtio.FNetGuestECN

// fake is a queue whose tap is a datagram socket: a frame with its header is a datagram, without the kernel's limits.
type fake struct {
	*queue
	rig  *porttest.Rig
	peer int // the network's end
}

func newFake(t testing.TB) *fake {
	t.Helper()
	rig := porttest.NewRig(t)
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	p := &Port{name: "fake", fds: fds[:1], accepted: every}
	q, err := newQueue(p, 0, rig.Resources())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		q.Close()
		p.events.wait()
		unix.Close(fds[0])
		unix.Close(fds[1])
	})
	return &fake{queue: q, rig: rig, peer: fds[1]}
}

// arrive makes a datagram come from the network.
func (f *fake) arrive(t testing.TB, datagram []byte) {
	t.Helper()
	if _, err := unix.Write(f.peer, datagram); err != nil {
		t.Fatal(err)
	}
}

// sent is the next datagram that the queue wrote, nil if there is none.
func (f *fake) sent(t testing.TB) []byte {
	t.Helper()
	buf := make([]byte, 1<<17)
	n, err := unix.Read(f.peer, buf)
	if err == unix.EAGAIN {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	return buf[:n]
}

func withHeader(h virtio.NetHdr, frame []byte) []byte {
	b := make([]byte, virtio.NetHdrLen, virtio.NetHdrLen+len(frame))
	h.Encode(b)
	return append(b, frame...)
}

// TestTAP03NothingIsCut receives frames up to the longest, and longer ones: nothing is cut.
func TestTAP03NothingIsCut(t *testing.T) {
	f := newFake(t)
	var pkts [1]packet.Packet
	for _, size := range []int{14, 60, 4096, 4097, 9014, 9018, 65534, 65549, virtio.MaxFrame} {
		frame := porttest.Frame(size, byte(size))
		hdr := virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, GSOType: virtio.GSOTCPv4 | virtio.GSOECN, HdrLen: 54, GSOSize: 1448, CsumStart: 34, CsumOffset: 16}
		sent := hdr
		sent.NumBuffers = 0xeeee
		f.arrive(t, withHeader(sent, frame))
		if n := f.Recv(pkts[:]); n != 1 {
			t.Fatalf("%d bytes: Recv = %d", size, n)
		}
		if got := porttest.Bytes(&pkts[0]); !bytes.Equal(got, frame) || !pkts[0].LenCheck() {
			t.Errorf("%d bytes: %d came", size, len(got))
		}
		if pkts[0].Hdr != hdr {
			t.Errorf("%d bytes: header %+v, want %+v", size, pkts[0].Hdr, hdr)
		}
		if want := (size + 4095) / 4096; int(pkts[0].NFrag) != want {
			t.Errorf("%d bytes: %d pages, want %d", size, pkts[0].NFrag, want)
		}
		f.rig.Release(pkts[:])
	}
	for _, size := range []int{virtio.MaxFrame + 1, stock.WindowPages * 4096, stock.WindowPages*4096 + 1, 100000} {
		f.arrive(t, withHeader(virtio.NetHdr{}, make([]byte, size)))
		f.arrive(t, withHeader(virtio.NetHdr{}, porttest.Frame(60, 1)))
		before := porttest.DropCount(f, "too_long")
		if got := f.rig.Recv(t, f, 1); len(got) != 1 || len(got[0]) != 60 {
			t.Errorf("after %d bytes the next frame did not come", size)
		}
		if got := porttest.DropCount(f, "too_long") - before; got != 1 {
			t.Errorf("%d bytes: %d counted as too long", size, got)
		}
	}
}

// TestSmallFramesTakeOnePage checks that a read leaves the pages alone that the frame did not reach.
func TestSmallFramesTakeOnePage(t *testing.T) {
	f := newFake(t)
	if !f.stock.Fill() {
		t.Fatal("no pages")
	}
	touched := make([][]byte, 0, stock.WindowPages)
	for _, v := range f.stock.Window()[1:] {
		frag := packet.Frag{Addr: v.Base, Len: uint32(v.Len)}
		clear(frag.Bytes())
		touched = append(touched, frag.Bytes())
	}
	f.arrive(t, withHeader(virtio.NetHdr{}, bytes.Repeat([]byte{0xaa}, 60)))
	next := f.stock.Window()[2].Base
	if got := f.rig.Recv(t, f, 1); len(got) != 1 {
		t.Fatal("frame did not come")
	}
	if got := f.stock.Window()[1].Base; got != next {
		t.Errorf("the next frame goes to %#x, want the second page, %#x", got, next)
	}
	for i, page := range touched[1:] {
		if !bytes.Equal(page, make([]byte, len(page))) {
			t.Errorf("page %d was written to", i+1)
		}
	}
}

// TestBatchesKeepOrder moves more frames than a batch, of mixed sizes, through several refills of the stock.
func TestBatchesKeepOrder(t *testing.T) {
	f := newFake(t)
	sizes := []int{60, 9000, 14, 4096, 30000, 4097, 1514}
	for i := range 200 {
		frame := porttest.Frame(sizes[i%len(sizes)], byte(i))
		f.arrive(t, withHeader(virtio.NetHdr{}, frame))
		if got := f.rig.Recv(t, f, 1); len(got) != 1 || !bytes.Equal(got[0], frame) {
			t.Fatalf("frame %d came back wrong", i)
		}
	}
}

func TestArmFollowsEAGAIN(t *testing.T) {
	f := newFake(t)
	var pkts [port.MaxBatch]packet.Packet
	if !f.Arm() {
		t.Error("a queue that was never read may have frames")
	}
	f.Recv(pkts[:])
	if f.Arm() {
		t.Error("nothing is there")
	}
	for range 3 {
		f.arrive(t, withHeader(virtio.NetHdr{}, porttest.Frame(60, 0)))
	}
	if n := f.Recv(pkts[:2]); n != 2 || !f.Arm() {
		t.Errorf("Recv = %d, Arm = %v with a frame left", n, f.Arm())
	}
	f.rig.Release(pkts[:2])
	n := f.Recv(pkts[:])
	f.rig.Release(pkts[:n])
	if n != 1 || f.Arm() {
		t.Errorf("Recv = %d, Arm = %v at the end", n, f.Arm())
	}
}

func TestNoAllocationsWithTraffic(t *testing.T) {
	f := newFake(t)
	small, large := withHeader(virtio.NetHdr{}, porttest.Frame(60, 0)), withHeader(virtio.NetHdr{}, porttest.Frame(9000, 0))
	buf := make([]byte, 1<<14)
	var pkts [port.MaxBatch]packet.Packet
	allocations := testing.AllocsPerRun(100, func() {
		f.arrive(t, small)
		f.arrive(t, large)
		n := f.Recv(pkts[:])
		f.Send(pkts[:n])
		f.Arm()
		for range n {
			_, _ = unix.Read(f.peer, buf)
		}
	})
	if allocations != 0 {
		t.Errorf("%v allocations a batch", allocations)
	}
	if n := porttest.DropCount(f, ""); n != 0 {
		t.Errorf("%d frames were dropped", n)
	}
}

func TestMalformedReads(t *testing.T) {
	f := newFake(t)
	for _, size := range []int{1, 11, 12, 12 + 13} {
		f.arrive(t, make([]byte, size))
	}
	var pkts [8]packet.Packet
	if n := f.Recv(pkts[:]); n != 0 {
		t.Errorf("Recv = %d", n)
	}
	if got := porttest.DropCount(f, "too_short"); got != 4 {
		t.Errorf("too_short = %d, want 4", got)
	}
}

func TestStaleOffloads(t *testing.T) {
	tso4 := virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, GSOType: virtio.GSOTCPv4, GSOSize: 1448}
	ecn := virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, GSOType: virtio.GSOTCPv6 | virtio.GSOECN, GSOSize: 1448}
	for _, tc := range []struct {
		name     string
		accepted virtio.Features
		hdr      virtio.NetHdr
		want     *virtio.NetHdr // nil: dropped
	}{
		{"plain", 0, virtio.NetHdr{}, &virtio.NetHdr{}},
		{"checksum verified", every, virtio.NetHdr{Flags: virtio.HdrFDataValid}, &virtio.NetHdr{Flags: virtio.HdrFDataValid}},
		{"OFF-10 checksum verified, guest cannot know", 0, virtio.NetHdr{Flags: virtio.HdrFDataValid}, &virtio.NetHdr{}},
		{"unknown flag", every, virtio.NetHdr{Flags: 0x84}, &virtio.NetHdr{}},
		{"checksum", 0, virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: 34, CsumOffset: 6}, nil},
		{"segments", every, tso4, &tso4},
		{"segments of the other protocol", virtio.FNetGuestCSum | virtio.FNetGuestTSO6, tso4, nil},
		{"ECN", every, ecn, &ecn},
		{"ECN without the feature", every &^ virtio.FNetGuestECN, ecn, nil},
		{"UDP segments", every, virtio.NetHdr{GSOType: virtio.GSOUDPL4}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFake(t)
			f.port.accepted = tc.accepted
			f.arrive(t, withHeader(tc.hdr, porttest.Frame(3000, 0)))
			var pkts [2]packet.Packet
			n := f.Recv(pkts[:])
			switch {
			case tc.want == nil && (n != 0 || porttest.DropCount(f, "stale_offload") != 1):
				t.Errorf("Recv = %d, not counted as stale", n)
			case tc.want != nil && (n != 1 || pkts[0].Hdr != *tc.want):
				t.Errorf("Recv = %d, header %+v, want %+v", n, pkts[0].Hdr, *tc.want)
			}
			f.rig.Release(pkts[:n])
		})
	}
}

func TestNoMemory(t *testing.T) {
	f := newFake(t)
	var held []packet.Packet
	for {
		page, ok := f.rig.Pool.Alloc()
		if !ok {
			break
		}
		var p packet.Packet
		p.Append(packet.Frag{Addr: f.rig.Arena.Addr(page), Len: 1, Page: page})
		held = append(held, p)
	}
	frame := porttest.Frame(60, 0)
	f.arrive(t, withHeader(virtio.NetHdr{}, frame))
	var pkts [8]packet.Packet
	if n := f.Recv(pkts[:]); n != 0 || porttest.DropCount(f, "no_memory") != 1 || f.Arm() {
		t.Errorf("Recv = %d, no_memory = %d, Arm = %v", n, porttest.DropCount(f, "no_memory"), f.Arm())
	}
	f.rig.Release(held)
	f.arrive(t, withHeader(virtio.NetHdr{}, frame))
	if got := f.rig.Recv(t, f, 1); len(got) != 1 || !bytes.Equal(got[0], frame) {
		t.Error("no frame after memory came back")
	}
}

func TestSendWritesHeaderAndFragments(t *testing.T) {
	f := newFake(t)
	frame := porttest.Frame(virtio.MaxFrame, 7)
	p := f.rig.Packet(t, frame, 0)
	p.Hdr = virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, GSOType: virtio.GSOTCPv6, HdrLen: 74, GSOSize: 1428, CsumStart: 54, CsumOffset: 16, NumBuffers: 9}
	want := p.Hdr
	want.NumBuffers = 0
	if n := f.Send([]packet.Packet{p}); n != 1 {
		t.Fatalf("Send = %d", n)
	}
	if got := f.sent(t); !bytes.Equal(got, withHeader(want, frame)) {
		t.Errorf("%d bytes were written, or with another header", len(got))
	}
	if n := f.Send([]packet.Packet{f.rig.Packet(t, porttest.Frame(13, 0), 0), {}}); n != 2 {
		t.Errorf("Send = %d of two runts", n)
	}
	if got := f.sent(t); got != nil || porttest.DropCount(f, "too_short") != 2 {
		t.Errorf("runts: %d bytes written, %d counted", len(got), porttest.DropCount(f, "too_short"))
	}
}

// TestTAP01FullQueueDrops checks the rule for EAGAIN: the frame is dropped and counted, nobody waits.
func TestTAP01FullQueueDrops(t *testing.T) {
	f := newFake(t)
	sent := 0
	for range 16 {
		pkts := make([]packet.Packet, port.MaxBatch)
		for i := range pkts {
			pkts[i] = f.rig.Packet(t, porttest.Frame(60, 0), 0)
		}
		if n := f.Send(pkts); n != len(pkts) {
			t.Fatalf("Send = %d of %d", n, len(pkts))
		}
		sent += len(pkts)
	}
	arrived := 0
	for f.sent(t) != nil {
		arrived++
	}
	if dropped := int(porttest.DropCount(f, "no_buffers")); dropped == 0 || arrived+dropped != sent {
		t.Errorf("%d sent, %d arrived, %d dropped", sent, arrived, dropped)
	}
}

func TestWriteReasons(t *testing.T) {
	for errno, want := range map[unix.Errno]reason{
		unix.EIO: tapDown, unix.EBADFD: tapDeleted, unix.ENXIO: tapDeleted, unix.EINVAL: badHeader, unix.EAGAIN: noBuffers,
		unix.ENOBUFS: noBuffers, unix.ENOMEM: noBuffers, unix.EMSGSIZE: tooLong, unix.EFAULT: writeError,
	} {
		if got := writeReason(errno); got != want {
			t.Errorf("%v counts as %s, want %s", errno, reasonNames[got], reasonNames[want])
		}
	}
}

func FuzzFrames(f *testing.F) {
	f.Add(withHeader(virtio.NetHdr{}, porttest.Frame(60, 0)), uint16(0))
	f.Add(withHeader(virtio.NetHdr{Flags: 1, GSOType: 1, GSOSize: 1448, CsumStart: 34, CsumOffset: 16}, porttest.Frame(3000, 0)), uint16(40000))
	f.Add([]byte{0, 0, 0}, uint16(0))
	f.Add(make([]byte, virtio.NetHdrLen), uint16(0xffff))
	q := newFake(f)
	f.Fuzz(func(t *testing.T, head []byte, extra uint16) {
		datagram := append(head, make([]byte, extra)...)
		if len(datagram) == 0 {
			return
		}
		q.arrive(t, datagram)
		var pkts [2]packet.Packet
		before := porttest.DropCount(q, "")
		n := q.Recv(pkts[:])
		dropped := porttest.DropCount(q, "") - before
		if n+int(dropped) != 1 {
			t.Fatalf("%d bytes: received %d, dropped %d", len(datagram), n, dropped)
		}
		if n == 1 && (!pkts[0].LenCheck() || !bytes.Equal(porttest.Bytes(&pkts[0]), datagram[virtio.NetHdrLen:])) {
			t.Fatal("frame was changed")
		}
		q.rig.Release(pkts[:n])
	})
}
