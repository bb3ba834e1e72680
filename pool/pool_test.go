package pool

import (
	"slices"
	"strings"
	"testing"

	"github.com/vhostd/vhostd/pagemem"
)

func mustAlloc(t testing.TB, p *Pool) pagemem.PageID {
	t.Helper()
	id, ok := p.Alloc()
	if !ok {
		t.Fatal("no page")
	}
	return id
}

func stats(p *Pool) Stats {
	p.Publish()
	return p.Stats()
}

func TestNewRejects(t *testing.T) {
	a := newArena(t, 8, 0)
	for _, c := range []struct {
		cfg  Config
		want string
	}{
		{Config{Owner: me}, "no arena"},
		{Config{Arena: a}, "owner 0"},
		{Config{Arena: a, Owner: me, RingSize: -5}, "-5"},
	} {
		if _, err := New(c.cfg); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: error %v, want %q in it", c.cfg, err, c.want)
		}
	}
}

func TestRingSize(t *testing.T) {
	for n, want := range map[int]int{0: 1024, 1: 1, 2: 2, 3: 4, 1000: 1024, 16384: 16384, 20000: 16384, 1 << 30: 16384} {
		if got := ringSize(n); got != want {
			t.Errorf("ringSize(%d) = %d, want %d", n, got, want)
		}
	}
}

// TestAllocOrder follows a page through the three places it can come from.
func TestAllocOrder(t *testing.T) {
	a := newArena(t, 256, 0)
	inits := 0
	p := newPool(t, Config{Arena: a, Init: func(addr uintptr, n int) {
		if !a.Contains(addr, uint64(n)) || n != pagemem.PageSize {
			t.Errorf("init of %d bytes at %#x", n, addr)
		}
		inits++
	}})
	first := mustAlloc(t, p)
	if s := stats(p); s.Slow != 1 || s.Empty != 1 || s.Fast != 0 || s.InFlight != CacheRefill || inits != CacheRefill {
		t.Fatalf("after the first page: %+v, %d initialized", s, inits)
	}
	second := mustAlloc(t, p)
	p.Put(first, 1, me)
	p.Put(second, 1, me)
	if got := mustAlloc(t, p); got != second {
		t.Fatalf("got page %d, want the last recycled one, %d", got, second)
	}
	if s := stats(p); s.Fast != 2 || s.Cached != 2 {
		t.Fatalf("after recycling: %+v", s)
	}
	p.Put(second, 1, other)
	rest := make([]pagemem.PageID, CacheRefill-1)
	if n := p.AllocN(rest); n != len(rest) || slices.Contains(rest, second) {
		t.Fatalf("AllocN got %d pages, %v", n, rest)
	}
	if got := mustAlloc(t, p); got != second {
		t.Fatalf("got page %d, want %d from the ring", got, second)
	}
	if s := stats(p); s.Refill != 1 || s.Ring != 1 || s.Slow != 1 {
		t.Fatalf("after the ring: %+v", s)
	}
	p.Put(second, 1, me)
	p.PutBulk(rest, me)
}

func TestOverflow(t *testing.T) {
	a := newArena(t, 512, 0)
	p := newPool(t, Config{Arena: a, RingSize: 16})
	ids := make([]pagemem.PageID, 192)
	if n := p.AllocN(ids); n != len(ids) {
		t.Fatalf("got %d pages", n)
	}
	for _, id := range ids {
		p.Put(id, 1, me)
	}
	s := stats(p)
	if s.Cached != CacheSize || s.CacheFull != 64 || s.Ring != 16 || s.RingFull != 48 {
		t.Fatalf("overflow: %+v", s)
	}
	if s.InFlight != CacheSize+16 || a.InUse() != CacheSize+16 {
		t.Fatalf("%d in flight, %d in use", s.InFlight, a.InUse())
	}
}

func TestPutBulk(t *testing.T) {
	a := newArena(t, 512, 0)
	p := newPool(t, Config{Arena: a, RingSize: 32})
	ids := make([]pagemem.PageID, 64)
	p.AllocN(ids)
	shared, held := ids[5], ids[9]
	a.Retain(shared, 1)
	a.Ref(held)
	p.PutBulk(slices.Clone(ids), other)
	s := stats(p)
	if s.Ring != 32 || s.RingFull != 30 || s.ReleasedShared != 1 {
		t.Fatalf("bulk: %+v", s)
	}
	if got := a.RefCount(held); got != 1 {
		t.Fatalf("%d references on the page that a mirror holds", got)
	}
	a.Unref(held, 1)
	a.Release(shared, 1, me)
	if s = stats(p); s.Cached != 1 {
		t.Fatalf("last fragment: %+v", s)
	}
}

// TestForeignReference: a page that somebody else holds leaves the pool.
func TestForeignReference(t *testing.T) {
	a := newArena(t, 64, 0)
	p := newPool(t, Config{Arena: a})
	id := mustAlloc(t, p)
	a.Ref(id)
	a.Release(id, 1, me)
	if s := stats(p); s.ReleasedShared != 1 || s.InFlight != 63 || a.InUse() != 64 {
		t.Fatalf("released: %+v, %d in use", s, a.InUse())
	}
	if !a.Unref(id, 1) || a.InUse() != 63 {
		t.Fatal("the last holder did not free the page")
	}
}

