package pagemem

const (
	// MaxFrag is the largest fragment in bytes. Larger ones could only be had at the start of a
	// compound page (page_frag_alloc's fragsz > PAGE_SIZE).
	MaxFrag = PageSize
	// Line is the bytes of a cache line: fragments that start and end at multiples of it share none.
	Line = 64
	// WindowRefs are the references of a page that a [Window] has just opened:
	// PAGE_FRAG_CACHE_MAX_SIZE + 1, so that the window keeps one even if each byte is a fragment.
	WindowRefs = ChunkSize + 1
)

// Frag is a part of a page. A fragment that was allocated or committed holds one reference on its page.
type Frag struct {
	Page PageID  // compound head
	Off  uint32  // from the start of the compound page
	Size uint32  // bytes
	Addr uintptr // host address, valid while a reference is held
}

// Window is the page that a fragment allocator hands out from its start to its end. Of the references that the
// allocator took on the page at once, Refs are still its own: a fragment costs a decrement. The allocators
// (fragalloc.Cache, fragalloc.RefPage, pool.FragPool) differ in where pages come from and what the references are.
//
// A Window belongs to one goroutine, that of its allocator. The zero value has no page.
type Window struct {
	Base uintptr // host address of the page
	Size uint32  // its bytes, 0: no page
	Off  uint32  // first byte that is free
	Refs uint32  // references that are the allocator's
	Page PageID
}

// Open begins a page of size bytes; whatever it counts, the allocator has WindowRefs references to give.
func (w *Window) Open(a *Arena, page PageID, size uint32) {
	*w = Window{Base: a.Addr(page), Size: size, Refs: WindowRefs, Page: page}
}

// Reopen begins the same page again; the allocator has WindowRefs references to give once more.
func (w *Window) Reopen() { w.Off, w.Refs = 0, WindowRefs }

// Next allocates whole cache lines that are next in the page, without a call: size is a multiple of Line in
// bytes, 1 to MaxFrag. ok is false, and nothing is taken, when the page has not that much left.
func (w *Window) Next(size uint32) (addr uintptr, page PageID, ok bool) {
	off := (w.Off + Line - 1) &^ (Line - 1)
	if off+size > w.Size {
		return 0, 0, false
	}
	w.Refs--
	w.Off = off + size
	return w.Base + uintptr(off), w.Page, true
}

// Take allocates size bytes whose start is a multiple of align, with one reference. The arguments satisfy FragArgs.
// ok is false, and nothing is taken, when the page has not that much left.
func (w *Window) Take(size, align uint32) (f Frag, ok bool) {
	off := alignUp(w.Off, align)
	if off+size > w.Size {
		return Frag{}, false
	}
	w.Refs--
	w.Off = off + size
	return Frag{w.Page, off, size, w.Base + uintptr(off)}, true
}

// Rest returns all that is left from the first aligned byte on, if that is min bytes or more. It takes nothing.
func (w *Window) Rest(min, align uint32) (f Frag, ok bool) {
	off := alignUp(w.Off, align)
	if off+min > w.Size {
		return Frag{}, false
	}
	return Frag{w.Page, off, w.Size - off, w.Base + uintptr(off)}, true
}

// Commit takes the first used bytes of what Rest returned, with a reference or, if they continue the fragment
// before and share its reference, without. It returns the true size, used plus the alignment gap in front. 0
// means that nothing was taken: used is out of range or f is stale.
func (w *Window) Commit(f Frag, used uint32, ref bool) (trueSize uint32) {
	end := f.Off + used
	if ref && used == 0 || f.Page != w.Page || f.Off < w.Off || used > f.Size || end > w.Size {
		return 0
	}
	trueSize = end - w.Off
	w.Off = end
	if ref {
		w.Refs--
	}
	return trueSize
}

// Abort undoes the last allocation or commit: its reference and size bytes come back, an alignment gap does not.
// It is false, and nothing is done, if that cannot have been one of this page.
func (w *Window) Abort(size uint32) bool {
	if size > w.Off || w.Refs >= WindowRefs {
		return false
	}
	w.Refs++
	w.Off -= size
	return true
}

// FragArgs says whether a fragment of this size and alignment can be had: 1 to MaxFrag bytes, a power of two up to a page.
func FragArgs(size, align uint32) bool {
	return size-1 < MaxFrag && align-1 < PageSize && align&(align-1) == 0
}

func alignUp(off, align uint32) uint32 { return (off + align - 1) &^ (align - 1) }
