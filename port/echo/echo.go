// Package echo is the network that returns each frame to the guest that sent it, with its offload marks and, unless told
// otherwise, with source and destination address exchanged. A frame comes back on the queue pair it was sent on.
package echo

import (
	"cmp"
	"fmt"
	"strconv"
	"sync/atomic"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/internal/waiting"
	"github.com/vhostd/vhostd/virtio"
)

const kind = "echo"

// features: the frame comes back as unfinished as it was sent, and the device finishes it for a guest that sends what it
// cannot receive.
const features = virtio.FNetCSum | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN |
	virtio.FNetGuestCSum | virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6 | virtio.FNetGuestECN

// Bounds and default of [Options.Backlog].
const (
	DefaultBacklog = 1024
	MaxBacklog     = 65536
)

// Options configure an echo network.
type Options struct {
	// Swap exchanges the destination and the source address of each frame, so that a guest accepts it as sent to itself.
	Swap bool
	// Backlog is how many frames a queue holds while the guest has no receive buffers; 0 means DefaultBacklog. A full
	// backlog is back-pressure, no frame is lost. What all queues of the network hold together is bounded as well, by the memory
	// of one full backlog of the largest frames and by Budget.
	Backlog int
	// Budget bounds the memory of waiting frames together with that of other echo networks; nil means a budget of its own.
	Budget *Budget
}

// Budget bounds the memory of waiting frames.
type Budget = waiting.Budget

// budgetShare is the part of the arena that waiting frames may occupy. One network gets half of that.
const budgetShare = 2

// budget is the cost that a network's queues may hold together, if others leave it that much.
func (o Options) budget() int64 { return int64(o.Backlog) * (virtio.MaxFrame + waiting.FrameCost) }

// Validate returns a [port.OptionError] for the first option with a value that is not accepted.
func (o Options) Validate() error {
	if o.Backlog < 0 || o.Backlog > MaxBacklog {
		return &port.OptionError{Kind: kind, Option: "backlog", Value: strconv.Itoa(o.Backlog),
			Accept: fmt.Sprintf("1 to %d, 0 for the default %d", MaxBacklog, DefaultBacklog)}
	}
	return nil
}

// Port returns frames. It implements [port.Port].
type Port struct {
	opts    Options
	queues  port.QueueSet
	account waiting.Account // of the frames in all queues
}

// New makes a network that returns frames.
func New(opts Options) (*Port, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	if opts.Backlog == 0 {
		opts.Backlog = DefaultBacklog
	}
	return &Port{opts: opts, account: waiting.Account{Budget: cmp.Or(opts.Budget, new(Budget))}}, nil
}

// Kind is "echo".
func (*Port) Kind() string { return kind }

// Features are all offloads, in both directions.
func (*Port) Features() virtio.Features { return features }

// MTU is 0: what the guest can send it can receive.
func (*Port) MTU() int { return 0 }

// SetMTU accepts anything.
func (*Port) SetMTU(int) error { return nil }

// Configure refuses features that were not offered.
func (*Port) Configure(acked virtio.Features) error {
	return port.CheckOffloads(kind, features, acked)
}

// OpenQueue implements [port.Port].
func (p *Port) OpenQueue(i int, r port.Resources) (port.Queue, error) {
	q, err := p.queues.Open(i, func() (port.Queue, error) {
		p.account.Budget.LimitTo(r.Arena.Bytes() / budgetShare)
		return &queue{
			ring: make([]packet.Packet, p.opts.Backlog), swap: p.opts.Swap,
			arena: r.Arena, owner: r.Owner, port: p, index: i,
		}, nil
	})
	if err != nil {
		return nil, fmt.Errorf("network echo: %w", err)
	}
	return q, nil
}

// Announce does nothing: there is nobody to tell.
func (*Port) Announce([6]byte) error { return nil }

// Status is always up.
func (*Port) Status() port.Status { return port.Status{Up: true} }

// Close implements [port.Port].
func (p *Port) Close() error { return p.queues.Close() }

// queue is a bounded FIFO of frames.
type queue struct {
	ring  []packet.Packet
	head  int // oldest frame
	count int
	swap  bool
	arena *pagemem.Arena
	owner pagemem.OwnerID

	tooShort atomic.Uint64
	port     *Port
	cost     int64 // of the frames in ring, part of port.account
	index    int
	closed   bool
}

// etherLen is the length of an Ethernet header, addrLen that of one of its addresses.
const (
	etherLen = 14
	addrLen  = 6
)

func (q *queue) Send(pkts []packet.Packet) (n int) {
	// An empty queue takes one frame in any case, so that none waits for the others.
	room := min(q.port.opts.budget()-q.port.account.Held(), q.port.account.Room())
	before := q.cost
	for n < len(pkts) && q.count < len(q.ring) && (q.cost-before < room || q.count == 0) {
		p := &pkts[n]
		n++
		if p.Len < etherLen {
			packet.Release(q.arena, pkts[n-1:n], q.owner)
			q.tooShort.Add(1)
			continue
		}
		if q.swap {
			swapAddresses(p)
		}
		at := q.head + q.count
		if at >= len(q.ring) {
			at -= len(q.ring)
		}
		q.cost += waiting.CostOf(p)
		p.MoveTo(&q.ring[at])
		q.count++
	}
	q.port.account.Charge(q.cost - before)
	return n
}

func (q *queue) Recv(pkts []packet.Packet) (n int) {
	want := min(len(pkts), q.count, port.MaxBatch)
	if want == 0 {
		return 0
	}
	before := q.cost
	for n < want {
		run := q.ring[q.head:min(q.head+want-n, len(q.ring))]
		for i := range run {
			q.cost -= waiting.CostOf(&run[i])
			run[i].MoveTo(&pkts[n])
			n++
		}
		if q.head += len(run); q.head == len(q.ring) {
			q.head = 0
		}
	}
	q.port.account.Charge(q.cost - before)
	q.count -= n
	if q.count == 0 {
		q.head = 0 // a queue that keeps up uses the same few slots, which stay in the cache
	}
	return n
}

func (*queue) ReadyFD() int { return -1 }

func (q *queue) Arm() bool { return q.count > 0 }

func (q *queue) Drops(visit func(reason string, n uint64)) {
	visit("too_short", q.tooShort.Load())
}

func (q *queue) Close() error {
	if q.closed {
		return nil
	}
	q.closed = true
	packet.Release(q.arena, q.ring, q.owner)
	q.port.account.Charge(-q.cost)
	q.head, q.count, q.cost = 0, 0, 0
	q.port.queues.Remove(q.index)
	return nil
}

// swapAddresses exchanges the two addresses of a frame of at least etherLen bytes, in place: the sender gave up its fragments
// and nobody else has seen them.
func swapAddresses(p *packet.Packet) {
	head := p.Bytes(0)
	if len(head) < 2*addrLen {
		swapScattered(p)
		return
	}
	dst, src := (*[addrLen]byte)(head[:addrLen]), (*[addrLen]byte)(head[addrLen:])
	*dst, *src = *src, *dst
}

// swapScattered is swapAddresses for addresses that several fragments share.
func swapScattered(p *packet.Packet) {
	var old [2 * addrLen]byte
	p.CopyTo(old[:], 0)
	at := 0
	for i := 0; i < int(p.NFrag) && at < len(old); i++ {
		b := p.Bytes(i)
		for j := 0; j < len(b) && at < len(old); j++ {
			b[j] = old[(at+addrLen)%len(old)]
			at++
		}
	}
}
