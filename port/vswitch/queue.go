package vswitch

import (
	"sync/atomic"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
)

// queue is a port's share of a queue pair. It implements [port.Queue], [port.Enabler] and [port.Holder].
type queue struct {
	port   *Port
	index  int
	sender sender
	inbox  *inbox
	drops  drops

	asked   bool // the bell was asked for, by the owner
	enabled bool // written by the owner under port.mu
	closed  atomic.Bool
}

func newQueue(p *Port, index int, r port.Resources) (*queue, error) {
	q := &queue{port: p, index: index, enabled: true}
	q.sender = sender{port: p, arena: r.Arena, owner: r.Owner, drops: &q.drops}
	var err error
	if q.inbox, err = newInbox(p.backlog, &p.account, r.Arena, &q.drops[queueClosed]); err != nil {
		return nil, err
	}
	return q, nil
}

// Send never refuses a frame: what a receiver has no room for is lost there.
func (q *queue) Send(pkts []packet.Packet) int {
	for rest := pkts; len(rest) > 0; {
		n := min(len(rest), port.MaxBatch)
		q.sender.send(rest[:n])
		rest = rest[n:]
	}
	return len(pkts)
}

// Held implements [port.Holder].
func (q *queue) Held() int { return q.sender.held }

// accept takes frames over from a port and any worker, whose identity is by, as far as there is room; the others stay the caller's and
// are counted here.
func (q *queue) accept(pkts []packet.Packet, from *Port, by pagemem.OwnerID) (n int) {
	src := from.source()
	memory := q.port.account.Fit(pkts)
	if memory == 0 && q.inbox.length() == 0 {
		memory = 1 // nobody waits for others to make room
	}
	closed := false
	if room := min(memory, q.inbox.room(src)); room > 0 {
		n, closed = q.inbox.push(pkts[:room], src, by)
	}
	if n == len(pkts) {
		return n
	}
	why := backlogFull
	switch {
	case closed:
		why = queueClosed
	case n == memory:
		why = memoryFull
	}
	q.drops.add(why, len(pkts)-n)
	return n
}

func (q *queue) Recv(pkts []packet.Packet) int {
	if q.asked {
		q.asked = false
		q.inbox.Disarm()
	}
	return q.inbox.pop(pkts[:min(len(pkts), port.MaxBatch)])
}

func (q *queue) ReadyFD() int { return q.inbox.FD() }

func (q *queue) Arm() bool {
	if !q.inbox.empty() {
		return true
	}
	q.asked = true
	return !q.inbox.Arm() || !q.inbox.empty()
}

// SetEnabled implements [port.Enabler]. Flows move to the queues that are enabled; what waits in this one is lost.
func (q *queue) SetEnabled(on bool) error {
	if q.closed.Load() || on == q.enabled {
		return nil
	}
	if on {
		q.discard() // from senders that had not seen yet that it was disabled
	}
	q.port.enable(q, on)
	if !on {
		q.discard()
	}
	return nil
}

// discard throws away what waits.
func (q *queue) discard() {
	var pkts [8]packet.Packet
	for n := q.inbox.pop(pkts[:]); n > 0; n = q.inbox.pop(pkts[:]) {
		packet.Release(q.sender.arena, pkts[:n], q.sender.owner)
		q.drops.add(disabled, n)
	}
}

func (q *queue) Drops(visit func(reason string, n uint64)) { q.drops.visit(visit) }

func (q *queue) Close() error {
	if q.closed.Swap(true) {
		return nil
	}
	q.port.leave(q)
	err := q.inbox.close(q.sender.owner)
	q.port.queues.Remove(q.index)
	return err
}
