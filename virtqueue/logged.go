package virtqueue

import "github.com/vhostd/vhostd/guestmem"

// UsedLog says in which dirty log and at which guest addresses the pages are marked
// that a device writes in a ring itself; those of buffers are marked by who fills
// them. The zero UsedLog marks nothing.
type UsedLog struct {
	Log *guestmem.Log
	// Used is the used ring of a split ring, of a packed ring the device's event
	// suppression structure. The front-end gives it with VHOST_USER_SET_VRING_ADDR.
	Used uint64
	// Desc is a packed ring's descriptor ring, which vhost-user.rst has no address for.
	Desc uint64
}

// WithLog returns the same ring with marks according to l, instead of those that q
// may have made. Without a log it is the bare ring, which logging costs nothing.
// Like any method it is for q's owner.
func WithLog(q Ring, l UsedLog) Ring {
	switch bare := q.(type) {
	case *loggedSplit:
		q = bare.Split
	case *loggedPacked:
		q = bare.Packed
	}
	if l.Log == nil {
		return q
	}
	switch bare := q.(type) {
	case *Split:
		return &loggedSplit{bare, l}
	case *Packed:
		return &loggedPacked{bare, l}
	}
	return q
}

// Offsets in a used ring (virtio 1.3 section 2.7.8).
const (
	usedFlagsAt   = 0
	usedIdxAt     = 2
	usedEntriesAt = 4
	usedEntrySize = 8
)

// loggedSplit marks after each store into the used ring.
type loggedSplit struct {
	*Split
	log UsedLog
}

func (q *loggedSplit) mark(at, n uint64) { q.log.Log.Mark(q.log.Used+at, n) }

// entries marks the used entries of n positions from pos on.
func (q *loggedSplit) entries(pos uint16, n int) {
	first := int(pos & q.ring.mask)
	head := min(n, q.Size()-first)
	q.mark(usedEntriesAt+usedEntrySize*uint64(first), usedEntrySize*uint64(head))
	q.mark(usedEntriesAt, usedEntrySize*uint64(n-head))
}

func (q *loggedSplit) Complete(head uint16, written uint32) {
	pos := q.consumed
	q.Split.Complete(head, written)
	if !q.oneUsed {
		q.entries(pos, 1)
	}
}

func (q *loggedSplit) CompleteBatch(b *Batch, from, n int) {
	pos := q.consumed
	q.Split.CompleteBatch(b, from, n)
	if !q.oneUsed && n > 0 {
		q.entries(pos, n)
	}
}

func (q *loggedSplit) Publish(lag int) (published int) {
	pos := q.published
	published = q.Split.Publish(lag)
	if published == 0 {
		return 0
	}
	if q.oneUsed {
		q.entries(pos, 1)
	}
	q.mark(usedIdxAt, 2)
	return published
}

func (q *loggedSplit) EnableKicks() (more bool) {
	more = q.Split.EnableKicks()
	q.kickRequest()
	return more
}

func (q *loggedSplit) EnableKicksForMore() (more bool) {
	more = q.Split.EnableKicksForMore()
	q.kickRequest()
	return more
}

func (q *loggedSplit) DisableKicks() {
	if q.eventIdx || q.kicks == kicksOff {
		return // nothing is written
	}
	q.Split.DisableKicks()
	q.kickRequest()
}

// kickRequest marks where a device says what it wants of kicks.
func (q *loggedSplit) kickRequest() {
	q.mark(usedFlagsAt, 2)
	if q.eventIdx {
		q.mark(usedEntriesAt+usedEntrySize*uint64(q.Size()), 2)
	}
}

// loggedPacked marks after each store into the descriptor ring and the device's
// event suppression structure.
type loggedPacked struct {
	*Packed
	log UsedLog
}

func (q *loggedPacked) Publish(lag int) (published int) {
	first := q.published
	published = q.Packed.Publish(lag)
	if published == 0 {
		return 0
	}
	// From the first used descriptor to the end of the last chain: more than was
	// written, but not more pages unless chains are longer than a page of descriptors.
	n := q.published.since(first, q.size)
	if q.oneUsed {
		n = 1
	}
	head := min(n, q.Size()-int(first.idx))
	q.log.Log.Mark(q.log.Desc+descSize*uint64(first.idx), descSize*uint64(head))
	q.log.Log.Mark(q.log.Desc, descSize*uint64(n-head))
	return published
}

func (q *loggedPacked) EnableKicks() (more bool) {
	more = q.Packed.EnableKicks()
	q.log.Log.Mark(q.log.Used, 4)
	return more
}

func (q *loggedPacked) EnableKicksForMore() (more bool) {
	more = q.Packed.EnableKicksForMore()
	q.log.Log.Mark(q.log.Used, 4)
	return more
}

func (q *loggedPacked) DisableKicks() {
	if q.kicks == kicksOff {
		return // nothing is written
	}
	q.Packed.DisableKicks()
	q.log.Log.Mark(q.log.Used, 4)
}
