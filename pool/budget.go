package pool

import "sync/atomic"

// Budget bounds the pages that rest in all private contexts which share it: at most CacheRefill for each, and not more than
// its limit together. With thousands of senders these caches would otherwise be most of the memory, which was the objection to
// pfrag_pool. Who gets nothing allocates page by page. Safe for concurrent use.
type Budget struct {
	limit    int64
	contexts atomic.Int64
	leased   atomic.Int64
}

// NewBudget makes a budget of so many pages.
func NewBudget(pages int) *Budget { return &Budget{limit: int64(pages)} }

// Leased returns the pages that contexts may have resting now; fewer do, because a context that gave pages out keeps its lease
// until it needs more.
func (b *Budget) Leased() int { return int(b.leased.Load()) }

func (b *Budget) ceiling() int64 { return min(b.limit, CacheRefill*b.contexts.Load()) }

// lease exchanges a context's lease for one of up to want pages and returns what it got.
func (b *Budget) lease(old, want int64) (granted int64) {
	for {
		used := b.leased.Load()
		granted = max(0, min(want, b.ceiling()-(used-old)))
		if b.leased.CompareAndSwap(used, used-old+granted) {
			return granted
		}
	}
}
