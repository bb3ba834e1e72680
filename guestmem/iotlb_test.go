package guestmem_test

import (
	"encoding/binary"
	"math"
	"testing"

	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/guestmem"
)

// Front-end addresses of the IOTLB tests: a and b are neighbors there and apart in guest addresses, with a hole behind b.
const (
	uvaA = 0x7f0000000000
	uvaB = uvaA + 16*page
	gpaA = 0x100000
	gpaB = 0x900000
)

func iotlbTable(t testing.TB) *guestmem.Table {
	return table(t, []guestmem.RegionSpec{{GPA: gpaA, Size: 16 * page, UVA: uvaA}, {GPA: gpaB, Size: 16 * page, UVA: uvaB}},
		memfd(t, 16*page, 0), memfd(t, 16*page, 0))
}

func newIOTLB(t testing.TB) (*guestmem.IOTLB, *guestmem.Table) {
	tab := iotlbTable(t)
	return guestmem.NewIOTLB(tab, func() {}), tab
}

func update(t testing.TB, x *guestmem.IOTLB, iova, size, uva uint64, perm uint8) (replaced bool) {
	t.Helper()
	replaced, err := x.Update(iova, size, uva, perm)
	if err != nil {
		t.Fatal(err)
	}
	return replaced
}

// host is where the IOTLB finds addr, 0 if it does not.
func find(x *guestmem.IOTLB, addr uint64, write bool) uintptr {
	m, outcome := x.Translate(addr, write)
	if outcome != guestmem.Mapped {
		return 0
	}
	return m.Host + uintptr(addr-m.Addr)
}

// C75: what makes no sense is refused and changes nothing.
func TestC75_IOTLBRefuses(t *testing.T) {
	x, _ := newIOTLB(t)
	for _, c := range []struct {
		name            string
		iova, size, uva uint64
		perm            uint8
	}{
		{"no bytes", page, 0, uvaA, 3},
		{"IOVA wraps", math.MaxUint64 - page + 2, page, uvaA, 3},
		{"front-end address wraps", page, page, math.MaxUint64 - 10, 3},
		{"outside the table", page, page, 0x1000, 3},
		{"into the hole", page, 17 * page, uvaB, 3},
		{"all there is", 0, math.MaxUint64, 0, 3},
		{"no rights", page, page, uvaA, 0},
		{"unknown rights", page, page, uvaA, 4},
		{"unknown rights beside known ones", page, page, uvaA, 7},
	} {
		if _, err := x.Update(c.iova, c.size, c.uva, c.perm); err == nil {
			t.Errorf("%s is accepted", c.name)
		}
		if x.Len() != 0 {
			t.Fatalf("%s left something", c.name)
		}
	}
	update(t, x, math.MaxUint64-page+1, page, uvaA, 3)
	if find(x, math.MaxUint64, true) == 0 {
		t.Error("the last address is not translated")
	}
}

func TestIOTLBRights(t *testing.T) {
	x, tab := newIOTLB(t)
	host, _ := tab.Lookup(gpaA, 1)
	for i, perm := range []uint8{1, 2, 3} {
		iova := uint64(i) << 20
		update(t, x, iova, page, uvaA, perm)
		for _, write := range []bool{false, true} {
			want := uintptr(0)
			if perm&map[bool]uint8{false: 1, true: 2}[write] != 0 {
				want = host + 5
			}
			if got := find(x, iova+5, write); got != want {
				t.Errorf("rights %d, write %v: %#x, want %#x", perm, write, got, want)
			}
		}
	}
}

// An entry over two regions becomes two, and an area has to be in one piece.
func TestIOTLBOverRegions(t *testing.T) {
	x, tab := newIOTLB(t)
	update(t, x, 0x5000, 32*page, uvaA, 3)
	a, _ := tab.Lookup(gpaA, 1)
	b, _ := tab.Lookup(gpaB, 1)
	if x.Len() != 2 || find(x, 0x5000, true) != a || find(x, 0x5000+16*page, true) != b {
		t.Errorf("%d entries, at %#x and %#x, want 2, %#x and %#x", x.Len(), find(x, 0x5000, true), find(x, 0x5000+16*page, true), a, b)
	}
	if host, _, o := x.Area(0x5000+8, 16*page-8, true); o != guestmem.Mapped || host != a+8 {
		t.Errorf("an area inside a region: %#x, %v", host, o)
	}
	_, _, o := x.Area(0x5000, 16*page+1, true)
	if want := b == a+16*page; (o == guestmem.Mapped) != want {
		t.Errorf("an area over two regions: %v", o)
	}
	if _, missing, o := x.Area(0x5000+31*page, 2*page, true); o != guestmem.Missing || missing != 0x5000+32*page {
		t.Errorf("an area whose end is not known: missing %#x, %v", missing, o)
	}
	if _, _, o := x.Area(math.MaxUint64, 2, true); o != guestmem.Unmapped {
		t.Errorf("an area around the last address: %v", o)
	}
	// Pages the other way round: known, and never in one piece.
	update(t, x, 0x100000, page, uvaA+page, 3)
	update(t, x, 0x100000+page, page, uvaA, 3)
	if _, _, o := x.Area(0x100000, 2*page, false); o != guestmem.Unmapped {
		t.Errorf("an area of pages in another order: %v", o)
	}
}

