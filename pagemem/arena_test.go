package pagemem

import (
	"errors"
	"os"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
)

func TestConfigRejected(t *testing.T) {
	for _, c := range []struct {
		cfg  Config
		want string
	}{
		{Config{}, "arena of 0 bytes"},
		{Config{Bytes: MaxBytes + 1}, "accepted are 1 to"},
		{Config{Bytes: 1 << 20, HugePageSize: 4096}, "huge pages of 4096 bytes, accepted are 2097152 and 1073741824"},
		{Config{Bytes: 1 << 20, Node: node(-1)}, "NUMA node -1, accepted are 0 to 1023"},
		{Config{Bytes: 1 << 20, Node: node(1024)}, "NUMA node 1024"},
		{Config{Bytes: 1 << 20, ReservePages: -1}, "reserve of -1 pages"},
		{Config{Bytes: 1 << 20, ReservePages: 256}, "can spare 0 to 248"},
	} {
		if a, err := NewArena(c.cfg); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, error %v, want %q", c.cfg, a, err, c.want)
		}
	}
}

// TestOneLineAPage: two pages' counts never share a cache line.
func TestOneLineAPage(t *testing.T) {
	if got := reflect.TypeFor[page]().Size(); got != 64 {
		t.Errorf("metadata of a page takes %d bytes", got)
	}
}

func TestAddresses(t *testing.T) {
	a := newArena(t, 3, 0)
	if a.Bytes() != 3*ChunkSize || a.Addr(5) != a.Base()+5*PageSize {
		t.Fatalf("%d bytes, page 5 at %#x of %#x", a.Bytes(), a.Addr(5), a.Base())
	}
	for _, c := range []struct {
		addr uintptr
		n    uint64
		want bool
	}{
		{a.Base(), 3 * ChunkSize, true},
		{a.Base(), 3*ChunkSize + 1, false},
		{a.Base() + 3*ChunkSize - 1, 1, true},
		{a.Base() + 3*ChunkSize, 0, false},
		{a.Base() - 1, 2, false},
		{a.Base() + 1, ^uint64(0), false},
		{0, 1, false},
	} {
		if got := a.Contains(c.addr, c.n); got != c.want {
			t.Errorf("Contains(base%+d, %d) = %v", int64(c.addr-a.Base()), c.n, got)
		}
	}
}

// TestLazy: memory that nobody touched is not populated.
func TestLazy(t *testing.T) {
	before := resident(t)
	a := newArena(t, 1<<15, 0) // 1 GiB
	ids := make([]PageID, 64)
	a.AllocBulk(ids)
	if grown := resident(t) - before; grown > 64<<20 {
		t.Errorf("an untouched arena of 1 GiB takes %d MiB", grown>>20)
	}
	for _, p := range ids {
		a.Unref(p, 1)
	}
}

func resident(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, c := range strings.Fields(string(text))[1] {
		n = n*10 + int(c-'0')
	}
	return n * os.Getpagesize()
}

// TestOrdersShareMemory: pages of one order, freed, serve the other.
func TestOrdersShareMemory(t *testing.T) {
	a := newArena(t, 4, 0)
	ids := make([]PageID, 40)
	for round := range 3 {
		if n := a.AllocBulk(ids); n != 32 {
			t.Fatalf("round %d: %d pages of 32", round, n)
		}
		if _, ok := a.Alloc(ChunkOrder, NoReserve); ok {
			t.Fatal("a chunk from a full arena")
		}
		for _, p := range ids[:32] {
			if !a.Unref(p, 1) {
				t.Fatalf("page %d not freed", p)
			}
		}
		var chunks []PageID
		for {
			p, ok := a.Alloc(ChunkOrder, AllowReserve)
			if !ok {
				break
			}
			if p%ChunkPages != 0 || a.Order(p+3) != ChunkOrder || a.Head(p+7) != p {
				t.Fatalf("chunk %d: order %d, head %d", p, a.Order(p+3), a.Head(p+7))
			}
			chunks = append(chunks, p)
		}
		if len(chunks) != 4 {
			t.Fatalf("round %d: %d chunks of 4", round, len(chunks))
		}
		for _, p := range chunks {
			a.Unref(p+5, 1) // any page of the compound page names it
		}
	}
}

