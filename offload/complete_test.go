package offload_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/gopacket/gopacket"

	"github.com/vhostd/vhostd/offload"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/virtio"
)

// protocols are the frames that checksum and segmentation tests go through.
func protocols() map[string]spec {
	all := map[string]spec{}
	for _, v6 := range []bool{false, true} {
		for _, udp := range []bool{false, true} {
			for tags := range 3 {
				for _, opts := range []int{0, 8, 24} {
					name := fmt.Sprintf("v6=%v/udp=%v/tags=%d/opts=%d", v6, udp, tags, opts)
					all[name] = spec{v6: v6, udp: udp, tags: tags, ipOpts: opts, tcpOpts: opts, tcpFlags: flagACK}
				}
			}
		}
	}
	return all
}

// OFF-01, OFF-09: one sender, receivers with and without GUEST_CSUM.
func TestPartialChecksumPerReceiver(t *testing.T) {
	for name, s := range protocols() {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			s.payload = pattern(1001)
			want := s.build(t)
			frame, h := s.partial(t)

			frames, hdrs, reason := r.finish(t, r.packet(t, h, frame), virtio.FNetGuestCSum)
			if reason != offload.OK || !bytes.Equal(frames[0], frame) || hdrs[0] != h {
				t.Errorf("GUEST_CSUM: reason %v, header %+v, frame intact %v", reason, hdrs, bytes.Equal(frames[0], frame))
			}
			for _, cuts := range [][]int{nil, {14}, {s.l4() + s.csumOffset() + 1}, {1, 2, 3, 500, 501}, {300, 700}} {
				frames, hdrs, reason = r.finish(t, r.packet(t, h, frame, cuts...), 0)
				if reason != offload.OK || hdrs[0] != (virtio.NetHdr{}) {
					t.Fatalf("cuts %v: reason %v, headers %+v", cuts, reason, hdrs)
				}
				if !bytes.Equal(frames[0], want) {
					t.Errorf("cuts %v: frame differs from the one with its checksum", cuts)
				}
				verify(t, frames[0])
			}
		})
	}
}

// OFF-05: a UDP checksum that computes to zero is sent as 0xffff.
func TestZeroChecksum(t *testing.T) {
	for _, test := range []struct {
		name string
		spec spec
		want uint16
	}{
		{"udp4", spec{udp: true, payload: make([]byte, 2)}, 0xffff},
		{"udp6", spec{udp: true, v6: true, payload: make([]byte, 2)}, 0xffff},
		{"tcp4", spec{payload: make([]byte, 2)}, 0},
		{"tcp6", spec{v6: true, payload: make([]byte, 2)}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			frame, h := test.spec.partial(t)
			// The last payload word becomes what is missing to a sum of 0xffff.
			sum := gopacket.ComputeChecksum(frame[h.CsumStart:], 0)
			binary.BigEndian.PutUint16(frame[len(frame)-2:], gopacket.FoldChecksum(sum))
			frames, _, reason := r.finish(t, r.packet(t, h, frame), 0)
			if reason != offload.OK {
				t.Fatal(reason)
			}
			if got := binary.BigEndian.Uint16(frames[0][h.CsumStart+h.CsumOffset:]); got != test.want {
				t.Errorf("checksum %#04x, want %#04x", got, test.want)
			}
		})
	}
}

func TestPublishedZeroChecksumDatagram(t *testing.T) {
	r := newRig(t)
	s := spec{udp: true, payload: []byte{0xe0, 0x1f}}
	frame, h := s.partial(t)
	binary.BigEndian.PutUint16(frame[34:], 1000)
	binary.BigEndian.PutUint16(frame[36:], 2000)
	frames, _, _ := r.finish(t, r.packet(t, h, frame), 0)
	if got := binary.BigEndian.Uint16(frames[0][40:]); got != 0xffff {
		t.Errorf("checksum %#04x, want 0xffff", got)
	}
}

