package virtqueue

// maxWalk ends a batch after so many descriptors beyond those of plain chains. Segments
// do not bound that work, because a descriptor without bytes is none.
const maxWalk = 2048

// Fill appends up to max further available chains to b: those after what is
// peeked already, as far as the batch has room for chains and segments. Each
// descriptor is copied once, the copy is judged and translated.
//
// It returns how many chains were appended. A chain with a Fault is among
// them, with N 0. A chain that needs more segments than b has left stays for
// a later batch, so 0 with a non-empty batch can mean that the batch is full;
// a chain that an empty batch cannot hold is FaultTooLong. Chains of very many
// descriptors make n less than what is there, too: see maxWalk.
//
// With an err n is 0: chains before the place where something is wrong are
// delivered first. A *BrokenError means that the ring must be stopped. A
// *MissError, which only a ring with Config.Via returns, means that the next
// chain refers to an address that the translator does not know yet; the ring is
// as before, and Fill is to be called again when it does.
func (q *Split) Fill(b *Batch, max int) (n int, err error) {
	if !q.settled {
		q.settle()
	}
	ready := int(q.available - q.peeked)
	if ready == 0 {
		if ready, err = q.refresh(); ready == 0 {
			return 0, err
		}
	}
	n = min(max, ready, MaxBatch-b.N)
	if n <= 0 {
		return 0, nil
	}
	if q.tracked == nil {
		n, err = q.peek(b, b.Chains[b.N:b.N+n])
	} else {
		n, err = q.peekTracked(b, b.Chains[b.N:b.N+n])
	}
	b.N += n
	q.peeked += uint16(n)
	if int16(q.peeked-q.seen) > 0 {
		q.seen = q.peeked
	}
	return n, err
}

// refresh reads the driver's index, which happens only when every entry known
// of is peeked. A driver cannot have more chains outstanding than the ring has
// descriptors, counted from the used index it can see.
func (q *Split) refresh() (ready int, err error) {
	idx := q.ring.availIdx()
	ready = int(idx - q.peeked)
	if ready+int(q.peeked-q.published) > int(q.size) {
		return 0, &BrokenError{Reason: brokenAvail, Value: idx, Next: q.peeked, Size: q.size}
	}
	q.available = idx
	return ready, nil
}

// peek describes the next chains in chains and returns how many it did.
func (q *Split) peek(b *Batch, chains []Chain) (n int, err error) {
	for start := q.walked; ; {
		n += q.peekPlain(b, chains[n:], q.peeked+uint16(n))
		if n == len(chains) {
			return n, nil
		}
		head := q.ring.head(q.peeked + uint16(n))
		if head >= q.size {
			if n == 0 {
				err = &BrokenError{Reason: brokenHead, Value: head, Next: q.peeked, Size: q.size}
			}
			return n, err
		}
		if !q.walk(b, &chains[n], head, q.ring.descriptor(head)) {
			return n, q.missing(n)
		}
		if n++; q.walked-start >= maxWalk {
			return n, nil
		}
	}
}

// peekTracked is peek for a ring with an inflight region.
func (q *Split) peekTracked(b *Batch, chains []Chain) (n int, err error) {
	t := q.tracked
	if _, again := t.resubmitted(q.peeked); again {
		n, err = q.peekAgain(b, chains)
	} else {
		n, err = q.peek(b, chains)
	}
	t.fetch(q.peeked, chains[:n])
	return n, err
}

// peekAgain is peek for chains of an earlier life, up to the last of them.
func (q *Split) peekAgain(b *Batch, chains []Chain) (n int, err error) {
	for start := q.walked; n < len(chains) && q.walked-start < maxWalk; n++ {
		head, again := q.tracked.resubmitted(q.peeked + uint16(n))
		if !again {
			break
		}
		if !q.walk(b, &chains[n], head, q.ring.descriptor(head)) {
			return n, q.missing(n)
		}
	}
	return n, nil
}

// peekPlain describes the chains from position pos on as long as they are the
// commonest sort: one descriptor, in the region of the last one. Heads and
// descriptors it stops at are read afresh and judged by peek. The loop makes
// no calls, so that what it needs stays in registers.
func (q *Split) peekPlain(b *Batch, chains []Chain, pos uint16) (n int) {
	segs := b.NSegs
	for n = range chains {
		head := q.ring.head(pos + uint16(n))
		if head >= q.size || segs >= MaxSegs {
			b.NSegs = segs
			return n
		}
		d := q.ring.descriptor(head)
		host, ok := q.cur.Hit(d.addr, uint64(d.len()))
		if !ok || !q.plain(d) {
			b.NSegs = segs
			return n
		}
		setPlain(&chains[n], &b.Segs[segs], head, segs, host, d.len())
		segs++
	}
	b.NSegs = segs
	return len(chains)
}
