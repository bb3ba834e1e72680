package pool

import "github.com/vhostd/vhostd/pagemem"

// Put drops n fragment references on a page. The last one recycles the page:
// directly if by is the owner, which must then be the calling context, else
// through the ring. Anybody may call it.
func (p *Pool) Put(id pagemem.PageID, n int, by pagemem.OwnerID) { p.ReleasePage(id, n, by) }

var _ pagemem.BulkReleaser = (*Pool)(nil)

// ReleasePage is Put, for pagemem.Arena.Release. The owner's way for a page that nobody else holds is free of calls.
func (p *Pool) ReleasePage(id pagemem.PageID, n int, by pagemem.OwnerID) {
	alone := n == 1 && !pagemem.Debug && p.arena.Unshared(id)
	if c := &p.ctx; alone && by == p.owner && c.n < CacheSize && !p.destroyed {
		c.cache[c.n] = id
		c.n++
		c.own.cached++
		return
	}
	if alone && by != p.owner || p.drop(id, int64(n), by) {
		one := [1]pagemem.PageID{id}
		p.pushRing(one[:])
	}
}

// PutBulk drops one fragment reference on each of the pages, which all belong to
// this pool, and takes the ring once for up to BulkSize pages. It clobbers ids.
// Anybody may call it.
func (p *Pool) PutBulk(ids []pagemem.PageID, by pagemem.OwnerID) {
	if by == p.owner && !p.destroyed && !pagemem.Debug {
		ids = p.recycleRun(ids)
	}
	last := 0
	for _, id := range ids {
		if p.drop(id, 1, by) {
			ids[last] = id
			last++
		}
	}
	for ids = ids[:last]; len(ids) > 0; {
		n := min(len(ids), BulkSize)
		p.pushRing(ids[:n])
		ids = ids[n:]
	}
}

// recycleRun takes the pages at the start of ids into the cache, as far as the dropped
// reference is the only one on them, and returns the others. It is for the owner.
func (p *Pool) recycleRun(ids []pagemem.PageID) []pagemem.PageID {
	c, n := &p.ctx, 0
	for n < len(ids) && c.n < CacheSize && p.arena.Unshared(ids[n]) {
		c.cache[c.n] = ids[n]
		c.n++
		n++
	}
	c.own.cached += uint64(n)
	return ids[n:]
}

// drop drops n fragment references and returns true if the page is now for the
// ring.
func (p *Pool) drop(id pagemem.PageID, n int64, by pagemem.OwnerID) (toRing bool) {
	if left := p.arena.Frags(id).Drop(n); left != 0 {
		p.checkLeft(left, id)
		return false
	}
	if !p.recyclable(id) {
		p.disown(id)
		return false
	}
	if pagemem.Debug {
		p.markIdle(id, true)
	}
	return by != p.owner || p.destroyed || !p.pushCache(id)
}

// checkLeft judges what a drop left behind: others' fragments, or a bug.
func (p *Pool) checkLeft(left int64, id pagemem.PageID) {
	if left < 0 {
		p.arena.Misuse("put more fragments than there are on page", uint32(id))
	}
}

// recyclable says whether the pool is a page's only holder and may keep it.
func (p *Pool) recyclable(id pagemem.PageID) bool {
	return p.arena.RefCount(id) == 1 && !p.arena.IsReserve(id)
}

// disown lets a page go that is not recyclable.
func (p *Pool) disown(id pagemem.PageID) {
	p.shared.Add(1)
	p.giveUp(id)
}

// pushCache is for the owner.
func (p *Pool) pushCache(id pagemem.PageID) bool {
	c := &p.ctx
	if c.n == CacheSize {
		c.own.cacheFull++
		return false
	}
	c.cache[c.n] = id
	c.n++
	c.own.cached++
	return true
}

// pushRing puts pages into the ring, those that do not fit back into the arena.
func (p *Pool) pushRing(ids []pagemem.PageID) {
	n := 0
	if !p.dying.Load() {
		if n = p.ring.push(ids); n < len(ids) {
			p.ringFull.Add(uint64(len(ids) - n))
		}
	}
	for _, id := range ids[n:] {
		p.giveUp(id)
	}
}

// giveUp lets a page go: it stays with those who share it, or returns to the arena.
func (p *Pool) giveUp(id pagemem.PageID) {
	if pagemem.Debug {
		p.arena.SetIdle(id, false)
	}
	p.arena.SetReleaser(id, 0)
	p.arena.Unref(id, 1)
	// Counted last, so that nothing in flight means that the arena has all pages back.
	p.release.Add(1)
	p.alarm()
}

// giveUpAll is giveUp for pages at rest, which nobody shares. It clobbers nothing.
func (p *Pool) giveUpAll(ids []pagemem.PageID) {
	for _, id := range ids {
		if pagemem.Debug {
			p.arena.SetIdle(id, false)
		}
		if p.arena.RefCount(id) != 1 {
			p.arena.Misuse("somebody holds a page that rests in a pool:", uint32(id))
		}
	}
	p.arena.FreeBulk(ids)
	p.release.Add(uint32(len(ids)))
	p.alarm()
}

// alarm tells the reaper that something came home.
func (p *Pool) alarm() {
	if p.dying.Load() {
		select {
		case p.wake <- struct{}{}:
		default:
		}
	}
}

func (p *Pool) markIdle(id pagemem.PageID, idle bool) {
	if !p.arena.SetIdle(id, idle) {
		p.arena.Misuse("recycled twice, or not by its pool: page", uint32(id))
	}
}
