package guestmem

import (
	"errors"
	"fmt"
	"slices"
)

// ErrPresent says that a table has the region already, mapped from the same file.
var ErrPresent = errors.New("guestmem: the region is in the table already")

// ErrAbsent says that a table does not have the region.
var ErrAbsent = errors.New("guestmem: no such region in the table")

// With returns a table that has the region s of file fd in addition. It shares the
// mappings of t, and each of the two is closed for itself, in any order. The file
// descriptor stays the caller's and may be closed at once; t may be nil or closed. The
// region is judged as NewTable does, *RegionError included; if exactly s of the same file
// is there already, the error is ErrPresent.
func (t *Table) With(s RegionSpec, fd int) (*Table, error) {
	before := t.Regions()
	if i := slices.Index(before, s); i >= 0 && t.regions[i].mapping.is(fd) {
		return nil, ErrPresent
	}
	if len(before) >= MaxSlots {
		return nil, fmt.Errorf("guestmem: the table has %d memory regions, and no more are accepted", len(before))
	}
	if reason := s.problem(before); reason != "" {
		return nil, &RegionError{Index: len(before), Region: s, Reason: reason}
	}
	if err := checkTotal(append(before, s)); err != nil {
		return nil, err
	}
	r, err := newRegion(s, fd)
	if err != nil {
		err.Index = len(before)
		return nil, err
	}
	return newTable(append(t.shared(), r)), nil
}

// Without returns a table that lacks the region of t with the addresses and the size of
// s; the offset in the file does not matter. It may have no region left. It shares the
// other mappings of t as With does. If there is no such region the error is ErrAbsent.
func (t *Table) Without(s RegionSpec) (*Table, error) {
	regions := t.shared()
	i := slices.IndexFunc(regions, func(r region) bool { return r.GPA == s.GPA && r.UVA == s.UVA && r.Size == s.Size })
	if i < 0 {
		return nil, ErrAbsent
	}
	return newTable(slices.Delete(regions, i, i+1)), nil
}

// shared returns a copy of the regions for another table.
func (t *Table) shared() []region {
	if t == nil {
		return nil
	}
	return slices.Clone(t.regions)
}
