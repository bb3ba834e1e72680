package virtio

// MaxFrame is the largest Ethernet frame in bytes that is carried: 65,535
// bytes of IP packet, the Ethernet header and one VLAN tag.
const MaxFrame = 65535 + EthernetHdrLen + 4

// EthernetHdrLen is the shortest frame that has a protocol.
const EthernetHdrLen = 14

// MinGSOSize is the smallest payload per segment that is accepted. It bounds
// the work of one frame to 1,366 segments (MaxFrame/MinGSOSize); no path MTU
// that IP allows asks for less.
const MinGSOSize = 48

// HdrError says why CheckTx refused a header; 0 is a good header.
type HdrError uint8

// Reasons of CheckTx.
const (
	HdrOK              HdrError = iota
	HdrFrameShort               // shorter than an Ethernet header
	HdrFrameLong                // longer than MaxFrame
	HdrCsumNotAcked             // NEEDS_CSUM without VIRTIO_NET_F_CSUM
	HdrCsumOutOfRange           // the checksum field would lie outside the frame
	HdrGSOUnknown               // gso_type that the specification does not know
	HdrGSONotAcked              // gso_type whose HOST_* feature was not acked
	HdrECNNotAcked              // ECN without VIRTIO_NET_F_HOST_ECN, or not with TCP
	HdrGSOSizeTooSmall          // gso_size 0 or below MinGSOSize
	HdrGSOWithoutCsum           // segmentation without NEEDS_CSUM
	HdrGSOHeadersShort          // frame ends before the transport header does
	numHdrErrors
)

var hdrErrorNames = [numHdrErrors]string{
	"ok", "frame_short", "frame_long", "csum_not_acked", "csum_out_of_range", "gso_unknown",
	"gso_not_acked", "ecn_not_acked", "gso_size_too_small", "gso_without_csum", "gso_headers_short",
}

// String is the reason as a metric label, such as "csum_out_of_range".
func (e HdrError) String() string {
	if e < numHdrErrors {
		return hdrErrorNames[e]
	}
	return "unknown"
}

// HdrErrors lists every reason but HdrOK, for tables of counters.
func HdrErrors() []HdrError {
	all := make([]HdrError, 0, numHdrErrors-1)
	for e := HdrOK + 1; e < numHdrErrors; e++ {
		all = append(all, e)
	}
	return all
}

// CheckTx judges the header of a frame that a driver transmits. frameLen
// counts the Ethernet header but not the virtio header; acked are the features
// the driver acked. h must be a private copy.
//
// On HdrOK the copy is also normalized, so that nothing a driver has no say in
// travels on: flag bits other than NEEDS_CSUM are cleared (virtio 1.3 section
// 5.1.6.2.2 has the device ignore unknown ones, and a sender's DATA_VALID
// proves nothing), fields that the type and flags make meaningless are zeroed,
// and hdr_len, a hint, is zeroed when it exceeds the frame.
func (h *NetHdr) CheckTx(frameLen int, acked Features) HdrError {
	if frameLen < EthernetHdrLen {
		return HdrFrameShort
	}
	if frameLen > MaxFrame {
		return HdrFrameLong
	}
	h.NumBuffers = 0
	h.Flags &= HdrFNeedsCsum
	if h.Flags == 0 {
		h.CsumStart, h.CsumOffset = 0, 0
	} else if e := h.checkCsum(frameLen, acked); e != HdrOK {
		return e
	}
	if h.GSOType == GSONone {
		h.HdrLen, h.GSOSize = 0, 0
		return HdrOK
	}
	return h.checkGSO(frameLen, acked)
}

func (h *NetHdr) checkCsum(frameLen int, acked Features) HdrError {
	if !acked.Has(FNetCSum) {
		return HdrCsumNotAcked
	}
	if int(h.CsumStart)+int(h.CsumOffset)+2 > frameLen {
		return HdrCsumOutOfRange
	}
	return HdrOK
}

func (h *NetHdr) checkGSO(frameLen int, acked Features) HdrError {
	var feature Features
	transport := 20
	switch h.GSOType &^ GSOECN {
	case GSOTCPv4:
		feature = FNetHostTSO4
	case GSOTCPv6:
		feature = FNetHostTSO6
	case GSOUDP:
		feature, transport = FNetHostUFO, 8
	case GSOUDPL4:
		feature, transport = FNetHostUSO, 8
	default:
		return HdrGSOUnknown
	}
	switch {
	case !acked.Has(feature):
		return HdrGSONotAcked
	case h.GSOType&GSOECN != 0 && (!acked.Has(FNetHostECN) || transport == 8):
		return HdrECNNotAcked
	case h.GSOSize < MinGSOSize:
		return HdrGSOSizeTooSmall
	case h.Flags&HdrFNeedsCsum == 0:
		return HdrGSOWithoutCsum
	case int(h.CsumStart)+transport > frameLen:
		return HdrGSOHeadersShort
	}
	if int(h.HdrLen) > frameLen {
		h.HdrLen = 0
	}
	return HdrOK
}
