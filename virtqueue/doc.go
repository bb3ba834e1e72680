// Package virtqueue is the device side of a virtqueue in memory that a guest
// shares, of the split and the packed format (virtio 1.3 sections 2.7 and 2.8).
// Ring is what both do; what is said here of split rings is said of packed ones
// at Packed.
//
// A ring is worked in batches. Fill copies, validates and translates further
// available chains into a Batch; the owner moves the data; Complete stages a
// used entry for each chain, oldest first; Publish makes the staged entries
// visible with one store; NeedsCall says whether the driver wants a call.
// Chains that cannot be used now go back with Unfill.
//
// The guest is not trusted. Every shared word is loaded once into a private
// copy, and the copy is judged and used. What is wrong inside a chain (an
// address, a direction, a loop) is the chain's Fault: the owner completes it
// with length 0 and the ring goes on. What is wrong with the ring itself (an
// available index, a head or a packed descriptor's state that cannot be) is a
// *BrokenError and the ring must be stopped.
//
// Work is bounded. A chain has at most MaxSegs segments and visits at most
// MaxSegs entries of a descriptor table, never more than the table has;
// descriptors without bytes count. An indirect table may be longer than the
// ring, up to MaxSize entries, because Linux drivers use such tables.
//
// Four positions, free-running modulo 65536, describe a ring:
//
//	published <= consumed <= peeked <= available
//
// Chains between consumed and peeked are in a batch, used entries between
// published and consumed are staged. Chains are completed in the order in
// which they were made available, so that the used index in memory is also
// the position to resume from.
//
// A ring has one owner and no locks.
package virtqueue
