//go:build (amd64 || arm64) && !race

package word

import (
	"sync/atomic"
	"unsafe"
)

// Load64Acquire loads an 8-aligned word whole. ORDER: before every later load
// and store; pairs with the peer's release store of any part of the word.
func Load64Acquire(addr uintptr) uint64 {
	// SAFETY: the caller gives 8 bytes of a mapping, 8-aligned.
	// ORDER: acquire.
	return atomic.LoadUint64((*uint64)(unsafe.Add(nil, addr)))
}

// Load32 loads a 4-aligned word whole.
func Load32(addr uintptr) uint32 {
	// SAFETY: the caller gives 4 bytes of a mapping, 4-aligned.
	// ORDER: acquire, which callers need not.
	return atomic.LoadUint32((*uint32)(unsafe.Add(nil, addr)))
}

// Store32 stores a 4-aligned word whole.
func Store32(addr uintptr, v uint32) {
	// SAFETY: the caller gives 4 bytes of a mapping, 4-aligned.
	// ORDER: release; a caller that needs a barrier behind it adds Fence.
	atomic.StoreUint32((*uint32)(unsafe.Add(nil, addr)), v)
}
