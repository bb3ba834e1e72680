//go:build (amd64 || arm64) && race

package word

import "unsafe"

// The race detector does sync/atomic's accesses in C, where memory that vanishes ends the program; it ignores accesses of Go to memory
// that is not Go's.

// Load64Acquire loads an 8-aligned word whole. ORDER: before every later load
// and store; pairs with the peer's release store of any part of the word.
//
//go:noinline
func Load64Acquire(addr uintptr) uint64 {
	// SAFETY: the caller gives 8 bytes of a mapping, 8-aligned.
	// ORDER: acquire, by the barrier.
	v := *(*uint64)(unsafe.Add(nil, addr))
	Fence()
	return v
}

// Load32 loads a 4-aligned word whole.
//
//go:noinline
func Load32(addr uintptr) uint32 {
	// SAFETY: the caller gives 4 bytes of a mapping, 4-aligned.
	// ORDER: none, which callers need not.
	return *(*uint32)(unsafe.Add(nil, addr))
}

// Store32 stores a 4-aligned word whole.
//
//go:noinline
func Store32(addr uintptr, v uint32) {
	Fence()
	// SAFETY: the caller gives 4 bytes of a mapping, 4-aligned.
	// ORDER: release, by the barrier.
	*(*uint32)(unsafe.Add(nil, addr)) = v
}
