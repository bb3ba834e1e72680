package pagemem

// Flags say what an allocation may do.
type Flags uint8

const (
	// NoReserve leaves the reserve alone.
	NoReserve Flags = 0
	// AllowReserve takes an order-0 page of the reserve when no other is left
	// (what the kernel calls pfmemalloc). Such pages must not be recycled.
	AllowReserve Flags = 1
)

// Alloc allocates a page of order 0 or ChunkOrder with one reference. It
// returns false when there is none, and for any other order. The contents are
// whatever was there before.
func (a *Arena) Alloc(order int, flags Flags) (PageID, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch order {
	case 0:
		var one [1]PageID
		n := a.takePages(&a.normal, one[:])
		if n == 0 && flags&AllowReserve != 0 {
			n = a.takePages(&a.reserve, one[:])
		}
		a.account(n)
		return one[0], n == 1
	case ChunkOrder:
		p, ok := a.takeWhole(&a.normal)
		if !ok {
			a.account(0)
			return 0, false
		}
		a.account(1)
		return p, true
	default:
		a.account(0)
		return 0, false
	}
}

// AllocBulk fills dst with order-0 pages, one reference each, never from the
// reserve, and returns how many it got.
func (a *Arena) AllocBulk(dst []PageID) int {
	if len(dst) == 0 {
		return 0
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.takePages(&a.normal, dst)
	a.account(n)
	return n
}

// AllocList is AllocBulk for up to n pages that come as a linked list, as alloc_pages_bulk_list of the kernel returned them
// before there was an array form: first is the list's head, ListNext leads on. It returns how many pages there are.
func (a *Arena) AllocList(n int) (first PageID, got int) {
	if n <= 0 {
		return 0, 0
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	var some [ChunkPages]PageID
	for got < n {
		taken := a.takePages(&a.normal, some[:min(n-got, len(some))])
		if taken == 0 {
			break
		}
		for _, p := range some[:taken] {
			a.pages[p].next = first
			first = p
		}
		got += taken
	}
	a.account(got)
	return first, got
}

// ListNext returns what follows p in the list that AllocList returned. It means nothing for the last page.
func (a *Arena) ListNext(p PageID) PageID { return a.pages[p].next }

func (a *Arena) account(n int) {
	if n == 0 {
		a.failed++
	} else {
		a.allocs++
	}
}

// Order returns the order of the page that contains p, which must be allocated.
func (a *Arena) Order(p PageID) int { return int(a.pages[p].order) }

// Head returns the first page of the page that contains p, which must be allocated.
func (a *Arena) Head(p PageID) PageID { return a.pages[p].head }

// IsReserve says whether p came from the reserve.
func (a *Arena) IsReserve(p PageID) bool { return uint32(p)/ChunkPages >= a.reserveStart }

// Contains says whether n bytes at addr lie inside the arena.
func (a *Arena) Contains(addr uintptr, n uint64) bool {
	off := uint64(addr - a.base)
	return off < a.bytes && n <= a.bytes-off
}

// Free frees a page of which the caller holds the only reference, whatever the
// count says. Most callers want Unref.
func (a *Arena) Free(p PageID) {
	if !a.clean(p) {
		return
	}
	a.mu.Lock()
	ok := a.giveBack(p)
	a.mu.Unlock()
	if !ok {
		a.Misuse("freed twice: page", uint32(p))
	}
}

// FreeBulk is Free for several pages under one lock.
func (a *Arena) FreeBulk(ids []PageID) {
	for _, p := range ids {
		a.clean(p)
	}
	twice := -1
	a.mu.Lock()
	for i, p := range ids {
		if a.pages[p].head == p && !a.giveBack(p) {
			twice = i
		}
	}
	a.mu.Unlock()
	if twice >= 0 {
		a.Misuse("freed twice: page", uint32(ids[twice]))
	}
}

// clean makes a page that is about to be freed like a new one. It is false for a part of a compound page.
func (a *Arena) clean(p PageID) bool {
	m := &a.pages[p]
	if m.head != p {
		a.Misuse("freed a compound page by its part", uint32(p))
		return false
	}
	m.ref.rest()
	m.pool = 0
	if Debug {
		poison(a.Addr(p), PageSize<<m.order)
	}
	return true
}
