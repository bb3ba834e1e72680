package guestmem

import (
	"fmt"
	"math"
	"strings"
	"sync/atomic"
)

// LogPage is the number of bytes that one bit of a Log stands for
// (VHOST_LOG_PAGE of vhost-user.rst, "Migration"), whatever the host's pages are.
const LogPage = 4096

// maxLogBytes bounds a log: 32 TiB of guest addresses, four times MaxBytes, because
// a guest's memory need not begin at 0.
const maxLogBytes = 1 << 30

// Log is the bitmap in which a back-end tells a migrating front-end what it wrote:
// page p is bit p%8 of byte p/8, in the file from the offset on that
// VHOST_USER_SET_LOG_BASE gives. A nil Log takes marks and forgets them.
//
// Mark and MarkAll are safe for concurrent use, by other processes too. Close needs
// everybody else to be done. The file can be truncated like guest memory: who marks
// runs under a guard that asks Owns.
type Log struct {
	host    uintptr // of the bitmap's first byte
	pages   uint64  // bits of the bitmap
	mapping *mapping
	beyond  atomic.Uint64
}

// NewLog maps a bitmap of size bytes that begins at offset in the file. The
// descriptor stays the caller's and may be closed at once.
func NewLog(size, offset uint64, fd int) (*Log, error) {
	spec := RegionSpec{Size: size, MmapOffset: offset}
	reason := spec.problem(nil)
	if reason == "" && size > maxLogBytes {
		reason = fmt.Sprintf("more than %#x bytes", int64(maxLogBytes))
	}
	if reason != "" {
		return nil, fmt.Errorf("guestmem: dirty log of %#x bytes at file offset %#x: %s", size, offset, reason)
	}
	m, delta, fail := mapRegion(spec, fd)
	if fail != nil {
		fail.Region, fail.Reason = spec, strings.TrimSuffix(fail.Reason, "; "+shareHint)
		return nil, fmt.Errorf("dirty log: %w", fail)
	}
	m.users.Add(1)
	return &Log{host: m.addr + delta, pages: size * 8, mapping: m}, nil
}

// Mark marks the pages that hold n bytes at guest address gpa, after they were
// written. Pages that the bitmap has no bit for are counted, see Beyond.
func (l *Log) Mark(gpa, n uint64) {
	if l == nil || n == 0 {
		return
	}
	end := gpa + (n - 1)
	if end < gpa {
		end = math.MaxUint64
	}
	first, last := gpa/LogPage, end/LogPage
	if last >= l.pages {
		l.beyond.Add(last - max(first, l.pages) + 1)
		if first >= l.pages {
			return
		}
		last = l.pages - 1
	}
	l.set(first, last)
}

// MarkAll marks all of t's pages, for the time of which nobody knows what was
// written. A *FaultError says that the log's file was truncated.
func (l *Log) MarkAll(t *Table) error {
	return guard(l.Owns, func() {
		for _, r := range t.Regions() {
			l.Mark(r.GPA, r.Size)
		}
	})
}

// Beyond is how many pages were not marked because the bitmap is too short.
func (l *Log) Beyond() uint64 {
	if l == nil {
		return 0
	}
	return l.beyond.Load()
}

// Owns reports whether host lies in the log's mapping.
func (l *Log) Owns(host uintptr) bool {
	return l != nil && l.mapping != nil && host-l.mapping.addr < l.mapping.length
}

// Close unmaps the log. Further calls do nothing; a nil log may be closed.
func (l *Log) Close() error {
	if l == nil || l.mapping == nil {
		return nil
	}
	m := l.mapping
	l.pages, l.mapping = 0, nil
	if err := m.release(); err != nil {
		return fmt.Errorf("guestmem: unmapping the dirty log: %w", err)
	}
	return nil
}

// GPA is Lookup the other way round: the guest address of the byte at host, and how
// many of the n bytes from there on lie in the same region. Both are 0 for an address
// outside the regions.
func (t *Table) GPA(host uintptr, n uint64) (gpa, run uint64) {
	m := Marker{table: t}
	if !m.find(host) {
		return 0, 0
	}
	off := uint64(host - m.host)
	return m.gpa + off, min(n, m.size-off)
}

// Marker marks in a log by host address. It remembers the region of its last hit,
// belongs to one owner and is not safe for concurrent use. The zero Marker marks
// nothing.
type Marker struct {
	log       *Log
	table     *Table
	gpa, size uint64
	host      uintptr
}

// NewMarker returns a marker for memory of t. With a nil log it marks nothing.
func NewMarker(l *Log, t *Table) Marker { return Marker{log: l, table: t} }

// On reports whether marks go anywhere, which is what to ask before collecting them.
func (m *Marker) On() bool { return m.log != nil }

// Mark marks the pages that hold n bytes at host, after they were written.
func (m *Marker) Mark(host uintptr, n uint64) {
	for n > 0 {
		off := uint64(host - m.host)
		if off >= m.size {
			if !m.find(host) {
				return
			}
			continue
		}
		run := min(n, m.size-off)
		m.log.Mark(m.gpa+off, run)
		host, n = host+uintptr(run), n-run
	}
}

func (m *Marker) find(host uintptr) bool {
	if m.table == nil {
		return false
	}
	for i := range m.table.regions {
		if r := &m.table.regions[i]; uint64(host-r.host) < r.Size {
			m.gpa, m.size, m.host = r.GPA, r.Size, r.host
			return true
		}
	}
	return false
}
