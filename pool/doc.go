// Package pool recycles pages between the allocator and a packet path the way
// the kernel's page_pool does (net/core/page_pool.c,
// include/net/page_pool/helpers.h).
//
// # Contexts
//
// A [Pool] has one owner, the worker whose [pagemem.OwnerID] it was made with.
// Only the owner allocates, publishes statistics and destroys. Anybody puts
// pages back: the owner straight into its cache, all others through a bounded
// lock-free ring, and what does not fit goes back to the arena. There is no
// "current CPU" in Go, so every put names its context.
//
// # Two counts
//
// A page in the pool's care has its own references (pagemem.Arena.Ref), 1 for
// the pool itself and more while somebody outside shares the page, and its
// fragments, the references that packets hold. The last fragment that is put
// recycles the page if the pool is then the only holder and the page is not from
// the reserve; otherwise the pool gives the page up. Whoever took a reference
// with Ref drops it with Unref, whoever holds a packet releases it with
// pagemem.Arena.Release.
//
// # Memory ordering
//
// The return ring's slots are single atomic words, position and page together,
// so that no reader sees a slot half written. Everything that a releasing
// goroutine did to a page happens before its atomic store of the slot, which the
// owner's atomic load of that slot reads before the page is used again. For the
// owner's direct recycling program order is enough. The fragment count orders
// the goroutines that share one page, see package pagemem.
//
// A producer that was preempted between claiming slots and filling them delays
// the entries behind it, never a goroutine: producers go on claiming, and the
// owner takes fresh pages from the arena meanwhile.
package pool
