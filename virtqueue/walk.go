package virtqueue

import "math"

// walk describes in c the chain that starts at head with descriptor d. It
// returns false, with b unchanged, when the chain does not fit behind the
// segments that b already holds, or when an address of it is missing.
func (q *Split) walk(b *Batch, c *Chain, head uint16, d descriptor) (fits bool) {
	first := b.NSegs
	if q.plain(d) && first < MaxSegs {
		if host, run := q.lookup(&q.cur, d.addr, uint64(d.len()), q.writes()); run == uint64(d.len()) {
			setPlain(c, &b.Segs[first], head, first, host, d.len())
			b.NSegs++
			return true
		}
	}
	total, descs, fault := q.gather(b, d)
	c.Head, c.Fault, c.Descs, c.Written = head, FaultNone, uint16(descs), 0
	c.First, c.N, c.Len = uint16(first), uint16(b.NSegs-first), uint32(min(total, maxLen))
	c.Readable = q.readableSegs(b, first)
	if fault == FaultNone {
		return true
	}
	full := b.NSegs == MaxSegs
	b.NSegs = first
	if fault == faultMissing || fault == FaultTooLong && full && first > 0 {
		return false
	}
	c.Fault, c.N, c.Len = fault, 0, 0
	return true
}

// descTable is where a chain's next descriptor comes from: the ring's own
// table or an indirect one.
type descTable struct {
	indirect bool
	gpa      uint64 // of an indirect table
	entries  int
}

// gather appends the segments of the chain that starts with d. descs counts
// entries of the ring's own table. Every step is counted, also of descriptors
// without bytes, so that no loop outlasts the table it is in.
func (q *Split) gather(b *Batch, d descriptor) (total uint64, descs int, fault Fault) {
	from := descTable{entries: int(q.size)}
	descs, q.readable = 1, -1
	for steps := 1; ; steps++ {
		q.walked++
		ok := false
		if d.flags()&descFIndirect != 0 {
			if from.indirect {
				return total, descs, FaultNested
			}
			if fault = q.checkTable(d, d.flags()); fault != FaultNone {
				return total, descs, fault
			}
			from = descTable{indirect: true, gpa: d.addr, entries: int(d.len() / descSize)}
			steps = 0
			d, ok = q.entry(from, 0)
		} else {
			if d.flags()&descFWrite != q.want && q.misdirected(b, d.flags()) {
				return total, descs, FaultDirection
			}
			if total += uint64(d.len()); total > math.MaxUint32 {
				return total, descs, FaultLength
			}
			if fault = q.appendSegs(b, d.addr, uint64(d.len())); fault != FaultNone {
				return total, descs, fault
			}
			if d.flags()&descFNext == 0 {
				return total, descs, FaultNone
			}
			if fault = from.checkNext(d.next(), steps); fault != FaultNone {
				return total, descs, fault
			}
			d, ok = q.entry(from, d.next())
		}
		if !ok {
			return total, descs, q.absent()
		}
		if !from.indirect {
			descs++
		}
	}
}

// checkNext judges the index of another descriptor after steps of them.
func (t descTable) checkNext(next uint16, steps int) Fault {
	switch {
	case int(next) >= t.entries:
		return FaultNext
	case steps >= t.entries:
		return FaultLoop
	case steps >= MaxSegs:
		return FaultTooLong
	}
	return FaultNone
}

// entry copies entry i < t.entries.
func (q *Split) entry(t descTable, i uint16) (d descriptor, ok bool) {
	if !t.indirect {
		return q.ring.descriptor(i), true
	}
	return q.tableEntry(t.gpa + uint64(i)*descSize)
}
