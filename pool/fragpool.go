package pool

import "github.com/vhostd/vhostd/pagemem"

// MinRest is the fewest bytes that FragPool.Prepare offers: less is not worth a fragment of its own.
const MinRest = 32

// FragPool hands out fragments of pages of a pool, as pfrag_pool does for a socket (net/core/pfrag_pool.c of the RFC of
// August 2021): what the sender allocates comes back, when it was sent, to the pool of the worker that completes it, and from
// there to the sender. The current page's fragments are counted privately, so that one costs no atomic operation until it is freed.
//
// A FragPool has a private context of its pool, which is another pool once it follows another worker. It belongs to one
// goroutine. Between Prepare and its Commit nothing else may be asked of it. Fragments are released by anybody, through
// pagemem.Arena.Release, also after the FragPool was flushed or follows another pool.
type FragPool struct {
	win    pagemem.Window
	ctx    *Context // nil: no pool
	arena  *pagemem.Arena
	owner  pagemem.OwnerID
	budget *Budget
}

// NewFragPool returns an empty FragPool for the worker with this id, 0 for a goroutine that is none. It has no pool until it
// follows a worker. budget, if not nil, bounds the pages that rest in it.
func NewFragPool(a *pagemem.Arena, owner pagemem.OwnerID, budget *Budget) *FragPool {
	return &FragPool{arena: a, owner: owner, budget: budget}
}

// Follow makes the pages come from the pool of the worker that completes what is sent. Nothing happens if that is the pool
// in use, or if the worker has none: then the old one stays. It is for the moment between two batches.
func (f *FragPool) Follow(w *Workers, completer pagemem.OwnerID) (changed bool) {
	p := w.Of(completer)
	if p == nil || f.ctx != nil && f.ctx.pool == p {
		return false
	}
	ctx, err := p.NewContext(f.owner, f.budget)
	if err != nil {
		return false // destroyed meanwhile, which is as if it were not there
	}
	f.Flush()
	f.ctx = ctx
	return true
}

// Pool returns the pool in use, nil without one.
func (f *FragPool) Pool() *Pool {
	if f.ctx == nil {
		return nil
	}
	return f.ctx.pool
}

// Window is the current page, from which the owner may take whole cache lines with Window.Next.
func (f *FragPool) Window() *pagemem.Window { return &f.win }

// Alloc allocates size bytes, 1 to pagemem.MaxFrag, whose start is a multiple of align, a power of two up to a page. ok is false,
// and nothing was taken, for other arguments, without a pool, and when pool and arena have no page: the caller falls back to
// another allocator, as a socket does to sk_page_frag.
func (f *FragPool) Alloc(size, align uint32) (frag pagemem.Frag, ok bool) {
	if !pagemem.FragArgs(size, align) {
		return pagemem.Frag{}, false
	}
	if frag, ok = f.win.Take(size, align); ok || !f.refill() {
		return frag, ok
	}
	return f.win.Take(size, align)
}

// Prepare makes sure that at least min contiguous bytes are there, and MinRest in any case, and returns all that the page has left from
// the first aligned byte on. It reserves nothing. Arguments and failures are those of Alloc.
//
// A fragment that shall continue the one before is prepared with align 1: it begins at the very byte where that one ended.
// One that shall not is prepared with align pagemem.Line, so that no two fragments share a cache line. (The RFC rounded at the end of a
// fragment, after which nothing whose size was no multiple of a line could be continued.)
func (f *FragPool) Prepare(min, align uint32) (frag pagemem.Frag, ok bool) {
	if !pagemem.FragArgs(min, align) {
		return pagemem.Frag{}, false
	}
	min = max(min, MinRest)
	if frag, ok = f.win.Rest(min, align); ok || !f.refill() {
		return frag, ok
	}
	return f.win.Rest(min, align)
}

// Commit takes the first used bytes of a prepared fragment: with a reference, or merged into the fragment committed before,
// which they continue and whose reference they share. It returns the true size, used plus the alignment gap before it. 0 means that
// nothing was taken, because used is out of range or frag is stale.
func (f *FragPool) Commit(frag pagemem.Frag, used uint32, merge bool) (trueSize uint32) {
	trueSize = f.win.Commit(frag, used, !merge)
	if trueSize == 0 && (!merge || used != 0) {
		f.arena.Misuse("committed nothing, or what was not prepared, on page", uint32(frag.Page))
	}
	return trueSize
}

// refill makes a whole page available: the used-up one if nobody uses it any more, else one of the pool. Without one there is
// no current page.
func (f *FragPool) refill() bool {
	if f.ctx == nil {
		return false
	}
	if f.win.Size != 0 && f.ctx.usedUp(f.win.Page, int64(f.win.Refs)) {
		f.count(f.win.Page)
		f.win.Reopen()
		return true
	}
	f.win = pagemem.Window{}
	id, ok := f.ctx.Alloc()
	if !ok {
		return false
	}
	f.count(id)
	f.win.Open(f.arena, id, f.ctx.pool.size)
	return true
}

// count takes all references of a page that has one.
func (f *FragPool) count(id pagemem.PageID) { f.arena.Frags(id).Add(pagemem.WindowRefs - 1) }

// Flush gives the current page and all that rests privately back and lets go of the pool. Fragments that are out stay valid.
func (f *FragPool) Flush() {
	if f.ctx == nil {
		return
	}
	f.endPage()
	f.ctx.Close()
	f.ctx = nil
}

func (f *FragPool) endPage() {
	if f.win.Size == 0 {
		return
	}
	p, id := f.ctx.pool, f.win.Page
	left := f.arena.Frags(id).Drop(int64(f.win.Refs))
	f.win = pagemem.Window{}
	if left == 0 {
		p.giveUp(id)
	} else {
		p.checkLeft(left, id)
	}
}

// Resting returns how many pages wait in the private context, the current one not among them.
func (f *FragPool) Resting() int {
	if f.ctx == nil {
		return 0
	}
	return f.ctx.Resting()
}

// Trim gives what rests privately back: the sender has been idle.
func (f *FragPool) Trim() {
	if f.ctx != nil {
		f.ctx.Trim()
	}
}

// Publish makes the private counters visible in the pool's Stats.
func (f *FragPool) Publish() {
	if f.ctx != nil {
		f.ctx.Publish()
	}
}
