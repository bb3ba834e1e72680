package pool

import (
	"testing"

	"github.com/vhostd/vhostd/pagemem"
	"pgregory.net/rapid"
)

// newFragPool makes a FragPool that follows worker "me" with pool p.
func newFragPool(t testing.TB, a *pagemem.Arena, p *Pool, owner pagemem.OwnerID) *FragPool {
	t.Helper()
	var w Workers
	if err := w.Register(p); err != nil {
		t.Fatal(err)
	}
	f := NewFragPool(a, owner, nil)
	if !f.Follow(&w, me) || f.Pool() != p {
		t.Fatal("the worker's pool was not found")
	}
	t.Cleanup(f.Flush)
	return f
}

func mustFrag(t testing.TB, f *FragPool, size, align uint32) pagemem.Frag {
	t.Helper()
	frag, ok := f.Alloc(size, align)
	if !ok {
		t.Fatal("no fragment")
	}
	return frag
}

// TestFragPoolRecycles: in steady state the sender lives on what the completing worker gives back.
func TestFragPoolRecycles(t *testing.T) {
	for _, owner := range []pagemem.OwnerID{me, other} {
		a := newArena(t, 512, 0)
		p := newPool(t, Config{Arena: a})
		f := newFragPool(t, a, p, owner)
		var out []pagemem.Frag
		for range 20000 {
			out = append(out, mustFrag(t, f, 1536, pagemem.Line))
			if len(out) == 64 {
				for _, frag := range out {
					a.Release(frag.Page, 1, me)
				}
				out = out[:0]
			}
		}
		for _, frag := range out {
			a.Release(frag.Page, 1, me)
		}
		f.Publish()
		p.Publish()
		s := p.Stats()
		if s.Slow > 4 || int(s.InFlight) != a.InUse() {
			t.Errorf("sender on worker %d: %+v, %d in use", owner, s, a.InUse())
		}
		if got := s.Fast + s.Slow + s.Refill + s.Borrowed; got != 10000 {
			t.Errorf("sender on worker %d: %d pages for 20000 fragments of 1536, want 10000: %+v", owner, got, s)
		}
	}
}

// TestFragPoolWithoutPool: a worker that recycles nothing is an ordinary one; the sender is told to use another allocator, and a
// pool that it has already stays (in the RFC a NAPI context that was not recyclable was no longer found at all).
func TestFragPoolWithoutPool(t *testing.T) {
	a := newArena(t, 64, 0)
	var w Workers
	f := NewFragPool(a, me, nil)
	if f.Follow(&w, me) || f.Pool() != nil {
		t.Error("found a pool where there is none")
	}
	if _, ok := f.Alloc(64, 64); ok {
		t.Error("a fragment without a pool")
	}
	if _, ok := f.Prepare(64, 64); ok {
		t.Error("prepared a fragment without a pool")
	}
	f.Trim()
	f.Publish()
	f.Flush()
	p := newPool(t, Config{Arena: a})
	if err := w.Register(p); err != nil {
		t.Fatal(err)
	}
	if !f.Follow(&w, me) || f.Follow(&w, me) || f.Follow(&w, other) || f.Pool() != p {
		t.Error("does not stay with its pool")
	}
	a.Release(mustFrag(t, f, 100, 64).Page, 1, other)
	f.Flush()
}

// TestFragPoolOutlivesRegistration: the pool goes away while a sender uses it (the RFC's napi->pp was used after its
// critical section). It exists until the sender lets go.
func TestFragPoolOutlivesRegistration(t *testing.T) {
	a := newArena(t, 256, 0)
	var w Workers
	p := newPool(t, Config{Arena: a})
	if err := w.Register(p); err != nil {
		t.Fatal(err)
	}
	f := NewFragPool(a, other, nil)
	f.Follow(&w, me)
	first := mustFrag(t, f, 2048, 64)
	w.Unregister(p)
	p.Destroy()
	second := mustFrag(t, f, 2048, 64) // the current page is still the sender's
	if second.Page != first.Page {
		t.Errorf("fragments on pages %d and %d", first.Page, second.Page)
	}
	out := []pagemem.Frag{first, second}
	for range 2 * CacheRefill { // and so is what rests with it
		frag, ok := f.Alloc(4096, 64)
		if !ok {
			break
		}
		out = append(out, frag)
	}
	if len(out) != 2+CacheRefill-1 {
		t.Errorf("%d fragments came from a destroyed pool, %d pages rested", len(out)-2, CacheRefill-1)
	}
	for _, frag := range out {
		a.Release(frag.Page, 1, me)
	}
	if isDone(p) {
		t.Error("the pool is gone under its sender")
	}
	f.Flush()
	waitDone(t, p)
	if f.Follow(&w, me) {
		t.Error("found a destroyed pool")
	}
	if a.InUse() != 0 {
		t.Errorf("%d pages in use", a.InUse())
	}
}

