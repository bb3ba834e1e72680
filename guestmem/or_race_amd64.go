//go:build race

package guestmem

// or32 sets bits of a word that others change, too. The race detector would do it in C, where memory that vanishes ends the
// program.
//
//go:noescape
func or32(word *uint32, mask uint32)
