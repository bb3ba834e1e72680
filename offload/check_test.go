package offload_test

import (
	"encoding/binary"
	"testing"

	"github.com/gopacket/gopacket/layers"

	"github.com/vhostd/vhostd/offload"
	"github.com/vhostd/vhostd/virtio"
)

// RING-08, B5, B7, B14, C65, C66: what a header may not ask of a frame.
func TestCheck(t *testing.T) {
	v4 := spec{payload: pattern(4000)}
	v6 := spec{payload: pattern(4000), v6: true}
	udp := spec{payload: pattern(4000), udp: true}
	long := spec{payload: pattern(4000), v6: true, ipOpts: 200}
	for _, test := range []struct {
		name   string
		s      spec
		change func(h *virtio.NetHdr, frame []byte) []byte
		want   offload.Reason
	}{
		{"TSO4", v4, nil, offload.OK},
		{"TSO6", v6, nil, offload.OK},
		{"USO", udp, nil, offload.OK},
		{"UFO", udp, gsoType(virtio.GSOUDP), offload.GSOType},
		{"type 2", v4, gsoType(2), offload.GSOType},
		{"type 7", v4, gsoType(7), offload.GSOType},
		{"type 0x7f", v4, gsoType(0x7f), offload.GSOType},
		{"ECN alone", v4, gsoType(virtio.GSOECN), offload.GSOType},
		{"ECN with UDP", udp, gsoType(virtio.GSOUDPL4 | virtio.GSOECN), offload.GSOType},
		{"TSO6 on IPv4", v4, gsoType(virtio.GSOTCPv6), offload.GSOProtocol},
		{"TSO4 on IPv6", v6, gsoType(virtio.GSOTCPv4), offload.GSOProtocol},
		{"TSO4 on UDP", udp, gsoType(virtio.GSOTCPv4), offload.GSOProtocol},
		{"USO on TCP", v4, gsoType(virtio.GSOUDPL4), offload.GSOProtocol},
		{"TSO4 on ARP", v4, put16(12, 0x0806), offload.GSOProtocol},
		{"TSO4 on three tags", spec{payload: pattern(4000), tags: 2}, put16(20, 0x8100), offload.GSOProtocol},
		{"TSO4 on ICMP", v4, put8(14+9, 1), offload.GSOProtocol},
		{"gso_size 0", v4, gsoSize(0), offload.GSOSize},
		{"gso_size 1", v4, gsoSize(1), offload.GSOSize},
		{"gso_size 47", v4, gsoSize(47), offload.GSOSize},
		{"gso_size 65535", v4, gsoSize(65535), offload.OK},
		{"no NEEDS_CSUM", v4, flags(0), offload.CsumMissing},
		{"csum_start of another header", v4, csum(36, 16), offload.CsumMismatch},
		{"csum_offset of UDP", v4, csum(34, 6), offload.CsumMismatch},
		{"csum_start beyond the frame", v4, csum(60000, 16), offload.CsumRange},
		{"csum sum wraps 16 bits", v4, csum(0xfff0, 0x0020), offload.CsumRange},
		{"csum_start in the Ethernet header", v4, csum(13, 16), offload.CsumRange},
		{"fragment", v4, put16(14+6, 0x2000), offload.GSOFragment},
		{"later fragment", v4, put16(14+6, 1), offload.GSOFragment},
		{"IPv6 fragment header", v6, put8(14+6, 44), offload.GSOFragment},
		{"IHL 4", v4, put8(14, 0x44), offload.HeaderMalformed},
		{"IPv4 version 6", v4, put8(14, 0x65), offload.HeaderMalformed},
		{"IPv6 version 4", v6, put8(14, 0x40), offload.HeaderMalformed},
		{"TCP header of 16 bytes", v4, put8(34+12, 0x40), offload.HeaderMalformed},
		{"TCP header beyond the frame", v4, truncate(14+20+30, put8(34+12, 0xf0)), offload.HeaderTruncated},
		{"IHL beyond the frame", v4, truncate(14+56, put8(14, 0x4f)), offload.HeaderTruncated},
		{"no payload", v4, truncate(14+20+20, nil), offload.HeaderTruncated},
		{"one byte of payload", v4, truncate(14+20+21, nil), offload.OK},
		{"UDP header cut", udp, truncate(14+20+8, put8(14, 0x46)), offload.HeaderTruncated},
		{"20 bytes", v4, truncate(20, csum(14, 4)), offload.HeaderTruncated},
		{"13 bytes", v4, truncate(13, nil), offload.Runt},
		{"headers beyond the parser", long, nil, offload.HeaderTooLong},
		{"routing header", spec{payload: pattern(4000), v6: true, ipOpts: 8}, routing(1), offload.GSORouted},
		{"routing header used up", spec{payload: pattern(4000), v6: true, ipOpts: 8}, routing(0), offload.OK},
		{"hdr_len huge", v4, func(h *virtio.NetHdr, b []byte) []byte { h.HdrLen = 65535; return b }, offload.OK},
		{"hdr_len 0", v4, func(h *virtio.NetHdr, b []byte) []byte { h.HdrLen = 0; return b }, offload.OK},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			frame, h := test.s.gso(t, 1448)
			if test.change != nil {
				frame = test.change(&h, frame)
			}
			p := r.packet(t, h, frame)
			if got := offload.Check(&p); got != test.want {
				t.Errorf("Check: %v, want %v", got, test.want)
			}
			// A receiver that lacks everything gets the same verdict.
			if _, _, got := r.finish(t, p, 0); got != test.want {
				t.Errorf("Finish: %v, want %v", got, test.want)
			}
			ok, okHdr := v4.gso(t, 1448)
			r.checkSegments(t, v4, ok, okHdr, 0)
		})
	}
}

