//go:build !(race && amd64)

package guestmem

import "sync/atomic"

// or32 sets bits of a word that others change, too.
func or32(word *uint32, mask uint32) { atomic.OrUint32(word, mask) }
