package driver

import (
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/virtio"
)

// noID is in all but the last descriptor of a chain, where an id means nothing
// (virtio 1.3 section 2.8.6): a device that reads the wrong one is found out.
const noID = 0xdead

// place is a descriptor and the wrap counter of the lap in which it is meant.
type place struct {
	idx  int
	wrap bool
}

func (p place) add(n, size int) place {
	if p.idx += n; p.idx >= size {
		return place{p.idx - size, !p.wrap}
	}
	return p
}

// word has the wrap counter in bit 15.
func (p place) word() uint16 {
	if p.wrap {
		return uint16(p.idx) | 1<<15
	}
	return uint16(p.idx)
}

func placeOf(word uint16) place { return place{int(word & 0x7fff), word>>15 != 0} }

// availFlags and usedFlags are what the flags of a descriptor at p have of its state when the driver shows it and when the
// device has used it.
func (p place) availFlags() uint16 {
	if p.wrap {
		return DescFAvail
	}
	return DescFUsed
}

func (p place) usedFlags() uint16 {
	if p.wrap {
		return DescFAvail | DescFUsed
	}
	return 0
}

// PackedRing is the driver side of one packed ring (virtio 1.3 section 2.8),
// with the methods of Ring. Where those return heads, these return buffer ids.
type PackedRing struct {
	mem                         packedMemory
	eventIdx, indirect, inOrder bool

	free     fifo     // buffer ids
	oldest   uint16   // id of the oldest chain that is outstanding, if they return in order: then ids go round
	descs    []uint16 // of the chain with that id, 0: not outstanding
	chains   int      // outstanding
	numFree  int      // descriptors
	staged   int      // chains added and not published
	unkicked int      // descriptors published since NeedsKick was last asked

	avail    place // behind what was added
	begin    place // first descriptor that is staged
	meta     uint64
	pending  int // descriptors staged
	used     place
	batch    bool   // a used descriptor stands for more chains
	last     uint16 // id of the last of those
	lastUsed uint32 // and its length
	err      error
}

// NewPacked makes a packed ring and resets its memory. Desc, Avail and Used are
// the descriptor ring, the driver's and the device's event suppression
// structure, aligned to 16, 4 and 4 bytes. Any size up to 32768 is legal.
func NewPacked(cfg Config) (*PackedRing, error) {
	if cfg.Size < 1 || cfg.Size > 32768 {
		return nil, fmt.Errorf("driver: ring of %d descriptors, need 1 to 32768", cfg.Size)
	}
	if cfg.Desc == 0 || cfg.Desc%16 != 0 || cfg.Avail == 0 || cfg.Avail%4 != 0 || cfg.Used == 0 || cfg.Used%4 != 0 {
		return nil, fmt.Errorf("driver: ring areas at %#x, %#x, %#x, need multiples of 16, 4 and 4", cfg.Desc, cfg.Avail, cfg.Used)
	}
	r := &PackedRing{
		mem:      packedMemory{desc: cfg.Desc, driver: cfg.Avail, device: cfg.Used, size: cfg.Size},
		eventIdx: cfg.Features.Has(virtio.FRingEventIdx),
		indirect: cfg.Features.Has(virtio.FRingIndirectDesc),
		inOrder:  cfg.Features.Has(virtio.FInOrder),
		free:     newFIFO(cfg.Size),
		descs:    make([]uint16, cfg.Size),
	}
	r.Reset(1 << 15)
	return r, nil
}

// Reset clears the ring's memory and forgets every chain. Both sides are to
// start at start, a descriptor with the wrap counter in bit 15: 0x8000 for a
// driver, anything for a test that wants to see the ring wrap.
func (r *PackedRing) Reset(start uint16) {
	r.mem.zero()
	r.Attach(start)
	at := placeOf(start)
	for i := range r.mem.size {
		// As if all before it had been used in this lap and the others in the one before.
		lap := at.wrap == (i < at.idx)
		r.mem.storeMeta(i, packMeta(0, 0, place{wrap: lap}.usedFlags()))
	}
}

