package guestmem_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/internal/testmain"
)

func slot(i int) guestmem.RegionSpec {
	return guestmem.RegionSpec{GPA: uint64(i) * page, Size: page, UVA: 1<<40 - uint64(i)*page, MmapOffset: uint64(i%2) * page}
}

// slots returns a table of n regions, of two pages of one file in turn, made one by one.
func slots(t testing.TB, n, fd int) *guestmem.Table {
	t.Helper()
	var tab *guestmem.Table
	for i := range n {
		next, err := tab.With(slot(i), fd)
		if err != nil {
			t.Fatal(err)
		}
		if err := tab.Close(); err != nil {
			t.Fatal(err)
		}
		tab = next
	}
	t.Cleanup(func() {
		if err := tab.Close(); err != nil {
			t.Error(err)
		}
	})
	return tab
}

// Tables that follow one another share mappings, which live as long as the last table.
func TestChangedTablesShare(t *testing.T) {
	leak := testmain.Mappings("memfd:guestmem-test")
	fd := memfd(t, 4*page, 0)
	a, b := guestmem.RegionSpec{GPA: 2 * page, Size: page, UVA: page}, guestmem.RegionSpec{Size: page, UVA: 5 * page, MmapOffset: page}
	must := func(tab *guestmem.Table, err error) *guestmem.Table {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return tab
	}
	var none *guestmem.Table
	one := must(none.With(a, fd))
	two := must(one.With(b, fd))
	only := must(two.Without(guestmem.RegionSpec{GPA: a.GPA, Size: a.Size, UVA: a.UVA, MmapOffset: 77}))
	empty := must(only.Without(b))
	for i, want := range [][]guestmem.RegionSpec{{a}, {b, a}, {b}, {}} {
		if diff := cmp.Diff(want, []*guestmem.Table{one, two, only, empty}[i].Regions()); diff != "" {
			t.Errorf("table %d: %s", i, diff)
		}
	}
	hostA, _ := one.Lookup(a.GPA, 1)
	hostB, _ := two.Lookup(b.GPA, 1)
	if same, _ := two.Lookup(a.GPA, 1); same != hostA {
		t.Errorf("region a is mapped at %#x and at %#x", hostA, same)
	}
	if same, _ := only.Lookup(b.GPA, 1); same != hostB {
		t.Errorf("region b is mapped at %#x and at %#x", hostB, same)
	}
	if bytes, n := guestmem.Reserved(); bytes != 2*page || n != 2 {
		t.Errorf("%d bytes in %d mappings are counted, want two pages", bytes, n)
	}
	for _, tab := range []*guestmem.Table{two, one, empty} { // two before one: any order
		if err := tab.Close(); err != nil {
			t.Fatal(err)
		}
	}
	bytesAt(hostB, page)[0] = 1 // still only's
	if only.Owns(hostA) || !only.Owns(hostB) {
		t.Error("the table owns other regions than it has")
	}
	if err := errors.Join(only.Close(), only.Close()); err != nil {
		t.Fatal(err)
	}
	if err := leak(); err != nil {
		t.Error(err)
	}
	if bytes, n := guestmem.Reserved(); bytes != 0 || n != 0 {
		t.Errorf("%d bytes in %d mappings are still counted", bytes, n)
	}
}

