package fragalloc

import (
	"errors"
	"strings"
	"sync"
	"testing"

	"github.com/vhostd/vhostd/pagemem"
)

func mustAlloc(t testing.TB, c *Cache, size, align uint32) Frag {
	t.Helper()
	f, err := c.Alloc(size, align)
	if err != nil {
		t.Fatal(err)
	}
	return f
}

func TestArguments(t *testing.T) {
	c := NewCache(newArena(t, 1, 0))
	for _, bad := range []struct {
		size, align uint32
		want        string
	}{
		{0, 1, "fragment of 0 bytes"},
		{4097, 1, "accepted are 1 to 4096"},
		{1<<32 - 1, 1, "fragment of 4294967295"},
		{64, 0, "alignment 0"},
		{64, 3, "alignment 3"},
		{64, 8192, "powers of two from 1 to 4096"},
		{64, 1 << 31, "alignment 2147483648"},
	} {
		_, err := c.Alloc(bad.size, bad.align)
		if want := (ArgError{bad.size, bad.align}); !errors.Is(err, want) || !strings.Contains(err.Error(), bad.want) {
			t.Errorf("Alloc(%d, %d): %v", bad.size, bad.align, err)
		}
		if _, err := c.Prepare(bad.size, bad.align); !errors.Is(err, ArgError{bad.size, bad.align}) {
			t.Errorf("Prepare(%d, %d): %v", bad.size, bad.align, err)
		}
		if _, ok := c.Probe(bad.size, bad.align); ok {
			t.Errorf("Probe(%d, %d) succeeded", bad.size, bad.align)
		}
	}
	if c.win.Size != 0 {
		t.Error("a wrong request took a page")
	}
}

func TestAllocCountsUp(t *testing.T) {
	a := newArena(t, 2, 0)
	c := NewCache(a)
	first := mustAlloc(t, c, 100, 1)
	second := mustAlloc(t, c, 50, 64)
	third := mustAlloc(t, c, 1, 1)
	if first.Off != 0 || second.Off != 128 || third.Off != 178 {
		t.Errorf("offsets %d, %d, %d", first.Off, second.Off, third.Off)
	}
	if second.Addr != a.Addr(second.Page)+128 || second.Size != 50 {
		t.Errorf("%+v in a page at %#x", second, a.Addr(second.Page))
	}
	if got := a.RefCount(first.Page); got != maxBias {
		t.Errorf("%d references", got)
	}
	for _, f := range []Frag{first, second, third} {
		a.Release(f.Page, 1, 0)
	}
	if got := a.RefCount(first.Page); got != int64(c.win.Refs) {
		t.Errorf("%d references, bias %d", got, c.win.Refs)
	}
	c.Drain()
	if a.InUse() != 0 {
		t.Error("drained cache keeps a page")
	}
	c.Drain()
}

// TestReuse: a used-up page without fragments serves again, one with fragments is left to them.
func TestReuse(t *testing.T) {
	a := newArena(t, 4, 0)
	c := NewCache(a)
	fill := func() (last Frag) {
		for range 8 {
			last = mustAlloc(t, c, 4096, 1)
			a.Release(last.Page, 1, 0)
		}
		return last
	}
	page := fill().Page
	f := mustAlloc(t, c, 1, 1)
	if f.Page != page || f.Off != 0 || c.win.Refs != maxBias-1 || a.RefCount(page) != maxBias {
		t.Errorf("reused: %+v, bias %d, %d references", f, c.win.Refs, a.RefCount(page))
	}
	for range 8 {
		g := mustAlloc(t, c, 4096, 1)
		a.Release(g.Page, 1, 0)
	}
	if c.win.Page == page || a.RefCount(page) != 1 || a.InUse() != 16 {
		t.Errorf("page %d still current or %d references, %d in use", page, a.RefCount(page), a.InUse())
	}
	a.Release(f.Page, 1, 0)
	if a.InUse() != 8 {
		t.Errorf("%d pages in use after the last fragment", a.InUse())
	}
	c.Drain()
}

