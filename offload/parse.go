package offload

import (
	"encoding/binary"

	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/vhostd/vhostd/virtio"
)

const (
	// maxHeader is how much of a frame's start is parsed: two tags, the largest
	// IPv4 and TCP headers (142 bytes), or an IPv6 header with 134 bytes of
	// extension headers in front of the largest TCP header.
	maxHeader = 256

	etherLen = header.EthernetMinimumSize
	tagLen   = 4
	maxTags  = 2

	etherTypeIPv4  = 0x0800
	etherTypeIPv6  = 0x86dd
	etherTypeVLAN  = 0x8100 // IEEE 802.1Q, C-tag
	etherTypeSVLAN = 0x88a8 // IEEE 802.1ad, S-tag

	protoTCP = uint8(header.TCPProtocolNumber)
	protoUDP = uint8(header.UDPProtocolNumber)

	extHopByHop = 0
	extRouting  = 43
	extFragment = 44
	extDestOpts = 60

	tcpCsumOffset = 16
	udpCsumOffset = 6
)

// layout says where the headers of a TCP or UDP frame lie, in bytes from the
// start of the frame.
type layout struct {
	l3, l4, end int
	v6, tcp     bool
}

// parse finds the headers in head, the private copy of the first bytes of a
// frame of frameLen bytes. Every position in the result lies inside head.
func parse(head []byte, frameLen int) (layout, Reason) {
	p := parser{head: head, frameLen: frameLen}
	etherType, r := p.ethernet()
	if r != OK {
		return layout{}, r
	}
	var proto uint8
	switch etherType {
	case etherTypeIPv4:
		proto, r = p.ipv4()
	case etherTypeIPv6:
		proto, r = p.ipv6()
	default:
		r = GSOProtocol
	}
	if r == OK {
		r = p.transport(proto)
	}
	return p.layout, r
}

// parser walks over the headers; end is where the next one starts.
type parser struct {
	layout
	head     []byte
	frameLen int
}

// need reports why n more bytes of header are not there to be read.
func (p *parser) need(n int) Reason {
	switch {
	case p.end+n <= len(p.head):
		return OK
	case p.end+n > p.frameLen:
		return HeaderTruncated
	default:
		return HeaderTooLong
	}
}

func (p *parser) ethernet() (etherType uint16, r Reason) {
	p.end = etherLen
	if r = p.need(0); r != OK {
		return 0, r
	}
	for tags := 0; ; tags++ {
		etherType = binary.BigEndian.Uint16(p.head[p.end-2:])
		if tags == maxTags || etherType != etherTypeVLAN && etherType != etherTypeSVLAN {
			return etherType, OK
		}
		if r = p.need(tagLen); r != OK {
			return 0, r
		}
		p.end += tagLen
	}
}

func (p *parser) ipv4() (proto uint8, r Reason) {
	if r = p.need(header.IPv4MinimumSize); r != OK {
		return 0, r
	}
	ip := header.IPv4(p.head[p.end:])
	n := int(ip.HeaderLength())
	if header.IPVersion(ip) != header.IPv4Version || n < header.IPv4MinimumSize {
		return 0, HeaderMalformed
	}
	if r = p.need(n); r != OK {
		return 0, r
	}
	if ip.More() || ip.FragmentOffset() != 0 {
		return 0, GSOFragment
	}
	p.l3 = p.end
	p.end += n
	return ip.Protocol(), OK
}

func (p *parser) ipv6() (proto uint8, r Reason) {
	if r = p.need(header.IPv6MinimumSize); r != OK {
		return 0, r
	}
	ip := header.IPv6(p.head[p.end:])
	if header.IPVersion(ip) != header.IPv6Version {
		return 0, HeaderMalformed
	}
	p.v6 = true
	p.l3 = p.end
	p.end += header.IPv6MinimumSize
	proto = ip.NextHeader()
	for proto == extHopByHop || proto == extRouting || proto == extDestOpts {
		// Each round consumes at least 8 bytes of head, which bounds the walk.
		if r = p.need(8); r != OK {
			return 0, r
		}
		ext := p.head[p.end:]
		n := (int(ext[1]) + 1) * 8
		if r = p.need(n); r != OK {
			return 0, r
		}
		if proto == extRouting && ext[3] != 0 {
			return 0, GSORouted
		}
		proto = ext[0]
		p.end += n
	}
	if proto == extFragment {
		return 0, GSOFragment
	}
	return proto, OK
}

func (p *parser) transport(proto uint8) Reason {
	p.l4 = p.end
	switch proto {
	case protoTCP:
		p.tcp = true
		if r := p.need(header.TCPMinimumSize); r != OK {
			return r
		}
		n := int(header.TCP(p.head[p.l4:]).DataOffset())
		if n < header.TCPMinimumSize {
			return HeaderMalformed
		}
		if r := p.need(n); r != OK {
			return r
		}
		p.end += n
	case protoUDP:
		if r := p.need(header.UDPMinimumSize); r != OK {
			return r
		}
		p.end += header.UDPMinimumSize
	default:
		return GSOProtocol
	}
	return OK
}

// matches reports whether the frame is of the protocol that gsoType, without its
// ECN bit, names.
func (l *layout) matches(gsoType uint8) bool {
	switch gsoType {
	case virtio.GSOTCPv4:
		return l.tcp && !l.v6
	case virtio.GSOTCPv6:
		return l.tcp && l.v6
	case virtio.GSOUDPL4:
		return !l.tcp
	}
	return false
}

// csumOffset is where the checksum field lies in the transport header.
func (l *layout) csumOffset() int {
	if l.tcp {
		return tcpCsumOffset
	}
	return udpCsumOffset
}