func TestAddedRegionsRefused(t *testing.T) {
	fd, other := memfd(t, 4*page, 0), memfd(t, 4*page, 0)
	tab := table(t, []guestmem.RegionSpec{{GPA: page, Size: page, UVA: 8 * page}}, fd)
	dup, err := unix.Dup(fd)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(dup)
	if _, err := tab.With(tab.Regions()[0], dup); !errors.Is(err, guestmem.ErrPresent) {
		t.Errorf("the same region by another descriptor of the file: %v", err)
	}
	for name, c := range map[string]struct {
		spec guestmem.RegionSpec
		fd   int
		want string
	}{
		"same region, other file": {tab.Regions()[0], other, "guest addresses overlap"},
		"other offset":            {guestmem.RegionSpec{GPA: page, Size: page, UVA: 8 * page, MmapOffset: page}, fd, "guest addresses overlap"},
		"guest overlap":           {guestmem.RegionSpec{GPA: 2*page - 1, Size: page}, fd, "guest addresses overlap"},
		"front-end overlap":       {guestmem.RegionSpec{GPA: 8 * page, Size: page, UVA: 9*page - 1}, fd, "front-end addresses overlap"},
		"size 0":                  {guestmem.RegionSpec{GPA: 8 * page}, fd, "size is 0"},
		"too large":               {guestmem.RegionSpec{GPA: 8 * page, Size: 2 * page, MmapOffset: 3 * page}, fd, "the file has"},
		"too much":                {guestmem.RegionSpec{GPA: 8 * page, Size: guestmem.MaxBytes, UVA: 1 << 44}, fd, "at most"},
		"no descriptor":           {tab.Regions()[0], -1, "guest addresses overlap"},
	} {
		if _, err := tab.With(c.spec, c.fd); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
	}
	if _, err := tab.With(guestmem.RegionSpec{GPA: 1 << 40, Size: page}, fuseFile(t, page)); err == nil || !strings.Contains(err.Error(), "FUSE") {
		t.Errorf("a file on FUSE: %v", err)
	}
	for _, s := range []guestmem.RegionSpec{{}, {GPA: page, Size: 2 * page, UVA: 8 * page}, {GPA: page, Size: page, UVA: page}, {GPA: 0, Size: page, UVA: 8 * page}} {
		if _, err := tab.Without(s); !errors.Is(err, guestmem.ErrAbsent) {
			t.Errorf("removal of %+v: %v", s, err)
		}
	}
	if bytes, n := guestmem.Reserved(); bytes != page || n != 1 {
		t.Errorf("%d bytes in %d mappings are counted, want one page", bytes, n)
	}
}

func TestAllSlots(t *testing.T) {
	fd := memfd(t, 2*page, 0)
	tab := slots(t, guestmem.MaxSlots, fd)
	for i := range guestmem.MaxSlots {
		if err := unix.Fallocate(fd, 0, 0, page); err != nil {
			t.Fatal(err)
		}
		s := slot(i)
		host, run := tab.Lookup(s.GPA+5, page)
		uva, ok := tab.LookupUVA(s.UVA+5, page-5)
		if run != page-5 || !ok || uva != host || !tab.Owns(host) {
			t.Fatalf("slot %d: %#x, %#x bytes, by front-end address %#x %v", i, host, run, uva, ok)
		}
	}
	if _, run := tab.Lookup(guestmem.MaxSlots*page, 1); run != 0 {
		t.Error("an address behind the last slot is mapped")
	}
	if _, err := tab.With(slot(guestmem.MaxSlots), fd); err == nil || !strings.Contains(err.Error(), "509") {
		t.Errorf("one more: %v", err)
	}
}

// TestMappingsLimited: guests with many slots leave mappings to the others and to the runtime.
func TestMappingsLimited(t *testing.T) {
	testmain.Long(t)
	fd := memfd(t, 2*page, 0)
	for i := range guestmem.MaxMappings / guestmem.MaxSlots {
		slots(t, guestmem.MaxSlots, fd)
		if t.Failed() {
			t.Fatal(i)
		}
	}
	rest := slots(t, guestmem.MaxMappings%guestmem.MaxSlots, fd)
	if _, err := rest.With(slot(guestmem.MaxSlots-1), fd); err == nil || !strings.Contains(err.Error(), "all together") {
		t.Errorf("one more: %v", err)
	}
}

// modelTable is a table and what it should have.
type modelTable struct {
	tab   *guestmem.Table
	specs []guestmem.RegionSpec
	files []int
}

// find is a translation in the plainest words.
func (m *modelTable) find(addr uint64, start func(guestmem.RegionSpec) uint64) int {
	return slices.IndexFunc(m.specs, func(s guestmem.RegionSpec) bool { return addr >= start(s) && addr-start(s) < s.Size })
}

func overlaps(a, an, b, bn uint64) bool { return a < b+bn && b < a+an }

