package virtqueue

import "github.com/vhostd/vhostd/virtqueue/internal/word"

// NeedsCall reports whether the driver wants to be called for what was
// published since it was last asked. Ask once per batch, after Publish.
// A structure that makes no sense asks for calls.
func (q *Packed) NeedsCall() bool {
	n := q.uncall
	if n == 0 {
		return false
	}
	q.uncall = 0
	// ORDER: the used descriptors against the driver's structure; pairs with the
	// driver's barrier between writing that and looking at the descriptors.
	word.Fence()
	event, flags := q.ring.driverEvent()
	if flags == eventDisable {
		return false
	}
	if flags != eventDesc || !q.eventIdx {
		return true
	}
	first := !q.called
	q.called = true
	// A driver may have missed calls of an earlier life. After a lap the range
	// covers every event.
	return first || n >= int(q.size) || q.passed(event, n)
}

// passed reports whether the event is among the last n < size descriptors
// before published (section 2.8.10).
func (q *Packed) passed(event uint16, n int) bool {
	to, at := int(q.published.idx), int(event&0x7fff)
	if event>>15 != q.published.wrap {
		at -= int(q.size)
	}
	return to-n <= at && at < to
}

// EnableKicks asks the driver to kick when it adds a chain, then looks at the
// ring once more: true means that chains are available that are not peeked, and
// that nobody may have kicked for them, so the caller must not sleep.
func (q *Packed) EnableKicks() (more bool) { return q.armKicks(0) }

// EnableKicksForMore is EnableKicks for a caller that knows of chains it cannot
// use yet: true only if there are chains that Fill has never delivered.
func (q *Packed) EnableKicksForMore() (more bool) { return q.armKicks(q.seenAhead) }

// armKicks asks for a kick for the n-th descriptor from peeked on and reports
// whether the driver was there already.
func (q *Packed) armKicks(n uint16) (more bool) {
	if q.eventIdx {
		q.ring.setDeviceEvent(q.peeked.add(n, q.size).word(), eventDesc)
	} else if q.kicks != kicksOn {
		q.ring.setDeviceEvent(0, eventEnable)
	}
	q.kicks = kicksOn
	// ORDER: the request against the load of the flags; pairs with the driver's
	// barrier between making a chain available and looking at the request.
	word.Fence()
	return !q.untouched(n)
}

// DisableKicks tells the driver that kicks are not needed.
func (q *Packed) DisableKicks() {
	if q.kicks != kicksOff {
		q.ring.setDeviceEvent(0, eventDisable)
		q.kicks = kicksOff
	}
}
