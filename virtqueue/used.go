package virtqueue

// Unfill gives back the newest n peeked chains; a later Fill delivers them
// again. More than are peeked is a caller's error and panics.
func (q *Split) Unfill(n int) {
	if n < 0 || n > int(q.peeked-q.consumed) {
		panic("virtqueue: Unfill of chains that are not peeked")
	}
	q.peeked -= uint16(n)
	if q.tracked != nil {
		q.tracked.unfetch(q.peeked, n)
	}
}

// Complete stages the used entry of the oldest peeked chain, whose head is
// head and into which written bytes were written. The driver sees nothing of
// it before Publish. Without a peeked chain it panics.
func (q *Split) Complete(head uint16, written uint32) {
	if q.consumed == q.peeked {
		panic("virtqueue: Complete without a peeked chain")
	}
	if q.heads != nil {
		q.heads[q.consumed&q.ring.mask] = head
	}
	if !q.oneUsed {
		q.ring.setUsed(q.consumed, head, written)
	}
	q.consumed++
	q.settled = true
}

// CompleteBatch completes the n chains of b from index from on, which must be
// the oldest peeked ones in their order, with each one's Written. It does what
// n calls of Complete do.
func (q *Split) CompleteBatch(b *Batch, from, n int) {
	if n <= 0 {
		return
	}
	if n > int(q.peeked-q.consumed) {
		panic("virtqueue: CompleteBatch of chains that are not peeked")
	}
	chains := b.Chains[from : from+n]
	if q.heads != nil {
		for i := range chains {
			q.heads[(q.consumed+uint16(i))&q.ring.mask] = chains[i].Head
		}
	}
	if !q.oneUsed {
		for i := range chains {
			q.ring.setUsed(q.consumed+uint16(i), chains[i].Head, chains[i].Written)
		}
	}
	q.consumed += uint16(n)
	q.settled = true
}

// Staged is how many used entries are written but not published.
func (q *Split) Staged() int { return int(q.consumed - q.published) }

// Publish shows the driver all staged used entries but the newest lag, with
// one store, and returns how many became visible. Entries once published stay
// so, whatever lag is.
//
// A transmitq with VIRTIO_F_IN_ORDER gets one used entry for all of them: in the
// place of the first, with the head of the last and length 0.
func (q *Split) Publish(lag int) (published int) {
	n := q.Staged() - max(lag, 0)
	if n <= 0 {
		return 0
	}
	if q.oneUsed {
		q.ring.setUsed(q.published, q.heads[(q.published+uint16(n)-1)&q.ring.mask], 0)
	}
	if q.tracked != nil {
		q.publishTracked(n)
		return n
	}
	q.published += uint16(n)
	q.ring.setUsedIdx(q.published)
	q.uncall += n
	return n
}

// publishTracked is the end of Publish for a ring with an inflight region: the steps
// of vhost-user.rst, in its order.
func (q *Split) publishTracked(n int) {
	t, from := q.tracked, q.published
	before := t.last
	t.link(from, n)
	q.published += uint16(n)
	q.ring.setUsedIdx(q.published)
	t.clear(from, n, before)
	if int(q.published-t.from) >= len(t.resubmit) {
		t.resubmit = nil // or the index would come by again
	}
	q.uncall += n
}