// TestReuseResetsOffset: between a Prepare that used the page again and its
// Commit, Probe sees the new offset.
func TestReuseResetsOffset(t *testing.T) {
	a := newArena(t, 1, 0)
	c := NewCache(a)
	for range 8 {
		a.Release(mustAlloc(t, c, 4096, 1).Page, 1, 0)
	}
	f, err := c.Prepare(100, 1)
	if err != nil {
		t.Fatal(err)
	}
	if g, ok := c.Probe(100, 1); !ok || g != f || f.Off != 0 || f.Size != pagemem.ChunkSize {
		t.Errorf("prepared %+v, probed %+v, %v", f, g, ok)
	}
	c.Drain()
}

func TestFallbackToSmallPagesAndReserve(t *testing.T) {
	a := newArena(t, 3, 8)
	chunk, _ := a.Alloc(pagemem.ChunkOrder, pagemem.NoReserve)
	small := make([]pagemem.PageID, 7)
	a.AllocBulk(small) // leaves one normal page, no chunk
	c := NewCache(a)
	normal := mustAlloc(t, c, 4096, 1)
	if c.win.Size != pagemem.PageSize || c.IsReserve() {
		t.Fatalf("page of %d bytes, reserve %v", c.win.Size, c.IsReserve())
	}
	spare := mustAlloc(t, c, 4096, 1)
	if c.win.Size != pagemem.PageSize || !c.IsReserve() || !a.IsReserve(spare.Page) {
		t.Fatalf("page of %d bytes, reserve %v", c.win.Size, c.IsReserve())
	}
	a.Release(spare.Page, 1, 0)
	a.Unref(chunk, 1)
	// The reserve page is free of fragments, yet must not be used again.
	f := mustAlloc(t, c, 100, 1)
	if c.win.Size != pagemem.ChunkSize || c.IsReserve() || a.InUse() != 7+1+8 {
		t.Fatalf("page of %d bytes, reserve %v, %d in use", c.win.Size, c.IsReserve(), a.InUse())
	}
	a.Release(f.Page, 1, 0)
	a.Release(normal.Page, 1, 0)
	c.Drain()
	for _, p := range small {
		a.Unref(p, 1)
	}
}

func TestNoMem(t *testing.T) {
	a := newArena(t, 1, 0)
	c := NewCache(a)
	var out []Frag
	for {
		f, err := c.Alloc(4096, 64)
		if err != nil {
			if !errors.Is(err, ErrNoMem) {
				t.Fatal(err)
			}
			break
		}
		out = append(out, f)
	}
	if len(out) != 8 {
		t.Fatalf("%d fragments", len(out))
	}
	if _, ok := c.Probe(1, 1); ok {
		t.Error("probe found room in an empty cache")
	}
	if n := c.AllocN(make([]Frag, 3), 64, 64); n != 0 {
		t.Errorf("AllocN got %d", n)
	}
	for _, f := range out {
		a.Release(f.Page, 1, 0)
	}
	if f := mustAlloc(t, c, 64, 64); f.Off != 0 {
		t.Errorf("offset %d in a new page", f.Off)
	} else {
		a.Release(f.Page, 1, 0)
	}
	c.Drain()
}

