package pool

import (
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/vhostd/vhostd/pagemem"
)

// TestStatisticsAreExact: every counter follows from the number of rounds, for each of the three ways that a page can take.
// n is a multiple of what each way moves at once.
func TestStatisticsAreExact(t *testing.T) {
	const n = 64 * 1000
	for name, way := range map[string]struct {
		run  func(a *pagemem.Arena, p *Pool)
		want Stats
	}{
		"fast": {func(a *pagemem.Arena, p *Pool) {
			for range n {
				id, _ := p.Alloc()
				p.Put(id, 1, me)
			}
		}, Stats{Fast: n - 1, Slow: 1, Empty: 1, Cached: n, InFlight: 64}},
		"ring": {func(a *pagemem.Arena, p *Pool) {
			for range n {
				id, _ := p.Alloc()
				p.Put(id, 1, other)
			}
		}, Stats{Fast: n - 1000, Slow: 1, Empty: 1, Refill: 999, Ring: n, InFlight: 64}},
		"ring in bulk": {func(a *pagemem.Arena, p *Pool) {
			var ids [BulkSize]pagemem.PageID
			for range n / BulkSize {
				p.AllocN(ids[:])
				p.PutBulk(ids[:], other)
			}
		}, Stats{Fast: n - 1000, Slow: 1, Empty: 1, Refill: 999, Ring: n, InFlight: 64}},
		"slow": {func(a *pagemem.Arena, p *Pool) {
			for range n {
				id, _ := p.Alloc()
				a.Ref(id) // somebody else holds it, so that it cannot be recycled
				p.Put(id, 1, me)
				a.Unref(id, 1)
			}
		}, Stats{Fast: n - 1000, Slow: 1000, Empty: 1000, ReleasedShared: n}},
		"ring full": {func(a *pagemem.Arena, p *Pool) {
			var ids [128]pagemem.PageID
			for range n / 128 {
				p.AllocN(ids[:])
				for _, id := range ids {
					p.Put(id, 1, other)
				}
			}
		}, Stats{Fast: n - 1000, Slow: 501, Empty: 501, Refill: 499, Ring: 500 * 64, RingFull: 500 * 64, InFlight: 64}},
		"cache full": {func(a *pagemem.Arena, p *Pool) {
			var ids [192]pagemem.PageID
			for range n / 192 {
				p.AllocN(ids[:])
				for _, id := range ids {
					p.Put(id, 1, me)
				}
			}
		}, Stats{Fast: 333*192 - 335, Slow: 3, Empty: 3, Refill: 332, Cached: 333 * 128, CacheFull: 333 * 64, Ring: 333 * 64, InFlight: 192}},
	} {
		t.Run(name, func(t *testing.T) {
			a := newArena(t, 512, 0)
			p := newPool(t, Config{Arena: a, RingSize: 64})
			way.run(a, p)
			if s := stats(p); s != way.want {
				t.Errorf("%+v\nwant %+v", s, way.want)
			}
		})
	}
}

// crossElements is how many pages TestCrossWorkers moves: 10^8 in the long form, a hundredth with the race detector.
func crossElements() int {
	n := 1_000_000
	if os.Getenv("VHOSTD_LONG") == "1" {
		n = 100_000_000
		if pagemem.Debug {
			n = 1_000_000
		}
	} else if pagemem.Debug {
		n = 200_000
	}
	return n
}

// TestCrossWorkers: one worker allocates, two others return what they are given, singly or in bulk. Nothing is lost or comes
// twice, whatever the ring had room for, and at the end nothing is in flight.
func TestCrossWorkers(t *testing.T) {
	for name, bulk := range map[string]bool{"single": false, "bulk": true} {
		t.Run(name, func(t *testing.T) { crossWorkers(t, crossElements(), bulk) })
	}
}

func crossWorkers(t *testing.T, n int, bulk bool) {
	a := newArena(t, 4096, 0)
	p := newPool(t, Config{Arena: a, RingSize: 512})
	// A page's mark says who has it: 0 the pool, 1 a returner.
	marks := make([]atomic.Int32, 4096)
	lanes := [2]chan []pagemem.PageID{make(chan []pagemem.PageID, 8), make(chan []pagemem.PageID, 8)}
	spare := make(chan []pagemem.PageID, 32)
	var returned atomic.Int64
	var returners sync.WaitGroup
	for i, lane := range lanes {
		by := pagemem.OwnerID(10 + i)
		returners.Go(func() {
			for ids := range lane {
				for _, id := range ids {
					if !marks[id].CompareAndSwap(1, 0) {
						t.Errorf("page %d came twice", id)
					}
				}
				returned.Add(int64(len(ids)))
				giveBack(a, p, ids, by, bulk)
				spare <- ids[:0]
			}
		})
	}
	for range cap(spare) - 4 {
		spare <- make([]pagemem.PageID, 0, BulkSize)
	}
	for sent := 0; sent < n; {
		ids := <-spare
		ids = ids[:p.AllocN(ids[:min(BulkSize, n-sent)])]
		for _, id := range ids {
			if !marks[id].CompareAndSwap(0, 1) {
				t.Errorf("page %d was handed out twice", id)
			}
		}
		if sent += len(ids); len(ids) == 0 {
			runtime.Gosched()
		}
		lanes[(sent/BulkSize)%2] <- ids
	}
	for _, lane := range lanes {
		close(lane)
	}
	returners.Wait()
	s := stats(p)
	if got := returned.Load(); got != int64(n) || s.Ring+s.RingFull != uint64(n) {
		t.Errorf("%d of %d came back, %d through the ring, %d did not fit", got, n, s.Ring, s.RingFull)
	}
	if got := s.Fast + s.Slow + s.Refill; got != uint64(n) {
		t.Errorf("%d allocations counted, want %d: %+v", got, n, s)
	}
	if int(s.InFlight) != a.InUse() {
		t.Errorf("%d in flight, %d in use", s.InFlight, a.InUse())
	}
	p.Destroy()
	waitDone(t, p)
	if p.InFlight() != 0 || a.InUse() != 0 || a.Stats().Misuse != 0 {
		t.Errorf("%d in flight, %d in use, %d misuses at the end", p.InFlight(), a.InUse(), a.Stats().Misuse)
	}
}

func giveBack(a *pagemem.Arena, p *Pool, ids []pagemem.PageID, by pagemem.OwnerID, bulk bool) {
	if bulk {
		p.PutBulk(ids, by)
		return
	}
	for _, id := range ids {
		a.Release(id, 1, by)
	}
}

// TestForgottenPutShows: one put too few out of many is seen in the pool's accounts, the arena's, and by who waits for the end.
func TestForgottenPutShows(t *testing.T) {
	a := newArena(t, 512, 0)
	p := newPool(t, Config{Arena: a})
	c := newContext(t, p, other, nil)
	var forgotten pagemem.PageID
	for i := range 1000 {
		id := mustTake(t, c)
		if i == 500 {
			forgotten = id
			continue
		}
		a.Release(id, 1, pagemem.OwnerID(1+i%2))
	}
	c.Close()
	p.Destroy()
	if isDone(p) || p.InFlight() != 1 || a.InUse() != 1 || a.Close() == nil {
		t.Errorf("done %v, %d in flight, %d in use", isDone(p), p.InFlight(), a.InUse())
	}
	a.Release(forgotten, 1, other)
	waitDone(t, p)
}
