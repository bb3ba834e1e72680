package guestmem

import (
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

const (
	arrivalPage  = 4096
	arrivalPages = 1300 // more than two chunks, and no whole number of them
	arrivalGPA   = 1 << 32
)

// newArrivalTable has one region, which begins 3 pages and 16 bytes into its file.
func newArrivalTable(t testing.TB) *Table {
	t.Helper()
	fd, err := unix.MemfdCreate("arrival", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	spec := RegionSpec{GPA: arrivalGPA, Size: arrivalPages*arrivalPage - 16, UVA: 1 << 40, MmapOffset: 3*arrivalPage + 16}
	if err := unix.Ftruncate(fd, int64(spec.MmapOffset+spec.Size)); err != nil {
		t.Fatal(err)
	}
	table, err := NewTable([]RegionSpec{spec}, []int{fd})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { table.Close() })
	return table
}

// newTestArrival awaits the table's region.
func newTestArrival(t testing.TB) (a *Arrival, table *Table, part Part, notified *int) {
	t.Helper()
	notified = new(int)
	table = newArrivalTable(t)
	a = NewArrival(func() { *notified++ })
	part, fresh := a.Await(table, arrivalGPA)
	if !fresh || part.Start != 3*arrivalPage || part.Head != 16 || part.Length != arrivalPages*arrivalPage {
		t.Fatalf("part %+v, fresh %v", part, fresh)
	}
	if again, fresh := a.Await(table, arrivalGPA); fresh || again != part {
		t.Fatalf("again: part %+v, fresh %v", again, fresh)
	}
	a.SetTable(table)
	return a, table, part, notified
}

// TestArrivalModel compares with a set of pages.
func TestArrivalModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		a, table, part, _ := newTestArrival(t)
		var there [arrivalPages]bool
		asked := map[uint64]bool{}
		page := rapid.Uint64Range(0, arrivalPages-1)
		rt.Repeat(map[string]func(*rapid.T){
			"arrive": func(rt *rapid.T) {
				p, ok := a.Next()
				if !ok {
					return
				}
				n := p.Offset / arrivalPage
				if p.Part != part.Number || p.Size != arrivalPage || there[n] || !asked[n] {
					rt.Fatalf("page %+v is fetched; there %v, asked for %v", p, there[n], asked[n])
				}
				var around [8]uint64
				for i := range around {
					around[i] = rapid.Uint64().Draw(rt, "around") & rapid.Uint64().Draw(rt, "mask")
				}
				a.Arrived(p, around)
				there[n] = true
				delete(asked, n)
				for i := range uint64(512) {
					if q := n&^511 + i; q < arrivalPages && around[i/64]>>(i%64)&1 != 0 {
						there[q] = true
					}
				}
				for q := range asked {
					if there[q] {
						delete(asked, q) // it is not fetched any more
					}
				}
			},
			"nobody asked": func(rt *rapid.T) {
				p := page.Draw(rt, "page")
				if !asked[p] && !there[p] {
					if a.Arrived(Page{Part: part.Number, Offset: p * arrivalPage, Size: arrivalPage}, [8]uint64{0: 1}) {
						rt.Fatal("a page counts as arrived that nobody fetched")
					}
				}
			},
			"look": func(rt *rapid.T) {
				p := page.Draw(rt, "page")
				addr := max(arrivalGPA, arrivalGPA+p*arrivalPage-16)
				m, outcome := a.Translate(addr, rapid.Bool().Draw(rt, "write"))
				if (outcome == Mapped) != there[p] {
					rt.Fatalf("page %d there %v, outcome %v", p, there[p], outcome)
				}
				if outcome != Mapped {
					return
				}
				if host, _ := table.Lookup(addr, 1); m.Host+uintptr(addr-m.Addr) != host {
					rt.Fatalf("page %d: %+v, host %#x", p, m, host)
				}
				for at := m.Addr; at < m.Addr+m.Size; at += 8 {
					if q := (at - arrivalGPA + 16) / arrivalPage; !there[q] {
						rt.Fatalf("%+v covers page %d, which is missing", m, q)
					}
				}
			},
			"want": func(rt *rapid.T) {
				p := page.Draw(rt, "page")
				n := rapid.Uint64Range(1, 40*arrivalPage).Draw(rt, "bytes")
				addr := max(arrivalGPA, arrivalGPA+p*arrivalPage-16)
				if now := a.Want(addr, n, false); now != there[p] {
					rt.Fatalf("page %d there %v, now %v", p, there[p], now)
				}
				first := (addr - arrivalGPA + 16) / arrivalPage
				last := min((addr-arrivalGPA+16+n-1)/arrivalPage, first+wantPages-1, arrivalPages-1)
				for q := first; q <= last; q++ {
					if !there[q] {
						asked[q] = true
					}
				}
			},
			"hold": func(rt *rapid.T) {
				p := page.Draw(rt, "page")
				n := rapid.Uint64Range(1, (arrivalPages-p)*arrivalPage).Draw(rt, "bytes")
				addr := max(arrivalGPA, arrivalGPA+p*arrivalPage-16)
				n = min(n, arrivalGPA+table.regions[0].Size-addr)
				host, _ := table.Lookup(addr, n)
				all := true
				for q := (addr - arrivalGPA + 16) / arrivalPage; q <= (addr-arrivalGPA+16+n-1)/arrivalPage; q++ {
					if !there[q] {
						all, asked[q] = false, true
					}
				}
				if got := a.Holds(host, n); got != all {
					rt.Fatalf("%d bytes from page %d: held %v, expected %v", n, p, got, all)
				}
			},
		})
		if err := table.Close(); err != nil {
			rt.Fatal(err)
		}
	})
}

