package pool

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/vhostd/vhostd/pagemem"
)

func newContext(t testing.TB, p *Pool, owner pagemem.OwnerID, b *Budget) *Context {
	t.Helper()
	c, err := p.NewContext(owner, b)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func mustTake(t testing.TB, c *Context) pagemem.PageID {
	t.Helper()
	id, ok := c.Alloc()
	if !ok {
		t.Fatal("no page")
	}
	return id
}

// TestContextsHoldIsSummed: two goroutines allocate from one pool and a third puts. A shared hold counter would lose
// increments here (the RFC's hold_cnt++ under several contexts); the sum of private ones is exact.
func TestContextsHoldIsSummed(t *testing.T) {
	const rounds = 3000
	a := newArena(t, 4096, 0)
	p := newPool(t, Config{Arena: a, RingSize: 64})
	back := make(chan pagemem.PageID, 64)
	var allocators sync.WaitGroup
	for i := range 2 {
		c := newContext(t, p, pagemem.OwnerID(10+i), nil)
		allocators.Go(func() {
			for range rounds {
				id, ok := c.Alloc()
				if !ok {
					t.Error("no page")
					return
				}
				back <- id
			}
			c.Publish()
		})
	}
	go func() { allocators.Wait(); close(back) }()
	for id := range back {
		a.Release(id, 1, other)
	}
	s := p.Stats()
	if got := s.Fast + s.Refill + s.Slow; got != 2*rounds {
		t.Errorf("%d allocations counted, want %d: %+v", got, 2*rounds, s)
	}
	if int(s.InFlight) != a.InUse() {
		t.Errorf("%d in flight, %d in use", s.InFlight, a.InUse())
	}
}

// TestContextOnTheOwnersWorker takes what the owner recycled directly, without the ring.
func TestContextOnTheOwnersWorker(t *testing.T) {
	a := newArena(t, 256, 0)
	p := newPool(t, Config{Arena: a})
	near, far := newContext(t, p, me, nil), newContext(t, p, other, nil)
	ids := make([]pagemem.PageID, 10)
	for i := range ids {
		ids[i] = mustTake(t, near)
	}
	rest := near.Resting()
	for range rest {
		ids = append(ids, mustTake(t, near))
	}
	for _, id := range ids {
		a.Release(id, 1, me) // the owner's cache has them now
	}
	if id := mustTake(t, near); id != ids[len(ids)-1] {
		t.Errorf("got page %d, want %d, the last that came back", id, ids[len(ids)-1])
	} else {
		a.Release(id, 1, other)
	}
	if id := mustTake(t, far); !slices.Contains(ids, id) {
		t.Errorf("the other worker got page %d, none of those in the ring", id)
	} else {
		a.Release(id, 1, other)
	}
	near.Publish()
	far.Publish()
	p.Publish()
	if s := p.Stats(); s.Borrowed != 1 || s.Refill != 1 || s.Slow != 1 || s.InFlight != CacheRefill {
		t.Errorf("%+v", s)
	}
}

// TestContextKeepsThePool: a destroyed pool gives nothing, and is gone when its last context is closed, not earlier.
func TestContextKeepsThePool(t *testing.T) {
	a := newArena(t, 256, 0)
	p := newPool(t, Config{Arena: a})
	c, idle := newContext(t, p, other, nil), newContext(t, p, 3, nil)
	id := mustTake(t, c)
	frag, _, _, _ := c.AllocFrag(300)
	p.Destroy()
	if _, err := p.NewContext(me, nil); !errors.Is(err, ErrDestroyed) {
		t.Errorf("context of a destroyed pool: %v", err)
	}
	if _, ok := idle.Alloc(); ok {
		t.Error("a destroyed pool gave a page to an empty context")
	}
	a.Release(id, 1, other)
	a.Release(frag, 1, me)
	if isDone(p) {
		t.Error("the pool is gone with two contexts open")
	}
	c.Close()
	c.Close()
	if isDone(p) {
		t.Error("the pool is gone with a context open")
	}
	idle.Close()
	waitDone(t, p)
	if _, ok := c.Alloc(); ok || a.InUse() != 0 {
		t.Errorf("a closed context gave a page, or %d in use", a.InUse())
	}
}

// TestRefillForms: all forms fill the cache with the same pages in the end; what they count differs.
func TestRefillForms(t *testing.T) {
	for _, c := range []struct {
		cfg  Config
		want Stats // after 128 pages
	}{
		{Config{Refill: RefillArray}, Stats{Fast: 126, Slow: 2, Empty: 2, InFlight: 128}},
		{Config{Refill: RefillList}, Stats{Fast: 126, Slow: 2, Empty: 2, InFlight: 128}},
		{Config{Refill: RefillSingle}, Stats{Slow: 128, Empty: 128, InFlight: 128}},
		{Config{Order: pagemem.ChunkOrder}, Stats{SlowHighOrder: 128, Empty: 128, InFlight: 128}},
	} {
		c.cfg.Arena = newArena(t, 128*pagemem.ChunkPages, 0)
		p := newPool(t, c.cfg)
		seen := map[pagemem.PageID]bool{}
		for range 128 {
			id := mustAlloc(t, p)
			if seen[id] || c.cfg.Arena.Order(id) != c.cfg.Order {
				t.Fatalf("%v: page %d of order %d, seen before: %v", c.cfg.Refill, id, c.cfg.Arena.Order(id), seen[id])
			}
			seen[id] = true
		}
		if s := stats(p); s != c.want {
			t.Errorf("%v, order %d: %+v, want %+v", c.cfg.Refill, c.cfg.Order, s, c.want)
		}
		for id := range seen {
			p.Put(id, 1, me)
		}
	}
	for want, cfg := range map[string]Config{"order 1": {Order: 1}, "refill 3": {Refill: 3}} {
		cfg.Arena, cfg.Owner = newArena(t, 8, 0), me
		if _, err := New(cfg); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: error %v, want %q in it", cfg, err, want)
		}
	}
}

