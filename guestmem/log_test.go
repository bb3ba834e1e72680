package guestmem_test

import (
	"bytes"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/guestmem"
)

func newLog(t testing.TB, size, offset uint64, fd int) *guestmem.Log {
	t.Helper()
	l, err := guestmem.NewLog(size, offset, fd)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// fileBytes reads a file without the mapping.
func fileBytes(t testing.TB, fd, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	if got, err := unix.Pread(fd, b, 0); err != nil || got != n {
		t.Fatalf("read %d of %d bytes: %v", got, n, err)
	}
	return b
}

// TestLogBits is A25 and MIG-02: bits appear from the offset on, whatever that is, and
// nowhere else; those that the bitmap has not are counted.
func TestLogBits(t *testing.T) {
	const file, size = 0x12000, 0x1000
	for _, offset := range []uint64{0, 0x1000, 0x800, 1, 2, 3, 0x1007, file - size} {
		fd := memfd(t, file, 0)
		l := newLog(t, size, offset, fd)
		want := make([]byte, file)
		mark := func(gpa, n uint64, pages ...uint64) {
			l.Mark(gpa, n)
			for _, p := range pages {
				want[offset+p/8] |= 1 << (p % 8)
			}
		}
		const last = size*8 - 1
		mark(0, 1, 0)
		mark(9*page+page-1, 2, 9, 10)
		mark(100*page, 0)
		mark(100*page+5, 70*page, seq(100, 170)...)
		mark(last*page, page, last)
		mark((last-1)*page, 3*page, last-1, last) // one beyond
		mark((last+1)*page, 1)                    // one beyond
		mark(^uint64(0), 5)                       // the last page of all
		mark(0xfffffffffffff000, ^uint64(0))
		if got := fileBytes(t, fd, file); !bytes.Equal(got, want) {
			t.Errorf("offset %#x: the file differs", offset)
		}
		if l.Beyond() != 4 {
			t.Errorf("offset %#x: %d pages beyond, want 4", offset, l.Beyond())
		}
	}
}

func seq(from, to uint64) (s []uint64) {
	for ; from <= to; from++ {
		s = append(s, from)
	}
	return s
}

// TestLogRefused is A1, A12, MIG-02: nothing stays mapped.
func TestLogRefused(t *testing.T) {
	good := memfd(t, 0x10000, 0)
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	sealed := memfd(t, page, 0)
	if _, err := unix.FcntlInt(uintptr(sealed), unix.F_ADD_SEALS, unix.F_SEAL_WRITE); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name         string
		size, offset uint64
		fd           int
		want         string
	}{
		{"empty", 0, 0, good, "size is 0"},
		{"wraps", ^uint64(0), 1, good, "63 bits"},
		{"wraps to the file's size", ^uint64(0) - 0xfff, 0x2000, good, "63 bits"},
		{"63 bits", 1 << 62, 1 << 62, good, "63 bits"},
		{"huge", 1<<30 + 1, 0, good, "more than"},
		{"offset beyond", 1, 0x10000, good, "the file has"},
		{"longer than the file", 0x10001, 0, good, "the file has"},
		{"pipe", page, 0, pipe[0], "pipe"},
		{"sealed", page, 0, sealed, "F_SEAL_WRITE"},
		{"closed", page, 0, 1 << 20, "descriptor"},
	} {
		l, err := guestmem.NewLog(tt.size, tt.offset, tt.fd)
		if err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v, want %q", tt.name, err, tt.want)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	newLog(t, 0x10000, 0, good)
}

// TestNilLog: marks without a log go nowhere.
func TestNilLog(t *testing.T) {
	var l *guestmem.Log
	l.Mark(5, 5)
	if l.Beyond() != 0 || l.Owns(0) || l.Close() != nil {
		t.Error("a nil log did something")
	}
	m := guestmem.NewMarker(nil, nil)
	m.Mark(5, 5)
	if m.On() {
		t.Error("a marker without a log is on")
	}
}

// TestTruncatedLog is C73: the fault is the log's, and guards see it.
func TestTruncatedLog(t *testing.T) {
	needFaultAddresses(t)
	fd := memfd(t, 4*page, 0)
	l := newLog(t, 4*page, 0, fd)
	tab := table(t, []guestmem.RegionSpec{{Size: page, GPA: 3 * page * 8 * page}}, memfd(t, page, 0))
	if err := l.MarkAll(tab); err != nil {
		t.Fatal(err)
	}
	if got := fileBytes(t, fd, 4*page); got[3*page] != 1 {
		t.Errorf("byte %#x", got[3*page])
	}
	if err := unix.Ftruncate(fd, page); err != nil {
		t.Fatal(err)
	}
	if err := l.MarkAll(tab); err == nil {
		t.Error("no error from a truncated log")
	}
}

// TestMarker marks by host address what the table maps; an address outside is nobody's.
func TestMarker(t *testing.T) {
	const gap = 1 << 32
	a, b := memfd(t, 16*page, 0), memfd(t, 16*page, 0)
	tab := table(t, []guestmem.RegionSpec{{Size: 16 * page, UVA: 0}, {GPA: gap, Size: 15 * page, UVA: 1 << 40, MmapOffset: page / 2}}, a, b)
	fd := memfd(t, gap/page/8+page, 0)
	l := newLog(t, gap/page/8+page, 0, fd)
	m := guestmem.NewMarker(l, tab)
	rapid.Check(t, func(rt *rapid.T) {
		base, size := uint64(0), uint64(16*page)
		if rapid.Bool().Draw(rt, "second") {
			base, size = gap, 15*page
		}
		off := rapid.Uint64Range(0, size-1).Draw(rt, "offset")
		n := rapid.Uint64Range(1, size-off).Draw(rt, "bytes")
		host, _ := tab.Lookup(base+off, n)
		if gpa, run := tab.GPA(host, n); gpa != base+off || run != n {
			rt.Fatalf("GPA says %#x and %d, want %#x and %d", gpa, run, base+off, n)
		}
		before := fileBytes(t, fd, gap/page/8+page)
		m.Mark(host, n)
		for p := (base + off) / page; p <= (base+off+n-1)/page; p++ {
			before[p/8] |= 1 << (p % 8)
		}
		if !bytes.Equal(fileBytes(t, fd, len(before)), before) {
			rt.Fatal("the bitmap differs")
		}
	})
	m.Mark(1, 1)
	if gpa, run := tab.GPA(1, 1); gpa != 0 || run != 0 {
		t.Error("a foreign address has a guest address")
	}
}

// TestLogIsShared: threads that set bits of the same bytes lose none.
func TestLogIsShared(t *testing.T) {
	fd := memfd(t, page, 0)
	l := newLog(t, page-3, 3, fd)
	var wg sync.WaitGroup
	for k := range uint64(8) {
		wg.Go(func() {
			for p := k; p < 8*(page-3); p += 8 {
				l.Mark(p*page, 1)
			}
		})
	}
	wg.Wait()
	if got := fileBytes(t, fd, page)[3:]; !bytes.Equal(got, bytes.Repeat([]byte{0xff}, page-3)) {
		t.Error("a bit is missing")
	}
}
