package virtionet

import (
	"sync/atomic"

	"github.com/vhostd/vhostd/offload"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

// drop names why the device itself made a frame disappear.
type drop uint8

const (
	dropTooShort drop = iota
	dropTooLong
	dropDisabled
	dropNoBuffer
	dropUnusableBuffer
	dropStopped
	dropNoMemory
	dropUnwanted
	dropCommand
	nDrops
)

var dropNames = [nDrops]string{
	dropTooShort:       "too_short",
	dropTooLong:        "too_long",
	dropDisabled:       "queue_disabled",
	dropNoBuffer:       "rx_buffers_too_small",
	dropUnusableBuffer: "rx_buffer_unusable",
	dropStopped:        "ring_stopped",
	dropNoMemory:       "no_memory",
	dropUnwanted:       "rx_filter",
	dropCommand:        "command_refused",
}

// The other packages' reasons are small numbers; a fixed table holds their counts.
const maxReasons = 32

// ringCounters count for one ring as long as the device lives, over connections.
type ringCounters struct {
	counters
	published published
}

// counters are plain: the worker's thread alone touches them.
type counters struct {
	packets, bytes, batches uint64
	kicks, calls            uint64
	copied                  uint64 // bytes of frames out of the guest's memory
	pastCache, fences       uint64 // of these by non-temporal stores
	drops                   [nDrops]uint64
	faults                  [maxReasons]uint64 // by virtqueue.Fault
	hdrErrors               [maxReasons]uint64 // by virtio.HdrError
	reasons                 [maxReasons]uint64 // by offload.Reason
	anyDrop                 bool
}

// published are the copies that other goroutines read.
type published struct {
	packets, bytes, batches, kicks, calls atomic.Uint64
	copied, pastCache, fences             atomic.Uint64
	position, available                   atomic.Uint32
	started, broken                       atomic.Bool
	waiting                               atomic.Bool           // for its translator; true in here first, and nowhere else
	reason                                atomic.Pointer[error] // why it is broken
	drops                                 [nDrops]atomic.Uint64
	faults, hdrErrors, reasons            [maxReasons]atomic.Uint64
}

// publish copies what changed. It runs once per turn.
func (r *ring) publish() {
	c, p := &r.counters, &r.published
	p.packets.Store(c.packets)
	p.bytes.Store(c.bytes)
	p.batches.Store(c.batches)
	p.kicks.Store(c.kicks)
	p.calls.Store(c.calls)
	if c.copied > 0 { // before pastCache, of which it is the upper bound
		p.copied.Store(c.copied)
	}
	if c.fences > 0 {
		p.pastCache.Store(c.pastCache)
		p.fences.Store(c.fences)
	}
	if r.q != nil {
		p.position.Store(uint32(r.q.Consumed()))
		p.available.Store(uint32(r.q.AvailSeen()))
	}
	if !c.anyDrop {
		return
	}
	c.anyDrop = false
	storeAll(p.drops[:], c.drops[:])
	storeAll(p.faults[:], c.faults[:])
	storeAll(p.hdrErrors[:], c.hdrErrors[:])
	storeAll(p.reasons[:], c.reasons[:])
}

func storeAll(dst []atomic.Uint64, src []uint64) {
	for i, v := range src {
		dst[i].Store(v)
	}
}

func (c *counters) dropped(d drop) {
	c.drops[d]++
	c.anyDrop = true
}

func (c *counters) faulted(f virtqueue.Fault) {
	c.faults[f%maxReasons]++
	c.anyDrop = true
}

func (c *counters) refused(r offload.Reason) {
	c.reasons[r%maxReasons]++
	c.anyDrop = true
}

// publishState copies the ring's condition; it runs when control or a fault changes it.
func (r *ring) publishState() {
	r.published.started.Store(r.started)
	r.published.broken.Store(r.broken)
	if !r.broken {
		r.published.reason.Store(nil)
	}
	r.publish()
}

// visitDrops lists the published counters that are not zero.
func (p *published) visitDrops(visit func(reason string, n uint64)) {
	for i := range p.drops {
		if n := p.drops[i].Load(); n > 0 {
			visit(dropNames[i], n)
		}
	}
	for i := range maxReasons {
		if n := p.faults[i].Load(); n > 0 {
			visit(virtqueue.Fault(i).String(), n)
		}
		if n := p.hdrErrors[i].Load(); n > 0 {
			visit(virtio.HdrError(i).String(), n)
		}
		if n := p.reasons[i].Load(); n > 0 {
			visit(offload.Reason(i).String(), n)
		}
	}
}
