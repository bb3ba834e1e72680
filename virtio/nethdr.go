package virtio

import "encoding/binary"

// Values of NetHdr.Flags and NetHdr.GSOType (virtio 1.3 section 5.1.6).
const (
	HdrFNeedsCsum = 1 // VIRTIO_NET_HDR_F_NEEDS_CSUM
	HdrFDataValid = 2 // VIRTIO_NET_HDR_F_DATA_VALID
	HdrFRSCInfo   = 4 // VIRTIO_NET_HDR_F_RSC_INFO

	GSONone  = 0    // VIRTIO_NET_HDR_GSO_NONE
	GSOTCPv4 = 1    // VIRTIO_NET_HDR_GSO_TCPV4
	GSOUDP   = 3    // VIRTIO_NET_HDR_GSO_UDP
	GSOTCPv6 = 4    // VIRTIO_NET_HDR_GSO_TCPV6
	GSOUDPL4 = 5    // VIRTIO_NET_HDR_GSO_UDP_L4
	GSOECN   = 0x80 // VIRTIO_NET_HDR_GSO_ECN
)

// Sizes of the header in bytes on the ring.
const (
	NetHdrLen       = 12 // with num_buffers: VERSION_1 or MRG_RXBUF
	NetHdrLenLegacy = 10
)

// NetHdr is a decoded, private copy of struct virtio_net_hdr. Its layout is
// the wire's on a little-endian machine.
type NetHdr struct {
	Flags, GSOType uint8
	HdrLen         uint16 // bytes of headers to copy to every segment; a hint, never trusted
	GSOSize        uint16 // payload bytes a segment
	CsumStart      uint16 // where the checksum's coverage starts, from the first Ethernet byte
	CsumOffset     uint16 // where to store it, from CsumStart
	NumBuffers     uint16 // receive only: buffers the packet is spread over
}

// NetHdrLen is the number of header bytes in front of each frame under the
// acked features f.
func (f Features) NetHdrLen() int {
	if f.Any(FVersion1 | FNetMrgRxBuf) {
		return NetHdrLen
	}
	return NetHdrLenLegacy
}

// Decode sets h from the 10 or 12 bytes of b; without the last two,
// NumBuffers is 0. A shorter b is a caller's error and panics.
func (h *NetHdr) Decode(b []byte) {
	_ = b[NetHdrLenLegacy-1]
	h.Flags, h.GSOType = b[0], b[1]
	h.HdrLen = binary.LittleEndian.Uint16(b[2:])
	h.GSOSize = binary.LittleEndian.Uint16(b[4:])
	h.CsumStart = binary.LittleEndian.Uint16(b[6:])
	h.CsumOffset = binary.LittleEndian.Uint16(b[8:])
	h.NumBuffers = 0
	if len(b) >= NetHdrLen {
		h.NumBuffers = binary.LittleEndian.Uint16(b[10:])
	}
}

// Encode writes h into b: 12 bytes if they fit, else 10. A b shorter than
// that is a caller's error and panics.
func (h NetHdr) Encode(b []byte) {
	_ = b[NetHdrLenLegacy-1]
	b[0], b[1] = h.Flags, h.GSOType
	binary.LittleEndian.PutUint16(b[2:], h.HdrLen)
	binary.LittleEndian.PutUint16(b[4:], h.GSOSize)
	binary.LittleEndian.PutUint16(b[6:], h.CsumStart)
	binary.LittleEndian.PutUint16(b[8:], h.CsumOffset)
	if len(b) >= NetHdrLen {
		binary.LittleEndian.PutUint16(b[10:], h.NumBuffers)
	}
}
