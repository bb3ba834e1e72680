package virtqueue

import (
	"cmp"
	"errors"
	"fmt"
	"slices"

	"github.com/vhostd/vhostd/guestmem"
)

// Inflight is one ring's part of the region that VHOST_USER_SET_INFLIGHT_FD shares: which chains were
// taken and not completed, in the layout of vhost-user.rst ("Inflight I/O tracking"). The
// front-end can change any byte at any time, so that nothing is read from it but once, when the ring starts.
type Inflight struct {
	Host    uintptr         // of the ring's part, aligned to 8
	Entries uint16          // for which it has room, at least the ring's size
	Mem     *guestmem.Table // which holds it
	// Resubmitted is how many chains of an earlier life were found, Refused why what is in the
	// region is of no use: then it was begun anew.
	Resubmitted int
	Refused     error
}

const (
	inflightVersion = 1
	inflightAlign   = 64 // INFLIGHT_ALIGNMENT of libvhost-user and DPDK

	splitHeader  = 16
	splitEntry   = 16
	packedHeader = 32
	packedEntry  = 32
)

// InflightBytes is how many bytes of the region belong to each ring of up to size descriptors.
func InflightBytes(size int, packed bool) uint64 {
	n := splitHeader + splitEntry*uint64(size)
	if packed {
		n = packedHeader + packedEntry*uint64(size)
	}
	return (n + inflightAlign - 1) &^ (inflightAlign - 1)
}

// End makes the part one that nobody has used. It touches the region.
func (i *Inflight) End() { splitRegion{i.Host, i.Entries}.end() }

func (i *Inflight) check(size uint16) error {
	if i.Host == 0 || i.Host%8 != 0 || i.Entries < size || i.Entries > MaxSize {
		return fmt.Errorf("virtqueue: inflight region at host address %#x for %d descriptors, a ring of %d needs as many, at a multiple of 8", i.Host, i.Entries, size)
	}
	return nil
}

// splitTrack keeps a split ring's part of the region.
type splitTrack struct {
	region  splitRegion
	counter uint64
	last    uint16 // last_batch_head
	// heads has those of peeked and staged chains by position.
	heads []uint16
	// resubmit are heads of an earlier life, in the place of the available ring's entries from position from on.
	resubmit []uint16
	from     uint16
}

// track makes inflight the ring's region. It touches the ring's and the region's memory.
func (q *Split) track(inflight *Inflight) error {
	if err := inflight.check(q.size); err != nil {
		return err
	}
	t := &splitTrack{region: splitRegion{inflight.Host, inflight.Entries}}
	if q.heads == nil {
		q.heads = make([]uint16, q.size)
	}
	t.heads = q.heads
	q.settle()
	heads, err := t.region.recover(&q.ring, q.size)
	if err != nil {
		t.region.begin(q.consumed)
	}
	inflight.Resubmitted, inflight.Refused = len(heads), refusal(err)
	inOrder := true
	for i, head := range heads {
		inOrder = inOrder && head == q.ring.head(q.consumed+uint16(i))
	}
	if !inOrder {
		t.resubmit, t.from = heads, q.consumed
	}
	q.tracked = t
	return nil
}

// recover finishes the batch of an earlier life and returns the heads that it took and did not complete, oldest first.
// With an error the region says nothing.
func (r splitRegion) recover(ring *ring, size uint16) (heads []uint16, err error) {
	version, descs, last, used := r.header()
	if version == 0 {
		return nil, errNew
	}
	now := ring.usedIdx()
	batch := now - used
	if version != inflightVersion || descs != r.entries || batch > size {
		return nil, fmt.Errorf("virtqueue: inflight region with version %d, %d entries and used index %d; %d, %d and up to %d before %d are right", version, descs, used, inflightVersion, r.entries, size, now)
	}
	for range batch {
		if last >= size {
			return nil, fmt.Errorf("virtqueue: inflight region: the last batch names entry %d of %d", last, size)
		}
		_, next, _ := r.entry(last)
		r.setState(last, 0, next)
		last = next
	}
	r.setUsed(now)
	type taken struct {
		head    uint16
		counter uint64
	}
	var all []taken
	for i := range size {
		if inflight, _, counter := r.entry(i); inflight == 1 {
			all = append(all, taken{i, counter})
		}
	}
	if more := ring.availIdx() - now; len(all) > int(more) || more > size {
		return nil, fmt.Errorf("virtqueue: inflight region has %d chains, the ring %d from its used index on", len(all), more)
	}
	slices.SortFunc(all, func(a, b taken) int { return cmp.Compare(a.counter, b.counter) })
	for _, t := range all {
		heads = append(heads, t.head)
	}
	return heads, nil
}

// fetch marks chains as taken.
func (t *splitTrack) fetch(pos uint16, chains []Chain) {
	mask := uint16(len(t.heads) - 1)
	for i := range chains {
		head := chains[i].Head
		t.heads[(pos+uint16(i))&mask] = head
		t.region.setCounter(head, t.counter)
		t.counter++
		t.region.setState(head, 1, 0)
	}
}

// unfetch takes the marks back.
func (t *splitTrack) unfetch(pos uint16, n int) {
	mask := uint16(len(t.heads) - 1)
	for i := range n {
		t.region.setState(t.heads[(pos+uint16(i))&mask], 0, 0)
	}
}

// link puts the batch of n chains from pos on into the list by which a later life finds it.
func (t *splitTrack) link(pos uint16, n int) {
	mask := uint16(len(t.heads) - 1)
	for i := range n {
		head := t.heads[(pos+uint16(i))&mask]
		t.region.setState(head, 1, t.last)
		t.last = head
		t.region.setLast(head)
	}
}

// clear ends a batch that the driver can see: the entries keep their links for the case that this, too, is cut short.
func (t *splitTrack) clear(pos uint16, n int, before uint16) {
	mask := uint16(len(t.heads) - 1)
	for i := range n {
		head := t.heads[(pos+uint16(i))&mask]
		t.region.setState(head, 0, before)
		before = head
	}
	t.region.setUsed(pos + uint16(n))
}

// resubmitted is the chain of an earlier life that stands at a position.
func (t *splitTrack) resubmitted(pos uint16) (head uint16, ok bool) {
	if i := int(pos - t.from); i < len(t.resubmit) {
		return t.resubmit[i], true
	}
	return 0, false
}

// errNew is a region that nobody has used.
var errNew = errors.New("virtqueue: new inflight region")

// refusal is an error about a region that somebody used.
func refusal(err error) error {
	if err == errNew {
		return nil
	}
	return err
}