type change = func(h *virtio.NetHdr, frame []byte) []byte

func gsoType(v uint8) change {
	return func(h *virtio.NetHdr, b []byte) []byte { h.GSOType = v; return b }
}

func gsoSize(v uint16) change {
	return func(h *virtio.NetHdr, b []byte) []byte { h.GSOSize = v; return b }
}

func flags(v uint8) change {
	return func(h *virtio.NetHdr, b []byte) []byte { h.Flags = v; return b }
}

func csum(start, offset uint16) change {
	return func(h *virtio.NetHdr, b []byte) []byte { h.CsumStart, h.CsumOffset = start, offset; return b }
}

func put8(at int, v byte) change {
	return func(_ *virtio.NetHdr, b []byte) []byte { b[at] = v; return b }
}

func put16(at int, v uint16) change {
	return func(_ *virtio.NetHdr, b []byte) []byte { binary.BigEndian.PutUint16(b[at:], v); return b }
}

func truncate(n int, then change) change {
	return func(h *virtio.NetHdr, b []byte) []byte {
		b = b[:n]
		if then != nil {
			b = then(h, b)
		}
		return b
	}
}

// routing turns the hop-by-hop header behind an untagged IPv6 header into a
// routing header.
func routing(segmentsLeft byte) change {
	return func(_ *virtio.NetHdr, b []byte) []byte {
		b[14+6] = byte(layers.IPProtocolIPv6Routing)
		copy(b[14+40+2:], []byte{4, segmentsLeft, 0, 0, 0, 0})
		return b
	}
}

// MTU-05: short frames with plausible contents, without and with marks.
func TestRunts(t *testing.T) {
	r := newRig(t)
	for _, n := range []int{1, 5, 13, 14, 15, 18, 20, 33, 34, 41, 42, 53, 59} {
		for _, etherType := range []uint16{0x0800, 0x86dd, 0x0806, 0x8100, 0x88a8} {
			frame := make([]byte, 64)
			binary.BigEndian.PutUint16(frame[12:], etherType)
			frame[14] = 0x4f
			binary.BigEndian.PutUint16(frame[16:], 0xffff)
			if etherType == 0x86dd {
				frame[14] = 0x6f
			}
			p := r.packet(t, virtio.NetHdr{}, frame[:n])
			want := offload.OK
			if n < 14 {
				want = offload.Runt
			}
			if got := offload.Check(&p); got != want {
				t.Errorf("%d bytes of %#x: %v, want %v", n, etherType, got, want)
			}
			p.Release(r.arena, 0)
			for _, gso := range []uint8{virtio.GSOTCPv4, virtio.GSOTCPv6, virtio.GSOUDPL4} {
				h := virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, GSOType: gso, GSOSize: 1448, CsumStart: 34, CsumOffset: 6}
				if _, _, got := r.finish(t, r.packet(t, h, frame[:n]), 0); got == offload.OK {
					t.Errorf("%d bytes of %#x segmented as type %d", n, etherType, gso)
				}
			}
		}
	}
	r.settled(t)
}

func TestOversize(t *testing.T) {
	r := newRig(t)
	p := r.packet(t, virtio.NetHdr{}, pattern(virtio.MaxFrame))
	if got := offload.Check(&p); got != offload.OK {
		t.Errorf("the largest frame: %v", got)
	}
	p.Release(r.arena, 0)
	p = r.packet(t, virtio.NetHdr{}, pattern(virtio.MaxFrame+1))
	if got := offload.Check(&p); got != offload.Oversize {
		t.Errorf("one byte more: %v", got)
	}
	p.Release(r.arena, 0)

	// A frame beyond what IP can express, and a segment of it just as long.
	s := spec{payload: pattern(65535 - 40)}
	frame, h := s.gso(t, 65535)
	frame = append(frame, 1, 2, 3)
	if _, _, got := r.finish(t, r.packet(t, h, frame), 0); got != offload.Oversize {
		t.Errorf("a segment of 65,538 bytes: %v", got)
	}
}

func TestReasonNames(t *testing.T) {
	seen := map[string]bool{}
	for r := range offload.NumReasons {
		if name := r.String(); name == "" || seen[name] {
			t.Errorf("reason %d is called %q", r, name)
		} else {
			seen[name] = true
		}
	}
	if got := offload.NumReasons.String(); got != "unknown" {
		t.Errorf("a value beyond the last is called %q", got)
	}
}
