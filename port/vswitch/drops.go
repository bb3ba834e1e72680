package vswitch

import "sync/atomic"

// reason is why a frame disappeared. accepted is none.
type reason uint8

const (
	// Counted at the queue that sent the frame.
	tooShort      reason = iota
	invalidSource        // a group or zero as source address
	foreignSource        // not the address that the port is pinned to
	stolenSource         // the address that another port is pinned to
	linkLocal            // for the next bridge only, which is here
	samePort             // the receiver is behind the sender's own port
	stationDown          // the receiver's port has no enabled queue, and there is no uplink to look behind
	noReceiver           // nobody else is there
	floodLimit           // too many copies for other ports within a millisecond
	// Counted at the queue that would have received it.
	backlogFull
	memoryFull
	disabled // the guest stopped receiving while the frame was waiting
	queueClosed
	numReasons

	// No losses, but verdicts of the same function.
	accepted
	flooded
	unknown
)

var reasonNames = [numReasons]string{
	"too_short", "bad_source", "foreign_source", "stolen_source", "link_local", "same_port", "station_down", "no_receiver", "flood_limit",
	"backlog_full", "memory_full", "disabled", "queue_closed",
}

// drops counts lost frames; several workers may add, anybody reads.
type drops [numReasons]atomic.Uint64

func (d *drops) add(r reason, n int) { d[r].Add(uint64(n)) }

func (d *drops) visit(visit func(reason string, n uint64)) {
	for r := range d {
		visit(reasonNames[r], d[r].Load())
	}
}
