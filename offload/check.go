package offload

import (
	"gvisor.dev/gvisor/pkg/tcpip/header"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/virtio"
)

// Check judges the marks in p.Hdr against the frame itself: where the checksum
// lies and, if the frame is to be segmented, that its EtherType, transport
// protocol and header lengths are what gso_type says, through up to two VLAN
// tags, IPv4 options and IPv6 extension headers. A frame without marks passes
// whatever it contains, as does a checksum request of any protocol that lies
// inside the frame. hdr_len is a hint that nothing here depends on.
//
// It is called once, where a frame enters, after virtio.NetHdr.CheckTx judged
// the header by itself.
func Check(p *packet.Packet) Reason {
	if p.Hdr.GSOType == virtio.GSONone {
		return checkCsum(p)
	}
	var head [maxHeader]byte
	_, r := checkGSO(p, head[:p.PeekHeader(head[:])])
	return r
}

// checkCsum judges length and checksum request.
func checkCsum(p *packet.Packet) Reason {
	switch {
	case p.Len < etherLen:
		return Runt
	case p.Len > virtio.MaxFrame:
		return Oversize
	case p.Hdr.Flags&virtio.HdrFNeedsCsum == 0:
		return OK
	case p.Hdr.CsumStart < etherLen || csumField(&p.Hdr)+2 > int(p.Len):
		return CsumRange
	}
	return OK
}

// csumField is the position of the checksum field in the frame.
func csumField(h *virtio.NetHdr) int {
	return int(h.CsumStart) + int(h.CsumOffset)
}

// checkGSO judges a segmentation request by head, the private copy of the
// frame's start, and returns where the headers are.
func checkGSO(p *packet.Packet, head []byte) (layout, Reason) {
	if r := checkCsum(p); r != OK {
		return layout{}, r
	}
	h := &p.Hdr
	switch gso := h.GSOType &^ virtio.GSOECN; {
	case gso != virtio.GSOTCPv4 && gso != virtio.GSOTCPv6 && h.GSOType != virtio.GSOUDPL4:
		return layout{}, GSOType
	case h.GSOSize < virtio.MinGSOSize:
		return layout{}, GSOSize
	case h.Flags&(virtio.HdrFNeedsCsum|virtio.HdrFDataValid) == 0:
		return layout{}, CsumMissing
	}
	l, r := parse(head, int(p.Len))
	if r != OK {
		return l, r
	}
	switch {
	case !l.matches(h.GSOType &^ virtio.GSOECN):
		return l, GSOProtocol
	case l.end >= int(p.Len):
		return l, HeaderTruncated
	case h.Flags&virtio.HdrFNeedsCsum != 0 && (int(h.CsumStart) != l.l4 || int(h.CsumOffset) != l.csumOffset()):
		return l, CsumMismatch
	case l.ipLen(min(int(h.GSOSize), int(p.Len)-l.end)) > 0xffff:
		return l, Oversize
	}
	return l, OK
}

// ipLen is the value of the IP header's length field for a frame with the given
// number of transport payload bytes: IPv6 does not count its own fixed header.
func (l *layout) ipLen(payload int) int {
	n := l.end - l.l3 + payload
	if l.v6 {
		n -= header.IPv6MinimumSize
	}
	return n
}
