package vswitch

import (
	"encoding/binary"
	"math/bits"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/virtio"
)

// maxHeader is as far as a flow is looked for: an Ethernet header, two VLAN tags, the longest IPv4 header and two ports.
const maxHeader = virtio.EthernetHdrLen + 2*vlanLen + 60 + 4

// VLAN tags and EtherTypes (IEEE 802.1Q section 9.5, RFC 894, RFC 2464).
const (
	vlanLen       = 4
	etherTypeIPv4 = 0x0800
	etherTypeIPv6 = 0x86dd
	etherTypeVLAN = 0x8100
	etherTypeQinQ = 0x88a8
)

// Protocols whose header starts with a source and a destination port.
const (
	protoTCP  = 6
	protoUDP  = 17
	protoSCTP = 132
)

// headerOf returns the start of a frame of at least virtio.EthernetHdrLen bytes, from its first fragment if that has enough of it and
// from scratch otherwise.
func headerOf(p *packet.Packet, scratch *[maxHeader]byte) []byte {
	want := min(p.Len, maxHeader)
	if p.Frags[0].Len >= want {
		return p.Bytes(0)[:want]
	}
	return scratch[:p.PeekHeader(scratch[:want])]
}

// macOf is the address at the start of b as a number.
func macOf(b []byte) uint64 {
	return uint64(binary.BigEndian.Uint16(b))<<32 | uint64(binary.BigEndian.Uint32(b[2:]))
}

// addresses are a header's destination and source.
func addresses(h []byte) (dst, src uint64) {
	_ = h[virtio.EthernetHdrLen-1]
	return binary.BigEndian.Uint64(h) >> 16, binary.BigEndian.Uint64(h[6:]) >> 16
}

func isGroup(mac uint64) bool { return mac>>40&1 != 0 }

// badSource says that no station can have the address.
func badSource(mac uint64) bool { return mac == 0 || isGroup(mac) }

// isLinkLocal recognizes the addresses that a bridge never passes on (IEEE 802.1Q, table 8-1).
func isLinkLocal(mac uint64) bool { return mac&^0xf == 0x0180c2000000 }

// flowOf is a hash of what the frames of one flow have in common: IP addresses, protocol and, except in fragments, ports; for other
// protocols the Ethernet header.
func flowOf(h []byte) uint32 {
	etherType, at := binary.BigEndian.Uint16(h[12:]), virtio.EthernetHdrLen
	for range 2 {
		if (etherType == etherTypeVLAN || etherType == etherTypeQinQ) && len(h) >= at+vlanLen {
			etherType = binary.BigEndian.Uint16(h[at+2:])
			at += vlanLen
		}
	}
	switch l3 := h[at:]; {
	case etherType == etherTypeIPv4 && len(l3) >= 20:
		return flowOfIPv4(l3)
	case etherType == etherTypeIPv6 && len(l3) >= 40:
		return flowOfIPv6(l3)
	}
	return fold(mix(binary.BigEndian.Uint64(h), binary.BigEndian.Uint64(h[6:])))
}

func flowOfIPv4(h []byte) uint32 {
	const fragment = 0x3fff // more fragments, or an offset
	proto := h[9]
	size := int(h[0]&0xf) * 4
	var ports uint32
	if binary.BigEndian.Uint16(h[6:])&fragment == 0 && size >= 20 && hasPorts(proto) && len(h) >= size+4 {
		ports = binary.BigEndian.Uint32(h[size:])
	}
	return fold(mix(binary.BigEndian.Uint64(h[12:]), uint64(proto)<<32|uint64(ports)))
}

func flowOfIPv6(h []byte) uint32 {
	next := h[6]
	var ports uint32
	if hasPorts(next) && len(h) >= 44 {
		ports = binary.BigEndian.Uint32(h[40:])
	}
	x := mix(binary.BigEndian.Uint64(h[8:]), binary.BigEndian.Uint64(h[16:]))
	x = mix(x^binary.BigEndian.Uint64(h[24:]), binary.BigEndian.Uint64(h[32:]))
	return fold(mix(x, uint64(next)<<32|uint64(ports)))
}

func hasPorts(proto byte) bool { return proto == protoTCP || proto == protoUDP || proto == protoSCTP }

// mix folds the 128-bit product of two words that were made odd-looking by constants without a pattern.
func mix(a, b uint64) uint64 {
	hi, lo := bits.Mul64(a^0x9e3779b97f4a7c15, b^0xd1b54a32d192ed03)
	return hi ^ lo
}

func fold(x uint64) uint32 { return uint32(x) ^ uint32(x>>32) }

// share maps a hash evenly to one of n.
func share(hash uint32, n int) int { return int(uint64(hash) * uint64(n) >> 32) }
