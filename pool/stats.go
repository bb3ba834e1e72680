package pool

import "sync/atomic"

// Stats counts what the pool did, over all contexts, with the names of the kernel's
// page_pool_stats. There is no "waive": an arena has no NUMA nodes.
type Stats struct {
	Fast          uint64 // allocations from the cache
	Slow          uint64 // allocations that went to the arena, one for each bulk
	SlowHighOrder uint64 // the same for pages of order 3, one for each
	Empty         uint64 // the ring was empty when the cache needed pages, or another context was at it
	Refill        uint64 // the cache was refilled from the ring
	Borrowed      uint64 // a private context was refilled from the cache of the pool's owner

	Cached         uint64 // pages recycled into the cache
	CacheFull      uint64 // the cache was full, the page went to the ring
	Ring           uint64 // pages recycled through the ring
	RingFull       uint64 // the ring was full, the page went to the arena
	ReleasedShared uint64 // pages given up because others hold them, or they are from the reserve (released_refcnt)
	Trimmed        uint64 // pages that an idle or closed context gave back

	InFlight int32
}

// Add adds other's counters and pages.
func (s *Stats) Add(other Stats) {
	s.Fast += other.Fast
	s.Slow += other.Slow
	s.SlowHighOrder += other.SlowHighOrder
	s.Empty += other.Empty
	s.Refill += other.Refill
	s.Borrowed += other.Borrowed
	s.Cached += other.Cached
	s.CacheFull += other.CacheFull
	s.Ring += other.Ring
	s.RingFull += other.RingFull
	s.ReleasedShared += other.ReleasedShared
	s.Trimmed += other.Trimmed
	s.InFlight += other.InFlight
}

// ownStats is counted by a context's goroutine without atomics.
type ownStats struct {
	fast, slow, slowHighOrder, empty, refill, borrowed, cached, cacheFull, trimmed uint64
}

// published is what others see of ownStats.
type published struct {
	fast, slow, slowHighOrder, empty, refill, borrowed, cached, cacheFull, trimmed atomic.Uint64
}

// add adds what a context published.
func (s *ownStats) add(p *published) {
	s.fast += p.fast.Load()
	s.slow += p.slow.Load()
	s.slowHighOrder += p.slowHighOrder.Load()
	s.empty += p.empty.Load()
	s.refill += p.refill.Load()
	s.borrowed += p.borrowed.Load()
	s.cached += p.cached.Load()
	s.cacheFull += p.cacheFull.Load()
	s.trimmed += p.trimmed.Load()
}

// Publish is Context.Publish for the owner.
func (p *Pool) Publish() { p.ctx.Publish() }

// Publish makes the context's counters visible to Stats. Its goroutine calls it once a
// batch; counters that did not change cost nothing.
func (c *Context) Publish() {
	now, last, out := &c.own, &c.shown, &c.snapshot
	publish(&out.fast, now.fast, &last.fast)
	publish(&out.slow, now.slow, &last.slow)
	publish(&out.slowHighOrder, now.slowHighOrder, &last.slowHighOrder)
	publish(&out.empty, now.empty, &last.empty)
	publish(&out.refill, now.refill, &last.refill)
	publish(&out.borrowed, now.borrowed, &last.borrowed)
	publish(&out.cached, now.cached, &last.cached)
	publish(&out.cacheFull, now.cacheFull, &last.cacheFull)
	publish(&out.trimmed, now.trimmed, &last.trimmed)
}

func publish(out *atomic.Uint64, now uint64, last *uint64) {
	if now != *last {
		*last = now
		out.Store(now)
	}
}

// Stats returns the counters, those of each context as of its last Publish. Anybody may
// call it.
func (p *Pool) Stats() Stats {
	inFlight := p.InFlight()
	p.mu.Lock()
	defer p.mu.Unlock()
	sum := p.retired
	sum.add(&p.ctx.snapshot)
	for _, c := range p.contexts {
		sum.add(&c.snapshot)
	}
	return Stats{
		Fast:           sum.fast,
		Slow:           sum.slow,
		SlowHighOrder:  sum.slowHighOrder,
		Empty:          sum.empty,
		Refill:         sum.refill,
		Borrowed:       sum.borrowed,
		Cached:         sum.cached,
		CacheFull:      sum.cacheFull,
		Ring:           p.ring.pushed(),
		RingFull:       p.ringFull.Load(),
		ReleasedShared: p.shared.Load(),
		Trimmed:        sum.trimmed,
		InFlight:       inFlight,
	}
}
