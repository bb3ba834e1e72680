package pool

import (
	"time"

	"github.com/vhostd/vhostd/pagemem"
)

// Destroy gives all pages at rest back and ends the pool once those with packets
// have come home too and all contexts are closed. It does not wait: if pages are out, a goroutine does,
// however long it takes, and warns each minute. Puts go on working meanwhile;
// allocating does not. Owner only; a second call does nothing.
func (p *Pool) Destroy() {
	if p.destroyed {
		return
	}
	p.destroyed = true
	p.ctx.closed = true
	p.ctx.endFragForGood()
	p.ctx.Trim()
	p.Publish()
	// Under the lock, so that no context appears after it.
	p.mu.Lock()
	p.dying.Store(true)
	p.mu.Unlock()
	if !p.finished() {
		go p.reap()
	}
}

// Done is closed when the pool is destroyed and every page has come home.
func (p *Pool) Done() <-chan struct{} { return p.done }

// reap waits for the pages that are still out. Puts wake it; the ticker finds
// pages whose producer saw the pool alive but was overtaken by Destroy.
func (p *Pool) reap() {
	tick := time.NewTicker(p.reapEvery)
	defer tick.Stop()
	start := time.Now()
	warned := start
	for {
		select {
		case <-p.wake:
		case <-tick.C:
		}
		if p.finished() {
			return
		}
		if now := time.Now(); now.Sub(warned) >= p.warnEvery {
			warned = now
			p.log.Warn("destroyed page pool waits for pages",
				"in_flight", p.InFlight(), "contexts", p.openContexts(), "seconds", int(now.Sub(start).Seconds()))
		}
	}
}

// finished empties the ring and, if nothing is in flight and no context is open, ends the pool.
func (p *Pool) finished() bool {
	var ids [BulkSize]pagemem.PageID
	for n := p.ring.consume(ids[:]); n > 0; n = p.ring.consume(ids[:]) {
		p.giveUpAll(ids[:n])
	}
	if p.openContexts() > 0 {
		return false
	}
	left := p.InFlight()
	if left > 0 {
		return false
	}
	if left < 0 {
		p.arena.Misuse("more pages left than entered pool", uint32(p.id))
	}
	p.arena.Unregister(p.id)
	close(p.done)
	return true
}

func (p *Pool) openContexts() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.contexts)
}
