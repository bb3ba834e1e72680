package guestmem

import "sort"

// Lookup returns the host address of gpa and how many of the n bytes from
// there on are contiguous: less than n when the region ends first. Both are 0
// when gpa is unmapped. Sums never wrap, whatever gpa and n are.
func (t *Table) Lookup(gpa, n uint64) (host uintptr, run uint64) {
	if r := t.find(gpa); r != nil {
		off := gpa - r.GPA
		return r.host + uintptr(off), min(n, r.Size-off)
	}
	return 0, 0
}

// few is the number of regions up to which a look at each is faster than a binary
// search (BenchmarkLookup).
const few = 8

func (t *Table) find(gpa uint64) *region {
	if t == nil {
		return nil
	}
	if len(t.regions) > few {
		return search(t.regions, gpa)
	}
	for i := range t.regions {
		if r := &t.regions[i]; gpa-r.GPA < r.Size {
			return r
		}
	}
	return nil
}

// search is find for many regions, in ascending order.
func search(rs []region, gpa uint64) *region {
	first, n := 0, len(rs)
	for n > 1 {
		half := n / 2
		if rs[first+half].GPA <= gpa {
			first += half
		}
		n -= half
	}
	if r := &rs[first]; gpa-r.GPA < r.Size {
		return r
	}
	return nil
}

// LookupUVA returns the host address of front-end address uva if all n bytes
// from there on lie in one region.
func (t *Table) LookupUVA(uva, n uint64) (host uintptr, ok bool) {
	r := t.findUVA(uva)
	if r == nil {
		return 0, false
	}
	off := uva - r.UVA
	return r.host + uintptr(off), n <= r.Size-off
}

func (t *Table) findUVA(uva uint64) *region {
	if t == nil {
		return nil
	}
	i := sort.Search(len(t.byUVA), func(i int) bool { return t.byUVA[i].UVA > uva })
	if i == 0 || uva-t.byUVA[i-1].UVA >= t.byUVA[i-1].Size {
		return nil
	}
	return t.byUVA[i-1]
}

// Owns reports whether host lies in one of the table's mappings, the margins
// that page rounding adds included.
func (t *Table) Owns(host uintptr) bool {
	if t == nil {
		return false
	}
	for i := range t.regions {
		m := t.regions[i].mapping
		if host-m.addr < m.length {
			return true
		}
	}
	return false
}

// Cursor remembers the region of its last hit. It belongs to one ring and is
// not safe for concurrent use. A new table needs a new Cursor.
type Cursor struct {
	gpa, size uint64
	host      uintptr
	t         *Table
}

// NewCursor returns a cursor over t; with a nil table nothing is mapped.
func NewCursor(t *Table) Cursor { return Cursor{t: t} }

// Hit returns the host address of gpa if all n bytes lie in the region of the
// last hit. It inlines to two compares; when it fails, Lookup decides.
func (c *Cursor) Hit(gpa, n uint64) (host uintptr, ok bool) {
	off := gpa - c.gpa
	return c.host + uintptr(off), off < c.size && n <= c.size-off
}

// Lookup is Table.Lookup, and remembers the region for Hit.
func (c *Cursor) Lookup(gpa, n uint64) (host uintptr, run uint64) {
	if host, ok := c.Hit(gpa, n); ok {
		return host, n
	}
	r := c.t.find(gpa)
	if r == nil {
		return 0, 0
	}
	c.gpa, c.size, c.host = r.GPA, r.Size, r.host
	off := gpa - r.GPA
	return r.host + uintptr(off), min(n, r.Size-off)
}
