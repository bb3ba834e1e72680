package sock

import "sync/atomic"

// reason is why a frame disappeared.
type reason int

const (
	noPeer reason = iota
	tooShort
	tooLong
	noBuffers
	writeError
	noMemory
	numReasons
)

var reasonNames = [numReasons]string{"no_peer", "too_short", "too_long", "no_buffers", "write_error", "no_memory"}

// drops counts a queue's lost frames; the worker adds, anybody reads.
type drops [numReasons]atomic.Uint64

func (d *drops) add(r reason) { d[r].Add(1) }

func (d *drops) visit(visit func(reason string, n uint64)) {
	for r := range d {
		visit(reasonNames[r], d[r].Load())
	}
}
