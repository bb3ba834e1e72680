package pagemem

import "math/bits"

// chunk is the allocation state of eight pages, guarded by the arena's lock.
// Links are chunk index + 1, 0 ends a list.
type chunk struct {
	next, prev uint32
	free       uint8 // carved to order 0: bit i set means page i is free
	state      chunkState
}

type chunkState uint8

const (
	stateFree  chunkState = iota // on the zone's list of whole chunks, or never carved
	statePages                   // carved to order 0
	stateWhole                   // allocated as one order-3 page
)

const allFree = 1<<ChunkPages - 1

// zone is a range of chunks with its free lists, guarded by the arena's lock.
type zone struct {
	fresh, end uint32 // chunks never carved yet; taken last, so untouched memory stays untouched
	whole      uint32 // free chunks, singly linked
	partial    uint32 // order-0 chunks with a free page, doubly linked
}

// takeChunk removes a free chunk from the zone.
func (a *Arena) takeChunk(z *zone) (index uint32, ok bool) {
	if z.whole != 0 {
		index = z.whole - 1
		z.whole = a.chunks[index].next
		return index, true
	}
	if z.fresh == z.end {
		return 0, false
	}
	index = z.fresh
	z.fresh++
	for i := index * ChunkPages; i < (index+1)*ChunkPages; i++ {
		a.pages[i].ref.rest()
		a.pages[i].frag.rest()
	}
	return index, true
}

// carve splits a free chunk into pages of the given order.
func (a *Arena) carve(index uint32, order int) {
	first := index * ChunkPages
	for i := first; i < first+ChunkPages; i++ {
		m := &a.pages[i]
		m.order = uint8(order)
		m.head = PageID(i)
		if order == ChunkOrder {
			m.head = PageID(first)
		}
	}
}

// takeWhole allocates an order-3 page.
func (a *Arena) takeWhole(z *zone) (PageID, bool) {
	index, ok := a.takeChunk(z)
	if !ok {
		return 0, false
	}
	a.carve(index, ChunkOrder)
	a.chunks[index].state = stateWhole
	a.inUse += ChunkPages
	return PageID(index * ChunkPages), true
}

// takePages allocates order-0 pages and returns how many.
func (a *Arena) takePages(z *zone, dst []PageID) (n int) {
	for n < len(dst) {
		if z.partial == 0 && !a.addPartial(z) {
			break
		}
		index := z.partial - 1
		c := &a.chunks[index]
		for c.free != 0 && n < len(dst) {
			bit := bits.TrailingZeros8(c.free)
			c.free &= c.free - 1
			dst[n] = PageID(index*ChunkPages + uint32(bit))
			n++
		}
		if c.free == 0 {
			a.unlink(z, index)
		}
	}
	a.inUse += n
	return n
}

// addPartial carves a free chunk to order 0.
func (a *Arena) addPartial(z *zone) bool {
	index, ok := a.takeChunk(z)
	if !ok {
		return false
	}
	a.carve(index, 0)
	a.chunks[index].state = statePages
	a.chunks[index].free = allFree
	a.link(z, index)
	return true
}

// giveBack frees the page with this head. It returns false if the page is free already.
func (a *Arena) giveBack(head PageID) bool {
	index := uint32(head) / ChunkPages
	c := &a.chunks[index]
	z := a.zoneOf(index)
	switch c.state {
	case stateWhole:
		a.inUse -= ChunkPages
		a.pushWhole(z, index)
		return true
	case statePages:
		bit := uint8(1) << (head % ChunkPages)
		if c.free&bit != 0 {
			return false
		}
		a.inUse--
		if c.free == 0 {
			a.link(z, index)
		}
		c.free |= bit
		if c.free == allFree {
			a.unlink(z, index)
			a.pushWhole(z, index)
		}
		return true
	default:
		return false
	}
}

func (a *Arena) pushWhole(z *zone, index uint32) {
	a.chunks[index] = chunk{next: z.whole}
	z.whole = index + 1
}

func (a *Arena) link(z *zone, index uint32) {
	c := &a.chunks[index]
	c.prev, c.next = 0, z.partial
	if c.next != 0 {
		a.chunks[c.next-1].prev = index + 1
	}
	z.partial = index + 1
}

func (a *Arena) unlink(z *zone, index uint32) {
	c := &a.chunks[index]
	if c.next != 0 {
		a.chunks[c.next-1].prev = c.prev
	}
	if c.prev != 0 {
		a.chunks[c.prev-1].next = c.next
	} else {
		z.partial = c.next
	}
	c.next, c.prev = 0, 0
}

func (a *Arena) zoneOf(index uint32) *zone {
	if index >= a.reserveStart {
		return &a.reserve
	}
	return &a.normal
}
