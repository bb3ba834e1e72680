package pool

import (
	"sync/atomic"

	"github.com/vhostd/vhostd/pagemem"
)

// ring is a bounded queue of pages with many producers and one consumer at a time.
//
// Position p lives in slot p mod size. A slot holds uint32(p+1)<<32 | page, so
// the consumer sees that the slot was filled for this lap; it never writes
// slots. Instead it stores its position once per batch, and a producer that
// finds room between the two positions claims slots by moving tail. The kernel's
// ptr_ring (include/linux/ptr_ring.h) takes a lock instead, under which a
// preempted producer would stall all others.
type ring struct {
	slots []atomic.Uint64
	mask  uint64

	_    [64]byte
	tail atomic.Uint64 // next position to claim, by producers
	_    [64]byte
	head atomic.Uint64 // next position to consume, stored by the consumer
	busy atomic.Bool   // somebody consumes; on the consumer's line
	_    [64]byte
}

// newRing makes a ring whose size is a power of two.
func newRing(size int) *ring {
	return &ring{slots: make([]atomic.Uint64, size), mask: uint64(size - 1)}
}

// push appends ids, or the first of them, and returns how many fitted.
// Safe for concurrent use.
func (r *ring) push(ids []pagemem.PageID) int {
	for {
		// A stale tail makes room meaningless, but then the swap fails.
		tail := r.tail.Load()
		room := int64(len(r.slots)) - int64(tail-r.head.Load())
		n := int64(len(ids))
		if n > room {
			n = room
		}
		if n <= 0 {
			return 0
		}
		if !r.tail.CompareAndSwap(tail, tail+uint64(n)) {
			continue
		}
		for i, id := range ids[:n] {
			pos := tail + uint64(i)
			// ORDER: all uses of the page before this store; pairs with the load in pop.
			r.slots[pos&r.mask].Store(uint64(uint32(pos+1))<<32 | uint64(id))
		}
		return int(n)
	}
}

// consume is pop for one of several consumers. Who finds another at work gets nothing, as if the ring were empty: to
// wait for a goroutine that may be preempted would cost more than fresh pages. Safe for concurrent use.
func (r *ring) consume(dst []pagemem.PageID) (n int) {
	if r.head.Load() == r.tail.Load() || !r.busy.CompareAndSwap(false, true) {
		return 0
	}
	n = r.pop(dst)
	// ORDER: head and the loads of slots before this store; pairs with the swap above.
	r.busy.Store(false)
	return n
}

// pop moves up to len(dst) pages to dst and returns how many. Consumer only.
func (r *ring) pop(dst []pagemem.PageID) (n int) {
	head := r.head.Load()
	for n < len(dst) {
		pos := head + uint64(n)
		word := r.slots[pos&r.mask].Load()
		if uint32(word>>32) != uint32(pos+1) {
			break
		}
		dst[n] = pagemem.PageID(word)
		n++
	}
	if n > 0 {
		// ORDER: the loads of the slots before this store; pairs with the load of head in push.
		r.head.Store(head + uint64(n))
	}
	return n
}

// pushed returns how many pages ever went through the ring.
func (r *ring) pushed() uint64 { return r.tail.Load() }