// TestPartialFirst: single pages come from chunks in use as long as there are any.
func TestPartialFirst(t *testing.T) {
	a := newArena(t, 8, 0)
	ids := make([]PageID, 9)
	a.AllocBulk(ids)
	a.Unref(ids[3], 1)
	again := make([]PageID, 8)
	a.AllocBulk(again)
	if !slices.Contains(again, ids[3]) {
		t.Errorf("freed page %d not among %v", ids[3], again)
	}
	used := map[PageID]bool{}
	for _, p := range append(again, ids...) {
		used[p/ChunkPages] = true
	}
	if len(used) != 2 {
		t.Errorf("16 pages in %d chunks", len(used))
	}
	for _, p := range again {
		a.Unref(p, 1)
	}
	for _, p := range ids {
		if p != ids[3] {
			a.Unref(p, 1)
		}
	}
}

func TestReserve(t *testing.T) {
	a := newArena(t, 3, 5) // rounded up to one chunk
	if got := a.Stats().Reserve; got != 8 {
		t.Fatalf("%d pages in reserve", got)
	}
	ids := make([]PageID, 30)
	if n := a.AllocBulk(ids); n != 16 {
		t.Fatalf("bulk got %d, the normal zone has 16", n)
	}
	if _, ok := a.Alloc(0, NoReserve); ok {
		t.Fatal("took the reserve without leave")
	}
	if _, ok := a.Alloc(ChunkOrder, AllowReserve); ok {
		t.Fatal("the reserve gave a chunk")
	}
	spare, ok := a.Alloc(0, AllowReserve)
	if !ok || !a.IsReserve(spare) || a.IsReserve(ids[0]) {
		t.Fatalf("reserve page %d, %v", spare, ok)
	}
	a.Unref(ids[0], 1)
	if p, ok := a.Alloc(0, AllowReserve); !ok || p != ids[0] {
		t.Fatalf("got page %d before the normal ones, %v", p, ok)
	}
	a.Unref(spare, 1)
	if _, ok := a.Alloc(0, NoReserve); ok {
		t.Fatal("a reserve page went to the normal zone")
	}
	for _, p := range ids[:16] {
		a.Unref(p, 1)
	}
}

func TestBadOrder(t *testing.T) {
	a := newArena(t, 1, 0)
	for _, order := range []int{-1, 1, 2, 4} {
		if _, ok := a.Alloc(order, AllowReserve); ok {
			t.Errorf("order %d accepted", order)
		}
	}
}

func TestClose(t *testing.T) {
	a := newArena(t, 2, 0)
	p, _ := a.Alloc(ChunkOrder, NoReserve)
	if err := a.Close(); !errors.Is(err, ErrInUse) || !strings.Contains(err.Error(), "8 of 16") {
		t.Fatalf("close with a page out: %v", err)
	}
	a.Unref(p, 1)
	for range 2 {
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if _, ok := a.Alloc(0, AllowReserve); ok {
		t.Fatal("a page of a closed arena")
	}
}

func TestMisuse(t *testing.T) {
	a := newArena(t, 2, 0)
	p, _ := a.Alloc(0, NoReserve)
	chunk, _ := a.Alloc(ChunkOrder, NoReserve)
	misuse(t, a, func() { a.Unref(p, 2) })
	if got := a.RefCount(p); got != 1 {
		t.Errorf("%d references after a refused drop", got)
	}
	misuse(t, a, func() { a.Free(chunk + 1) })
	a.Unref(p, 1)
	misuse(t, a, func() { a.Unref(p, 1) })
	misuse(t, a, func() { a.FreeBulk([]PageID{p}) })
	misuse(t, a, func() { a.FreeBulk([]PageID{chunk + 1}) })
	a.Unref(chunk, 1)
	misuse(t, a, func() { a.Unref(chunk, 1) })
	if s := a.Stats(); s.InUse != 0 {
		t.Errorf("%d pages in use", s.InUse)
	}
	if n := a.AllocBulk(make([]PageID, 17)); n != 16 {
		t.Errorf("%d pages after a double free", n)
	}
	for p := range PageID(16) {
		a.Unref(p, 1)
	}
}

func TestOwnerIDsDiffer(t *testing.T) {
	var wg sync.WaitGroup
	var seen sync.Map
	for range 8 {
		wg.Go(func() {
			for range 100 {
				id := NewOwnerID()
				if _, twice := seen.LoadOrStore(id, true); twice || id == 0 {
					t.Errorf("owner id %d twice, or nobody", id)
				}
			}
		})
	}
	wg.Wait()
}

func TestNoAllocation(t *testing.T) {
	a := newArena(t, 32, 0)
	var ids [64]PageID
	n := testing.AllocsPerRun(100, func() {
		a.AllocBulk(ids[:])
		for _, p := range ids {
			a.Retain(p, 1)
			a.Release(p, 2, 1)
		}
		p, _ := a.Alloc(ChunkOrder, NoReserve)
		a.Unref(p, 1)
	})
	if n != 0 {
		t.Errorf("%v allocations", n)
	}
}