func TestReserve(t *testing.T) {
	a := newArena(t, 8, 8)
	p := newPool(t, Config{Arena: a, UseReserve: true})
	ids := make([]pagemem.PageID, 20)
	n := p.AllocN(ids)
	if n != 16 {
		t.Fatalf("got %d pages of 8 and 8 in reserve", n)
	}
	for _, id := range ids[:n] {
		a.Release(id, 1, me)
	}
	if s := stats(p); s.Cached != 8 || s.ReleasedShared != 8 || a.InUse() != 8 {
		t.Fatalf("reserve pages were kept: %+v, %d in use", s, a.InUse())
	}
}

func TestArenaEmpty(t *testing.T) {
	a := newArena(t, 8, 8)
	p := newPool(t, Config{Arena: a})
	ids := make([]pagemem.PageID, 9)
	if n := p.AllocN(ids); n != 8 {
		t.Fatalf("got %d of 8 pages", n)
	}
	if _, ok := p.Alloc(); ok {
		t.Fatal("got a page of the reserve")
	}
	if _, _, _, ok := p.AllocFrag(100); ok {
		t.Fatal("got a fragment of the reserve")
	}
	p.PutBulk(ids[:8], me)
}

func TestAllocFrag(t *testing.T) {
	a := newArena(t, 64, 0)
	p := newPool(t, Config{Arena: a})
	type frag struct{ off, got uint32 }
	for _, c := range []struct {
		size uint32
		want []frag
	}{
		{0, nil},
		{4097, nil},
		{1 << 31, nil},
		{4096, []frag{{0, 4096}}},
		{2049, []frag{{0, 4096}}},
		{2048, []frag{{0, 2048}, {2048, 2048}}},
		{1500, []frag{{0, 1536}, {1536, 2560}}},
		{1024, []frag{{0, 1024}, {1024, 1024}, {2048, 1024}, {3072, 1024}}},
	} {
		var pages []pagemem.PageID
		for i, want := range c.want {
			id, off, got, ok := p.AllocFrag(c.size)
			if !ok || (frag{off, got}) != want || i > 0 && id != pages[0] {
				t.Errorf("size %d, fragment %d: page %d, %d bytes at %d, %v", c.size, i, id, got, off, ok)
			}
			pages = append(pages, id)
		}
		if c.want == nil {
			if _, _, _, ok := p.AllocFrag(c.size); ok {
				t.Errorf("size %d accepted", c.size)
			}
		}
		for _, id := range pages {
			a.Release(id, 1, me)
		}
	}
	// The page of the 1024s has no users any more: it serves again.
	before := stats(p)
	id, off, _, _ := p.AllocFrag(1024)
	if s := stats(p); off != 0 || s.Cached != before.Cached+1 || s.Fast != before.Fast+1 {
		t.Errorf("offset %d, %+v after %+v", off, s, before)
	}
	a.Release(id, 1, other)
}

func TestNoAllocation(t *testing.T) {
	a := newArena(t, 512, 0)
	p := newPool(t, Config{Arena: a})
	ids := make([]pagemem.PageID, 64)
	n := testing.AllocsPerRun(200, func() {
		p.AllocN(ids)
		for _, id := range ids[:32] {
			a.Release(id, 1, me)
		}
		p.PutBulk(ids[32:], other)
		id, _, _, _ := p.AllocFrag(500)
		a.Release(id, 1, other)
		p.Publish()
	})
	if n != 0 {
		t.Fatalf("%v allocations a batch", n)
	}
}

// TestSplitPageNotRecyclable: a page that is used up without users is not used
// again when somebody else holds it.
func TestSplitPageNotRecyclable(t *testing.T) {
	a := newArena(t, 64, 0)
	p := newPool(t, Config{Arena: a})
	first, _, _, _ := p.AllocFrag(2048)
	a.Ref(first)
	a.Release(first, 1, me)
	second, off, _, _ := p.AllocFrag(2048)
	a.Release(second, 1, other)
	third, _, _, _ := p.AllocFrag(2048)
	if second != first || off != 2048 || third == first {
		t.Fatalf("pages %d, %d at %d, %d", first, second, off, third)
	}
	if s := stats(p); s.ReleasedShared != 1 || s.InFlight != 63 {
		t.Errorf("%+v", s)
	}
	a.Release(third, 1, me)
	a.Unref(first, 1)
}

// TestMisuse: debug builds panic, others count and leave the page alone.
func TestMisuse(t *testing.T) {
	a, err := pagemem.NewArena(pagemem.Config{Bytes: 1 << 18})
	if err != nil {
		t.Fatal(err)
	}
	p := newPool(t, Config{Arena: a})
	id := mustAlloc(t, p)
	misuse := func(f func()) {
		before := a.Stats().Misuse
		defer func() {
			if got := recover(); pagemem.Debug != (got != nil) || a.Stats().Misuse != before+1 {
				t.Errorf("recovered %v, %d misuses counted", got, a.Stats().Misuse-before)
			}
		}()
		f()
	}
	misuse(func() { p.Put(id, 2, me) })
	p.Put(id, 1, me)
	if pagemem.Debug {
		misuse(func() { p.Put(id, 1, me) })
	}
	p.Destroy()
	if err := a.Close(); err != nil {
		t.Error(err)
	}
}
