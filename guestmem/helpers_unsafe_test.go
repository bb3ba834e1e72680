package guestmem_test

import (
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/internal/testmain"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("memfd:guestmem-test"), testmain.Goroutines()))
}

const page = 4096

// memfd returns a file of size bytes that is closed with the test.
func memfd(t testing.TB, size int64, flags int) int {
	t.Helper()
	fd, err := unix.MemfdCreate("guestmem-test", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING|flags)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	return fd
}

func table(t testing.TB, specs []guestmem.RegionSpec, fds ...int) *guestmem.Table {
	t.Helper()
	tab, err := guestmem.NewTable(specs, fds)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tab.Close(); err != nil {
			t.Error(err)
		}
	})
	return tab
}

// bytesAt views n bytes of a mapping.
func bytesAt(addr uintptr, n int) []byte {
	// SAFETY: the tests pass ranges that a table look-up returned.
	return unsafe.Slice((*byte)(unsafe.Add(nil, addr)), n)
}
