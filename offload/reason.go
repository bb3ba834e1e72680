package offload

// Reason says why a frame cannot be forwarded with the marks it carries. Zero
// means that nothing is wrong.
type Reason uint8

const (
	// OK: the frame may go on.
	OK Reason = iota
	// Runt: shorter than an Ethernet header.
	Runt
	// Oversize: longer than virtio.MaxFrame, or a segment of it would not fit
	// the length field of its IP header.
	Oversize
	// CsumRange: csum_start lies inside the Ethernet header, or the checksum
	// field does not lie inside the frame.
	CsumRange
	// CsumMissing: segmentation is asked for without NEEDS_CSUM.
	CsumMissing
	// CsumMismatch: csum_start or csum_offset is not that of the transport
	// header to be segmented.
	CsumMismatch
	// GSOType: a gso_type that is unknown, or not supported in software (UFO).
	GSOType
	// GSOSize: gso_size below virtio.MinGSOSize.
	GSOSize
	// GSOProtocol: the frame is not of the protocol that gso_type names.
	GSOProtocol
	// GSOFragment: segmentation is asked for on an IP fragment.
	GSOFragment
	// GSORouted: segmentation is asked for on an IPv6 packet whose routing
	// header still changes the destination, and with it the checksum.
	GSORouted
	// HeaderTruncated: the headers do not end before the frame does.
	HeaderTruncated
	// HeaderTooLong: the headers exceed what the parser looks at.
	HeaderTooLong
	// HeaderMalformed: a header length field is below its protocol's minimum,
	// or the version is not that of the EtherType.
	HeaderMalformed
	// NoMemory: the allocator had no buffer.
	NoMemory
	// NoRoom: the caller's output array cannot hold the segments.
	NoRoom

	// NumReasons sizes an array of counters indexed by Reason.
	NumReasons
)

var reasonNames = [NumReasons]string{
	OK:              "ok",
	Runt:            "runt",
	Oversize:        "oversize",
	CsumRange:       "csum_out_of_range",
	CsumMissing:     "gso_without_csum",
	CsumMismatch:    "gso_csum_mismatch",
	GSOType:         "gso_type",
	GSOSize:         "gso_size",
	GSOProtocol:     "gso_protocol_mismatch",
	GSOFragment:     "gso_on_fragment",
	GSORouted:       "gso_routing_header",
	HeaderTruncated: "header_truncated",
	HeaderTooLong:   "header_too_long",
	HeaderMalformed: "header_malformed",
	NoMemory:        "no_memory",
	NoRoom:          "no_room",
}

// String is the reason as a metric label.
func (r Reason) String() string {
	if r < NumReasons {
		return reasonNames[r]
	}
	return "unknown"
}
