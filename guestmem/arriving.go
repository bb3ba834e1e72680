package guestmem

import (
	"math/bits"
)

// chunkPages is how many pages are kept account of together.
const chunkPages = 512

// chunk has a bit for each of an aligned lot of pages, set if the page has arrived.
type chunk = [chunkPages / 64]uint64

// maxChunks bounds the account of one mapping: 512 GiB in pages of 4 KiB. Beyond it starts anew, and
// what has arrived is found to be there once more.
const maxChunks = 1 << 18

// arriving is which pages of a mapping have arrived. Its Arrival's lock guards it.
type arriving struct {
	number uint32
	shift  int // logarithm of the page's size
	pages  uint64
	chunks map[uint64]*chunk
}

func newArriving(number uint32, m *mapping) *arriving {
	a := &arriving{number: number, shift: bits.TrailingZeros64(m.page), chunks: make(map[uint64]*chunk)}
	a.pages = uint64(m.length) >> a.shift
	return a
}

// run returns the pages from first to end, end excluded, that have arrived around page p, as far as one
// chunk tells; none if p has not.
func (a *arriving) run(p uint64) (first, end uint64) {
	c := a.chunks[p/chunkPages]
	if c == nil || !has(c, p%chunkPages) {
		return 0, 0
	}
	base, at := p&^(chunkPages-1), p%chunkPages
	return base + start(c, at), base + stop(c, at)
}

// start is the first of the set bits that lie one next to the other up to at.
func start(c *chunk, at uint64) uint64 {
	for w := int(at / 64); w >= 0; w-- {
		clear := ^c[w]
		if w == int(at/64) {
			clear &= 1<<(at%64) - 1
		}
		if clear != 0 {
			return uint64(w*64 + bits.Len64(clear))
		}
	}
	return 0
}

// stop is the bit after the last of those from at on.
func stop(c *chunk, at uint64) uint64 {
	for w := int(at / 64); w < len(c); w++ {
		clear := ^c[w]
		if w == int(at/64) {
			clear &^= 1<<(at%64) - 1
		}
		if clear != 0 {
			return uint64(w*64 + bits.TrailingZeros64(clear))
		}
	}
	return chunkPages
}

func (a *arriving) has(p uint64) bool {
	c := a.chunks[p/chunkPages]
	return c != nil && has(c, p%chunkPages)
}

// add notes that page p has arrived, and of those around it the ones in more.
func (a *arriving) add(p uint64, more chunk) {
	if p >= a.pages {
		return
	}
	c := a.chunks[p/chunkPages]
	if c == nil {
		if len(a.chunks) == maxChunks {
			clear(a.chunks)
		}
		c = new(chunk)
		a.chunks[p/chunkPages] = c
	}
	for i := range c {
		c[i] |= more[i]
	}
	c[p%chunkPages/64] |= 1 << (p % 64)
	if last := a.pages - p&^(chunkPages-1); last < chunkPages { // nothing beyond the mapping
		for i := last; i < chunkPages; i++ {
			c[i/64] &^= 1 << (i % 64)
		}
	}
}

func has(c *chunk, i uint64) bool { return c[i/64]>>(i%64)&1 != 0 }