func TestArrivalOutsideAndAfterwards(t *testing.T) {
	a, table, part, notified := newTestArrival(t)
	if _, outcome := a.Translate(5, false); outcome != Unmapped {
		t.Errorf("outside: %v", outcome)
	}
	if !a.Want(5, 1, false) {
		t.Error("what is not mapped is waited for")
	}
	if a.Want(arrivalGPA, 1, true) || *notified != 1 {
		t.Errorf("notified %d times", *notified)
	}
	a.End()
	if m, outcome := a.Translate(arrivalGPA+1<<20, false); outcome != Mapped || m.Size != table.regions[0].Size {
		t.Errorf("after the end: %+v, %v", m, outcome)
	}
	if _, ok := a.Next(); ok {
		t.Error("a page is fetched after the end")
	}
	a.Arrived(Page{Part: part.Number, Size: arrivalPage}, [8]uint64{})
}

// TestArrivalIsBounded has a guest that wants everything, of which nothing comes.
func TestArrivalIsBounded(t *testing.T) {
	a, _, part, _ := newTestArrival(t)
	for p := range uint64(arrivalPages) {
		a.Want(arrivalGPA+p*arrivalPage, arrivalPage, false)
	}
	fetching := 0
	for {
		if _, ok := a.Next(); !ok {
			break
		}
		fetching++
	}
	if fetching != maxFetching || len(a.open) > maxWanted {
		t.Errorf("%d pages are being fetched, %d wanted", fetching, len(a.open))
	}
	a.SetTable(nil)
	if gone := a.Drop(); len(gone) != 1 || gone[0] != part.Number || len(a.open)+len(a.wanted) != 0 {
		t.Errorf("gone %v, open %d", gone, len(a.open))
	}
}

// TestArrivalBehindAnIOMMU asks the IOTLB first, and finds no more than both know.
func TestArrivalBehindAnIOMMU(t *testing.T) {
	a, table, _, _ := newTestArrival(t)
	misses := 0
	tlb := NewIOTLB(table, func() { misses++ })
	a.SetBehind(tlb)
	const iova = 0x7000_0000
	if _, outcome := a.Translate(iova, false); outcome != Missing || a.Want(iova, 8, false) || misses != 1 {
		t.Fatalf("outcome %v, %d questions", outcome, misses)
	}
	if _, err := tlb.Update(iova, arrivalPage, table.regions[0].UVA+arrivalPage-16, PermRead|PermWrite); err != nil {
		t.Fatal(err)
	}
	if _, outcome := a.Translate(iova, false); outcome != Missing || a.Want(iova, 8, false) {
		t.Fatalf("outcome %v", outcome)
	}
	p, ok := a.Next()
	if !ok || p.Offset != arrivalPage {
		t.Fatalf("page %+v, %v", p, ok)
	}
	a.Arrived(p, [8]uint64{0: 0xf})
	m, outcome := a.Translate(iova+8, true)
	if host, _ := table.Lookup(arrivalGPA+arrivalPage-16, 1); outcome != Mapped || m != (Mapping{Addr: iova, Size: arrivalPage, Host: host}) {
		t.Fatalf("%+v, %v", m, outcome)
	}
}
