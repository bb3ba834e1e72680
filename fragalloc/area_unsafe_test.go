package fragalloc

import (
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// area is mapped memory between two guard pages: an access outside it faults.
type area struct {
	base  uintptr
	bytes []byte
}

// newArea maps n bytes, a multiple of the page size, of a memfd, and returns the
// file for tests that truncate it. Both go away with the test.
func newArea(t testing.TB, n int) (area, int) {
	t.Helper()
	const page = 4096
	fd, err := unix.MemfdCreate("fragalloc-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Ftruncate(fd, int64(n)); err != nil {
		t.Fatal(err)
	}
	outer, err := unix.MmapPtr(-1, 0, nil, uintptr(n+2*page), unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.MunmapPtr(outer, uintptr(n+2*page)); err != nil {
			t.Error(err)
		}
	})
	// SAFETY: the page after the first guard page starts n bytes of the mapping just made.
	want := unsafe.Add(outer, page)
	got, err := unix.MmapPtr(fd, 0, want, uintptr(n), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
	if err != nil {
		t.Fatal(err)
	}
	// SAFETY: n bytes are mapped at got until the end of the test.
	return area{uintptr(got), unsafe.Slice((*byte)(got), n)}, fd
}
