package pagemem

import (
	"sync"
	"testing"
)

type recorder struct {
	page PageID
	n    int
	by   OwnerID
}

func (r *recorder) ReleasePage(p PageID, n int, by OwnerID) { *r = recorder{p, n, by} }

func TestReleaseFindsThePool(t *testing.T) {
	a := newArena(t, 1, 0)
	var first, second recorder
	a.Register(&first)
	id := a.Register(&second)
	p, _ := a.Alloc(0, NoReserve)
	a.SetReleaser(p, id)
	a.Retain(p, 2)
	if got := a.Frags(p).Load(); got != 3 {
		t.Errorf("%d fragments", got)
	}
	a.Release(p, 3, 77)
	if (second != recorder{p, 3, 77}) || (first != recorder{}) {
		t.Errorf("released to %+v and %+v", first, second)
	}
	if left := a.Frags(p).Drop(3); left != 0 {
		t.Errorf("%d fragments left", left)
	}
	a.Unregister(id)
	misuse(t, a, func() { a.Release(p, 1, 0) })
	misuse(t, a, func() { a.Unregister(id) })
	a.SetReleaser(p, 0)
	a.Release(p, 1, 0)
	if a.InUse() != 0 {
		t.Error("page not freed")
	}
}

func TestRegistryFull(t *testing.T) {
	a := newArena(t, 1, 0)
	r := &recorder{}
	for want := 1; want < 1<<16; want++ {
		if got := a.Register(r); int(got) != want {
			t.Fatalf("id %d, want %d", got, want)
		}
	}
	if got := a.Register(r); got != 0 {
		t.Fatalf("id %d from a full registry", got)
	}
	a.Unregister(4711)
	if got := a.Register(r); got != 4711 {
		t.Fatalf("id %d, only 4711 is free", got)
	}
}

// TestRegistryConcurrent looks ids up while others come and go.
func TestRegistryConcurrent(t *testing.T) {
	a := newArena(t, 1, 0)
	p, _ := a.Alloc(0, NoReserve)
	r := &counter{}
	a.SetReleaser(p, a.Register(r))
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for range 300 {
				var ids []uint16
				for range 20 {
					ids = append(ids, a.Register(&recorder{}))
				}
				for _, id := range ids {
					a.Unregister(id)
				}
				a.Release(p, 1, 0)
			}
		})
	}
	wg.Wait()
	if r.n != 900 {
		t.Errorf("%d releases arrived of 900", r.n)
	}
	a.SetReleaser(p, 0)
	a.Unref(p, 1)
}

type counter struct {
	mu sync.Mutex
	n  int
}

func (c *counter) ReleasePage(PageID, int, OwnerID) {
	c.mu.Lock()
	c.n++
	c.mu.Unlock()
}