func TestPrepareCommit(t *testing.T) {
	a := newArena(t, 2, 0)
	c := NewCache(a)
	a.Release(mustAlloc(t, c, 10, 1).Page, 1, 0)
	f, err := c.Prepare(64, 16)
	if err != nil {
		t.Fatal(err)
	}
	if f.Off != 16 || f.Size != pagemem.ChunkSize-16 || c.win.Off != 10 || c.win.Refs != maxBias-1 {
		t.Fatalf("prepared %+v at %d, bias %d", f, c.win.Off, c.win.Refs)
	}
	if got := c.Commit(f, 100); got != 106 || c.win.Off != 116 || c.win.Refs != maxBias-2 {
		t.Errorf("true size %d, offset %d, bias %d", got, c.win.Off, c.win.Refs)
	}
	g, ok := c.Probe(1, 1)
	if !ok || g.Off != f.Off+100 {
		t.Errorf("next part %+v does not continue the fragment", g)
	}
	if got := c.CommitNoRef(g, 50); got != 50 || c.win.Off != 166 || c.win.Refs != maxBias-2 {
		t.Errorf("coalesced %d, offset %d, bias %d", got, c.win.Off, c.win.Refs)
	}
	c.Abort(0)
	if c.win.Off != 166 || c.win.Refs != maxBias-1 {
		t.Errorf("gave back the reference: offset %d, bias %d", c.win.Off, c.win.Refs)
	}
	h := mustAlloc(t, c, 34, 1)
	c.Abort(34)
	if again := mustAlloc(t, c, 34, 1); again != h {
		t.Errorf("aborted %+v, then got %+v", h, again)
	}
	c.Abort(34)
	c.Drain()
}

func TestCommitMisuse(t *testing.T) {
	a := newArena(t, 2, 0)
	c := NewCache(a)
	f, _ := c.Prepare(64, 1)
	stale := f
	stale.Page++
	misuse(t, a, func() { c.Commit(f, 0) })
	misuse(t, a, func() { c.Commit(f, f.Size+1) })
	misuse(t, a, func() { c.Commit(stale, 64) })
	c.Commit(f, 64)
	misuse(t, a, func() { c.CommitNoRef(f, 64) })
	misuse(t, a, func() { c.Abort(65) })
	c.Abort(64)
	misuse(t, a, func() { c.Abort(0) })
	if c.win.Off != 0 || c.win.Refs != maxBias {
		t.Errorf("offset %d, bias %d", c.win.Off, c.win.Refs)
	}
	c.Drain()
}

func TestAllocN(t *testing.T) {
	a := newArena(t, 4, 0)
	c := NewCache(a)
	var out [40]Frag
	if n := c.AllocN(out[:], 1984, 64); n != len(out) {
		t.Fatalf("got %d", n)
	}
	// 16 fragments of 1984 bytes fit a chunk (a 1,514-byte frame in vhost_net).
	if out[15].Page != out[0].Page || out[16].Page == out[0].Page || out[16].Off != 0 {
		t.Errorf("fragments 0, 15, 16: %+v %+v %+v", out[0], out[15], out[16])
	}
	for _, f := range out {
		a.Release(f.Page, 1, 0)
	}
	c.Drain()
}

// TestReleaseElsewhere releases fragments on another goroutine while the owner
// goes on, as mm/page_frag's selftest does.
func TestReleaseElsewhere(t *testing.T) {
	a := newArena(t, 8, 0)
	c := NewCache(a)
	out := make(chan Frag, 512)
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for f := range out {
				a.Release(f.Page, 1, 0)
			}
		})
	}
	for i := range uint32(20000) {
		f, err := c.Alloc(1+i%4096, 1<<(i%7))
		if err == nil {
			out <- f
		}
	}
	close(out)
	wg.Wait()
	c.Drain()
	if s := a.Stats(); s.InUse != 0 || s.Misuse != 0 {
		t.Errorf("%+v", s)
	}
}

func TestNoAllocation(t *testing.T) {
	a := newArena(t, 8, 0)
	c := NewCache(a)
	n := testing.AllocsPerRun(100, func() {
		for range 64 {
			f, _ := c.Prepare(1536, 64)
			c.Commit(f, 1500)
			a.Release(f.Page, 1, 0)
			f, _ = c.Alloc(256, 64)
			a.Release(f.Page, 1, 0)
		}
	})
	if n != 0 {
		t.Errorf("%v allocations", n)
	}
	c.Drain()
}
