// Package bell wakes the worker of a receiving queue from any goroutine.
package bell

import (
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// States of a bell.
const (
	awake   uint32 = iota // the receiver looks by itself
	armed                 // the receiver sleeps, or is about to
	ringing               // a sender writes to the descriptor
	shut                  // the receiver is gone
)

// Bell wakes a receiver that sleeps, by an eventfd that is watched edge-triggered: every write is a new edge (eventfd_signal,
// fs/eventfd.c), so that nobody has to read the counter, which 2^64-2 writes would fill.
//
// The number of the descriptor could belong to another file as soon as it is closed, so whoever leaves last closes it: a sender that
// is ringing when the receiver goes, else the receiver.
type Bell struct {
	state atomic.Uint32
	fd    int
}

// Open makes the descriptor.
func (b *Bell) Open() (err error) {
	if b.fd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("create eventfd: %w", err)
	}
	return nil
}

// one is what a ring adds to the counter, in the byte order of all supported machines.
var one = [8]byte{1}

// Ring wakes the receiver if it is armed. Any worker; what the receiver shall find must be there before.
func (b *Bell) Ring() {
	// ORDER: the store that published the frame before this load; pairs with the store in Arm.
	if b.state.Load() != armed || !b.state.CompareAndSwap(armed, ringing) {
		return
	}
	for {
		if _, err := unix.Write(b.fd, one[:]); err != unix.EINTR {
			break // EAGAIN, a full counter, leaves the descriptor readable as well
		}
	}
	b.rung()
}

// rung ends what Ring began, and the bell if the receiver left meanwhile.
func (b *Bell) rung() {
	if !b.state.CompareAndSwap(ringing, awake) {
		_ = unix.Close(b.fd) // an eventfd has nothing to fail with
	}
}

// Arm asks for the next ring. False means that one is under way. The receiver looks for frames once more afterwards.
func (b *Bell) Arm() bool {
	// ORDER: the store before the receiver's next look; pairs with the load in Ring.
	return b.state.CompareAndSwap(awake, armed) || b.state.Load() == armed
}

// Disarm takes Arm back.
func (b *Bell) Disarm() { b.state.CompareAndSwap(armed, awake) }

// Close ends the bell; senders may still ring.
func (b *Bell) Close() error {
	if b.state.Swap(shut) == ringing {
		return nil
	}
	return unix.Close(b.fd)
}

// FD is the descriptor to watch, edge-triggered. It stays the bell's.
func (b *Bell) FD() int { return b.fd }
