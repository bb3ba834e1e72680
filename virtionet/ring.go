package virtionet

import (
	"sync/atomic"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/worker"
)

// ring is one virtqueue of a pair with its descriptors. It belongs to the worker's
// thread; its counters outlive it.
type ring struct {
	index   int
	q       virtqueue.Ring
	started bool
	enabled bool // of a receiveq: and its pair is one that the driver uses
	parked  bool // its memory is not in the present table
	broken  bool
	via     guestmem.Translator
	log     vhostuser.RingLog

	kickFD, callFD, errFD int
	held                  *atomic.Bool // of the device

	*ringCounters
}

func (r *ring) init(index int, d *Device) {
	r.index, r.ringCounters, r.held = index, d.ringCounters(index), &d.held
	r.kickFD, r.callFD, r.errFD = -1, -1, -1
}

// usable reports whether the ring's memory may be touched.
func (r *ring) usable() bool { return r.started && !r.broken && !r.parked }

// walked is the work on the ring's descriptors.
func (r *ring) walked() uint64 {
	if r.q == nil {
		return 0
	}
	return r.q.Walked()
}

// call signals the driver if it asked for it; the used entries are published.
func (r *ring) call(l *worker.Loop) {
	if r.usable() && r.q.NeedsCall() {
		r.signal(l)
	}
}

// signal writes the call eventfd without asking the ring.
func (r *ring) signal(l *worker.Loop) {
	if r.callFD < 0 {
		return
	}
	r.calls++
	r.write(l, r.callFD)
}

// write adds one to an eventfd of the front-end. A device whose front-end has once held
// the worker by it pays for writes that cannot wait, as long as it lives.
func (r *ring) write(l *worker.Loop, fd int) {
	if r.held.Load() {
		l.SignalAsync(fd)
	} else if !l.Signal(fd) {
		r.held.Store(true)
	}
}
