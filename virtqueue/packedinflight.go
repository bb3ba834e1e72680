package virtqueue

import (
	"cmp"
	"fmt"
	"slices"
)

// packedTrack keeps a packed ring's part of the inflight region. What it needs to know of the region it has in memory of
// its own: the region is only written.
type packedTrack struct {
	region  packedRegion
	counter uint64
	free    uint16   // free_head
	next    []uint16 // of each entry
	// head and last are the entries of the chain that begins at a descriptor.
	head, last []uint16
}

// usedAt is used_idx or old_used_idx with its wrap counter.
func usedAt(idx uint16, wrap uint8) place { return place{idx, uint16(wrap & 1)} }

// track begins the region anew at the ring's position. Nothing is peeked.
func (q *Packed) track(inflight *Inflight) {
	n := int(inflight.Entries)
	t := &packedTrack{
		region: packedRegion{inflight.Host, inflight.Entries},
		next:   make([]uint16, n), head: make([]uint16, q.size), last: make([]uint16, q.size),
	}
	for i := range t.next {
		t.next[i] = uint16(i + 1)
	}
	t.region.begin(q.published)
	q.tracked = t
}

// recover finds the position in what an earlier life has left in the region, or returns at. The chains that it took are
// put back into the ring as they were, to be taken again: it may have written used descriptors over them that the driver
// has not seen.
func (q *Packed) recover(inflight *Inflight, at place) place {
	r := packedRegion{inflight.Host, inflight.Entries}
	found, n, err := q.restore(r)
	inflight.Resubmitted, inflight.Refused = n, refusal(err)
	if err != nil {
		return at
	}
	return found
}

// taken is a chain in the region.
type taken struct {
	head    uint16
	counter uint64
	num     uint16
}

func (q *Packed) restore(r packedRegion) (at place, chains int, err error) {
	h := r.header()
	if h.version == 0 {
		return at, 0, errNew
	}
	at, free := usedAt(h.oldUsed, h.oldWrap), h.oldFree
	now := usedAt(h.used, h.wrap)
	if h.version != inflightVersion || h.descs != r.entries || at.idx >= q.size || now.idx >= q.size {
		return at, 0, fmt.Errorf("virtqueue: inflight region with version %d, %d entries and used descriptors %d and %d; %d, %d and less than %d are right", h.version, h.descs, at.idx, now.idx, inflightVersion, r.entries, q.size)
	}
	if now != at && q.state(at) != at.availFlags() {
		at, free = now, h.free // the driver has seen the batch
	}
	all := r.taken(free)
	var copies []packedCopy
	for _, c := range all {
		if copies, err = r.chain(copies, c, q.size); err != nil {
			return at, 0, err
		}
	}
	if !q.plausible(at, len(copies), place{}, false) {
		return at, 0, fmt.Errorf("virtqueue: inflight region: used descriptor %d does not fit what the ring holds: its driver has begun it anew", at.idx)
	}
	for i, c := range copies {
		if p := at.add(uint16(i), q.size); !q.isCopy(p, c) {
			return at, 0, fmt.Errorf("virtqueue: inflight region: descriptor %d is another one: its back-end completed out of order, or the ring was begun anew", p.idx)
		}
	}
	for i, c := range copies {
		q.ring.setUsed(int(at.add(uint16(i), q.size).idx), c.meta)
	}
	// Newest first: what is left is at any time what follows the position.
	r.setPosition(at, at)
	for _, c := range slices.Backward(all) {
		r.setInflight(c.head, 0)
	}
	return at, len(all), nil
}

// isCopy reports whether the ring has at p what the copy says, or a used descriptor that was written over it.
func (q *Packed) isCopy(p place, c packedCopy) bool {
	m := q.ring.meta(int(p.idx))
	return c.meta.flags()&packedState == p.availFlags() && q.ring.addr(int(p.idx)) == c.addr &&
		(m == c.meta || m.flags()&packedState == p.usedFlags())
}

// taken lists the chains of the region that are not free, oldest first.
func (r packedRegion) taken(free uint16) (all []taken) {
	isFree := make([]bool, r.entries)
	for range r.entries {
		if free >= r.entries || isFree[free] {
			break
		}
		isFree[free] = true
		free = r.entry(free).next
	}
	for i := range r.entries {
		if e := r.entry(i); e.inflight == 1 && !isFree[i] {
			all = append(all, taken{i, e.counter, e.num})
		}
	}
	slices.SortFunc(all, func(a, b taken) int { return cmp.Compare(a.counter, b.counter) })
	return all
}

// chain appends the descriptors of a chain.
func (r packedRegion) chain(copies []packedCopy, c taken, size uint16) ([]packedCopy, error) {
	last := r.entry(c.head).last
	at := c.head
	for n := uint16(1); ; n++ {
		if at >= r.entries || len(copies) == int(size) {
			return nil, fmt.Errorf("virtqueue: inflight region: chain of %d descriptors from entry %d goes on at %d of %d, %d in all", c.num, c.head, at, r.entries, len(copies))
		}
		d := r.copy(at)
		copies = append(copies, d)
		if end := d.meta.flags()&descFNext == 0; n == c.num || end {
			if n != c.num || !end || at != last {
				return nil, fmt.Errorf("virtqueue: inflight region: chain of %d descriptors from entry %d has another end at entry %d", c.num, c.head, at)
			}
			return copies, nil
		}
		at = r.entry(at).next
	}
}

// fetchTracked marks the newest chains, which Fill has just taken.
func (q *Packed) fetchTracked(chains []Chain) {
	t := q.tracked
	descs := uint16(0)
	for i := range chains {
		descs += chains[i].Descs
	}
	at := q.peeked.sub(descs, q.size)
	for i := range chains {
		first, head := at.idx, t.free
		for range chains[i].Descs {
			t.region.setCopy(t.free, packedCopy{q.ring.addr(int(at.idx)), q.ring.meta(int(at.idx))})
			t.last[first] = t.free
			t.free = t.next[t.free]
			at = at.add(1, q.size)
		}
		t.head[first] = head
		t.region.take(head, t.last[first], chains[i].Descs, t.counter)
		t.counter++
		t.region.setFree(t.free)
		t.region.setOldFree(t.free)
	}
}

// unfetch takes back the marks of the chains between peeked and to, newest first.
func (q *Packed) unfetch(to place) {
	t := q.tracked
	for to != q.peeked {
		last := to.sub(1, q.size)
		to = to.sub(uint16(q.slots[last.idx]>>slotDescs), q.size)
		t.region.setInflight(t.head[to.idx], 0)
		t.give(to.idx)
		t.region.setFree(t.free)
		t.region.setOldFree(t.free)
	}
}

// give puts the entries of the chain that begins at a descriptor before the free ones.
func (t *packedTrack) give(desc uint16) {
	last := t.last[desc]
	t.next[last] = t.free
	t.region.setNext(last, t.free)
	t.free = t.head[desc]
}

// link does what comes before n chains from first on become visible.
func (t *packedTrack) link(first place, n int, slots []uint64) {
	at, size := first, uint16(len(slots))
	for range n {
		t.give(at.idx)
		at = at.add(uint16(slots[at.idx]>>slotDescs), size)
	}
	t.region.setFree(t.free)
	t.region.setPosition(at, first)
}

// clear does what comes after it.
func (t *packedTrack) clear(first place, n int, slots []uint64) {
	at, size := first, uint16(len(slots))
	for range n {
		t.region.setInflight(t.head[at.idx], 0)
		at = at.add(uint16(slots[at.idx]>>slotDescs), size)
	}
	t.region.setOldFree(t.free)
	t.region.setPosition(at, at)
}
