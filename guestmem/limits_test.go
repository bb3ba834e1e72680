package guestmem_test

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
)

// TestTotals: one table, and all tables together, leave addresses to others.
func TestTotals(t *testing.T) {
	fd := memfd(t, 1<<60, 0)
	halves := []guestmem.RegionSpec{{Size: guestmem.MaxBytes / 2}, {GPA: 1 << 50, UVA: 1 << 50, Size: guestmem.MaxBytes / 2}}
	tab, err := guestmem.NewTable(halves, []int{fd, fd})
	if err != nil {
		t.Fatal(err)
	}
	if err := tab.Close(); err != nil {
		t.Fatal(err)
	}
	halves[1].Size += page
	if _, err := guestmem.NewTable(halves, []int{fd, fd}); err == nil || !strings.Contains(err.Error(), "at most") {
		t.Errorf("a table of more than MaxBytes: %v", err)
	}
	for range 2 {
		var tables []*guestmem.Table
		for {
			tab, err := guestmem.NewTable([]guestmem.RegionSpec{{Size: guestmem.MaxBytes}}, []int{fd})
			if err != nil {
				if !strings.Contains(err.Error(), "all together") {
					t.Errorf("after %d tables: %v", len(tables), err)
				}
				break
			}
			tables = append(tables, tab)
		}
		if len(tables) != 12 {
			t.Errorf("%d tables of MaxBytes fit, want 12", len(tables))
		}
		for _, tab := range tables {
			if err := tab.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestRemoteFileRefused needs no answer of the server but the attributes, which is the point: a page would need one more.
func TestRemoteFileRefused(t *testing.T) {
	fd := fuseFile(t, 1<<20)
	_, err := guestmem.NewTable([]guestmem.RegionSpec{{Size: 1 << 20}}, []int{fd})
	if err == nil || !strings.Contains(err.Error(), "FUSE") {
		t.Errorf("a file on FUSE: %v", err)
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil {
		t.Error(err)
	}
}
