package virtqueue

import "math"

const packedState = packedAvail | packedUsed

// Fill does what Split.Fill does. A chain's Head is the buffer id of its last
// descriptor, whatever that is, and Descs is how far the ring moves on by it.
func (q *Packed) Fill(b *Batch, max int) (n int, err error) {
	max = min(max, MaxBatch-b.N)
	if max <= 0 {
		return 0, nil
	}
	chains := b.Chains[b.N : b.N+max]
	for start := q.walked; ; {
		n += q.fillPlain(b, chains[n:])
		if n == max {
			break
		}
		var took bool
		if took, err = q.walk(b, &chains[n]); !took {
			break
		}
		if n++; n == max || q.walked-start >= maxWalk {
			break
		}
	}
	if n > 0 {
		err = nil // the next Fill finds it first
		if q.tracked != nil {
			q.fetchTracked(chains[:n])
		}
	}
	b.N += n
	return n, err
}

// advance takes chains of descs descriptors in all as peeked.
func (q *Packed) advance(chains int, descs uint16) {
	q.peeked = q.peeked.add(descs, q.size)
	q.held += chains
	q.seenAhead -= min(q.seenAhead, descs)
}

// fillPlain describes the next chains as long as they are the commonest sort:
// one descriptor, in the region of the last one. What it stops at is read afresh
// and judged by walk. The loop makes no calls and reads no fields, so that what
// it needs stays in registers.
func (q *Packed) fillPlain(b *Batch, chains []Chain) (n int) {
	ring, cur, slots, first := q.ring, q.cur, q.slots, b.NSegs
	chains = chains[:max(min(len(chains), q.room(), MaxSegs-first), 0)]
	segs := b.Segs[first:]
	idx, want := int(q.peeked.idx), q.peeked.availFlags()|q.want
	for ; n < len(chains); n++ {
		m := ring.meta(idx)
		if m.flags()&(packedState|descFNext|descFWrite|descFIndirect) != want || m.len()-1 >= maxLen {
			break
		}
		host, ok := cur.Hit(ring.addr(idx), uint64(m.len()))
		if !ok {
			break
		}
		setPlain(&chains[n], &segs[n], m.id(), first+n, host, m.len())
		slots[idx] = 1 << slotDescs
		if idx++; idx == len(slots) {
			idx, want = 0, want^packedState
		}
	}
	b.NSegs = first + n
	q.advance(n, uint16(n))
	return n
}

// walk describes in c the chain at peeked. It returns false, with b unchanged,
// if there is none, or if it does not fit behind the segments that b already
// holds, or with an error if the ring is broken or an address is missing.
func (q *Packed) walk(b *Batch, c *Chain) (took bool, err error) {
	room, at := q.room(), q.peeked
	if room == 0 {
		return false, nil
	}
	m := q.ring.meta(int(at.idx))
	switch m.flags() & packedState {
	case at.availFlags():
	case at.usedFlags():
		return false, &BrokenError{Reason: brokenFlags, Value: m.flags(), Next: at.word(), Size: q.size}
	default:
		return false, nil
	}
	first := b.NSegs
	if m.flags()&(descFNext|descFWrite|descFIndirect) == q.want && m.len()-1 < maxLen && first < MaxSegs {
		if host, run := q.lookup(&q.cur, q.ring.addr(int(at.idx)), uint64(m.len()), q.writes()); run == uint64(m.len()) {
			setPlain(c, &b.Segs[first], m.id(), first, host, m.len())
			b.NSegs++
			q.take(1)
			return true, nil
		}
	}
	q.readable = -1
	total, descs, last, fault := q.gather(b, at, m, room)
	if last.flags()&descFNext != 0 {
		b.NSegs = first
		return false, &BrokenError{Reason: brokenChain, Value: last.flags(), Next: at.word(), Size: q.size}
	}
	full := b.NSegs == MaxSegs
	if fault != FaultNone {
		b.NSegs = first
		if fault == faultMissing {
			return false, &q.miss
		}
		if fault == FaultTooLong && full && first > 0 {
			return false, nil
		}
		total = 0
	}
	c.Head, c.Fault, c.Descs, c.Written = last.id(), fault, descs, 0
	c.First, c.N, c.Len = uint16(first), uint16(b.NSegs-first), uint32(min(total, maxLen))
	c.Readable = q.readableSegs(b, first)
	q.take(descs)
	return true, nil
}

// take makes the next descs descriptors a peeked chain.
func (q *Packed) take(descs uint16) {
	slot := uint64(descs) << slotDescs
	q.slots[q.peeked.idx], q.slots[q.peeked.add(descs-1, q.size).idx] = slot, slot
	q.advance(1, descs)
}

// gather appends the segments of the chain that begins at the available
// descriptor m. It goes on to the chain's end after a fault too, for the id is
// there. A last descriptor with NEXT says that there is no end within room, or
// that a descriptor of the chain is not available, which the driver has to make
// it before the first (section 2.8.6).
func (q *Packed) gather(b *Batch, at place, m packedMeta, room int) (total uint64, descs uint16, last packedMeta, fault Fault) {
	for descs = 1; ; descs++ {
		if fault == FaultNone {
			fault = q.direct(b, &total, descriptor{q.ring.addr(int(at.idx)), uint64(m)}, descs)
		}
		q.walked++
		if m.flags()&descFNext == 0 || int(descs) == room {
			return total, descs, m, fault
		}
		at = at.add(1, q.size)
		follower := q.ring.meta(int(at.idx))
		if follower.flags()&packedState != at.availFlags() {
			return total, descs, m, fault
		}
		m = follower
	}
}

// direct appends what one descriptor of the ring stands for. One that refers to
// a table has to be the whole chain (section 2.8.7).
func (q *Packed) direct(b *Batch, total *uint64, d descriptor, n uint16) Fault {
	flags := packedMeta(d.meta).flags()
	if flags&descFIndirect == 0 {
		return q.buffer(b, total, d, flags, int(n))
	}
	if n > 1 {
		return FaultIndirect
	}
	if fault := q.checkTable(d, flags); fault != FaultNone {
		return fault
	}
	for i := range int(d.len() / descSize) {
		entry, ok := q.tableEntry(d.addr + uint64(i)*descSize)
		if !ok {
			return q.absent()
		}
		q.walked++
		// All entries belong to the chain; ids and flags besides WRITE mean
		// nothing (section 2.8.7), but INDIRECT is a mistake for sure.
		flags := packedMeta(entry.meta).flags()
		if flags&descFIndirect != 0 {
			return FaultNested
		}
		if fault := q.buffer(b, total, entry, flags, i+1); fault != FaultNone {
			return fault
		}
	}
	return FaultNone
}

// buffer appends the n-th buffer of a chain.
func (q *Packed) buffer(b *Batch, total *uint64, d descriptor, flags uint16, n int) Fault {
	if n > MaxSegs {
		return FaultTooLong
	}
	if flags&descFWrite != q.want && q.misdirected(b, flags) {
		return FaultDirection
	}
	if *total += uint64(d.len()); *total > math.MaxUint32 {
		return FaultLength
	}
	return q.appendSegs(b, d.addr, uint64(d.len()))
}