// A24: the log address of a ring is an IOVA; what is not translated has no guest address.
func TestA24_IOTLBGuestAddresses(t *testing.T) {
	x, _ := newIOTLB(t)
	update(t, x, 0xfffff000, page, uvaB+3*page, 3)
	if gpa, ok := x.GPA(0xfffff240); !ok || gpa != gpaB+3*page+0x240 {
		t.Errorf("guest address %#x, %v", gpa, ok)
	}
	for _, iova := range []uint64{0, 0xffffefff, 0x100000000, math.MaxUint64} {
		if gpa, ok := x.GPA(iova); ok {
			t.Errorf("%#x has guest address %#x", iova, gpa)
		}
	}
}

// An update says whether the rings have to forget something.
func TestIOTLBReplaced(t *testing.T) {
	x, _ := newIOTLB(t)
	for _, c := range []struct {
		name            string
		iova, size, uva uint64
		perm            uint8
		replaced        bool
	}{
		{"first", 0x10000, 4 * page, uvaA, 3, false},
		{"the same", 0x10000, 4 * page, uvaA, 3, false},
		{"a part of it", 0x10000 + page, page, uvaA + page, 3, false},
		{"less rights", 0x10000 + page, page, uvaA + page, 1, true},
		{"more rights", 0x10000 + page, page, uvaA + page, 3, false},
		{"elsewhere", 0x10000 + page, page, uvaA + 5*page, 3, true},
		{"beside", 0x10000 + 4*page, page, uvaA, 3, false},
	} {
		if got := update(t, x, c.iova, c.size, c.uva, c.perm); got != c.replaced {
			t.Errorf("%s: replaced %v", c.name, got)
		}
	}
}

// A new table keeps the entries whose memory stays where it is.
func TestIOTLBFollowsTheTable(t *testing.T) {
	x, tab := newIOTLB(t)
	update(t, x, 0, 16*page, uvaA, 3)
	update(t, x, 16*page, 16*page, uvaB, 3)
	less, err := tab.Without(guestmem.RegionSpec{GPA: gpaB, Size: 16 * page, UVA: uvaB})
	if err != nil {
		t.Fatal(err)
	}
	defer less.Close()
	x.SetTable(less)
	if find(x, 0, true) == 0 || find(x, 16*page, true) != 0 {
		t.Error("removing one region must forget what lies in it and nothing else")
	}
	x.SetTable(iotlbTable(t))
	if x.Len() != 0 {
		t.Error("entries survived a table with other mappings")
	}
	x.SetTable(nil)
	if _, err := x.Update(0, page, uvaA, 3); err == nil {
		t.Error("an entry without any memory is accepted")
	}
}

// However many entries come, a bounded number is kept, the newest among them, and none so briefly that the longest chain
// could not be completed.
func TestIOTLBIsBounded(t *testing.T) {
	x, _ := newIOTLB(t)
	for i := range uint64(3 * guestmem.MaxIOTLB) {
		update(t, x, i*2*page, page, uvaA+i%16*page, 3)
		if x.Len() > guestmem.MaxIOTLB {
			t.Fatalf("%d entries", x.Len())
		}
		if old := i - 2000; i > 2000 && find(x, old*2*page, true) == 0 {
			t.Fatalf("entry %d is gone after 2000 others", old)
		}
	}
	// Holes in one entry make many of one.
	x, _ = newIOTLB(t)
	update(t, x, 0, 16*page, uvaA, 3)
	for i := range uint64(3 * guestmem.MaxIOTLB) {
		x.Invalidate(1+2*i%(16*page), 1)
		if x.Len() > guestmem.MaxIOTLB {
			t.Fatalf("%d entries by holes", x.Len())
		}
	}
	update(t, x, 1<<40, page, uvaA, 3)
	if find(x, 1<<40, true) == 0 {
		t.Error("a new entry is gone at once")
	}
}

func TestQuestions(t *testing.T) {
	calls := 0
	x := guestmem.NewIOTLB(iotlbTable(t), func() { calls++ })
	next := func(want ...guestmem.Question) {
		t.Helper()
		for _, w := range want {
			if q, ok := x.Next(); !ok || q != w {
				t.Fatalf("next question %+v, %v, want %+v", q, ok, w)
			}
		}
		if q, ok := x.Next(); ok {
			t.Fatalf("one question too many: %+v", q)
		}
	}
	q := func(addr uint64, write bool) guestmem.Question { return guestmem.Question{Addr: addr, Write: write} }
	for range 3 {
		if x.Want(5, 1, true) || x.Want(5, 1, false) {
			t.Fatal("an answer out of nothing")
		}
	}
	next(q(5, true), q(5, false))
	if calls != 2 {
		t.Errorf("%d calls for two questions", calls)
	}
	x.PutAgain()
	next(q(5, true), q(5, false))
	update(t, x, 0, page, uvaA, 1) // answers the one for reading
	if x.Want(5, 1, true) || !x.Want(5, 1, false) {
		t.Error("an entry for reading is not one for writing")
	}
	next() // the other one was put, and had its answer
	x.Invalidate(0, page)
	x.Want(5, 1, true)
	next(q(5, true))
	update(t, x, 0, page, uvaA, 3)
	x.PutAgain()
	next()
	for i := range uint64(5000) {
		x.Want(1<<30+i*page, 1, false)
	}
	n := 0
	for _, ok := x.Next(); ok; _, ok = x.Next() {
		n++
	}
	if n == 0 || n > 1024 {
		t.Errorf("%d questions are kept", n)
	}
}