// A checksum request is about bytes, not about a protocol.
func TestGenericChecksum(t *testing.T) {
	for _, test := range []struct {
		name          string
		frame         []byte
		start, offset uint16
		cuts          []int
	}{
		{"ICMPv6 of unknown EtherType", pattern(90), 54, 2, nil},
		{"odd start", pattern(91), 33, 4, []int{34, 40}},
		{"field at the end", pattern(60), 14, 44, nil},
		{"field split between fragments", pattern(600), 100, 399, []int{500}},
		{"far field", pattern(9000), 8000, 10, []int{8011}},
		{"field split between buffers", pattern(9000), 4000, 95, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			h := virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: test.start, CsumOffset: test.offset}
			want := bytes.Clone(test.frame)
			sum := gopacket.FoldChecksum(gopacket.ComputeChecksum(test.frame[test.start:], 0))
			binary.BigEndian.PutUint16(want[test.start+test.offset:], sum)
			p := r.packet(t, h, test.frame, test.cuts...)
			if reason := offload.Check(&p); reason != offload.OK {
				t.Errorf("refused: %v", reason)
			}
			frames, _, reason := r.finish(t, p, 0)
			if reason != offload.OK || !bytes.Equal(frames[0], want) {
				t.Errorf("reason %v, frame as wanted %v", reason, bytes.Equal(frames[0], want))
			}
		})
	}
}

// A packet in as many fragments as fit has no place for one more.
func TestManyFragments(t *testing.T) {
	for _, n := range []int{packet.MaxFrags - 1, packet.MaxFrags} {
		for _, first := range []int{10, 1000} {
			r := newRig(t)
			s := spec{payload: pattern(40000)}
			var cuts []int
			for i := range n - 1 {
				cuts = append(cuts, first+i*1000)
			}
			frame, h := s.partial(t)
			if frames, _, reason := r.finish(t, r.packet(t, h, frame, cuts...), 0); reason != offload.OK {
				t.Fatalf("%d fragments: %v", n, reason)
			} else {
				verify(t, frames[0])
			}
			frame, h = s.gso(t, 1448)
			r.checkSegments(t, s, frame, h, 0, cuts...)
		}
	}
}

// OFF-10: no marks for a receiver without GUEST_CSUM, never two at once.
func TestMarksAreStripped(t *testing.T) {
	for _, test := range []struct {
		name string
		h    virtio.NetHdr
		rx   virtio.Features
		want virtio.NetHdr
	}{
		{"validated, no feature", virtio.NetHdr{Flags: virtio.HdrFDataValid}, 0, virtio.NetHdr{}},
		{"validated", virtio.NetHdr{Flags: virtio.HdrFDataValid}, guestAll, virtio.NetHdr{Flags: virtio.HdrFDataValid}},
		{"unknown flag", virtio.NetHdr{Flags: 0x80}, guestAll, virtio.NetHdr{}},
		{"leftovers", virtio.NetHdr{HdrLen: 1, GSOSize: 2, CsumStart: 3, CsumOffset: 4}, guestAll, virtio.NetHdr{}},
		{"leftovers, validated and unknown", virtio.NetHdr{Flags: 0x82, GSOSize: 2}, guestAll, virtio.NetHdr{Flags: virtio.HdrFDataValid}},
		{
			"both flags", virtio.NetHdr{Flags: 3, CsumStart: 34, CsumOffset: 16}, guestAll,
			virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: 34, CsumOffset: 16},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			frame := spec{payload: pattern(10)}.build(t)
			frames, hdrs, reason := r.finish(t, r.packet(t, test.h, frame), test.rx)
			if reason != offload.OK || hdrs[0] != test.want || !bytes.Equal(frames[0], frame) {
				t.Errorf("reason %v, header %+v, want %+v", reason, hdrs, test.want)
			}
		})
	}
}

