package guestmem_test

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/internal/testmain"
)

func TestSpecsRefused(t *testing.T) {
	one := guestmem.RegionSpec{GPA: 0x10000, Size: page, UVA: 0x7f0000000000}
	at := func(change func(*guestmem.RegionSpec)) guestmem.RegionSpec {
		s := one
		change(&s)
		return s
	}
	many := make([]guestmem.RegionSpec, guestmem.MaxRegions+1)
	for i := range many {
		many[i] = guestmem.RegionSpec{GPA: uint64(i) * page, Size: page, UVA: uint64(i) * page}
	}
	for _, c := range []struct {
		name  string
		specs []guestmem.RegionSpec
		fds   int // -1: one each
		want  string
	}{
		{"no region", nil, -1, "share=on"},
		{"nine regions", many, -1, "at most 8"},
		{"fd missing", []guestmem.RegionSpec{one}, 0, "1 memory regions came with 0 file descriptors"},
		{"fd too many", []guestmem.RegionSpec{one}, 2, "came with 2"},
		{"size 0", []guestmem.RegionSpec{at(func(s *guestmem.RegionSpec) { s.Size = 0 })}, -1, "size is 0"},
		{"guest address wraps", []guestmem.RegionSpec{at(func(s *guestmem.RegionSpec) { s.GPA = math.MaxUint64 - page + 2 })}, -1, "guest address + size"},
		{"front-end address wraps", []guestmem.RegionSpec{at(func(s *guestmem.RegionSpec) { s.UVA = math.MaxUint64 - page + 2 })}, -1, "front-end address + size"},
		{"offset wraps", []guestmem.RegionSpec{at(func(s *guestmem.RegionSpec) { s.MmapOffset = math.MaxUint64 - page + 2 })}, -1, "file offset + size"},
		{"offset beyond 63 bits", []guestmem.RegionSpec{at(func(s *guestmem.RegionSpec) { s.MmapOffset = math.MaxInt64 - page + 1 })}, -1, "file offset + size"},
		{"whole address space", []guestmem.RegionSpec{{Size: math.MaxUint64}}, -1, "file offset + size"},
		{"guest addresses overlap", []guestmem.RegionSpec{one, at(func(s *guestmem.RegionSpec) { s.GPA += page - 1; s.UVA = 0 })}, -1, "guest addresses overlap with region 0"},
		{"same guest address", []guestmem.RegionSpec{one, at(func(s *guestmem.RegionSpec) { s.UVA = 0 })}, -1, "guest addresses overlap"},
		{"front-end addresses overlap", []guestmem.RegionSpec{one, at(func(s *guestmem.RegionSpec) { s.GPA = 0; s.UVA -= page - 1 })}, -1, "front-end addresses overlap"},
		{"overlap at the top", []guestmem.RegionSpec{{GPA: math.MaxUint64 - 2*page + 1, Size: 2 * page}, {GPA: math.MaxUint64 - page + 1, Size: page, UVA: 1 << 40}}, -1, "guest addresses overlap"},
		{"overlap below the top", []guestmem.RegionSpec{{GPA: math.MaxUint64 - page + 1, Size: page}, {GPA: math.MaxUint64 - 2*page + 1, Size: 2 * page, UVA: 1 << 40}}, -1, "guest addresses overlap"},
		{"file too small", []guestmem.RegionSpec{at(func(s *guestmem.RegionSpec) { s.MmapOffset = 15*page + 1 })}, -1, "the file has 0x10000 bytes, the region ends at 0x10001"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.fds < 0 {
				c.fds = len(c.specs)
			}
			var fds []int
			for range c.fds {
				fds = append(fds, memfd(t, 16*page, 0))
			}
			tab, err := guestmem.NewTable(c.specs, fds)
			if err == nil {
				tab.Close()
			}
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("error %v, want %q", err, c.want)
			}
		})
	}
}

func TestFilesRefused(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "mem")
	if err := os.WriteFile(path, make([]byte, page), 0o600); err != nil {
		t.Fatal(err)
	}
	open := func(path string, flags int) int {
		fd, err := unix.Open(path, flags|unix.O_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(pipe[0]); unix.Close(pipe[1]) })
	sealed := memfd(t, page, 0)
	if _, err := unix.FcntlInt(uintptr(sealed), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name string
		fd   int
		want string
	}{
		{"read-only", open(path, unix.O_RDONLY), "not open for reading and writing"},
		{"write-only", open(path, unix.O_WRONLY), "not open for reading and writing"},
		{"path only", open(path, unix.O_PATH), "not open for reading and writing"},
		{"directory", open(dir, unix.O_RDONLY|unix.O_DIRECTORY), "is a directory"},
		{"pipe", pipe[0], "is a pipe"},
		{"device", open("/dev/zero", unix.O_RDWR), "is a character device"},
		{"sealed against writing", sealed, "F_SEAL_WRITE"},
		{"not a descriptor", -1, "fstat"},
	} {
		good := memfd(t, page, 0)
		specs := []guestmem.RegionSpec{{GPA: page, Size: page, UVA: page}, {Size: page}}
		_, err := guestmem.NewTable(specs, []int{good, c.fd})
		var region *guestmem.RegionError
		if !errors.As(err, &region) || region.Index != 1 || region.Region != specs[1] || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want region 1 and %q", c.name, err, c.want)
		}
	}
}

