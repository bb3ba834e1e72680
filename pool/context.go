package pool

import (
	"errors"
	"sync/atomic"

	"github.com/vhostd/vhostd/pagemem"
)

// Context is a supply of a pool's pages that one goroutine allocates from without a lock (the kernel's pp_alloc_cache).
// The pool's owner has one inside the pool, to which its puts return directly; NewContext makes further ones for senders
// that live on any worker. All methods are for the context's goroutine.
//
// A private context gets pages from the owner's cache if it is on the owner's worker, else from the ring, else from the arena.
type Context struct {
	pool   *Pool
	owner  pagemem.OwnerID
	budget *Budget // nil: the owner's own context, or unlimited
	leased int64   // pages charged to the budget

	n      int // pages in cache
	closed bool
	frag   fragState
	own    ownStats
	shown  ownStats
	cache  [CacheSize]pagemem.PageID

	// hold counts the pages that entered the pool through this context. One counter for all of them would need a locked
	// increment; InFlight adds them up.
	hold     atomic.Uint32
	snapshot published
	_        [64]byte
}

// ErrDestroyed means that a pool has no more pages to give.
var ErrDestroyed = errors.New("pool: destroyed")

// NewContext makes a private context for the worker whose id is owner, or for a goroutine that is no worker (0). The pool
// exists, destroyed or not, until the context is closed. budget, if not nil, bounds what rests in it. Anybody may call it;
// the error is ErrDestroyed.
func (p *Pool) NewContext(owner pagemem.OwnerID, budget *Budget) (*Context, error) {
	c := &Context{pool: p, owner: owner, budget: budget}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.dying.Load() {
		return nil, ErrDestroyed
	}
	p.contexts = append(p.contexts, c)
	if budget != nil {
		budget.contexts.Add(1)
	}
	return c, nil
}

// Close gives everything that rests in the context back to the arena and lets go of the pool. A second call does nothing. The
// context of the pool's owner is closed by Pool.Destroy.
func (c *Context) Close() {
	if c.closed {
		return
	}
	c.closed = true
	c.endFragForGood()
	c.Trim()
	c.Publish()
	p := c.pool
	p.mu.Lock()
	for i, other := range p.contexts {
		if other == c {
			p.contexts = append(p.contexts[:i], p.contexts[i+1:]...)
			break
		}
	}
	p.retired.add(&c.snapshot)
	p.retiredHold += c.hold.Load()
	p.mu.Unlock()
	if c.budget != nil {
		c.budget.contexts.Add(-1)
	}
	p.alarm()
}

// Resting returns how many pages wait in the context.
func (c *Context) Resting() int { return c.n }

// Trim gives the pages that rest in the context back to the arena: it has been idle.
func (c *Context) Trim() {
	if c.n > 0 {
		c.pool.giveUpAll(c.cache[:c.n])
		c.own.trimmed += uint64(c.n)
		c.n = 0
	}
	if c.budget != nil {
		c.leased = c.budget.lease(c.leased, 0)
	}
}

// Pool returns where the context's pages come from.
func (c *Context) Pool() *Pool { return c.pool }
