// Package fragalloc allocates fragments of pages the way the kernel's
// page_frag_cache does (mm/page_frag_cache.c and
// include/linux/page_frag_cache.h, with the prepare/commit interface of the
// netdev series "mm: page_frag: introduce prepare/probe/commit API", v21), and
// copies memory between mappings.
//
// # Fragments
//
// A [Cache] takes all references of a page at once and gives each fragment one
// of them by decrementing a private bias, so that a packet costs no atomic
// operation until it is freed. At any instant
//
//	page references = bias + fragments that are still out
//
// and the cache holds at least one itself, because a page of 32,768 bytes has
// 32,769 references and every fragment takes at least one byte. A page that is
// used up is left to its fragments, or used again in place if none is out.
//
// A Cache belongs to one goroutine. Fragments may be released by any, through
// pagemem.Arena.Release.
//
// # Copies
//
// [CopyVec] and [CopyVecNoCache] run in assembly and hold no state that a fault
// could leave behind: on a goroutine with debug.SetPanicOnFault(true), memory
// that vanished becomes a recoverable panic. The copy is then done in part.
//
// CopyVecNoCache's non-temporal stores are weakly ordered; the SFENCE that ends
// the call makes them visible before whatever the caller stores next, such as
// the index that publishes the packet. CopyVec uses ordinary stores and needs
// no fence on amd64. The Go twin is ordered by the caller's publishing store
// (a release store) on every architecture.
package fragalloc
