package guestmem

import (
	"fmt"
	"math"
	"slices"
	"sort"
	"sync"
)

// Access rights of an IOTLB entry, as VHOST_USER_IOTLB_MSG has them (enum
// VHOST_ACCESS_* of include/uapi/linux/vhost_types.h).
const (
	PermRead  = 1
	PermWrite = 2
)

const (
	// MaxIOTLB is how many entries an IOTLB keeps. The longest chain needs an
	// eighth of them, so that a chain is complete before its first address is
	// forgotten again, also while other rings ask.
	MaxIOTLB = 8192
	// keepIOTLB are left when there are too many: the newest.
	keepIOTLB = MaxIOTLB / 4 * 3
)

// IOTLB is what a front-end has told about the addresses of a device behind an
// IOMMU (IOVA). It is the Translator of the device's rings, and also keeps what
// they want and nobody has answered yet.
//
// Host addresses that it hands out stay in use until whoever changes the IOTLB
// has made the rings forget them (vhostuser.Device.SetMemory). Update, Invalidate
// and SetTable are for one goroutine; it prepares every change aside, so that
// workers never wait for more than an exchange.
type IOTLB struct {
	mu      sync.RWMutex // guards table, entries and questions
	table   *Table
	entries entries
	questions

	// The fields below belong to the goroutine that makes changes.
	spare entries // where the next change is prepared
	age   uint64  // of the newest entry
}

// entries are in order of addresses and disjoint.
type entries []ioEntry

// ioEntry translates first to last, both included, which lie in one region.
type ioEntry struct {
	first, last uint64
	uva         uint64
	host        uintptr
	perm        uint8
	age         uint64
}

// NewIOTLB returns an IOTLB over t without entries. notify is called when Next has
// something new to say, from the goroutine that asked; it must not block, nor
// call the IOTLB.
func NewIOTLB(t *Table, notify func()) *IOTLB {
	return &IOTLB{table: t, questions: questions{notify: notify}}
}

// Translate implements Translator: what is not known may yet come.
func (t *IOTLB) Translate(addr uint64, write bool) (Mapping, Outcome) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	e := t.entries.find(addr, write)
	if e == nil {
		return Mapping{}, Missing
	}
	return Mapping{Addr: e.first, Size: e.last - e.first + 1, Host: e.host}, Mapped
}

// find returns the entry of addr if it allows the access.
func (es entries) find(addr uint64, write bool) *ioEntry {
	i := es.from(addr)
	if i == len(es) || es[i].first > addr || es[i].perm&need(write) == 0 {
		return nil
	}
	return &es[i]
}

// from is the index of the first entry that does not end before addr.
func (es entries) from(addr uint64) int {
	return sort.Search(len(es), func(i int) bool { return es[i].last >= addr })
}

func need(write bool) uint8 {
	if write {
		return PermWrite
	}
	return PermRead
}

// Area returns the host address of n > 0 bytes at addr, which a ring needs in one
// piece. Missing comes with the first address that is not known; Unmapped means
// that the pieces are known but do not lie one behind the other in this process.
func (t *IOTLB) Area(addr, n uint64, write bool) (host uintptr, missing uint64, outcome Outcome) {
	if wraps(addr, n) {
		return 0, addr, Unmapped
	}
	t.mu.RLock()
	defer t.mu.RUnlock()
	apart := false
	for at, last := addr, addr+(n-1); ; {
		e := t.entries.find(at, write)
		if e == nil {
			return 0, at, Missing
		}
		here := e.host + uintptr(at-e.first)
		if at == addr {
			host = here
		}
		apart = apart || here-host != uintptr(at-addr)
		if e.last >= last {
			break
		}
		at = e.last + 1
	}
	if apart {
		return 0, addr, Unmapped
	}
	return host, 0, Mapped
}

// GPA returns the guest physical address of addr.
func (t *IOTLB) GPA(addr uint64) (gpa uint64, ok bool) {
	t.mu.RLock()
	defer t.mu.RUnlock()
	i := t.entries.from(addr)
	if i == len(t.entries) || t.entries[i].first > addr {
		return 0, false
	}
	uva := t.entries[i].uva + (addr - t.entries[i].first)
	r := t.table.findUVA(uva)
	if r == nil {
		return 0, false
	}
	return r.GPA + (uva - r.UVA), true
}

// Update enters that size bytes at iova are those at the front-end's address uva,
// with the access rights perm. It replaces what was known of them; replaced says
// that something was, and is different now, so that the rings must forget it. On
// error nothing has changed.
func (t *IOTLB) Update(iova, size, uva uint64, perm uint8) (replaced bool, err error) {
	switch {
	case size == 0:
		return false, fmt.Errorf("guestmem: IOTLB entry for %#x has no bytes", iova)
	case wraps(iova, size), wraps(uva, size):
		return false, fmt.Errorf("guestmem: IOTLB entry of %#x bytes for %#x, front-end address %#x: the sum exceeds 64 bits", size, iova, uva)
	case perm == 0 || perm&^(PermRead|PermWrite) != 0:
		return false, fmt.Errorf("guestmem: IOTLB entry for %#x has access rights %d, accepted are 1 (read), 2 (write) and 3 (both)", iova, perm)
	}
	fresh, err := t.pieces(iova, size, uva, perm)
	if err != nil {
		return false, err
	}
	last := iova + (size - 1)
	replaced = t.entries.differs(fresh)
	next := t.copied().cut(iova, last)
	next = slices.Insert(next, next.from(iova), fresh...).evict()
	t.exchange(next, func(o openQuestion) bool {
		return iova <= o.Addr && o.Addr <= last && perm&need(o.Write) != 0
	})
	return replaced, nil
}

