package pool

import (
	"fmt"
	"sync"

	"github.com/vhostd/vhostd/pagemem"
)

// Workers is the directory of the pools that workers recycle into, one for each: what netif_recyclable_napi_add and
// page_pool_get_by_napi_id of the pfrag_pool series are to a NAPI context. Who sends asks it for the pool of the worker that
// will complete the frame, so that the pages go straight back to where they came from. A worker without a pool is an ordinary
// one: it is not in the directory, and nothing else changes for it. Safe for concurrent use; the zero value is empty.
type Workers struct {
	mu    sync.RWMutex
	pools map[pagemem.OwnerID]*Pool
}

// Register makes p the pool of its owner. It is an error if the owner has another one.
func (w *Workers) Register(p *Pool) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if other := w.pools[p.owner]; other != nil && other != p {
		return fmt.Errorf("pool: worker %d has a pool already", p.owner)
	}
	if w.pools == nil {
		w.pools = map[pagemem.OwnerID]*Pool{}
	}
	w.pools[p.owner] = p
	return nil
}

// Unregister takes p out, before it is destroyed. Who found it earlier keeps it alive by a context.
func (w *Workers) Unregister(p *Pool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.pools[p.owner] == p {
		delete(w.pools, p.owner)
	}
}

// Of returns the pool of the worker with this id, nil if it has none.
func (w *Workers) Of(id pagemem.OwnerID) *Pool {
	w.mu.RLock()
	defer w.mu.RUnlock()
	return w.pools[id]
}
