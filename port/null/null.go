// Package null is the network that discards what the guest sends and never sends anything itself: the sink of throughput
// tests, and the least that a device needs behind it.
package null

import (
	"fmt"
	"sync/atomic"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
)

// features: a frame that nobody reads may be as unfinished as the guest likes.
const features = virtio.FNetCSum | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN

// Port discards. It implements [port.Port].
type Port struct{ queues port.QueueSet }

// New makes a network that discards.
func New() *Port { return &Port{} }

// Kind is "null".
func (*Port) Kind() string { return "null" }

// Features are those of a network that takes unfinished frames and returns none.
func (*Port) Features() virtio.Features { return features }

// MTU is 0: any frame can be thrown away.
func (*Port) MTU() int { return 0 }

// SetMTU accepts anything.
func (*Port) SetMTU(int) error { return nil }

// Configure refuses features that were not offered.
func (*Port) Configure(acked virtio.Features) error {
	return port.CheckOffloads("null", features, acked)
}

// OpenQueue implements [port.Port].
func (p *Port) OpenQueue(i int, r port.Resources) (port.Queue, error) {
	q, err := p.queues.Open(i, func() (port.Queue, error) {
		return &queue{arena: r.Arena, owner: r.Owner, set: &p.queues, index: i}, nil
	})
	if err != nil {
		return nil, fmt.Errorf("network null: %w", err)
	}
	return q, nil
}

// Announce does nothing: there is nobody to tell.
func (*Port) Announce([6]byte) error { return nil }

// Status is always up.
func (*Port) Status() port.Status { return port.Status{Up: true} }

// Close implements [port.Port].
func (p *Port) Close() error { return p.queues.Close() }

type queue struct {
	arena     *pagemem.Arena
	owner     pagemem.OwnerID
	discarded atomic.Uint64
	set       *port.QueueSet
	index     int
	closed    bool
}

func (q *queue) Send(pkts []packet.Packet) int {
	packet.Release(q.arena, pkts, q.owner)
	q.discarded.Add(uint64(len(pkts)))
	return len(pkts)
}

func (*queue) Recv([]packet.Packet) int { return 0 }
func (*queue) ReadyFD() int             { return -1 }
func (*queue) Arm() bool                { return false }

func (q *queue) Drops(visit func(reason string, n uint64)) {
	visit("discarded", q.discarded.Load())
}

func (q *queue) Close() error {
	if !q.closed {
		q.closed = true
		q.set.Remove(q.index)
	}
	return nil
}