func TestSealedAgainstResizing(t *testing.T) {
	fd := memfd(t, page, 0)
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW|unix.F_SEAL_SEAL); err != nil {
		t.Fatal(err)
	}
	table(t, []guestmem.RegionSpec{{Size: page}}, fd)
}

// The mapping shows the bytes of the file at the offset, whatever its
// alignment, and outlives the file descriptor.
func TestOffsets(t *testing.T) {
	for _, off := range []uint64{0, 1, 8, page - 1, page, page + 1, 3*page + 100} {
		fd := memfd(t, 8*page, 0)
		content := make([]byte, 8*page)
		for i := range content {
			content[i] = byte(i ^ i>>8)
		}
		if _, err := unix.Pwrite(fd, content, 0); err != nil {
			t.Fatal(err)
		}
		spec := guestmem.RegionSpec{GPA: 0x100000, Size: 2*page + 10, UVA: 0x7f0000000000, MmapOffset: off}
		tab := table(t, []guestmem.RegionSpec{spec}, fd)
		host, run := tab.Lookup(spec.GPA, spec.Size)
		if run != spec.Size {
			t.Fatalf("offset %#x: %#x bytes are mapped", off, run)
		}
		got := bytesAt(host, int(spec.Size))
		if diff := cmp.Diff(content[off:off+spec.Size], got); diff != "" {
			t.Errorf("offset %#x: other bytes", off)
		}
		got[5] = 0xee
		var b [1]byte
		if _, err := unix.Pread(fd, b[:], int64(off)+5); err != nil || b[0] != 0xee {
			t.Errorf("offset %#x: the file has %#x, %v", off, b[0], err)
		}
		if diff := cmp.Diff([]guestmem.RegionSpec{spec}, tab.Regions()); diff != "" {
			t.Error(diff)
		}
	}
}

// MEM-09: a length that is not whole huge pages is unmapped completely.
func TestHugePages(t *testing.T) {
	const huge = 2 << 20
	testmain.Hugepages(t, 2)
	fd, err := unix.MemfdCreate("guestmem-test", unix.MFD_CLOEXEC|unix.MFD_HUGETLB|unix.MFD_HUGE_2MB)
	if err != nil {
		testmain.Skip(t, "hugetlb memfd: %v", err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, 2*huge); err != nil {
		testmain.Skip(t, "hugetlb file: %v", err)
	}
	probe, err := unix.Mmap(fd, 0, huge, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Skipf("not applicable: a whole huge page cannot be mapped, as under user-mode emulation: %v", err)
	}
	if err := unix.Munmap(probe); err != nil {
		t.Fatal(err)
	}
	for _, off := range []uint64{0, page, huge, huge + 12} {
		leak := testmain.Mappings("memfd:guestmem-test")
		tab, err := guestmem.NewTable([]guestmem.RegionSpec{{Size: huge - page, MmapOffset: off}}, []int{fd})
		if err != nil {
			t.Fatal(err)
		}
		if err := tab.Close(); err != nil {
			t.Errorf("offset %#x: %v", off, err)
		}
		if err := leak(); err != nil {
			t.Errorf("offset %#x: %v", off, err)
		}
	}
}

// MEM-11: no mapping survives Close, nor a table that could not be made.
func TestMappingsStayFlat(t *testing.T) {
	leak := testmain.Mappings("memfd:guestmem-test")
	good, small := memfd(t, 4*page, 0), memfd(t, page, 0)
	specs := []guestmem.RegionSpec{
		{GPA: 0, Size: page, UVA: 0},
		{GPA: page, Size: page, UVA: page, MmapOffset: page},
		{GPA: 2 * page, Size: 2 * page, UVA: 2 * page, MmapOffset: 2 * page},
	}
	for range 200 {
		tab, err := guestmem.NewTable(specs, []int{good, good, good})
		if err != nil {
			t.Fatal(err)
		}
		host, _ := tab.Lookup(0, 1)
		if err := errors.Join(tab.Close(), tab.Close()); err != nil {
			t.Fatal(err)
		}
		if _, run := tab.Lookup(0, 1); run != 0 || tab.Owns(host) {
			t.Fatal("a closed table still translates")
		}
		if _, err := guestmem.NewTable(specs, []int{good, good, small}); err == nil {
			t.Fatal("file too small, no error")
		}
	}
	if err := leak(); err != nil {
		t.Error(err)
	}
	var none *guestmem.Table
	if err := none.Close(); err != nil || none.Regions() != nil || none.Owns(0) {
		t.Error("a nil table is not an empty one")
	}
}

func ExampleRegionError() {
	_, err := guestmem.NewTable([]guestmem.RegionSpec{{GPA: 0x1000, UVA: 0x2000}}, []int{0})
	fmt.Println(err)
	// Output: guestmem: region 0 (guest address 0x1000, size 0x0, front-end address 0x2000, file offset 0x0): size is 0
}
