package guestmem_test

import (
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/guestmem"
)

// Two neighbors, a hole, and a region that ends with the address space.
var layout = []guestmem.RegionSpec{
	{GPA: 2 * page, Size: page, UVA: 0x7f0000005000},
	{GPA: page, Size: page, UVA: 0x7f0000009000},
	{GPA: math.MaxUint64 - 2*page + 1, Size: 2 * page, UVA: math.MaxUint64 - 2*page + 1},
}

func layoutTable(t testing.TB) *guestmem.Table {
	return table(t, layout, memfd(t, page, 0), memfd(t, page, 0), memfd(t, 2*page, 0))
}

func TestLookup(t *testing.T) {
	tab := layoutTable(t)
	const top = math.MaxUint64
	for _, c := range []struct {
		gpa, n, run uint64
		region      int
		off         uintptr
	}{
		{page, 1, 1, 1, 0},
		{page, page, page, 1, 0},
		{page, 2 * page, page, 1, 0},
		{page + 4000, 200, 96, 1, 4000},
		{2*page - 1, 1, 1, 1, page - 1},
		{2 * page, 1, 1, 0, 0},
		{3*page - 1, 2, 1, 0, page - 1},
		{page, math.MaxUint64, page, 1, 0},
		{top, 1, 1, 2, 2*page - 1},
		{top, 100, 1, 2, 2*page - 1},
		{top - 2*page + 1, 2 * page, 2 * page, 2, 0},
		{0, 1, 0, -1, 0},
		{page - 1, 2, 0, -1, 0},
		{3 * page, 1, 0, -1, 0},
		{top - 2*page, 1, 0, -1, 0},
		{page, 0, 0, 1, 0},
	} {
		want := uintptr(0)
		if c.region >= 0 {
			base, _ := tab.Lookup(layout[c.region].GPA, 1)
			want = base + c.off
		}
		cursor := guestmem.NewCursor(tab)
		for range 2 {
			if host, run := cursor.Lookup(c.gpa, c.n); host != want || run != c.run {
				t.Errorf("cursor: %#x+%#x = %#x, %#x, want %#x, %#x", c.gpa, c.n, host, run, want, c.run)
			}
		}
		if host, run := tab.Lookup(c.gpa, c.n); host != want || run != c.run {
			t.Errorf("%#x+%#x = %#x, %#x, want %#x, %#x", c.gpa, c.n, host, run, want, c.run)
		}
	}
}

func TestLookupUVA(t *testing.T) {
	tab := layoutTable(t)
	for _, c := range []struct {
		uva, n uint64
		region int // -1: not inside one
		off    uintptr
	}{
		{0x7f0000005000, page, 0, 0},
		{0x7f0000005010, page - 0x10, 0, 0x10},
		{0x7f0000005010, page, -1, 0},
		{0x7f0000004fff, 2, -1, 0},
		{0x7f0000009000, 1, 1, 0},
		{page, 1, -1, 0},
		{math.MaxUint64, 1, 2, 2*page - 1},
		{math.MaxUint64, 2, -1, 0},
		{0x7f0000005000, math.MaxUint64, -1, 0},
	} {
		host, ok := tab.LookupUVA(c.uva, c.n)
		if ok != (c.region >= 0) {
			t.Errorf("%#x+%#x: ok = %v", c.uva, c.n, ok)
			continue
		}
		if !ok {
			continue
		}
		if base, _ := tab.Lookup(layout[c.region].GPA, 1); host != base+c.off {
			t.Errorf("%#x+%#x = %#x, want %#x", c.uva, c.n, host, base+c.off)
		}
	}
}

func TestOwns(t *testing.T) {
	tab := table(t, []guestmem.RegionSpec{{Size: 2 * page}}, memfd(t, 2*page, 0))
	base, _ := tab.Lookup(0, 1)
	for off, want := range map[uintptr]bool{0: true, 2*page - 1: true, 2 * page: false, ^uintptr(0): false} {
		if tab.Owns(base+off) != want {
			t.Errorf("Owns(base+%#x) = %v", off, !want)
		}
	}
	if tab.Owns(0) {
		t.Error("address 0 is owned")
	}
}

func TestNilTable(t *testing.T) {
	var tab *guestmem.Table
	cursor := guestmem.NewCursor(nil)
	_, a := tab.Lookup(0, 1)
	_, b := cursor.Lookup(0, 1)
	if _, ok := tab.LookupUVA(0, 1); ok || a != 0 || b != 0 {
		t.Error("a nil table translates")
	}
	if _, ok := cursor.Hit(0, 0); ok {
		t.Error("a fresh cursor hits")
	}
}

// A cursor answers as the table does, in any order of look-ups.
func TestCursorModel(t *testing.T) {
	tab := layoutTable(t)
	rapid.Check(t, func(rt *rapid.T) {
		cursor := guestmem.NewCursor(tab)
		for range 20 {
			gpa := rapid.SampledFrom([]uint64{0, page, 2 * page, 3 * page, math.MaxUint64 - 2*page}).Draw(rt, "base") +
				rapid.Uint64Range(0, 2*page).Draw(rt, "off") - page/2
			n := rapid.OneOf(rapid.Uint64Range(0, 2*page), rapid.Uint64()).Draw(rt, "n")
			host, run := tab.Lookup(gpa, n)
			if h, ok := cursor.Hit(gpa, n); ok && (h != host || run != n) {
				rt.Fatalf("Hit(%#x, %#x) = %#x, table says %#x, %#x", gpa, n, h, host, run)
			}
			if h, r := cursor.Lookup(gpa, n); h != host || r != run {
				rt.Fatalf("Lookup(%#x, %#x) = %#x, %#x, table says %#x, %#x", gpa, n, h, r, host, run)
			}
		}
	})
}

func BenchmarkCursorHit(b *testing.B) {
	tab := layoutTable(b)
	cursor := guestmem.NewCursor(tab)
	cursor.Lookup(page, 1)
	for b.Loop() {
		if _, ok := cursor.Hit(page+100, 64); !ok {
			b.Fatal("miss")
		}
	}
}
