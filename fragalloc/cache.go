package fragalloc

import (
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/pagemem"
)

// MaxSize is the largest fragment in bytes. Larger ones could only be had at the
// start of an order-3 page, and refusing them keeps a small page that was got
// under memory pressure (page_frag_alloc's fragsz > PAGE_SIZE).
const MaxSize = pagemem.MaxFrag

// Line is the bytes of a cache line: fragments that start and end at multiples of it share none.
const Line = pagemem.Line

// maxBias is the number of references of a current page: PAGE_FRAG_CACHE_MAX_SIZE + 1.
const maxBias = pagemem.WindowRefs

// ErrNoMem means that the arena had no page. Nothing was changed; the caller
// leaves its packet where it is and tries again later.
var ErrNoMem = errors.New("fragalloc: no page left in the arena")

// ArgError is a request that can never succeed.
type ArgError struct {
	Size, Align uint32
}

// Error says which argument was wrong and what is accepted.
func (e ArgError) Error() string {
	if e.Size-1 >= MaxSize {
		return fmt.Sprintf("fragalloc: fragment of %d bytes, accepted are 1 to %d", e.Size, MaxSize)
	}
	return fmt.Sprintf("fragalloc: alignment %d, accepted are powers of two from 1 to %d", e.Align, pagemem.PageSize)
}

// Frag is a part of a page. A fragment returned by Alloc, or committed, holds one reference on its page; after
// Prepare and Probe its size is all that the page has left.
type Frag = pagemem.Frag

// Cache hands out fragments of its current page. The zero value is not usable.
// It belongs to one goroutine, and between Prepare and its Commit nothing else
// may be asked of it but Probe.
type Cache struct {
	win     pagemem.Window // Refs is the kernel's pagecnt_bias
	reserve bool
	arena   *pagemem.Arena
}

// NewCache returns an empty cache that takes its pages from a.
func NewCache(a *pagemem.Arena) *Cache { return &Cache{arena: a} }

// Window is the current page, from which the cache's owner may take whole cache lines with Window.Next.
func (c *Cache) Window() *pagemem.Window { return &c.win }

// Alloc allocates size bytes, 1 to MaxSize, whose start is a multiple of align, a
// power of two up to a page. The size is not rounded: who wants no neighbor in
// its last cache line asks for whole lines.
// The error is ErrNoMem or an ArgError.
func (c *Cache) Alloc(size, align uint32) (Frag, error) {
	if pagemem.FragArgs(size, align) {
		if f, ok := c.win.Take(size, align); ok {
			return f, nil
		}
	}
	return c.allocSlow(size, align)
}

func (c *Cache) allocSlow(size, align uint32) (Frag, error) {
	if _, err := c.Prepare(size, align); err != nil {
		return Frag{}, err
	}
	f, _ := c.win.Take(size, align)
	return f, nil
}

// AllocN fills dst with fragments of one size and returns how many it got; fewer
// than asked for means ErrNoMem or arguments that Alloc rejects.
func (c *Cache) AllocN(dst []Frag, size, align uint32) (n int) {
	for n = range dst {
		f, err := c.Alloc(size, align)
		if err != nil {
			return n
		}
		dst[n] = f
	}
	return len(dst)
}

// Prepare makes sure that at least min contiguous bytes are there and returns
// all that the page has left from the first aligned byte on. It reserves
// nothing: Commit takes what was used, and not to commit is allowed.
// Arguments and errors are those of Alloc.
func (c *Cache) Prepare(min, align uint32) (Frag, error) {
	if !pagemem.FragArgs(min, align) {
		return Frag{}, ArgError{min, align}
	}
	f, ok := c.win.Rest(min, align)
	if !ok {
		if !c.refill() {
			return Frag{}, ErrNoMem
		}
		f, _ = c.win.Rest(min, align)
	}
	return f, nil
}

// Probe answers like Prepare but never takes or reuses a page.
func (c *Cache) Probe(min, align uint32) (Frag, bool) {
	if !pagemem.FragArgs(min, align) {
		return Frag{}, false
	}
	return c.win.Rest(min, align)
}

// Commit takes the first used bytes of a prepared fragment, 1 to f.Size, and one
// reference for them. It returns the true size: used plus the alignment gap
// before it. 0 means that the commit was refused, because used is out of range
// or f is stale: nothing was taken.
func (c *Cache) Commit(f Frag, used uint32) (trueSize uint32) { return c.commit(f, used, true) }

// CommitNoRef takes the first used bytes of a prepared fragment for the fragment
// committed before, which they continue and whose reference they share.
// It returns what Commit returns.
func (c *Cache) CommitNoRef(f Frag, used uint32) (trueSize uint32) { return c.commit(f, used, false) }

func (c *Cache) commit(f Frag, used uint32, ref bool) (trueSize uint32) {
	trueSize = c.win.Commit(f, used, ref)
	if trueSize == 0 && (ref || used != 0) {
		c.arena.Misuse("committed nothing, or what was not prepared, on page", uint32(f.Page))
	}
	return trueSize
}

// Abort undoes the last Alloc or Commit: its reference and size bytes come back,
// an alignment gap does not. Size 0 gives back the reference alone.
func (c *Cache) Abort(size uint32) {
	if !c.win.Abort(size) {
		c.arena.Misuse("aborted what is not the last allocation on page", uint32(c.win.Page))
	}
}

// Drain gives the current page up. Fragments that are out keep it alive.
func (c *Cache) Drain() {
	if c.win.Size != 0 {
		c.arena.Unref(c.win.Page, int64(c.win.Refs))
	}
	c.win, c.reserve = pagemem.Window{}, false
}

// IsReserve says whether the current page came from the arena's reserve. Only
// essential traffic should be built on such a page.
func (c *Cache) IsReserve() bool { return c.reserve }

// refill makes a whole page available. Without one it leaves the cache empty,
// as __page_frag_cache_refill does.
func (c *Cache) refill() bool {
	if c.win.Size != 0 && c.reuse() {
		return true
	}
	p, size, ok := allocPage(c.arena)
	if !ok {
		c.win, c.reserve = pagemem.Window{}, false
		return false
	}
	c.arena.AddRef(p, maxBias-1)
	c.win.Open(c.arena, p, size)
	c.reserve = c.arena.IsReserve(p)
	return true
}

// allocPage takes a compound page, else a small one, which may be of the reserve.
func allocPage(a *pagemem.Arena) (p pagemem.PageID, size uint32, ok bool) {
	if p, ok = a.Alloc(pagemem.ChunkOrder, pagemem.NoReserve); ok {
		return p, pagemem.ChunkSize, true
	}
	p, ok = a.Alloc(0, pagemem.AllowReserve)
	return p, pagemem.PageSize, ok
}

// reuse drops the bias of the used-up page. It returns true if no fragment was
// out and the page may serve again from its start.
func (c *Cache) reuse() bool {
	if !c.arena.DropRefs(c.win.Page, int64(c.win.Refs)) {
		return false
	}
	if c.reserve {
		c.arena.Free(c.win.Page)
		return false
	}
	c.arena.AddRef(c.win.Page, maxBias-1)
	c.win.Reopen()
	return true
}
