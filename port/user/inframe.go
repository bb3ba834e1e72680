package user

import (
	"encoding/binary"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/virtio"
)

const (
	etherIPv4 = 0x0800
	etherARP  = 0x0806
	etherIPv6 = 0x86dd

	protoICMP     = 1
	protoTCP      = 6
	protoUDP      = 17
	protoFragment = 44
	protoICMPv6   = 58

	ipv4Len            = 20
	ipv6Len            = 40
	udpLen             = 8
	udpChecksumOffset  = 6
	icmpLen            = 8
	icmpChecksumOffset = 2
	tcpMin             = 20
	tcpMax             = 60
)

// inFrame is a frame from a guest as far as it was judged. head is a private copy of its start; all offsets count from the frame's start
// and lie inside of the frame.
type inFrame struct {
	pkt  *packet.Packet
	head [128]byte
	n    int // valid bytes of head

	src, dst  netip.Addr
	l4        int // where the transport header is
	end       int // where the IP packet ends; behind it is padding
	proto     uint8
	ttl       uint8
	fragment  bool // a part of a datagram
	needsCsum bool // the sender left the transport checksum to us
}

func (f *inFrame) load(p *packet.Packet) reason {
	f.pkt = p
	f.n = p.PeekHeader(f.head[:])
	if f.n < virtio.EthernetHdrLen {
		return tooShort
	}
	return accepted
}

func (f *inFrame) etherType() uint16 { return binary.BigEndian.Uint16(f.head[12:]) }
func (f *inFrame) from() [6]byte     { return [6]byte(f.head[6:12]) }
func (f *inFrame) to() [6]byte       { return [6]byte(f.head[:6]) }

// parse judges the IP header. The accepted packets have no options and no extension headers but that of fragments.
func (f *inFrame) parse() reason {
	f.fragment, f.needsCsum = false, f.pkt.Hdr.Flags&virtio.HdrFNeedsCsum != 0
	if f.etherType() == etherIPv4 {
		return f.parseV4()
	}
	return f.parseV6()
}

func (f *inFrame) parseV4() reason {
	const l3 = virtio.EthernetHdrLen
	if f.n < l3+ipv4Len {
		return badHeader
	}
	b := f.head[l3:]
	if b[0] != 4<<4|ipv4Len/4 {
		if b[0]>>4 == 4 && b[0]&15 > ipv4Len/4 {
			return ipOptions
		}
		return badHeader
	}
	total := int(binary.BigEndian.Uint16(b[2:]))
	if total < ipv4Len || l3+total > int(f.pkt.Len) {
		return badHeader
	}
	if checksum.Checksum(b[:ipv4Len], 0) != 0xffff {
		return badChecksum
	}
	f.src, f.dst = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
	f.fragment = binary.BigEndian.Uint16(b[6:])&0x3fff != 0 // more fragments, or an offset
	f.proto, f.ttl = b[9], b[8]
	f.l4, f.end = l3+ipv4Len, l3+total
	return accepted
}

func (f *inFrame) parseV6() reason {
	const l3 = virtio.EthernetHdrLen
	if f.n < l3+ipv6Len {
		return badHeader
	}
	b := f.head[l3:]
	length := int(binary.BigEndian.Uint16(b[4:]))
	if b[0]>>4 != 6 || l3+ipv6Len+length > int(f.pkt.Len) {
		return badHeader
	}
	f.src, f.dst = netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40]))
	f.proto, f.ttl = b[6], b[7]
	f.l4, f.end = l3+ipv6Len, l3+ipv6Len+length
	switch f.proto {
	case 0, 43, 51, 60, 135, 139, 140: // hop-by-hop, routing, authentication, destination, mobility, HIP, shim
		return ipOptions
	case protoFragment:
		f.fragment = true
		if f.n < f.l4+8 || f.end < f.l4+8 {
			return badHeader
		}
		f.proto = f.head[f.l4] // what the stack puts together is of this protocol
		if f.proto != protoUDP && f.proto != protoICMPv6 {
			return otherProtocol
		}
	}
	return accepted
}

