package guestmem

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
)

// MaxRegions is how many regions NewTable accepts: the vhost-user
// specification's limit for VHOST_USER_SET_MEM_TABLE.
const MaxRegions = 8

// MaxSlots is how many regions a table may have that grows by With. libvhost-user takes
// as many (VHOST_USER_MAX_RAM_SLOTS), after the slots that KVM long gave a guest.
const MaxSlots = 509

// MaxBytes is how much all regions of one table may cover together. A sparse file of any
// size costs nothing, but its mapping takes addresses of this process.
const MaxBytes = 8 << 40

// RegionSpec describes one region as it travels in VHOST_USER_SET_MEM_TABLE
// and VHOST_USER_ADD_MEM_REG. All fields are in bytes.
type RegionSpec struct {
	GPA        uint64 // first guest physical address
	Size       uint64
	UVA        uint64 // first front-end virtual address
	MmapOffset uint64 // where the region starts in its file
}

// region is a mapped RegionSpec.
type region struct {
	RegionSpec
	host    uintptr // host address of the region's first byte
	mapping *mapping
}

// Table is a set of mapped regions.
type Table struct {
	regions []region  // in ascending order of guest addresses
	byUVA   []*region // in ascending order of front-end addresses
}

// RegionError says which region of a table was refused and why.
type RegionError struct {
	Index  int
	Region RegionSpec
	Reason string // what is wrong and what would be accepted
	Err    error  // the system's error, if there was one
}

func (e *RegionError) Error() string {
	s := fmt.Sprintf("guestmem: region %d (guest address %#x, size %#x, front-end address %#x, file offset %#x): %s",
		e.Index, e.Region.GPA, e.Region.Size, e.Region.UVA, e.Region.MmapOffset, e.Reason)
	if e.Err != nil {
		s += ": " + e.Err.Error()
	}
	return s
}

// Unwrap returns the system's error.
func (e *RegionError) Unwrap() error { return e.Err }

const shareHint = "give the guest shared memory, for QEMU: -object memory-backend-memfd,id=mem,size=SIZE,share=on -machine memory-backend=mem"

// NewTable validates all specs and maps each from its file, fds[i] for
// specs[i]. The file descriptors stay the caller's and may be closed at once.
// On error nothing stays mapped; an error about one region is a *RegionError.
func NewTable(specs []RegionSpec, fds []int) (*Table, error) {
	if err := checkSpecs(specs, fds); err != nil {
		return nil, err
	}
	regions := make([]region, 0, len(specs))
	for i, s := range specs {
		r, err := newRegion(s, fds[i])
		if err != nil {
			err.Index = i
			return nil, errors.Join(err, newTable(regions).Close())
		}
		regions = append(regions, r)
	}
	return newTable(regions), nil
}

// newRegion maps s, for newTable.
func newRegion(s RegionSpec, fd int) (region, *RegionError) {
	m, delta, err := mapRegion(s, fd)
	if err != nil {
		err.Region = s
		return region{}, err
	}
	return region{RegionSpec: s, host: m.addr + delta, mapping: m}, nil
}

// newTable takes over regions, and is one more user of their mappings.
func newTable(regions []region) *Table {
	slices.SortFunc(regions, func(a, b region) int { return cmp.Compare(a.GPA, b.GPA) })
	byUVA := make([]*region, len(regions))
	for i := range regions {
		regions[i].mapping.users.Add(1)
		byUVA[i] = &regions[i]
	}
	slices.SortFunc(byUVA, func(a, b *region) int { return cmp.Compare(a.UVA, b.UVA) })
	return &Table{regions: regions, byUVA: byUVA}
}

func checkSpecs(specs []RegionSpec, fds []int) error {
	switch {
	case len(specs) == 0:
		return fmt.Errorf("guestmem: the memory table is empty: no guest memory is backed by a file descriptor; %s", shareHint)
	case len(specs) > MaxRegions:
		return fmt.Errorf("guestmem: %d memory regions, at most %d are accepted", len(specs), MaxRegions)
	case len(specs) != len(fds):
		return fmt.Errorf("guestmem: %d memory regions came with %d file descriptors, each needs its own", len(specs), len(fds))
	}
	for i, s := range specs {
		if reason := s.problem(specs[:i]); reason != "" {
			return &RegionError{Index: i, Region: s, Reason: reason}
		}
	}
	return checkTotal(specs)
}

// checkTotal bounds the sizes of valid specs together, each of which is below 2^63.
func checkTotal(specs []RegionSpec) error {
	var n uint64
	for _, s := range specs {
		if n += s.Size; n > MaxBytes {
			return fmt.Errorf("guestmem: regions of %d bytes or more together, at most %d are accepted", n, uint64(MaxBytes))
		}
	}
	return nil
}

// problem says what is wrong with s by itself or next to the regions before it.
func (s RegionSpec) problem(before []RegionSpec) string {
	switch {
	case s.Size == 0:
		return "size is 0"
	case wraps(s.GPA, s.Size):
		return "guest address + size exceeds 64 bits"
	case wraps(s.UVA, s.Size):
		return "front-end address + size exceeds 64 bits"
	case s.MmapOffset > math.MaxInt64 || s.Size > math.MaxInt64-s.MmapOffset:
		return "file offset + size exceeds 63 bits"
	}
	for i, o := range before {
		if overlap(s.GPA, s.Size, o.GPA, o.Size) {
			return fmt.Sprintf("guest addresses overlap with region %d (%#x, size %#x)", i, o.GPA, o.Size)
		}
		if overlap(s.UVA, s.Size, o.UVA, o.Size) {
			return fmt.Sprintf("front-end addresses overlap with region %d (%#x, size %#x)", i, o.UVA, o.Size)
		}
	}
	return ""
}

// wraps reports whether the last of size bytes at addr lies beyond 64 bits.
func wraps(addr, size uint64) bool { return size-1 > math.MaxUint64-addr }

// overlap compares last bytes, so that ranges may end at the top of the space.
func overlap(a, an, b, bn uint64) bool { return a <= b+(bn-1) && b <= a+(an-1) }

// Close gives the table's mappings up and reports what could not be unmapped; what
// another table shares stays mapped. Further calls do nothing; a nil table may be closed.
func (t *Table) Close() error {
	if t == nil {
		return nil
	}
	var errs []error
	for i := range t.regions {
		if err := t.regions[i].mapping.release(); err != nil {
			errs = append(errs, fmt.Errorf("guestmem: unmapping the region at guest address %#x: %w", t.regions[i].GPA, err))
		}
	}
	t.regions, t.byUVA = nil, nil
	return errors.Join(errs...)
}

// Regions returns a copy of the table's regions in ascending order of guest addresses.
func (t *Table) Regions() []RegionSpec {
	if t == nil {
		return nil
	}
	specs := make([]RegionSpec, len(t.regions))
	for i := range t.regions {
		specs[i] = t.regions[i].RegionSpec
	}
	return specs
}

// Len returns the number of regions.
func (t *Table) Len() int {
	if t == nil {
		return 0
	}
	return len(t.regions)
}
