package fragalloc

import "github.com/vhostd/vhostd/pagemem"

// RefPage allocates fragments as the kernel did with struct page_frag before page_frag_cache replaced it (skb_page_frag_refill in
// net/core/sock.c): each fragment takes a reference of its own on the page, by an atomic increment. It is the baseline that
// [Cache] is compared with.
//
// A RefPage belongs to one goroutine. Fragments may be released by any, through pagemem.Arena.Release.
type RefPage struct {
	win   pagemem.Window // Refs means nothing here
	arena *pagemem.Arena
}

// NewRefPage returns an empty RefPage that takes its pages from a.
func NewRefPage(a *pagemem.Arena) *RefPage { return &RefPage{arena: a} }

// Window is the current page. Whoever takes fragments from it with Window.Next takes the reference of each with
// pagemem.Arena.Ref, before it is handed on.
func (r *RefPage) Window() *pagemem.Window { return &r.win }

// Alloc is Cache.Alloc.
func (r *RefPage) Alloc(size, align uint32) (Frag, error) {
	if !pagemem.FragArgs(size, align) {
		return Frag{}, ArgError{size, align}
	}
	f, ok := r.win.Take(size, align)
	if !ok {
		if !r.refill() {
			return Frag{}, ErrNoMem
		}
		f, _ = r.win.Take(size, align)
	}
	r.arena.Ref(f.Page)
	return f, nil
}

// refill makes a whole page available: the used-up one if no fragment is out, else another.
func (r *RefPage) refill() bool {
	if r.win.Size != 0 {
		if r.arena.RefCount(r.win.Page) == 1 && !r.arena.IsReserve(r.win.Page) {
			r.win.Reopen()
			return true
		}
		r.Drain()
	}
	p, size, ok := allocPage(r.arena)
	if ok {
		r.win.Open(r.arena, p, size)
	}
	return ok
}

// Drain gives the current page up. Fragments that are out keep it alive.
func (r *RefPage) Drain() {
	if r.win.Size != 0 {
		r.arena.Unref(r.win.Page, 1)
	}
	r.win = pagemem.Window{}
}
