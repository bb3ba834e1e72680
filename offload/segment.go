package offload

import (
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/vhostd/vhostd/packet"
)

const (
	tcpFlags = 13 // position of the flags in a TCP header
	tcpFIN   = 1 << 0
	tcpPSH   = 1 << 3
	tcpCWR   = 1 << 7
)

// segment cuts p, whose headers lie in f.head as l says, into frames of gso_size
// payload bytes, each with headers of its own. The payload is not copied: a page
// gets one more reference for each further piece of it. The payload length comes
// from the frame; the IP length fields, which senders may leave zero, are
// written and not read, as Linux does (net/ipv4/af_inet.c, inet_gso_segment).
func (f *Finisher) segment(p *packet.Packet, l *layout, out []packet.Packet) (int, Reason) {
	size := int(p.Hdr.GSOSize)
	payload := int(p.Len) - l.end
	n := (payload + size - 1) / size
	if n > len(out) {
		return 0, NoRoom
	}
	if p.NFrag == packet.MaxFrags && !f.flatten(p) {
		return 0, NoMemory
	}
	if !f.headers(out[:n], uint32(l.end)) {
		return 0, NoMemory
	}
	cut := cutter{f: f, p: p}
	cut.skip(uint32(l.end))
	for i := range out[:n] {
		off := i * size
		s := segmentHeader{layout: l, index: i, offset: off, payload: min(size, payload-off), last: i == n-1}
		s.sum = cut.move(&out[i], uint32(s.payload))
		b := out[i].Bytes(0)
		copy(b, f.head[:l.end])
		s.write(b)
	}
	p.Reset()
	return n, OK
}

// headers starts each frame of out with a buffer of size bytes. It reports
// false, and holds nothing, when there is not memory for all.
func (f *Finisher) headers(out []packet.Packet, size uint32) bool {
	for i := range out {
		b, ok := f.Alloc.AllocBuf(size)
		if !ok {
			packet.Release(f.Arena, out[:i], f.Owner)
			return false
		}
		out[i].Reset()
		out[i].Append(b)
	}
	return true
}

// cutter hands the fragments of p out in pieces, from front to back. A
// fragment's own reference goes to its first piece and one more is taken for
// each other piece, all at once when the fragment is used up, while all its
// pieces are still held here.
type cutter struct {
	f      *Finisher
	p      *packet.Packet
	i      int    // fragment
	off    uint32 // bytes of it that are used up
	pieces int    // pieces of it that were handed out
}

// skip uses n bytes up that nobody gets.
func (c *cutter) skip(n uint32) {
	for n > 0 {
		k := min(n, c.p.Frags[c.i].Len-c.off)
		n -= k
		c.advance(k)
	}
}

// move appends the next n bytes to dst and returns their sum.
func (c *cutter) move(dst *packet.Packet, n uint32) uint16 {
	var sum checksum.Checksumer
	for n > 0 {
		from := &c.p.Frags[c.i]
		k := min(n, from.Len-c.off)
		piece := packet.Frag{Addr: from.Addr + uintptr(c.off), Len: k, Page: from.Page}
		sum.Add(piece.Bytes())
		dst.Append(piece)
		c.pieces++
		n -= k
		c.advance(k)
	}
	return sum.Checksum()
}

// advance uses k bytes of the current fragment up and settles its references at
// its end.
func (c *cutter) advance(k uint32) {
	from := &c.p.Frags[c.i]
	c.off += k
	if c.off < from.Len {
		return
	}
	switch {
	case c.pieces == 0:
		c.f.Arena.Release(from.Page, 1, c.f.Owner)
	case c.pieces > 1:
		c.f.Arena.Retain(from.Page, c.pieces-1)
	}
	c.i++
	c.off, c.pieces = 0, 0
}

// segmentHeader is what makes one segment's headers differ from the original's.
type segmentHeader struct {
	*layout
	index   int    // 0 for the first segment
	offset  int    // of its payload in the original payload
	payload int    // bytes
	last    bool   // no segment follows
	sum     uint16 // one's complement sum of its payload
}

// write turns b, a copy of the original's headers, into the segment's headers.
func (s *segmentHeader) write(b []byte) {
	var addrs []byte
	if s.v6 {
		ip := header.IPv6(b[s.l3:])
		ip.SetPayloadLength(uint16(s.ipLen(s.payload)))
		addrs = ip[8:header.IPv6MinimumSize]
	} else {
		ip := header.IPv4(b[s.l3:s.l4])
		ip.SetTotalLength(uint16(s.ipLen(s.payload)))
		ip.SetID(ip.ID() + uint16(s.index))
		ip.SetChecksum(0)
		ip.SetChecksum(^checksum.Checksum(ip, 0))
		addrs = ip[12:header.IPv4MinimumSize]
	}
	t := b[s.l4:s.end]
	if s.tcp {
		s.writeTCP(t, addrs)
	} else {
		s.writeUDP(t, addrs)
	}
}

func (s *segmentHeader) writeTCP(t header.TCP, addrs []byte) {
	t.SetSequenceNumber(t.SequenceNumber() + uint32(s.offset))
	if s.index > 0 {
		t[tcpFlags] &^= tcpCWR
	}
	if !s.last {
		t[tcpFlags] &^= tcpFIN | tcpPSH
	}
	t.SetChecksum(0)
	t.SetChecksum(^s.fullSum(t, protoTCP, addrs))
}

func (s *segmentHeader) writeUDP(u header.UDP, addrs []byte) {
	u.SetLength(uint16(len(u) + s.payload))
	u.SetChecksum(0)
	u.SetChecksum(udpSum(^s.fullSum(u, protoUDP, addrs)))
}

// fullSum is the sum over pseudo header, transport header and payload. The
// transport header has an even length, so the payload's sum can be added.
func (s *segmentHeader) fullSum(t []byte, proto uint8, addrs []byte) uint16 {
	sum := PseudoSum(addrs, proto, len(t)+s.payload)
	return checksum.Combine(checksum.Checksum(t, sum), s.sum)
}

// PseudoSum is the one's complement sum, not inverted, over the pseudo header of
// TCP and UDP (RFC 9293, 3.1; RFC 8200, 8.1): what the checksum field of a frame
// marked NEEDS_CSUM holds. addrs is the source address followed by the
// destination address, 8 or 32 bytes as they lie in the IP header; length is
// that of the transport header and payload, up to 65,535.
func PseudoSum(addrs []byte, proto uint8, length int) uint16 {
	sum := checksum.Combine(uint16(proto), uint16(length))
	return checksum.Checksum(addrs, sum)
}