// transport judges the transport header of a packet that is no fragment.
func (f *inFrame) transport() reason {
	length := f.end - f.l4
	switch f.proto {
	case protoTCP:
		if length < tcpMin || f.n < f.l4+tcpMin {
			return badHeader
		}
		if n := f.tcpHeader(); n < tcpMin || n > length {
			return badHeader
		}
		return f.verify(header.TCPChecksumOffset)
	case protoUDP:
		if length < udpLen || f.n < f.l4+udpLen {
			return badHeader
		}
		n := int(binary.BigEndian.Uint16(f.head[f.l4+4:]))
		if n < udpLen || n > length {
			return badHeader
		}
		f.end = f.l4 + n
		if f.pkt.Hdr.GSOType != virtio.GSONone {
			return badMarks
		}
		if !f.needsCsum && f.src.Is4() && binary.BigEndian.Uint16(f.head[f.l4+6:]) == 0 {
			return accepted // without a checksum (RFC 768)
		}
		return f.verify(udpChecksumOffset)
	case protoICMP, protoICMPv6:
		if length < icmpLen || f.n < f.l4+icmpLen || (f.proto == protoICMP) != f.src.Is4() {
			return badHeader
		}
		if f.pkt.Hdr.GSOType != virtio.GSONone {
			return badMarks
		}
		return f.verify(icmpChecksumOffset)
	}
	return otherProtocol
}

// tcpHeader is the length that the TCP header says it has.
func (f *inFrame) tcpHeader() int { return int(f.head[f.l4+12]>>4) * 4 }

// verify checks the transport checksum, whose field is at offset, unless the sender has left it to us: then only that the mark means it.
func (f *inFrame) verify(offset int) reason {
	if f.needsCsum {
		h := &f.pkt.Hdr
		if int(h.CsumStart) != f.l4 || int(h.CsumOffset) != offset {
			return badMarks
		}
		return accepted
	}
	if f.pkt.Hdr.GSOType != virtio.GSONone {
		return badMarks // segments cannot have got their checksums yet
	}
	sum := uint16(0)
	if f.proto != protoICMP {
		sum = pseudoSum(f.proto, f.src, f.dst, f.end-f.l4)
	}
	if f.sum(f.l4, f.end, sum) != 0xffff {
		return badChecksum
	}
	return accepted
}

// sum is the one's complement sum over the bytes from..to of the frame.
func (f *inFrame) sum(from, to int, initial uint16) uint16 {
	var c checksum.Checksumer
	f.eachPiece(from, to, func(b []byte) { c.Add(b) })
	return checksum.Combine(c.Checksum(), initial)
}

// eachPiece visits the memory of the bytes from..to of the frame.
func (f *inFrame) eachPiece(from, to int, visit func([]byte)) {
	at := 0
	for i := 0; i < int(f.pkt.NFrag) && at < to; i++ {
		b := f.pkt.Bytes(i)
		low, high := max(from-at, 0), min(to-at, len(b))
		if low < high {
			visit(b[low:high])
		}
		at += len(b)
	}
}

// bytes returns from..to of the frame as one slice: inside its fragment, or gathered in scratch, which grows as needed.
func (f *inFrame) bytes(from, to int, scratch *[]byte) []byte {
	at := 0
	for i := range int(f.pkt.NFrag) {
		b := f.pkt.Bytes(i)
		if from >= at && to <= at+len(b) {
			return b[from-at : to-at]
		}
		at += len(b)
	}
	if cap(*scratch) < to-from {
		*scratch = make([]byte, 0, virtio.MaxFrame)
	}
	b := (*scratch)[:to-from]
	f.pkt.CopyTo(b, from)
	return b
}

// pseudoSum is the sum over the pseudo header (RFC 793, RFC 8200 section 8.1).
func pseudoSum(proto uint8, src, dst netip.Addr, length int) uint16 {
	sum := checksum.Combine(uint16(proto), uint16(length))
	if src.Is4() {
		a, b := src.As4(), dst.As4()
		return checksum.Checksum(b[:], checksum.Checksum(a[:], sum))
	}
	a, b := src.As16(), dst.As16()
	return checksum.Checksum(b[:], checksum.Checksum(a[:], sum))
}
