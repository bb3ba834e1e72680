//go:build amd64 || arm64

package word

import "unsafe"

// Load16Acquire loads a 2-aligned index. ORDER: before every later load and
// store; pairs with the peer's release store of the index.
//
//go:noescape
func Load16Acquire(addr uintptr) uint16

// Store16Release stores a 2-aligned index. ORDER: after every earlier load
// and store; pairs with the peer's acquire load of the index.
//
//go:noescape
func Store16Release(addr uintptr, v uint16)

// Store64Release stores an 8-aligned word whole. ORDER: after every earlier
// load and store; pairs with the peer's acquire load of any part of the word.
//
//go:noescape
func Store64Release(addr uintptr, v uint64)

// Fence is a full barrier. ORDER: stores before it against loads after it,
// which neither acquire nor release gives.
func Fence()

// Load16 is a plain load; the peer may change the word at any time, so it is
// loaded once and the copy is used.
func Load16(addr uintptr) uint16 {
	// SAFETY: the caller gives 2 bytes of a mapping, 2-aligned.
	// ORDER: none.
	return *(*uint16)(unsafe.Add(nil, addr))
}

// Load64 is a plain load like Load16, of any alignment.
func Load64(addr uintptr) uint64 {
	// SAFETY: the caller gives 8 bytes of a mapping; amd64 and arm64 load
	// unaligned words from normal memory.
	// ORDER: none, and a peer may be seen to have written half of it.
	return *(*uint64)(unsafe.Add(nil, addr))
}

// Load8 is a plain load of one byte.
func Load8(addr uintptr) uint8 {
	// SAFETY: the caller gives 1 byte of a mapping.
	// ORDER: none.
	return *(*uint8)(unsafe.Add(nil, addr))
}

// Store16 is a plain store; a later Store16Release publishes it.
func Store16(addr uintptr, v uint16) {
	// SAFETY: the caller gives 2 bytes of a mapping, 2-aligned.
	// ORDER: none.
	*(*uint16)(unsafe.Add(nil, addr)) = v
}

// Store64 is a plain store of any alignment; a later Store16Release publishes it.
func Store64(addr uintptr, v uint64) {
	// SAFETY: the caller gives 8 bytes of a mapping; amd64 and arm64 store
	// unaligned words to normal memory.
	// ORDER: none.
	*(*uint64)(unsafe.Add(nil, addr)) = v
}
