package virtqueue

import (
	"math"

	"github.com/vhostd/vhostd/virtqueue/internal/word"
)

// kickState is what the ring's memory was last told about kicks.
type kickState uint8

const (
	kicksUnknown kickState = iota // an earlier owner may have left either
	kicksOn
	kicksOff
)

// NeedsCall reports whether the driver wants to be called for what was
// published since it was last asked. Ask once per batch, after Publish.
func (q *Split) NeedsCall() bool {
	n := q.uncall
	if n == 0 {
		return false
	}
	q.uncall = 0
	// ORDER: the used index against the driver's flags or event index; pairs
	// with the driver's barrier between writing those and looking at the index.
	word.Fence()
	if !q.eventIdx {
		return q.ring.availFlags()&availFNoInterrupt == 0
	}
	first := !q.called
	q.called = true
	// The first comparison lacks an old index that the driver agrees with, and
	// after 65536 entries the range covers every event (vhost_notify,
	// drivers/vhost/vhost.c).
	if first || n > math.MaxUint16 {
		return true
	}
	return needEvent(q.ring.usedEvent(), q.published, q.published-uint16(n))
}

// needEvent reports whether event lies in [old, to), all modulo 65536
// (virtio 1.3 section 2.7.10, vring_need_event).
func needEvent(event, to, old uint16) bool { return to-event-1 < to-old }

// EnableKicks asks the driver to kick when it adds a chain, then looks at the
// ring once more: true means that chains are available that are not peeked,
// and that nobody may have kicked for them, so the caller must not sleep.
func (q *Split) EnableKicks() (more bool) { return q.armKicks() != q.peeked }

// EnableKicksForMore is EnableKicks for a caller that knows of chains it
// cannot use yet, such as a receiver with too few buffers for its packet: true
// only if there are chains that Fill has never delivered.
func (q *Split) EnableKicksForMore() (more bool) { return q.armKicks() != q.seen }

// armKicks returns the available index as it is after kicks were enabled. The
// index is not kept: refresh has to judge it first.
func (q *Split) armKicks() uint16 {
	q.settle()
	if q.eventIdx {
		q.ring.setAvailEvent(q.available)
	}
	// With event indexes the device keeps flags at 0 (virtio 1.3 section 2.7.10.2).
	if !q.eventIdx || q.kicks != kicksOn {
		q.ring.setUsedFlags(0)
		q.kicks = kicksOn
	}
	// ORDER: the request against the index load; pairs with the driver's
	// barrier between its index store and its look at the request. One of the
	// two sides sees the other.
	word.Fence()
	return q.ring.availIdx()
}

// DisableKicks tells the driver that kicks are not needed. With event indexes
// there is nothing to write: the driver passes the old event once at most.
func (q *Split) DisableKicks() {
	if q.eventIdx || q.kicks == kicksOff {
		return
	}
	q.ring.setUsedFlags(usedFNoNotify)
	q.kicks = kicksOff
}

// Empty reports whether no chain is available beyond the peeked ones. It reads
// the driver's index only if none is known of.
func (q *Split) Empty() bool {
	q.settle()
	return q.available == q.peeked && q.ring.availIdx() == q.peeked
}
