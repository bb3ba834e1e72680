package experiments

import "unsafe"

// addressOf returns the address of mapped memory, for the copy routines. b is not empty and lies outside the Go heap.
func addressOf(b []byte) uintptr {
	// SAFETY: b[0] exists; the address stays valid because b is mapped by mmap and is never moved until its owner unmaps it.
	return uintptr(unsafe.Pointer(&b[0]))
}