// naive is an IOTLB byte by byte.
type naive map[uint64]struct {
	uva  uint64
	perm uint8
}

const iotlbSpace = 40 // units in the model test

func iotlbUnit(i int) uint64 { return uint64(i) * 100 }

// TestIOTLBModel compares with a plain map after every message.
func TestIOTLBModel(t *testing.T) {
	tab := iotlbTable(t)
	rapid.Check(t, func(rt *rapid.T) {
		x, m := guestmem.NewIOTLB(tab, func() {}), naive{}
		for range rapid.IntRange(1, 40).Draw(rt, "messages") {
			from := rapid.IntRange(0, iotlbSpace-1).Draw(rt, "from")
			n := rapid.IntRange(1, 12).Draw(rt, "n")
			if rapid.Bool().Draw(rt, "update") {
				uva := uvaA + iotlbUnit(rapid.IntRange(0, 2*16*page/100+20).Draw(rt, "uva"))
				perm := uint8(rapid.IntRange(0, 4).Draw(rt, "perm"))
				end := uva + iotlbUnit(n)
				bad := perm == 0 || perm == 4 || end > uvaB+16*page
				if _, err := x.Update(iotlbUnit(from), iotlbUnit(n), uva, perm); (err != nil) != bad {
					rt.Fatalf("update: %v, bad %v", err, bad)
				} else if bad {
					continue
				}
				for i := range iotlbUnit(n) {
					e := m[0]
					e.uva, e.perm = uva+i, perm
					m[iotlbUnit(from)+i] = e
				}
			} else {
				size := rapid.SampledFrom([]uint64{iotlbUnit(n), 0, math.MaxUint64}).Draw(rt, "size")
				x.Invalidate(iotlbUnit(from), size)
				for a := range m {
					if a >= iotlbUnit(from) && (size != iotlbUnit(n) || a < iotlbUnit(from+n)) {
						delete(m, a)
					}
				}
			}
			m.compare(rt, x, tab)
		}
	})
}

func (m naive) compare(rt *rapid.T, x *guestmem.IOTLB, tab *guestmem.Table) {
	for i := range iotlbSpace + 12 {
		for _, a := range []uint64{iotlbUnit(i), iotlbUnit(i) + 99} {
			e := m[a]
			for _, write := range []bool{false, true} {
				want := uintptr(0)
				if e.perm&map[bool]uint8{false: 1, true: 2}[write] != 0 {
					want, _ = tab.LookupUVA(e.uva, 1)
				}
				if got := find(x, a, write); got != want {
					rt.Fatalf("%#x, write %v: %#x, want %#x", a, write, got, want)
				}
			}
		}
	}
}

// FuzzIOTLB: whatever is updated and invalidated, nothing outside the table is handed out, and the entries stay few.
func FuzzIOTLB(f *testing.F) {
	tab := iotlbTable(f)
	message := func(kind byte, iova, size, uva uint64, perm byte) []byte {
		b := append([]byte{kind}, binary.LittleEndian.AppendUint64(nil, iova)...)
		b = binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(b, size), uva)
		return append(b, perm)
	}
	f.Add(append(message(0, 0x5000, 32*page, uvaA, 3), message(1, 0x6000, page, 0, 0)...))
	f.Add(append(message(0, math.MaxUint64-page+1, page, uvaA, 1), message(1, 0, math.MaxUint64, 0, 0)...))
	f.Fuzz(func(t *testing.T, in []byte) {
		x := guestmem.NewIOTLB(tab, func() {})
		for ; len(in) >= 26; in = in[26:] {
			iova, size, uva := binary.LittleEndian.Uint64(in[1:]), binary.LittleEndian.Uint64(in[9:]), binary.LittleEndian.Uint64(in[17:])
			if in[0]&1 == 0 {
				_, _ = x.Update(iova, size, uva, in[25])
			} else {
				x.Invalidate(iova, size)
			}
			for _, a := range []uint64{iova, iova - 1, iova + size, iova + size - 1, 0, math.MaxUint64} {
				x.Want(a, size, true)
				m, outcome := x.Translate(a, false)
				if outcome != guestmem.Mapped {
					continue
				}
				if a-m.Addr >= m.Size || !tab.Owns(m.Host) || !tab.Owns(m.Host+uintptr(m.Size-1)) {
					t.Fatalf("%#x is in %+v, outside of memory", a, m)
				}
			}
		}
		if x.Len() > guestmem.MaxIOTLB {
			t.Fatalf("%d entries", x.Len())
		}
	})
}
