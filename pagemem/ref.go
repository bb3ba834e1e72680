package pagemem

import "sync/atomic"

// Count is a reference count that rests at 1, so that its only holder can drop
// it without a read-modify-write. It is safe for concurrent use by holders: to
// Add, one must hold a reference.
type Count struct{ v atomic.Int64 }

// Load returns the number of references.
func (c *Count) Load() int64 { return c.v.Load() }

// Add takes n further references.
func (c *Count) Add(n int64) { c.v.Add(n) }

// Drop drops n references. It returns how many are left; 0 makes the caller the
// only holder of the object, whose count rests at 1 again. A negative result
// means that nobody held so many; then nothing was dropped.
func (c *Count) Drop(n int64) (left int64) {
	if c.v.Load() == n {
		if n != 1 {
			c.v.Store(1)
		}
		return 0
	}
	return c.dropShared(n)
}

func (c *Count) dropShared(n int64) (left int64) {
	left = c.v.Add(-n)
	if left == 0 {
		c.v.Store(1)
	} else if left < 0 {
		c.v.Add(n)
	}
	return left
}

func (c *Count) rest() {
	if c.v.Load() != 1 {
		c.v.Store(1)
	}
}

// Ref takes a reference on the page that contains p, of which the caller holds one.
func (a *Arena) Ref(p PageID) { a.AddRef(p, 1) }

// AddRef takes n references on the page that contains p, of which the caller holds one.
func (a *Arena) AddRef(p PageID, n int64) { a.pages[a.pages[p].head].ref.Add(n) }

// RefCount returns the references on the page that contains p, which must be allocated.
func (a *Arena) RefCount(p PageID) int64 { return a.pages[a.pages[p].head].ref.Load() }

// Unref drops n references on the page that contains p and returns true if that
// freed it. References of a pool's packets are dropped by Release instead.
func (a *Arena) Unref(p PageID, n int64) bool {
	if !a.DropRefs(p, n) {
		return false
	}
	a.Free(a.pages[p].head)
	return true
}

// DropRefs drops n references on the page that contains p. It returns true if
// these were the last: the page is then not freed, the caller is its only holder
// and the count is 1.
func (a *Arena) DropRefs(p PageID, n int64) bool {
	left := a.pages[a.pages[p].head].ref.Drop(n)
	if left < 0 {
		a.Misuse("dropped more references than there are on page", uint32(p))
	}
	return left == 0
}

// Frags is the count of fragments of a pool's page. Only the pool uses it.
func (a *Arena) Frags(p PageID) *Count { return &a.pages[p].frag }

// Unshared says that a pool's page has one fragment reference and one holder and is
// not of the reserve: whoever drops that reference may keep the page.
func (a *Arena) Unshared(p PageID) bool {
	m := &a.pages[p]
	return m.frag.v.Load() == 1 && m.ref.v.Load() == 1 && !a.IsReserve(p)
}

// Release drops n references that packets hold on the page that contains p.
// A pool's page goes to its Releaser, any other is unreferenced. by is the
// caller's worker, 0 for none.
func (a *Arena) Release(p PageID, n int, by OwnerID) {
	id := a.pages[p].pool
	if id == 0 {
		a.Unref(p, int64(n))
		return
	}
	r := a.releasers.find(id)
	if r == nil {
		a.Misuse("released to a pool that is gone: page", uint32(p))
		return
	}
	(*r).ReleasePage(p, n, by)
}

// Retain takes n references of the kind that Release drops. The caller, or the
// packet that it holds, has one already.
func (a *Arena) Retain(p PageID, n int) {
	m := &a.pages[p]
	if m.pool != 0 {
		m.frag.Add(int64(n))
		return
	}
	a.AddRef(p, int64(n))
}
