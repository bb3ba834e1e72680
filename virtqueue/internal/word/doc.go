// Package word reads and writes single words of memory that a peer shares.
// Addresses are host addresses of mappings outside the Go heap; the caller
// answers for their range.
//
// sync/atomic has no 16-bit operations and plain Go accesses of adjacent or
// equal addresses may be merged or dropped by the compiler, so indexes go
// through assembly. A 32-bit operation on {flags, idx} is not a way out: the
// available ring is only promised 2-byte alignment (virtio 1.3 section 2.7).
package word
