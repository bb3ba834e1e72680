package driver

import "github.com/vhostd/vhostd/virtqueue/internal/word"

// NeedsKick reports whether the device wants a kick for what was published
// since it was last asked.
func (r *Ring) NeedsKick() bool {
	old := r.kicked
	r.kicked = r.published
	if old == r.published {
		return false
	}
	// ORDER: the available index against the device's request; pairs with the
	// device's barrier between writing the request and reading the index.
	word.Fence()
	if !r.eventIdx {
		return r.mem.usedFlags()&usedFNoNotify == 0
	}
	return r.published-r.mem.availEvent()-1 < r.published-old
}

// EnableCalls asks for a call for the next used chain. It returns true if
// chains are waiting already, for which no call may come.
func (r *Ring) EnableCalls() (more bool) { return r.requestCall(0) }

// DelayCalls asks for a call after three quarters of the outstanding chains
// are used, as Linux does for transmit completions. Without event indexes it
// is EnableCalls. It returns true if so many are waiting already.
func (r *Ring) DelayCalls() (more bool) {
	return r.requestCall(uint16(int(r.published-r.used) * 3 / 4))
}

func (r *Ring) requestCall(after uint16) (more bool) {
	r.mem.storeAvailFlags(0)
	if r.eventIdx {
		r.mem.storeUsedEvent(r.used + after)
	} else {
		after = 0
	}
	// ORDER: the request against the used index; pairs with the device's
	// barrier between its index store and its look at the request.
	word.Fence()
	return r.mem.usedIdx()-r.used > after
}

// DisableCalls tells the device that calls are not needed. With event indexes
// it moves the event out of the way: behind the last used chain.
func (r *Ring) DisableCalls() {
	if r.eventIdx {
		r.mem.storeUsedEvent(r.used - 1)
		return
	}
	r.mem.storeAvailFlags(availFNoInterrupt)
}

// HasUsed reports whether GetUsed would find something.
func (r *Ring) HasUsed() bool { return r.err == nil && r.mem.usedIdx() != r.used }
