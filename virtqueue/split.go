package virtqueue

import (
	"fmt"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
)

// Config describes a ring to start. The caller has translated the three areas
// and made sure that each lies entirely in guest memory (RingBytes).
type Config struct {
	Size uint16 // descriptors, up to MaxSize; of a split ring a power of two
	// Desc, Avail and Used are host addresses, aligned to 16, 2 and 4 bytes. In a
	// packed ring they are those of the descriptor ring, the driver's and the
	// device's event suppression structure, aligned to 16, 4 and 4 bytes.
	Desc, Avail, Used uintptr
	Features          virtio.Features
	// Base is what VHOST_USER_SET_VRING_BASE said. In a split ring the used index
	// in memory wins over it: front-ends send 0, the available index or the used
	// index for the same situation, and because chains are completed in order the
	// used index is always right. A packed ring has nothing of the kind.
	Base Position
	// Record, of a packed ring, and Inflight are where the ring keeps what a later life
	// needs, nil where it keeps nothing.
	Record   *Record
	Inflight *Inflight
	NoBase   bool            // VHOST_USER_SET_VRING_BASE did not arrive
	Mem      *guestmem.Table // translates what descriptors say
	// Via, when set, does so instead of Mem.
	Via guestmem.Translator
	// DeviceWrites is true for a receiveq, whose buffers must be
	// device-writable, and false for a transmitq, whose must be readable.
	DeviceWrites bool
	// BothWays is for a control queue instead: chains have readable buffers and
	// then writable ones (virtio 1.2 section 2.6.4.2), and Chain.Readable says how
	// many are which. DeviceWrites must be false.
	BothWays bool
}

// RingBytes gives the sizes in bytes of the three areas of a ring, event fields
// included (virtio 1.3 sections 2.7 and 2.8).
func RingBytes(size int, packed bool) (desc, avail, used uint64) {
	n := uint64(size)
	if packed {
		return 16 * n, 4, 4
	}
	return 16 * n, 6 + 2*n, 6 + 8*n
}

// Split is the device side of one split ring. It has one owner at a time.
type Split struct {
	translator
	ring ring

	size     uint16
	eventIdx bool
	settled  bool // a chain was completed, the positions are ours

	available uint16 // available index as last read
	peeked    uint16 // next available entry that Fill reads
	seen      uint16 // furthest that peeked has been
	consumed  uint16 // next used entry that Complete stages
	published uint16 // used index in memory

	start  uint16 // position that the ring was resumed at
	base   uint16
	noBase bool
	kicks  kickState
	called bool // NeedsCall has compared an event index before
	uncall int  // used entries published since NeedsCall was last asked

	// heads has those of staged chains by used entry where one entry stands for all
	// that are published together (oneUsed), or where chains are tracked, else it is nil.
	heads   []uint16
	oneUsed bool
	tracked *splitTrack // nil without an inflight region
}

// NewSplit makes the device side of a ring. Without an inflight region it touches no
// memory: the driver may still be about to reset the ring, so positions are settled by
// Fill.
func NewSplit(cfg Config) (*Split, error) {
	if cfg.Size == 0 || cfg.Size > MaxSize || cfg.Size&(cfg.Size-1) != 0 {
		return nil, fmt.Errorf("virtqueue: split ring of %d descriptors, need a power of two from 1 to %d", cfg.Size, MaxSize)
	}
	if cfg.Features.Has(virtio.FRingPacked) {
		return nil, fmt.Errorf("virtqueue: the packed ring format was acked, this is a split ring")
	}
	if cfg.Mem == nil {
		return nil, fmt.Errorf("virtqueue: ring without a memory table")
	}
	r := ring{desc: cfg.Desc, avail: cfg.Avail, used: cfg.Used, mask: cfg.Size - 1}
	if err := r.check(); err != nil {
		return nil, err
	}
	start := uint16(cfg.Base)
	q := &Split{
		translator: newTranslator(&cfg),
		ring:       r,
		size:       cfg.Size,
		eventIdx:   cfg.Features.Has(virtio.FRingEventIdx),
		base:       start,
		noBase:     cfg.NoBase,
		available:  start, peeked: start, seen: start, consumed: start, published: start,
		start: start,
	}
	if q.oneUsed = batchesUsed(&cfg); q.oneUsed {
		q.heads = make([]uint16, cfg.Size)
	}
	if cfg.Inflight != nil {
		if err := q.track(cfg.Inflight); err != nil {
			return nil, err
		}
	}
	return q, nil
}

// batchesUsed reports whether one used entry may stand for all chains that are
// published together (VIRTIO_F_IN_ORDER, virtio 1.3 sections 2.7.9 and 2.8.8).
// A receiveq cannot do so: the driver has to learn each chain's length.
func batchesUsed(cfg *Config) bool {
	return cfg.Features.Has(virtio.FInOrder) && !cfg.DeviceWrites && !cfg.BothWays
}

// Size is the number of descriptors.
func (q *Split) Size() int { return int(q.size) }

// SetMemory moves the ring to another memory table, in which the three areas
// lie at the given host addresses. Nothing may be peeked: segments of the old
// table must not be in use.
func (q *Split) SetMemory(t *guestmem.Table, desc, avail, used uintptr) {
	q.ring.desc, q.ring.avail, q.ring.used = desc, avail, used
	q.setMemory(t)
}

// Position is where the ring is to be resumed: the available index of the
// oldest chain that was not completed. Give back what is peeked and publish
// what is staged before asking.
func (q *Split) Position() Position {
	q.settle()
	return Position(q.consumed)
}

// Rebased reports whether the ring resumed from another position than
// VHOST_USER_SET_VRING_BASE asked for, which is worth one line in a log.
func (q *Split) Rebased() bool {
	q.settle()
	return !q.noBase && q.start != q.base
}

// settle takes the positions from the used index in memory for as long as
// nothing was completed: a driver that resets the ring late, after it was
// started, moves the index once more.
func (q *Split) settle() {
	if q.settled || q.peeked != q.consumed {
		return
	}
	if used := q.ring.usedIdx(); used != q.consumed {
		q.available, q.peeked, q.seen, q.consumed, q.published = used, used, used, used, used
		q.start = used
		if q.tracked != nil {
			q.tracked.resubmit = nil
		}
	}
}

// BrokenError says why a ring cannot be used any further.
type BrokenError struct {
	Reason string // metric label: "avail_index" or "head", of a packed ring "flags" or "chain"
	Value  uint16 // what the ring said
	Next   uint16 // available position at which it was found
	Size   uint16 // descriptors of the ring
}

func (e *BrokenError) Error() string {
	switch e.Reason {
	case brokenHead:
		return fmt.Sprintf("virtqueue: available entry %d names descriptor %d of a ring of %d", e.Next, e.Value, e.Size)
	case brokenFlags:
		return fmt.Sprintf("virtqueue: descriptor %d (bit 15: wrap counter) has flags %#x, a used one that was never available", e.Next, e.Value)
	case brokenChain:
		return fmt.Sprintf("virtqueue: the chain that begins at descriptor %d (bit 15: wrap counter) of a ring of %d goes on beyond what is available, flags %#x", e.Next, e.Size, e.Value)
	}
	return fmt.Sprintf("virtqueue: available index is %d at position %d, that is further than a ring of %d allows", e.Value, e.Next, e.Size)
}

const (
	brokenAvail = "avail_index"
	brokenHead  = "head"
	brokenFlags = "flags"
	brokenChain = "chain"
)
