// Package pagemem stands in for the kernel's page allocator: an arena of
// mmap'd memory outside the Go heap, handed out as 4 KiB pages (order 0) or
// as 32 KiB compound pages (order 3), with atomic reference counts.
//
// # Ownership
//
// A page is named by its [PageID]. Whoever allocates it holds one reference;
// a reference may move between goroutines with the packet that uses the page.
// Dropping the last one frees the page. A page may belong to a pool, which
// registers itself as a [Releaser]: [Arena.Release] and [Arena.Retain] then
// count the pool's fragments instead of the page's own references, so that
// code which holds a packet need not know where its pages came from.
//
// # Memory ordering
//
// Reference counts are sequentially consistent atomics. Dropping references
// orders the holder's last access to the page before the drop, and the drop
// that turns out to be the last one orders all earlier drops before the page's
// next use. A count rests at 1: if it equals what the caller holds, nobody else
// holds anything and nobody else can take a reference, so the last drop is one
// atomic load and at most one store (page_pool_unref_netmem in
// include/net/page_pool/helpers.h argues the same way). The remaining metadata
// of a page is plain: it is written under the arena's lock while the page is
// free, or by the page's only holder, and whoever reads it got the page from
// such a writer.
package pagemem