// TestFollowDestroyed: the directory may still know a pool that is being destroyed.
func TestFollowDestroyed(t *testing.T) {
	a := newArena(t, 64, 0)
	var w Workers
	p := newPool(t, Config{Arena: a})
	if err := w.Register(p); err != nil {
		t.Fatal(err)
	}
	p.Destroy()
	f := NewFragPool(a, other, nil)
	if f.Follow(&w, me) || f.Pool() != nil {
		t.Error("follows a destroyed pool")
	}
}

// TestFragPoolSwitches: a sender whose frames are completed elsewhere from now on flushes first; what is under way returns to the
// old pool.
func TestFragPoolSwitches(t *testing.T) {
	a := newArena(t, 256, 0)
	var w Workers
	here, there := newPool(t, Config{Arena: a}), newPool(t, Config{Arena: a, Owner: other})
	for _, p := range []*Pool{here, there} {
		if err := w.Register(p); err != nil {
			t.Fatal(err)
		}
	}
	f := NewFragPool(a, me, nil)
	defer f.Flush()
	f.Follow(&w, me)
	old := mustFrag(t, f, 1500, 64)
	if !f.Follow(&w, other) || f.Pool() != there {
		t.Fatal("does not follow")
	}
	if here.InFlight() != 1 {
		t.Errorf("%d pages of the old pool are out, want the one under way", here.InFlight())
	}
	fresh := mustFrag(t, f, 1500, 64)
	if fresh.Page == old.Page || there.InFlight() != CacheRefill {
		t.Errorf("%d pages of the new pool", there.InFlight())
	}
	a.Release(old.Page, 1, other) // by the new worker: through the ring
	a.Release(fresh.Page, 1, other)
	here.Publish()
	if s := here.Stats(); s.Ring != 1 {
		t.Errorf("the page under way did not return to its pool: %+v", s)
	}
}

// TestFragPoolCoalesces: a fragment of odd length can be continued at its very end, and the next one that stands alone shares no
// line with it. (Rounding each end up, as the RFC did, leaves a gap that nothing can be merged over.)
func TestFragPoolCoalesces(t *testing.T) {
	a := newArena(t, 256, 0)
	f := newFragPool(t, a, newPool(t, Config{Arena: a}), me)
	first, _ := f.Prepare(100, pagemem.Line)
	if got := f.Commit(first, 100, false); got != 100 {
		t.Fatalf("true size %d", got)
	}
	more, ok := f.Prepare(77, 1)
	if !ok || more.Page != first.Page || more.Off != first.Off+100 {
		t.Fatalf("%+v does not continue %+v", more, first)
	}
	if got := f.Commit(more, 77, true); got != 77 {
		t.Errorf("true size of the continuation %d", got)
	}
	alone, _ := f.Prepare(60, pagemem.Line)
	if got := f.Commit(alone, 60, false); alone.Off != 192 || got != 15+60 {
		t.Errorf("the next fragment is at %d with a true size of %d", alone.Off, got)
	}
	if refs := a.Frags(first.Page).Load() - int64(f.win.Refs); refs != 2 {
		t.Errorf("%d references are out for two fragments", refs)
	}
	a.Release(first.Page, 1, other)
	a.Release(alone.Page, 1, other)
}

// TestFragPoolRemainder: less than MinRest is not handed out, however little was asked for (the RFC offered any rest).
func TestFragPoolRemainder(t *testing.T) {
	a := newArena(t, 256, 0)
	f := newFragPool(t, a, newPool(t, Config{Arena: a}), me)
	big, _ := f.Prepare(1, 1)
	f.Commit(big, pagemem.PageSize-MinRest+1, false) // leaves one byte less than the minimum
	next, ok := f.Prepare(1, 1)
	if !ok || next.Page == big.Page || next.Size != pagemem.PageSize {
		t.Errorf("prepared %+v behind %+v", next, big)
	}
	f.Commit(next, pagemem.PageSize-MinRest, false)
	if rest, ok := f.Prepare(1, 1); !ok || rest.Page != next.Page || rest.Size != MinRest {
		t.Errorf("prepared %+v, want the last %d bytes", rest, MinRest)
	}
	a.Release(big.Page, 1, me)
	a.Release(next.Page, 1, me)
}

func TestFragPoolArguments(t *testing.T) {
	a := newArena(t, 64, 0)
	f := newFragPool(t, a, newPool(t, Config{Arena: a}), me)
	for _, c := range [][2]uint32{{0, 1}, {pagemem.PageSize + 1, 1}, {10, 3}, {10, 0}, {10, 2 * pagemem.PageSize}, {1 << 31, 1}} {
		if _, ok := f.Alloc(c[0], c[1]); ok {
			t.Errorf("%d bytes at %d accepted", c[0], c[1])
		}
		if _, ok := f.Prepare(c[0], c[1]); ok {
			t.Errorf("%d bytes at %d prepared", c[0], c[1])
		}
	}
}