// Attach forgets every chain like Reset but leaves the memory alone.
func (r *PackedRing) Attach(start uint16) {
	r.free.reset()
	r.oldest = 0
	for i := range r.mem.size {
		r.free.push(uint16(i))
	}
	clear(r.descs)
	at := placeOf(start)
	r.numFree, r.chains, r.staged, r.pending, r.unkicked = r.mem.size, 0, 0, 0, 0
	r.avail, r.begin, r.used = at, at, at
	r.batch, r.err = false, nil
}

// Size is the number of descriptors.
func (r *PackedRing) Size() int { return r.mem.size }

// Free is how many descriptors are not in use.
func (r *PackedRing) Free() int { return r.numFree }

// Outstanding is how many chains were added and not taken back.
func (r *PackedRing) Outstanding() int { return r.chains }

// AvailIdx is the next descriptor to fill, with the wrap counter in bit 15.
func (r *PackedRing) AvailIdx() uint16 { return r.avail.word() }

// LastUsed is the place of the next used descriptor, with the wrap counter in
// bit 15.
func (r *PackedRing) LastUsed() uint16 { return r.used.word() }

// Err is why the ring can no longer be used, nil while it can.
func (r *PackedRing) Err() error { return r.err }

// AddDirect stages a chain of the one buffer b and returns its id.
func (r *PackedRing) AddDirect(b Buf) (id uint16, err error) {
	if r.numFree == 0 {
		return 0, ErrFull
	}
	id = r.free.pop()
	r.put(b.Addr, b.Len, id, b.flags())
	r.stage(id, 1)
	return id, nil
}

// AddChain stages a chain of bufs, one descriptor each, and returns its id.
func (r *PackedRing) AddChain(bufs []Buf) (id uint16, err error) {
	switch {
	case len(bufs) == 0:
		return 0, errNoBuffers
	case len(bufs) > r.numFree:
		return 0, ErrFull
	}
	id = r.free.pop()
	for _, b := range bufs[:len(bufs)-1] {
		r.put(b.Addr, b.Len, noID, b.flags()|DescFNext)
	}
	last := bufs[len(bufs)-1]
	r.put(last.Addr, last.Len, id, last.flags())
	r.stage(id, len(bufs))
	return id, nil
}

// AddIndirect stages a chain of bufs through a table of len(bufs) entries, which
// it writes at host address host and which the device sees at addr. The table
// must stay untouched until the chain comes back.
func (r *PackedRing) AddIndirect(host uintptr, addr uint64, bufs []Buf) (id uint16, err error) {
	switch {
	case !r.indirect:
		return 0, errors.New("driver: VIRTIO_F_INDIRECT_DESC was not negotiated")
	case len(bufs) == 0:
		return 0, errNoBuffers
	case r.numFree == 0:
		return 0, ErrFull
	}
	for i, b := range bufs {
		PokePackedTable(host, i, b.Addr, b.Len, noID, b.flags())
	}
	id = r.free.pop()
	r.put(addr, uint32(16*len(bufs)), id, DescFIndirect)
	r.stage(id, 1)
	return id, nil
}

// put writes the next descriptor, except the flags of the first that is staged.
func (r *PackedRing) put(addr uint64, n uint32, id, flags uint16) {
	meta := packMeta(n, id, flags|r.avail.availFlags())
	r.mem.storeAddr(r.avail.idx, addr)
	if r.pending == 0 {
		r.begin, r.meta = r.avail, meta
	} else {
		r.mem.stageMeta(r.avail.idx, meta)
	}
	r.pending++
	r.avail = r.avail.add(1, r.mem.size)
}

func (r *PackedRing) stage(id uint16, descs int) {
	r.descs[id] = uint16(descs)
	r.chains++
	r.numFree -= descs
	r.staged++
}

// Publish shows the staged chains to the device and returns how many those are.
// The first descriptor's flags are written last: the device does not look at
// what is behind it before.
func (r *PackedRing) Publish() int {
	n := r.staged
	if n > 0 {
		r.mem.storeMeta(r.begin.idx, r.meta)
		r.unkicked += r.pending
		r.staged, r.pending = 0, 0
	}
	return n
}
