package ringstate

import "unsafe"

// words is a mapped range as words.
func words(b []byte) []uint64 {
	// SAFETY: b is part of a mapping, begins at a multiple of 8 bytes in it and is as long as len says.
	// ORDER: none here; the words are the caller's.
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(b))), len(b)/8)
}