// copied returns the entries for a change.
func (t *IOTLB) copied() entries { return append(t.spare[:0], t.entries...) }

// exchange makes next the entries, and drops the questions that closed names.
func (t *IOTLB) exchange(next entries, closed func(openQuestion) bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.entries, t.spare = next, t.entries
	t.open = slices.DeleteFunc(t.open, closed)
}

// pieces are the entries of an update, one for each region that it covers.
func (t *IOTLB) pieces(iova, size, uva uint64, perm uint8) (list []ioEntry, err error) {
	for done := uint64(0); done < size; {
		r := t.table.findUVA(uva + done)
		if r == nil {
			return nil, fmt.Errorf("guestmem: IOTLB entry of %#x bytes for %#x: front-end address %#x is in no memory region", size, iova, uva+done)
		}
		first, off := iova+done, uva+done-r.UVA
		run := min(size-done, r.Size-off)
		t.age++
		list = append(list, ioEntry{first: first, last: first + (run - 1), uva: uva + done, host: r.host + uintptr(off), perm: perm, age: t.age})
		done += run
	}
	return list, nil
}

// differs reports whether fresh entries contradict what was known.
func (es entries) differs(fresh []ioEntry) bool {
	for i := range fresh {
		n := &fresh[i]
		for j := es.from(n.first); j < len(es) && es[j].first <= n.last; j++ {
			old := &es[j]
			if old.host-uintptr(old.first) != n.host-uintptr(n.first) || old.perm&^n.perm != 0 {
				return true
			}
		}
	}
	return false
}

// Invalidate forgets size bytes at iova, up to the last address if the sum exceeds
// 64 bits. A size of 0 is 2^64, as QEMU's arithmetic has it when the guest
// invalidates everything (vhost_iommu_unmap_notify, hw/virtio/vhost.c), and 2^64-1
// bytes at 0 are all, too. The rings must then forget them as well.
func (t *IOTLB) Invalidate(iova, size uint64) {
	last := LastAddr(iova, size)
	t.exchange(t.copied().cut(iova, last).evict(), func(o openQuestion) bool {
		return iova <= o.Addr && o.Addr <= last // asked again, it is put again
	})
}

// LastAddr is the last address that Invalidate forgets.
func LastAddr(iova, size uint64) uint64 {
	if wraps(iova, size) || iova == 0 && size == math.MaxUint64 {
		return math.MaxUint64
	}
	return iova + (size - 1)
}

// cut removes what is known of first to last. Entries that reach beyond keep the rest.
func (es entries) cut(first, last uint64) entries {
	i := es.from(first)
	j := i
	var rest []ioEntry
	for ; j < len(es) && es[j].first <= last; j++ {
		e := es[j]
		if e.first < first {
			head := e
			head.last = first - 1
			rest = append(rest, head)
		}
		if e.last > last {
			off := last + 1 - e.first
			e.first, e.uva, e.host = last+1, e.uva+off, e.host+uintptr(off)
			rest = append(rest, e)
		}
	}
	return slices.Replace(es, i, j, rest...)
}

// evict forgets the oldest entries when there are too many. The pieces into which
// cut makes one are of the same age.
func (es entries) evict() entries {
	if len(es) <= MaxIOTLB {
		return es
	}
	ages := make([]uint64, len(es))
	for i := range es {
		ages[i] = es[i].age
	}
	slices.Sort(ages)
	oldest := ages[len(ages)-keepIOTLB]
	es = slices.DeleteFunc(es, func(e ioEntry) bool { return e.age < oldest })
	if len(es) > MaxIOTLB {
		es = slices.DeleteFunc(es, func(e ioEntry) bool { return e.age == oldest })
	}
	return es
}

// SetTable moves the IOTLB to another memory table and forgets the entries that
// it does not hold at the same place. A nil table holds none.
func (t *IOTLB) SetTable(table *Table) {
	next := slices.DeleteFunc(t.copied(), func(e ioEntry) bool {
		host, ok := table.LookupUVA(e.uva, e.last-e.first+1)
		return !ok || host != e.host
	})
	t.mu.Lock()
	defer t.mu.Unlock()
	t.table, t.entries, t.spare = table, next, t.entries
}

// Len is the number of entries.
func (t *IOTLB) Len() int {
	t.mu.RLock()
	defer t.mu.RUnlock()
	return len(t.entries)
}
