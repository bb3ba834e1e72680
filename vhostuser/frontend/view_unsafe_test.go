package frontend_test

import "unsafe"

// view makes mapped memory readable and writable as bytes.
func view(host uintptr, n uint32) []byte {
	// SAFETY: callers pass a segment that the ring translated, which lies in a
	// mapping of the table in use; the loop device stops before it is unmapped.
	return unsafe.Slice(*(**byte)(unsafe.Pointer(&host)), n)
}
