package frontend

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
)

// Region is one piece of guest memory in a memfd. Guest physical, front-end
// virtual and host addresses all differ, so that a mix-up cannot go unnoticed.
type Region struct {
	guestmem.RegionSpec
	// FD is the region's memfd, owned by the Memory.
	FD int

	file []byte // the whole mapped file; the region begins at MmapOffset
	next uint64 // allocation offset in the region
}

// Memory is the guest's memory as the front-end maps it.
type Memory struct {
	Regions []*Region
}

// uvaBase keeps the made-up front-end addresses away from guest addresses and,
// being above any user mapping of a small process, from host addresses.
const uvaBase = 0x7e00_0000_0000

// NewMemory creates one region for each size (bytes, multiple of the page size):
// the first at guest address 0, the second at 4 GiB and so on.
func NewMemory(sizes ...uint64) (*Memory, error) {
	m := &Memory{}
	for i, size := range sizes {
		spec := guestmem.RegionSpec{
			GPA:  uint64(i) << 32,
			Size: size,
			UVA:  uvaBase + uint64(i)<<36,
		}
		if _, err := m.Add(spec); err != nil {
			return nil, errors.Join(err, m.Close())
		}
	}
	return m, nil
}

// Add creates a memfd of MmapOffset+Size bytes for spec, maps it and appends the
// region.
func (m *Memory) Add(spec guestmem.RegionSpec) (*Region, error) {
	length := spec.MmapOffset + spec.Size
	fd, err := unix.MemfdCreate("vhost-user-frontend", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	if err != nil {
		return nil, fmt.Errorf("memfd: %w", err)
	}
	if err := unix.Ftruncate(fd, int64(length)); err != nil {
		return nil, errors.Join(fmt.Errorf("memfd of %d bytes: %w", length, err), unix.Close(fd))
	}
	file, err := unix.Mmap(fd, 0, int(length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("mapping %d bytes: %w", length, err), unix.Close(fd))
	}
	r := &Region{RegionSpec: spec, FD: fd, file: file}
	m.Regions = append(m.Regions, r)
	return r, nil
}

// Table returns the regions and descriptors as SET_MEM_TABLE carries them.
func (m *Memory) Table() (specs []guestmem.RegionSpec, fds []int) {
	for _, r := range m.Regions {
		specs = append(specs, r.RegionSpec)
		fds = append(fds, r.FD)
	}
	return specs, fds
}

// ErrNoMemory says that a region is full.
var ErrNoMemory = errors.New("guest memory is full")

// Alloc reserves size bytes at an alignment (a power of two) in region i, for
// good, and returns the guest address.
func (m *Memory) Alloc(i int, size, align uint64) (gpa uint64, err error) {
	r := m.Regions[i]
	start := (r.next + align - 1) &^ (align - 1)
	if start+size > r.Size {
		return 0, fmt.Errorf("%w: %d bytes in region %d of %d bytes", ErrNoMemory, size, i, r.Size)
	}
	r.next = start + size
	return r.GPA + start, nil
}

// Bytes returns n bytes of memory at a guest address, nil unless they lie in one
// region. The view is valid until Close.
func (m *Memory) Bytes(gpa, n uint64) []byte {
	r := m.find(gpa, n)
	if r == nil {
		return nil
	}
	off := r.MmapOffset + gpa - r.GPA
	return r.file[off : off+n : off+n]
}

// UVA translates a guest address to the made-up front-end address, 0 if it is not
// in a region.
func (m *Memory) UVA(gpa uint64) uint64 {
	if r := m.find(gpa, 1); r != nil {
		return r.UVA + gpa - r.GPA
	}
	return 0
}

// Host translates a guest address to where it is mapped in this process, 0 if it
// is not in a region.
func (m *Memory) Host(gpa uint64) uintptr {
	if b := m.Bytes(gpa, 1); b != nil {
		return addressOf(b)
	}
	return 0
}

func (m *Memory) find(gpa, n uint64) *Region {
	for _, r := range m.Regions {
		if off := gpa - r.GPA; off < r.Size && n <= r.Size-off {
			return r
		}
	}
	return nil
}

// Close unmaps the memory and closes the memfds. No ring over it may be used
// afterwards.
func (m *Memory) Close() error {
	var errs []error
	for _, r := range m.Regions {
		errs = append(errs, unix.Munmap(r.file), unix.Close(r.FD))
	}
	m.Regions = nil
	return errors.Join(errs...)
}