// TestChunksAreSplit: fragments of a pool of compound pages share 32 KiB.
func TestChunksAreSplit(t *testing.T) {
	a := newArena(t, 64, 0)
	p := newPool(t, Config{Arena: a, Order: pagemem.ChunkOrder})
	var ids []pagemem.PageID
	for i := range 16 {
		id, off, got, ok := p.AllocFrag(1984)
		if !ok || off != uint32(1984*i) || i > 0 && id != ids[0] {
			t.Fatalf("fragment %d: page %d, %d bytes at %d, %v", i, id, got, off, ok)
		}
		if i == 15 && off+got != pagemem.ChunkSize {
			t.Errorf("the last one has %d bytes at %d", got, off)
		}
		ids = append(ids, id)
	}
	for _, id := range ids {
		a.Release(id, 1, other)
	}
}

// TestBudget: what rests in private caches is bounded, and nobody is refused a page for it.
func TestBudget(t *testing.T) {
	a := newArena(t, 4096, 0)
	p := newPool(t, Config{Arena: a})
	b := NewBudget(100)
	var contexts []*Context
	for range 10 {
		contexts = append(contexts, newContext(t, p, other, b))
	}
	resting := func() (n int) {
		for _, c := range contexts {
			n += c.Resting()
		}
		return n
	}
	var out []pagemem.PageID
	for i, c := range contexts {
		out = append(out, mustTake(t, c))
		if b.Leased() > 100 || resting() > b.Leased() {
			t.Fatalf("after context %d: %d leased, %d resting of 100", i, b.Leased(), resting())
		}
	}
	if b.Leased() != 100 || contexts[0].Resting() != 63 || contexts[1].Resting() != 35 || contexts[2].Resting() != 0 {
		t.Errorf("%d leased, %d, %d and %d resting", b.Leased(), contexts[0].Resting(), contexts[1].Resting(), contexts[2].Resting())
	}
	contexts[0].Trim()
	if b.Leased() != 36 {
		t.Errorf("%d leased after the first was trimmed", b.Leased())
	}
	out = append(out, mustTake(t, contexts[2]))
	if contexts[2].leased != 64 || contexts[2].Resting() != 63 {
		t.Errorf("the third has leased %d of what is free, %d rest", contexts[2].leased, contexts[2].Resting())
	}
	p.PutBulk(out, other)
	for _, c := range contexts {
		c.Close()
	}
	if b.Leased() != 0 || b.contexts.Load() != 0 {
		t.Errorf("%d leased by %d contexts after all are closed", b.Leased(), b.contexts.Load())
	}
	wide := NewBudget(1 << 20)
	c := newContext(t, p, other, wide)
	p.Put(mustTake(t, c), 1, other)
	if wide.Leased() != CacheRefill {
		t.Errorf("one context leased %d pages", wide.Leased())
	}
}

// TestBudgetShared takes from one budget in several goroutines.
func TestBudgetShared(t *testing.T) {
	b := NewBudget(150)
	b.contexts.Add(4)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			mine := int64(0)
			for i := range 20000 {
				mine = b.lease(mine, int64(i%65))
				if got := b.Leased(); got > 150 {
					t.Errorf("%d leased of 150", got)
				}
			}
			b.lease(mine, 0)
		})
	}
	wg.Wait()
	if b.Leased() != 0 {
		t.Errorf("%d leased at the end", b.Leased())
	}
}

// TestWorkers: a worker's pool is found as long as it is registered, and a worker without one is nothing special.
func TestWorkers(t *testing.T) {
	a := newArena(t, 64, 0)
	var w Workers
	if w.Of(me) != nil {
		t.Error("an empty directory has a pool")
	}
	p, q := newPool(t, Config{Arena: a}), newPool(t, Config{Arena: a})
	far := newPool(t, Config{Arena: a, Owner: other})
	for range 2 {
		if err := w.Register(p); err != nil {
			t.Error(err)
		}
	}
	if err := w.Register(far); err != nil {
		t.Error(err)
	}
	if err := w.Register(q); err == nil || !strings.Contains(err.Error(), "worker 1 has a pool already") {
		t.Errorf("second pool of a worker: %v", err)
	}
	w.Unregister(q) // not there: does nothing
	if w.Of(me) != p || w.Of(other) != far || w.Of(77) != nil {
		t.Error("the directory is wrong")
	}
	w.Unregister(p)
	if w.Of(me) != nil || w.Of(other) != far {
		t.Error("the directory is wrong after a pool left")
	}
}