// TestChangesModel makes tables from tables, closes them in any order and compares every one that lives with the plain lists.
func TestChangesModel(t *testing.T) {
	const pages = 24
	files := []int{memfd(t, pages*page, 0), memfd(t, pages*page, 0)}
	gpa := func(s guestmem.RegionSpec) uint64 { return s.GPA }
	uva := func(s guestmem.RegionSpec) uint64 { return s.UVA }
	rapid.Check(t, func(rt *rapid.T) {
		live := []*modelTable{{}}
		defer func() {
			for _, m := range live {
				if err := m.tab.Close(); err != nil {
					rt.Fatal(err)
				}
			}
			if bytes, n := guestmem.Reserved(); bytes != 0 || n != 0 {
				rt.Fatalf("%d bytes in %d mappings are counted after the end", bytes, n)
			}
		}()
		for range rapid.IntRange(1, 40).Draw(rt, "changes") {
			from := rapid.SampledFrom(live).Draw(rt, "from")
			next := &modelTable{specs: slices.Clone(from.specs), files: slices.Clone(from.files)}
			var err, want error
			if len(from.specs) > 0 && rapid.IntRange(0, 3).Draw(rt, "remove") == 0 {
				i := rapid.IntRange(0, len(from.specs)-1).Draw(rt, "which")
				next.tab, err = from.tab.Without(from.specs[i])
				next.specs, next.files = slices.Delete(next.specs, i, i+1), slices.Delete(next.files, i, i+1)
			} else {
				place := func(name string) uint64 { return page * rapid.Uint64Range(0, pages).Draw(rt, name) }
				s := guestmem.RegionSpec{GPA: place("gpa"), UVA: place("uva"), Size: page * rapid.Uint64Range(1, 3).Draw(rt, "size")}
				file := rapid.SampledFrom(files).Draw(rt, "file")
				if len(from.specs) > 0 && rapid.IntRange(0, 4).Draw(rt, "again") == 0 {
					s = rapid.SampledFrom(from.specs).Draw(rt, "known")
				}
				for i, o := range from.specs {
					if o == s && from.files[i] == file {
						want = guestmem.ErrPresent
					} else if want == nil && (overlaps(o.GPA, o.Size, s.GPA, s.Size) || overlaps(o.UVA, o.Size, s.UVA, s.Size)) {
						want = errors.ErrUnsupported
					}
				}
				next.tab, err = from.tab.With(s, file)
				next.specs, next.files = append(next.specs, s), append(next.files, file)
			}
			if (err == nil) != (want == nil) || errors.Is(want, guestmem.ErrPresent) != errors.Is(err, guestmem.ErrPresent) {
				rt.Fatalf("change of %v to %v: %v, want %v", from.specs, next.specs, err, want)
			}
			if err == nil {
				live = append(live, next)
			}
			if len(live) > 4 {
				i := rapid.IntRange(0, len(live)-1).Draw(rt, "close")
				if err := live[i].tab.Close(); err != nil {
					rt.Fatal(err)
				}
				live = slices.Delete(live, i, i+1)
			}
		}
		for _, m := range live {
			for p := range uint64(pages + 4) {
				addr := p*page + 7
				_, run := m.tab.Lookup(addr, 1)
				if i := m.find(addr, gpa); (i >= 0) != (run == 1) {
					rt.Fatalf("guest address %#x: %d bytes, in %v", addr, run, m.specs)
				}
				host, ok := m.tab.LookupUVA(addr, 1)
				i := m.find(addr, uva)
				if (i >= 0) != ok {
					rt.Fatalf("front-end address %#x: %v, in %v", addr, ok, m.specs)
				}
				if ok {
					if same, _ := m.tab.Lookup(m.specs[i].GPA+addr-m.specs[i].UVA, 1); same != host || !m.tab.Owns(host) {
						rt.Fatalf("front-end address %#x is %#x, by guest address %#x", addr, host, same)
					}
				}
			}
		}
	})
}

// BenchmarkLookup looks regions up in an order that no cursor foresees.
func BenchmarkLookup(b *testing.B) {
	fd := memfd(b, 2*page, 0)
	for _, n := range []int{1, 2, 8, 9, 32, guestmem.MaxSlots} {
		b.Run(fmt.Sprintf("regions=%d", n), func(b *testing.B) {
			tab := slots(b, n, fd)
			var addrs [1024]uint64
			x := uint64(1)
			for i := range addrs {
				x = x*6364136223846793005 + 1442695040888963407
				addrs[i] = (x >> 33) % uint64(n) * page
			}
			cursor, i := guestmem.NewCursor(tab), 0
			for b.Loop() {
				if _, run := cursor.Lookup(addrs[i&1023], 64); run != 64 {
					b.Fatal("miss")
				}
				i++
			}
		})
	}
}