// TestFragPoolDry: without memory nothing changes but that the used-up page is gone; later it goes on.
func TestFragPoolDry(t *testing.T) {
	a := newArena(t, 8, 0)
	p := newPool(t, Config{Arena: a})
	f := newFragPool(t, a, p, other)
	var out []pagemem.Frag
	for {
		frag, ok := f.Alloc(4096, 64)
		if !ok {
			break
		}
		out = append(out, frag)
	}
	if len(out) != 8 {
		t.Fatalf("%d pages of 8", len(out))
	}
	a.Release(out[0].Page, 1, other)
	again := mustFrag(t, f, 4096, 64)
	if again.Page != out[0].Page {
		t.Errorf("got page %d, only %d is free", again.Page, out[0].Page)
	}
	for _, frag := range append(out[1:], again) {
		a.Release(frag.Page, 1, other)
	}
}

// TestFragPoolModel: whatever is allocated, merged, released by anybody, trimmed and flushed, fragments never overlap, a page's count is what is
// out, and everything comes home.
func TestFragPoolModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, err := pagemem.NewArena(pagemem.Config{Bytes: 2 << 20})
		if err != nil {
			t.Fatal(err)
		}
		order := rapid.SampledFrom([]int{0, pagemem.ChunkOrder}).Draw(t, "order")
		p, err := New(Config{Arena: a, Owner: me, RingSize: 16, Order: order, Refill: Refill(rapid.IntRange(0, 2).Draw(t, "refill"))})
		if err != nil {
			t.Fatal(err)
		}
		var w Workers
		if err := w.Register(p); err != nil {
			t.Fatal(err)
		}
		f := NewFragPool(a, rapid.SampledFrom([]pagemem.OwnerID{me, other}).Draw(t, "worker"), NewBudget(rapid.IntRange(0, 100).Draw(t, "budget")))
		var out []pagemem.Frag
		add := func(t *rapid.T, n pagemem.Frag) {
			for _, o := range out {
				if o.Page == n.Page && o.Off < n.Off+n.Size && n.Off < o.Off+o.Size {
					t.Fatalf("%+v overlaps %+v", n, o)
				}
			}
			out = append(out, n)
		}
		t.Repeat(map[string]func(*rapid.T){
			"alloc": func(t *rapid.T) {
				size, align := rapid.Uint32Range(1, 4096).Draw(t, "size"), uint32(1)<<rapid.IntRange(0, 12).Draw(t, "align")
				f.Follow(&w, me)
				if n, ok := f.Alloc(size, align); ok {
					if n.Size != size || n.Addr%uintptr(align) != 0 || n.Addr != a.Addr(n.Page)+uintptr(n.Off) {
						t.Fatalf("%+v for %d at %d", n, size, align)
					}
					add(t, n)
				}
			},
			"grow": func(t *rapid.T) {
				n, ok := f.Prepare(rapid.Uint32Range(1, 300).Draw(t, "min"), 1)
				if !ok {
					t.Skip("nothing")
				}
				used := rapid.Uint32Range(1, n.Size).Draw(t, "used")
				if len(out) > 0 {
					if last := &out[len(out)-1]; last.Page == n.Page && last.Off+last.Size == n.Off {
						f.Commit(n, used, true)
						last.Size += used
						return
					}
				}
				f.Commit(n, used, false)
				n.Size = used
				add(t, n)
			},
			"release": func(t *rapid.T) {
				if len(out) == 0 {
					t.Skip("nothing out")
				}
				i := rapid.IntRange(0, len(out)-1).Draw(t, "which")
				a.Release(out[i].Page, 1, anyOwner.Draw(t, "by"))
				out = append(out[:i], out[i+1:]...)
			},
			"trim":  func(*rapid.T) { f.Trim() },
			"flush": func(*rapid.T) { f.Flush() },
			"": func(t *rapid.T) {
				if got := int(p.InFlight()) * int(p.size) / pagemem.PageSize; got != a.InUse() {
					t.Fatalf("%d pages in flight, %d in use", got, a.InUse())
				}
				if f.win.Size == 0 {
					return
				}
				users := int64(0)
				for _, o := range out {
					if o.Page == f.win.Page {
						users++
					}
				}
				if got := a.Frags(f.win.Page).Load() - int64(f.win.Refs); got != users {
					t.Fatalf("%d references out on page %d, want %d", got, f.win.Page, users)
				}
			},
		})
		f.Flush()
		p.Destroy()
		for _, o := range out {
			a.Release(o.Page, 1, other)
		}
		<-p.Done()
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestFragPoolNoAllocation: nothing is allocated on the Go heap in steady state.
func TestFragPoolNoAllocation(t *testing.T) {
	a := newArena(t, 512, 0)
	p := newPool(t, Config{Arena: a})
	f := newFragPool(t, a, p, me)
	if n := testing.AllocsPerRun(500, func() {
		for i := range 64 {
			frag := mustFrag(t, f, 1536, 64)
			a.Release(frag.Page, 1, pagemem.OwnerID(1+i%2))
		}
		f.Publish()
	}); n != 0 {
		t.Errorf("%v allocations a batch", n)
	}
}
