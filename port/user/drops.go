package user

import "sync/atomic"

// reason is why a frame disappeared.
type reason uint8

const (
	// From the guest.
	tooShort       reason = iota
	otherStation          // not for us: a switch looks for unknown stations everywhere
	badHeader             // lengths or versions of the headers contradict the frame or each other
	badChecksum           // of a header or, if the guest should have completed it, of TCP or UDP
	badMarks              // virtio header marks that do not fit the frame
	ipOptions             // IPv4 options or IPv6 extension headers
	foreignSource         // an address that is not of this network
	badDestination        // one that is never routed: loopback, broadcast, multicast, link-local
	otherProtocol         // neither TCP, UDP nor echo
	policyRefused         // the egress policy
	flowLimit             // too many flows, or no descriptors
	sendFailed            // the host refused a datagram, or has no room for it
	noAnswer              // a request that nothing here answers
	stackFailed           // the stack has panicked, nothing passes any more
	// Towards the guest.
	ringFull
	noQueue   // no queue is open
	unknown   // nobody knows where the guest with the address is
	oversized // longer than a frame can be
	noMemory
	numReasons

	accepted // no loss, but a verdict of the same functions
)

var reasonNames = [numReasons]string{
	"too_short", "other_station", "bad_header", "bad_checksum", "bad_marks", "ip_options", "foreign_source", "bad_destination", "other_protocol",
	"policy", "flow_limit", "send_failed", "no_answer", "stack_failed", "ring_full", "no_queue", "unknown_station", "oversized", "no_memory",
}

// drops counts lost frames; anybody adds, anybody reads.
type drops [numReasons]atomic.Uint64

func (d *drops) add(r reason) { d[r].Add(1) }

func (d *drops) visit(visit func(reason string, n uint64)) {
	for r := range d {
		visit(reasonNames[r], d[r].Load())
	}
}
