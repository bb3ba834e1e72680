package user

import (
	"encoding/binary"
	"net/netip"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"

	"github.com/vhostd/vhostd/virtio"
)

const (
	defaultTTL  = 64
	fragmentLen = 8
	// fragmentMask makes the length of a fragment a multiple of eight bytes.
	fragmentMask = ^7
)

// sendIP sends a packet of our making to a guest: head is the transport header, body what follows. It is cut in pieces where it is
// longer than the MTU. hdr are the marks of a packet in one piece. Neither slice is kept.
func (p *Port) sendIP(src, dst netip.Addr, proto uint8, head, body []byte, hdr virtio.NetHdr) reason {
	mac, ok := p.neighbors.lookup(dst)
	if !ok {
		p.lost.add(unknown)
		p.ask(dst)
		return unknown
	}
	if length := len(head) + len(body) + ipLen(src); length > p.MTU() {
		return p.sendPieces(mac, src, dst, proto, head, body)
	}
	v := newIP(src, dst, proto, len(head)+len(body), false)
	_, _ = v.Write(head)
	_, _ = v.Write(body)
	return p.sendView(mac, src, dst, v, hdr)
}

func (p *Port) sendView(mac [6]byte, src, dst netip.Addr, v *buffer.View, hdr virtio.NetHdr) reason {
	f := outFrame{view: v, hdr: hdr}
	etherType := uint16(etherIPv4)
	if src.Is6() {
		etherType = etherIPv6
	}
	p.frame(mac, etherType, &f)
	return p.deliver(&f, flowHash(v.AsSlice()))
}

// sendPieces sends fragments. IPv4 says in its header, IPv6 in an extension header which piece it is (RFC 791, RFC 8200 section 4.5).
func (p *Port) sendPieces(mac [6]byte, src, dst netip.Addr, proto uint8, head, body []byte) reason {
	id := p.lastID.Add(1)
	room := p.MTU() - ipLen(src)
	if src.Is6() {
		room -= fragmentLen
	}
	room &= fragmentMask
	total := len(head) + len(body)
	for at := 0; at < total; at += room {
		n := min(room, total-at)
		more := at+n < total
		v := newIP(src, dst, proto, n, src.Is6())
		b := v.AsSlice()
		if src.Is4() {
			field := uint16(at / 8)
			if more {
				field |= 0x2000
			}
			binary.BigEndian.PutUint16(b[4:], uint16(id))
			binary.BigEndian.PutUint16(b[6:], field)
			putSum4(b)
		} else {
			field := uint16(at)
			if more {
				field |= 1
			}
			binary.BigEndian.PutUint16(b[ipv6Len+2:], field)
			binary.BigEndian.PutUint32(b[ipv6Len+4:], id)
		}
		writeRange(v, head, body, at, at+n)
		if r := p.sendView(mac, src, dst, v, virtio.NetHdr{}); r != accepted {
			return r
		}
	}
	return accepted
}

// writeRange appends the bytes from..to of head and body together.
func writeRange(v *buffer.View, head, body []byte, from, to int) {
	if from < len(head) {
		_, _ = v.Write(head[from:min(to, len(head))])
	}
	if to > len(head) {
		_, _ = v.Write(body[max(from-len(head), 0) : to-len(head)])
	}
}

func ipLen(a netip.Addr) int {
	if a.Is4() {
		return ipv4Len
	}
	return ipv6Len
}

// newIP makes a view that begins with an IP header for n bytes, and has room for them. With piece, an IPv6 header for fragments follows.
func newIP(src, dst netip.Addr, proto uint8, n int, piece bool) *buffer.View {
	if src.Is4() {
		v := buffer.NewView(ipv4Len + n)
		v.Grow(ipv4Len)
		b := v.AsSlice()
		b[0], b[8], b[9] = 4<<4|ipv4Len/4, defaultTTL, proto
		binary.BigEndian.PutUint16(b[2:], uint16(ipv4Len+n))
		s, d := src.As4(), dst.As4()
		copy(b[12:], s[:])
		copy(b[16:], d[:])
		putSum4(b)
		return v
	}
	size, next := ipv6Len, proto
	if piece {
		size, next = ipv6Len+fragmentLen, protoFragment
	}
	v := buffer.NewView(size + n)
	v.Grow(size)
	b := v.AsSlice()
	b[0], b[6], b[7] = 6<<4, next, defaultTTL
	binary.BigEndian.PutUint16(b[4:], uint16(size-ipv6Len+n))
	s, d := src.As16(), dst.As16()
	copy(b[8:], s[:])
	copy(b[24:], d[:])
	if piece {
		b[ipv6Len] = proto
	}
	return v
}

func putSum4(b []byte) {
	b[10], b[11] = 0, 0
	binary.BigEndian.PutUint16(b[10:], ^checksum.Checksum(b[:ipv4Len], 0))
}

// sendUDP sends a datagram to a guest. The checksum of one in one piece is left to whoever needs it.
func (p *Port) sendUDP(src, dst netip.AddrPort, payload []byte) reason {
	var head [udpLen]byte
	length := udpLen + len(payload)
	binary.BigEndian.PutUint16(head[:], src.Port())
	binary.BigEndian.PutUint16(head[2:], dst.Port())
	binary.BigEndian.PutUint16(head[4:], uint16(length))
	sum := pseudoSum(protoUDP, src.Addr(), dst.Addr(), length)
	if ipLen(src.Addr())+length > p.MTU() {
		if sum = ^checksum.Checksum(payload, checksum.Checksum(head[:], sum)); sum == 0 {
			sum = 0xffff // zero means that there is none
		}
	}
	binary.BigEndian.PutUint16(head[6:], sum)
	hdr := virtio.NetHdr{
		Flags: virtio.HdrFNeedsCsum, CsumStart: uint16(virtio.EthernetHdrLen + ipLen(src.Addr())), CsumOffset: udpChecksumOffset,
	}
	return p.sendIP(src.Addr(), dst.Addr(), protoUDP, head[:], payload, hdr)
}

// flowHash spreads flows over the queues, by the addresses and ports of an IP packet of ours.
func flowHash(b []byte) uint32 {
	from, to := 12, ipv4Len+4
	if b[0]>>4 == 6 {
		from, to = 8, ipv6Len+4
	}
	h := uint32(2166136261) // FNV-1a
	for _, c := range b[from:min(to, len(b))] {
		h = (h ^ uint32(c)) * 16777619
	}
	return h ^ h>>16
}
