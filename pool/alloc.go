package pool

import "github.com/vhostd/vhostd/pagemem"

// Alloc is Context.Alloc for the owner.
func (p *Pool) Alloc() (pagemem.PageID, bool) { return p.ctx.Alloc() }

// AllocN is Context.AllocN for the owner.
func (p *Pool) AllocN(dst []pagemem.PageID) (n int) { return p.ctx.AllocN(dst) }

// AllocFrag is Context.AllocFrag for the owner.
func (p *Pool) AllocFrag(size uint32) (id pagemem.PageID, off uint32, got uint32, ok bool) {
	return p.ctx.AllocFrag(size)
}

// Alloc returns a page with one fragment reference, false if the arena has none.
// The last page that was recycled comes first: it is in the processor's cache.
func (c *Context) Alloc() (pagemem.PageID, bool) {
	if c.n == 0 && !c.refill() {
		return 0, false
	}
	c.n--
	c.own.fast++
	id := c.cache[c.n]
	if pagemem.Debug {
		c.pool.markIdle(id, false)
	}
	return id, true
}

// AllocN fills dst with pages like Alloc and returns how many it got.
func (c *Context) AllocN(dst []pagemem.PageID) (n int) {
	for n < len(dst) {
		if c.n == 0 && !c.refill() {
			break
		}
		take := min(c.n, len(dst)-n)
		c.n -= take
		c.own.fast += uint64(take)
		n += copy(dst[n:], c.cache[c.n:c.n+take])
	}
	if pagemem.Debug {
		for _, id := range dst[:n] {
			c.pool.markIdle(id, false)
		}
	}
	return n
}

// refill puts at least one page into the empty cache. The page that the caller
// then takes is not a fast allocation, so it is taken off that count in advance.
func (c *Context) refill() bool {
	p := c.pool
	if c.closed || p.dying.Load() {
		return false
	}
	want := CacheRefill
	if c.budget != nil {
		c.leased = c.budget.lease(c.leased, CacheRefill)
		want = max(1, int(c.leased))
	}
	if c.n = c.recycled(c.cache[:want]); c.n > 0 {
		c.own.fast--
		return true
	}
	c.own.empty++
	if c.n = p.fresh(c.cache[:want]); c.n == 0 {
		return false
	}
	c.hold.Store(c.hold.Load() + uint32(c.n))
	if p.order > 0 {
		c.own.slowHighOrder++
	} else {
		c.own.slow++
	}
	c.own.fast--
	return true
}

// recycled takes pages that were put back.
func (c *Context) recycled(dst []pagemem.PageID) (n int) {
	p := c.pool
	if c.owner == p.owner && c != &p.ctx {
		// On the owner's worker: what it recycled directly need not go through the ring.
		if n = min(p.ctx.n, len(dst)); n > 0 {
			p.ctx.n -= n
			copy(dst, p.ctx.cache[p.ctx.n:p.ctx.n+n])
			c.own.borrowed++
			return n
		}
	}
	if n = p.ring.consume(dst); n > 0 {
		c.own.refill++
	}
	return n
}

// fresh takes pages from the arena into the pool; which context holds them is the caller's to count.
func (p *Pool) fresh(dst []pagemem.PageID) (n int) {
	switch {
	case p.order > 0 || p.refill == RefillSingle:
		if id, ok := p.arena.Alloc(p.order, pagemem.NoReserve); ok {
			dst[0], n = id, 1
		}
	case p.refill == RefillList:
		id, got := p.arena.AllocList(len(dst))
		for ; n < got; n++ {
			dst[n] = id
			id = p.arena.ListNext(id)
		}
	default:
		n = p.arena.AllocBulk(dst)
	}
	if n == 0 && p.useReserve && p.order == 0 {
		if id, ok := p.arena.Alloc(0, pagemem.AllowReserve); ok {
			dst[0], n = id, 1
		}
	}
	for _, id := range dst[:n] {
		p.adopt(id)
	}
	return n
}

func (p *Pool) adopt(id pagemem.PageID) {
	p.arena.SetReleaser(id, p.id)
	if pagemem.Debug {
		p.markIdle(id, true)
	}
	if p.init != nil {
		p.init(p.arena.Addr(id), int(p.size))
	}
}

// fragState is the page that AllocFrag splits.
type fragState struct {
	page  pagemem.PageID
	valid bool
	off   uint32
	users int64
}

// AllocFrag returns got >= size bytes at offset off of a page, with one fragment
// reference. A size above half a page gets the whole page. Otherwise sizes are
// rounded up to cache lines and share pages, and what no further fragment of
// this size could use is part of the last one, so got is the true size.
// ok is false for size 0, for more than a page, and when the arena has no page.
func (c *Context) AllocFrag(size uint32) (id pagemem.PageID, off uint32, got uint32, ok bool) {
	page := c.pool.size
	if size-1 >= page {
		return 0, 0, 0, false
	}
	size = (size + fragAlign - 1) &^ (fragAlign - 1)
	if size > page/2 {
		id, ok = c.Alloc()
		return id, 0, page, ok
	}
	f := &c.frag
	if f.valid && f.off+size > page {
		c.endFrag()
	}
	if !f.valid {
		if id, ok = c.Alloc(); !ok {
			return 0, 0, 0, false
		}
		c.beginFrag(id)
	}
	off = f.off
	f.users++
	f.off += size
	if f.off+size > page {
		size = page - off
		f.off = page
	}
	return f.page, off, size, true
}

func (c *Context) beginFrag(id pagemem.PageID) {
	c.pool.arena.Frags(id).Add(biasMax - 1)
	c.frag = fragState{page: id, valid: true}
}

// endFrag leaves the used-up page to its users. Without any left the page is
// used again at once (page_pool_drain_frag).
func (c *Context) endFrag() {
	f := c.frag
	c.frag = fragState{}
	if c.usedUp(f.page, biasMax-f.users) {
		c.beginFrag(f.page)
	}
}

// endFragForGood is endFrag without another use.
func (c *Context) endFragForGood() {
	if f := c.frag; f.valid {
		c.frag = fragState{}
		if left := c.pool.arena.Frags(f.page).Drop(biasMax - f.users); left == 0 {
			c.pool.giveUp(f.page)
		}
	}
}

// usedUp drops the references that a context kept of a page that it split. It returns true if the page may serve
// again: then it has one reference, as if it had been put and allocated.
func (c *Context) usedUp(id pagemem.PageID, kept int64) (again bool) {
	p := c.pool
	if left := p.arena.Frags(id).Drop(kept); left != 0 {
		p.checkLeft(left, id)
		return false
	}
	if !p.recyclable(id) {
		p.disown(id)
		return false
	}
	c.own.cached++
	c.own.fast++
	return true
}
