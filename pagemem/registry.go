package pagemem

import (
	"sync"
	"sync/atomic"
)

// Releaser is where a page with an owner pool goes when packet references on it
// are dropped. ReleasePage is called by any goroutine and must not block.
type Releaser interface {
	ReleasePage(p PageID, n int, by OwnerID)
}

// BulkReleaser is a Releaser that takes one reference on each of several pages at once.
// PutBulk may clobber ids and must not keep it.
type BulkReleaser interface {
	Releaser
	PutBulk(ids []PageID, by OwnerID)
}

const leafSize = 256

// registry maps 16-bit ids to Releasers. A lookup is two atomic loads, which
// are plain moves on amd64 and arm64; leaves appear as ids are used.
type registry struct {
	leaves [leafSize]atomic.Pointer[leaf]

	mu   sync.Mutex
	next int      // ids from here on were never used; 0 stands for 1
	free []uint16 // ids given back
}

type leaf [leafSize]atomic.Pointer[Releaser]

func (g *registry) find(id uint16) *Releaser {
	l := g.leaves[id/leafSize].Load()
	if l == nil {
		return nil
	}
	return l[id%leafSize].Load()
}

// Register gives r an id for SetReleaser, 0 if all 65,535 are taken. The
// registry refers to r until Unregister.
func (a *Arena) Register(r Releaser) (id uint16) {
	g := &a.releasers
	g.mu.Lock()
	defer g.mu.Unlock()
	if n := len(g.free); n > 0 {
		id = g.free[n-1]
		g.free = g.free[:n-1]
	} else {
		if g.next == 1<<16-1 {
			return 0
		}
		g.next++
		id = uint16(g.next)
	}
	slot := &g.leaves[id/leafSize]
	if slot.Load() == nil {
		slot.Store(new(leaf))
	}
	slot.Load()[id%leafSize].Store(&r)
	return id
}

// Unregister gives the id back. No page may carry it any more.
func (a *Arena) Unregister(id uint16) {
	g := &a.releasers
	g.mu.Lock()
	defer g.mu.Unlock()
	if id == 0 || g.find(id) == nil {
		a.Misuse("unregistered a releaser that is not there:", uint32(id))
		return
	}
	g.leaves[id/leafSize].Load()[id%leafSize].Store(nil)
	g.free = append(g.free, id)
}

// SetReleaser makes p, of order 0, a page of the pool with this id (0: of none).
// The caller is the page's only holder.
func (a *Arena) SetReleaser(p PageID, id uint16) { a.pages[p].pool = id }

// SetIdle marks a pool's page as resting in the pool and returns whether it was
// not before: a check against recycling a page twice, for debug builds.
func (a *Arena) SetIdle(p PageID, idle bool) bool {
	return a.pages[p].idle.Swap(idle) != idle
}
