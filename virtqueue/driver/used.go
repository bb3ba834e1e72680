package driver

import "fmt"

// GetUsed takes back the next used chain: the head that Add returned and how
// many bytes the device says it wrote. ok is false when there is none, or when
// the device broke the ring, which Err tells. With VIRTIO_F_IN_ORDER one used
// entry may stand for several chains (virtio 1.3 section 2.7.9); the length of
// all but the last of those is unknown and 0.
func (r *Ring) GetUsed() (head uint16, written uint32, ok bool) {
	if r.err != nil || r.used == r.usedIdx && !r.refresh() {
		return 0, 0, false
	}
	if r.inOrder {
		return r.nextInOrder()
	}
	if head, written, ok = r.entry(); ok {
		r.release(head)
		r.used++
	}
	return head, written, ok
}

// nextInOrder takes the oldest chain, of a batch that the present or the last
// used entry read stands for.
func (r *Ring) nextInOrder() (head uint16, written uint32, ok bool) {
	if !r.batch {
		if r.last, r.lastUsed, r.batch = r.entry(); !r.batch {
			return 0, 0, false
		}
	}
	head = r.oldest
	if head == r.last {
		r.batch, written = false, r.lastUsed
	}
	descs := r.chains[head].descs
	r.chains[head] = chain{}
	// The free descriptors are in the table's order as they always were, so that nothing moves.
	r.numFree += int(descs)
	r.oldest = (head + descs) & r.mem.mask
	r.used++
	return head, written, true
}

// entry reads the next used entry.
func (r *Ring) entry() (head uint16, written uint32, ok bool) {
	id, written := r.mem.usedEntry(r.used)
	if id >= uint32(len(r.chains)) || r.chains[id].descs == 0 {
		r.err = fmt.Errorf("driver: used entry %d names head %d, which is not outstanding", r.used, id)
		return 0, 0, false
	}
	return uint16(id), written, true
}

// refresh reads the device's index, once all that it covers was taken.
func (r *Ring) refresh() (more bool) {
	idx := r.mem.usedIdx()
	if idx-r.used > r.published-r.used {
		r.err = fmt.Errorf("driver: used index is %d at position %d with %d chains outstanding", idx, r.used, r.published-r.used)
		return false
	}
	if r.batch {
		r.err = fmt.Errorf("driver: used index is %d at position %d, the used entry stands for more chains", r.usedIdx, r.used)
		return false
	}
	r.usedIdx = idx
	return idx != r.used
}

// Err is why the ring can no longer be used, nil while it can.
func (r *Ring) Err() error { return r.err }

func (r *Ring) release(head uint16) {
	c := r.chains[head]
	r.chains[head] = chain{}
	for d := head; ; d = r.next[d] {
		r.putFree(d)
		if d == c.tail {
			return
		}
	}
}