func TestNoMemory(t *testing.T) {
	r := newRig(t)
	s := spec{payload: pattern(5000)}
	for left := range 4 {
		r.left = left
		frame, h := s.gso(t, 1448)
		if _, _, reason := r.finish(t, r.packet(t, h, frame), 0); reason != offload.NoMemory {
			t.Errorf("%d buffers for 4 segments: %v", left, reason)
		}
	}
	frame, h := s.partial(t)
	r.left = 0
	if _, _, reason := r.finish(t, r.packet(t, h, frame), 0); reason != offload.NoMemory {
		t.Errorf("no buffer for a header: %v", reason)
	}
	cuts := make([]int, packet.MaxFrags-1)
	for i := range cuts {
		cuts[i] = 300 + i
	}
	r.left = 1
	if _, _, reason := r.finish(t, r.packet(t, h, frame, cuts...), 0); reason != offload.NoMemory {
		t.Errorf("one buffer for two pages: %v", reason)
	}
}

func TestNoRoom(t *testing.T) {
	r := newRig(t)
	frame, h := spec{payload: pattern(5000)}.gso(t, 1448)
	for _, room := range []int{0, 3} {
		p := r.packet(t, h, frame)
		if n, reason := r.f.Finish(&p, 0, r.out[:room]); n != 0 || reason != offload.NoRoom {
			t.Errorf("room for %d of 4: %d frames, %v", room, n, reason)
		}
	}
}

func TestNoAllocations(t *testing.T) {
	r := newRig(t)
	tcp, tcpHdr := spec{payload: pattern(60000)}.gso(t, 1448)
	udp, udpHdr := spec{udp: true, payload: pattern(1400)}.partial(t)
	large := r.packet(t, tcpHdr, tcp)
	small := r.packet(t, udpHdr, udp)
	allocs := testing.AllocsPerRun(20, func() {
		for _, p := range [...]*packet.Packet{&large, &small} {
			q := r.share(p)
			if offload.Check(&q) != offload.OK || !offload.Needs(&q, 0) {
				t.Fatal("refused")
			}
			n, _ := r.f.Finish(&q, 0, r.out)
			packet.Release(r.arena, r.out[:n], 0)
		}
	})
	large.Release(r.arena, 0)
	small.Release(r.arena, 0)
	if allocs != 0 {
		t.Errorf("%v allocations", allocs)
	}
}

// poolStub counts fragments the way a page pool does.
type poolStub struct{ arena *pagemem.Arena }

func (s poolStub) ReleasePage(p pagemem.PageID, n int, _ pagemem.OwnerID) {
	s.arena.Frags(p).Drop(int64(n))
}

// Pieces of a pool's page are counted as the pool's fragments.
func TestPoolPagesAreShared(t *testing.T) {
	r := newRig(t)
	id := r.arena.Register(poolStub{r.arena})
	defer r.arena.Unregister(id)
	s := spec{payload: pattern(3000)}
	frame, h := s.gso(t, 1000)
	p := r.packet(t, h, frame[:100])
	page, _ := r.arena.Alloc(0, pagemem.NoReserve)
	r.arena.SetReleaser(page, id) // the count of fragments rests at 1: the packet's
	f := packet.Frag{Addr: r.arena.Addr(page), Len: uint32(len(frame) - 100), Page: page}
	copy(f.Bytes(), frame[100:])
	p.Append(f)

	n, reason := r.f.Finish(&p, 0, r.out)
	if n != 3 || reason != offload.OK {
		t.Fatalf("%d segments, %v", n, reason)
	}
	if got := r.arena.Frags(page).Load(); got != 3 {
		t.Errorf("%d fragments of the page, want 3", got)
	}
	packet.Release(r.arena, r.out[:n], 0)
	r.arena.SetReleaser(page, 0)
	r.arena.Unref(page, 1)
}

// OFF-07: what a port puts into the field of a frame that it marks NEEDS_CSUM.
func TestPseudoSum(t *testing.T) {
	for name, s := range protocols() {
		s.payload = pattern(999)
		frame := s.build(t)
		addrs, proto := frame[s.l3()+12:s.l3()+20], uint8(6)
		if s.v6 {
			addrs = frame[s.l3()+8 : s.l3()+40]
		}
		if s.udp {
			proto = 17
		}
		if got, want := offload.PseudoSum(addrs, proto, len(frame)-s.l4()), s.pseudo(frame); got != want {
			t.Errorf("%s: %#04x, want %#04x", name, got, want)
		}
	}
}
