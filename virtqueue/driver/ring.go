package driver

import (
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/virtio"
)

// ErrFull says that the descriptor table has too few free entries.
var ErrFull = errors.New("driver: ring is full")

var errNoBuffers = errors.New("driver: chain without buffers")

// Buf is one buffer of a chain as the device is to see it.
type Buf struct {
	Addr  uint64 // guest physical address
	Len   uint32 // bytes
	Write bool   // device-writable
}

// Config describes a ring.
type Config struct {
	Size              int             // descriptors, a power of two up to 32768
	Desc, Avail, Used uintptr         // host addresses, aligned to 16, 2 and 4 bytes
	Features          virtio.Features // EVENT_IDX, INDIRECT_DESC and IN_ORDER matter here
}

// Ring is the driver side of one split ring.
type Ring struct {
	mem      memory
	eventIdx bool
	indirect bool
	inOrder  bool

	oldest   uint16   // head of the oldest chain that is outstanding, if they return in order
	batch    bool     // a used entry stands for more chains
	last     uint16   // head of the last of those
	lastUsed uint32   // and its length
	free     []uint16 // ring buffer of free descriptors, oldest first
	freeHead int
	numFree  int
	chains   []chain // by head
	next     []uint16

	avail     uint16 // available index, staged chains included
	published uint16 // available index in memory
	kicked    uint16 // available index when NeedsKick was last asked
	used      uint16 // next used entry to take
	usedIdx   uint16 // used index as last read
	err       error
}

// chain is what the driver remembers of a chain under its head.
type chain struct {
	descs uint16 // descriptors used, 0: not outstanding
	tail  uint16
}

// New makes a ring and resets its memory.
func New(cfg Config) (*Ring, error) {
	if cfg.Size < 1 || cfg.Size > 32768 || cfg.Size&(cfg.Size-1) != 0 {
		return nil, fmt.Errorf("driver: ring of %d descriptors, need a power of two from 1 to 32768", cfg.Size)
	}
	if cfg.Desc == 0 || cfg.Desc%16 != 0 || cfg.Avail == 0 || cfg.Avail%2 != 0 || cfg.Used == 0 || cfg.Used%4 != 0 {
		return nil, fmt.Errorf("driver: ring areas at %#x, %#x, %#x, need multiples of 16, 2 and 4", cfg.Desc, cfg.Avail, cfg.Used)
	}
	r := &Ring{
		mem:      memory{desc: cfg.Desc, avail: cfg.Avail, used: cfg.Used, mask: uint16(cfg.Size - 1)},
		eventIdx: cfg.Features.Has(virtio.FRingEventIdx),
		indirect: cfg.Features.Has(virtio.FRingIndirectDesc),
		inOrder:  cfg.Features.Has(virtio.FInOrder),
		free:     make([]uint16, cfg.Size),
		chains:   make([]chain, cfg.Size),
		next:     make([]uint16, cfg.Size),
	}
	r.Reset(0)
	return r, nil
}

// Reset zeroes the ring's memory and forgets every chain. Both indexes start
// at start: 0 for a driver, anything for a test that wants to see them wrap.
func (r *Ring) Reset(start uint16) {
	r.mem.zero()
	r.Attach(start)
	r.mem.storeAvailIdx(start)
	r.mem.storeUsedIdx(start)
}

// Attach forgets every chain like Reset but leaves the memory alone, as a
// front-end does that finds a ring with position pos in use.
func (r *Ring) Attach(pos uint16) {
	for i := range r.free {
		r.free[i] = uint16(i)
	}
	clear(r.chains)
	r.oldest, r.batch = 0, false
	r.freeHead, r.numFree = 0, len(r.free)
	r.avail, r.published, r.kicked = pos, pos, pos
	r.used, r.usedIdx, r.err = pos, pos, nil
}

// Size is the number of descriptors.
func (r *Ring) Size() int { return len(r.free) }

// Free is how many descriptors are not in use.
func (r *Ring) Free() int { return r.numFree }

// Outstanding is how many chains were added and not taken back.
func (r *Ring) Outstanding() int { return int(r.avail - r.used) }

// AvailIdx is the available index, staged chains included.
func (r *Ring) AvailIdx() uint16 { return r.avail }

// LastUsed is the position of the next used entry.
func (r *Ring) LastUsed() uint16 { return r.used }

// AddDirect stages a chain of the one buffer b and returns its head.
func (r *Ring) AddDirect(b Buf) (head uint16, err error) {
	if r.numFree == 0 {
		return 0, ErrFull
	}
	head = r.takeFree()
	r.mem.storeDesc(head, b.Addr, b.Len, b.flags(), 0)
	r.stage(head, 1, head)
	return head, nil
}

// AddChain stages a chain of bufs, one descriptor each, and returns its head.
func (r *Ring) AddChain(bufs []Buf) (head uint16, err error) {
	switch {
	case len(bufs) == 0:
		return 0, errNoBuffers
	case len(bufs) > r.numFree:
		return 0, ErrFull
	}
	head = r.takeFree()
	at := head
	for _, b := range bufs[:len(bufs)-1] {
		next := r.takeFree()
		r.mem.storeDesc(at, b.Addr, b.Len, b.flags()|DescFNext, next)
		r.next[at] = next
		at = next
	}
	last := bufs[len(bufs)-1]
	r.mem.storeDesc(at, last.Addr, last.Len, last.flags(), 0)
	r.stage(head, len(bufs), at)
	return head, nil
}

// AddIndirect stages a chain of bufs through a table of len(bufs) entries,
// which it writes at host address host and which the device sees at addr. The
// table must stay untouched until the chain comes back.
func (r *Ring) AddIndirect(host uintptr, addr uint64, bufs []Buf) (head uint16, err error) {
	switch {
	case !r.indirect:
		return 0, errors.New("driver: VIRTIO_F_INDIRECT_DESC was not negotiated")
	case len(bufs) == 0:
		return 0, errNoBuffers
	case r.numFree == 0:
		return 0, ErrFull
	}
	for i, b := range bufs {
		flags, next := b.flags(), uint16(0)
		if i < len(bufs)-1 {
			flags, next = flags|DescFNext, uint16(i+1)
		}
		PokeTable(host, i, b.Addr, b.Len, flags, next)
	}
	head = r.takeFree()
	r.mem.storeDesc(head, addr, uint32(16*len(bufs)), DescFIndirect, 0)
	r.stage(head, 1, head)
	return head, nil
}

func (b Buf) flags() uint16 {
	if b.Write {
		return DescFWrite
	}
	return 0
}

// takeFree hands out descriptors oldest first: with a device that completes in
// order, chains then follow one another in the table, as VIRTIO_F_IN_ORDER
// demands of a driver (virtio 1.3 section 2.7.9).
func (r *Ring) takeFree() uint16 {
	d := r.free[r.freeHead]
	r.freeHead = (r.freeHead + 1) & int(r.mem.mask)
	r.numFree--
	return d
}

func (r *Ring) putFree(d uint16) {
	r.free[(r.freeHead+r.numFree)&int(r.mem.mask)] = d
	r.numFree++
}

func (r *Ring) stage(head uint16, descs int, tail uint16) {
	r.chains[head] = chain{descs: uint16(descs), tail: tail}
	r.mem.storeAvail(r.avail, head)
	r.avail++
}

// Publish shows the staged chains to the device and returns how many those are.
func (r *Ring) Publish() int {
	n := int(r.avail - r.published)
	if n > 0 {
		r.published = r.avail
		r.mem.storeAvailIdx(r.avail)
	}
	return n
}
