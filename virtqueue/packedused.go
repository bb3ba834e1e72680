package virtqueue

const slotUsed = 1<<slotDescs - 1 // a slot's length and id

// Unfill gives back the newest n peeked chains; a later Fill delivers them
// again. More than are peeked is a caller's error and panics.
func (q *Packed) Unfill(n int) {
	if n < 0 || n > q.held {
		panic("virtqueue: Unfill of chains that are not peeked")
	}
	q.held -= n
	before := q.peeked
	for range n {
		last := q.peeked.sub(1, q.size)
		descs := uint16(q.slots[last.idx] >> slotDescs)
		q.peeked = q.peeked.sub(descs, q.size)
		q.seenAhead += descs
	}
	if q.tracked != nil {
		q.unfetch(before)
	}
}

// Complete stages the used descriptor of the oldest peeked chain, with the id
// head and written bytes. The ring sees nothing of it before Publish. Without a
// peeked chain it panics.
func (q *Packed) Complete(head uint16, written uint32) {
	if q.held == 0 {
		panic("virtqueue: Complete without a peeked chain")
	}
	q.newest = q.consumed.idx
	slot := &q.slots[q.newest]
	descs := *slot >> slotDescs
	*slot = usedSlot(descs, head, written)
	q.consumed = q.consumed.add(uint16(descs), q.size)
	q.held--
	q.staged++
}

// CompleteBatch completes the n chains of b from index from on, which must be
// the oldest peeked ones in their order, with each one's Written.
func (q *Packed) CompleteBatch(b *Batch, from, n int) {
	if n <= 0 {
		return
	}
	if n > q.held {
		panic("virtqueue: CompleteBatch of chains that are not peeked")
	}
	idx, newest, slots := int(q.consumed.idx), 0, q.slots
	chains := b.Chains[from : from+n]
	for i := range chains {
		c := &chains[i]
		descs := slots[idx] >> slotDescs
		slots[idx] = usedSlot(descs, c.Head, c.Written)
		newest = idx
		if idx += int(descs); idx >= len(slots) {
			idx -= len(slots)
		}
	}
	q.newest = uint16(newest)
	q.consumed = q.consumed.to(idx)
	q.held -= n
	q.staged += n
}

// usedSlot is the slot of a completed chain of descs descriptors.
func usedSlot(descs uint64, id uint16, written uint32) uint64 {
	return descs<<slotDescs | uint64(id)<<32 | uint64(written)
}

// Staged is how many chains are completed but not published.
func (q *Packed) Staged() int { return q.staged }

// Publish shows the driver all staged used descriptors but the newest lag and
// returns how many chains that are. The driver sees none of them before it sees
// the first, which is written last.
//
// A transmitq with VIRTIO_F_IN_ORDER gets one used descriptor for all of them:
// in the place of the first, with the id of the last and length 0.
func (q *Packed) Publish(lag int) (published int) {
	n := q.staged - max(lag, 0)
	if n <= 0 {
		return 0
	}
	first := q.published
	if q.record.kept() {
		q.record.store(q.record.load().publishing(n))
	}
	if q.tracked != nil {
		q.tracked.link(first, n, q.slots)
	}
	var end int
	var used packedMeta
	if q.oneUsed {
		end, used = q.skip(n)
	} else {
		end, used = q.writeUsed(n)
	}
	q.ring.setUsedRelease(int(first.idx), used)
	q.published = first.to(end)
	if q.tracked != nil {
		q.tracked.clear(first, n, q.slots)
	}
	if q.record.kept() {
		q.record.store(settledAt(q.published, first))
	}
	q.staged -= n
	q.uncall += q.published.since(first, q.size)
	return n
}

// writeUsed writes the used descriptors of n staged chains except the first,
// which it returns, with the index behind the last chain.
func (q *Packed) writeUsed(n int) (end int, first packedMeta) {
	ring, slots := q.ring, q.slots
	end = int(q.published.idx)
	flags := q.published.usedFlags()
	for i := range n {
		slot := slots[end]
		m := usedDescriptor(slot, flags)
		if i == 0 {
			first = m
		} else {
			ring.setUsed(end, m)
		}
		if end += int(slot >> slotDescs); end >= len(slots) {
			end -= len(slots)
			flags ^= packedState
		}
	}
	return end, first
}

// skip returns the used descriptor that stands for n staged chains and the index
// behind the last of them.
func (q *Packed) skip(n int) (end int, used packedMeta) {
	slots := q.slots
	end = int(q.published.idx)
	var last uint64
	if n == q.staged {
		// Each step from slot to slot waits for the one before; without a lag none is needed.
		end, last = int(q.consumed.idx), slots[q.newest]
		n = 0
	}
	for range n {
		last = slots[end]
		if end += int(last >> slotDescs); end >= len(slots) {
			end -= len(slots)
		}
	}
	return end, usedDescriptor(usedSlot(0, packedMeta(last).id(), 0), q.published.usedFlags())
}

// usedDescriptor has the WRITE flag if there is a length to read (virtio 1.3 section 2.8.3).
func usedDescriptor(slot uint64, flags uint16) packedMeta {
	if uint32(slot) != 0 {
		flags |= descFWrite
	}
	return packedMeta(slot&slotUsed | uint64(flags)<<slotDescs)
}
