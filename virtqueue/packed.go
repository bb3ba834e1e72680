package virtqueue

import (
	"fmt"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
)

// Packed is the device side of one packed ring (virtio 1.3 section 2.8), with
// the methods of Split. It has one owner at a time.
//
// There is no available index: a chain is there if the flags of its first
// descriptor say so. Used descriptors lie where the chains did, because chains
// are completed in order; they are kept aside until Publish writes them, so that
// a chain which the driver was not told of can be found again.
type Packed struct {
	translator
	ring packedRing

	size     uint16
	eventIdx bool
	oneUsed  bool // one used descriptor stands for all that are published together

	peeked    place  // next descriptor that Fill looks at
	consumed  place  // first descriptor of the oldest chain not completed
	published place  // next used descriptor in memory
	held      int    // chains between consumed and peeked
	staged    int    // chains between published and consumed
	newest    uint16 // first descriptor of the chain completed last, while any is staged
	seenAhead uint16
	moved     bool // the base named two places

	record  recordState  // where the position is kept, too; see Record
	tracked *packedTrack // nil without an inflight region

	// slots has a word for each descriptor. In that of a chain's first and last
	// one the upper 16 bits are the chain's number of descriptors; in that of the
	// first the rest is, once it is completed, length and id of the used descriptor.
	slots []uint64

	kicks  kickState
	called bool // NeedsCall has compared an event before
	uncall int  // descriptors passed by what was published since NeedsCall was last asked
}

const slotDescs = 48 // shift of a slot's number of descriptors

// NewPacked makes the device side of a packed ring. It begins at the used half
// of the base: what lies between there and the available half was never
// completed and is delivered again. With a record that is to be resumed, or an inflight
// region, it touches the ring's memory.
func NewPacked(cfg Config) (*Packed, error) {
	if cfg.Size == 0 || cfg.Size > MaxSize {
		return nil, fmt.Errorf("virtqueue: packed ring of %d descriptors, need 1 to %d", cfg.Size, MaxSize)
	}
	if !cfg.Features.Has(virtio.FRingPacked) {
		return nil, fmt.Errorf("virtqueue: the packed ring format was not acked")
	}
	if cfg.Mem == nil {
		return nil, fmt.Errorf("virtqueue: ring without a memory table")
	}
	r := packedRing{desc: cfg.Desc, driver: cfg.Avail, device: cfg.Used}
	if err := r.check(); err != nil {
		return nil, err
	}
	base := cfg.Base
	if cfg.NoBase {
		base = FreshPacked
	}
	base, err := ParsePosition(uint32(base), cfg.Size, true)
	if err != nil {
		return nil, err
	}
	at := base.used()
	q := &Packed{
		translator: newTranslator(&cfg),
		ring:       r,
		size:       cfg.Size,
		eventIdx:   cfg.Features.Has(virtio.FRingEventIdx),
		oneUsed:    batchesUsed(&cfg),
		moved:      base.avail() != at,
	}
	if err := q.begin(&cfg, at); err != nil {
		return nil, err
	}
	return q, nil
}

// begin finds the place where the ring begins: what the record says, else the
// inflight region, else at.
func (q *Packed) begin(cfg *Config, at place) error {
	rec, inflight := cfg.Record, cfg.Inflight
	if inflight != nil {
		if err := inflight.check(q.size); err != nil {
			return err
		}
	}
	if rec == nil {
		q.slots = make([]uint64, cfg.Size)
	} else if err := q.adopt(rec); err != nil {
		return err
	}
	if rec == nil || !rec.Resumed {
		if inflight != nil {
			at = q.recover(inflight, at)
		}
		q.goTo(at)
		if rec != nil {
			q.record.store(stateValid | state(at.word()))
		}
	}
	if inflight != nil {
		q.track(inflight)
	}
	return nil
}

// Size is the number of descriptors.
func (q *Packed) Size() int { return int(q.size) }

// SetMemory moves the ring to another memory table, in which the descriptor
// ring, the driver's and the device's event suppression structure lie at the
// given host addresses. Nothing may be peeked.
func (q *Packed) SetMemory(t *guestmem.Table, desc, driver, device uintptr) {
	q.ring = packedRing{desc: desc, driver: driver, device: device}
	q.setMemory(t)
}

// Position is where the ring is to be resumed: at the oldest chain that the
// driver was not told of. Both halves are the same.
func (q *Packed) Position() Position { return q.published.position() }

// Consumed is Position, which touches no memory of the ring.
func (q *Packed) Consumed() Position { return q.Position() }

// Rebased reports whether the two halves of the base differed: the ring began at
// the used one.
func (q *Packed) Rebased() bool { return q.moved }

// AvailSeen is the descriptor behind the furthest chain that was delivered, with
// its wrap counter in bit 15.
func (q *Packed) AvailSeen() uint16 { return q.peeked.add(q.seenAhead, q.size).word() }

// room is how many descriptors from peeked on can belong to the driver: beyond
// them lies what it was not told to be used.
func (q *Packed) room() int { return int(q.size) - q.peeked.since(q.published, q.size) }

// untouched reports whether the driver has done nothing yet at the descriptor,
// the n-th from peeked on. Flags that cannot be count as done: Fill judges them.
func (q *Packed) untouched(n uint16) bool {
	if int(n) >= q.room() {
		return true
	}
	at := q.peeked.add(n, q.size)
	return (q.ring.meta(int(at.idx)).flags()^at.availFlags())&packedAvail != 0
}

// Empty reports whether no chain is available beyond the peeked ones.
func (q *Packed) Empty() bool { return q.untouched(0) }

// MoreAvailable reports whether there are chains that Fill has never delivered.
func (q *Packed) MoreAvailable() bool { return !q.untouched(q.seenAhead) }
