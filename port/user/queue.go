package user

import (
	"errors"

	"github.com/vhostd/vhostd/internal/bell"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/pool"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
)

// queue is the port's share of a queue pair. It implements [port.Queue] and [port.Enabler].
type queue struct {
	port  *Port
	index int
	arena *pagemem.Arena
	owner pagemem.OwnerID
	pool  *pool.Pool
	ring  ring
	bell  bell.Bell
	drops drops

	in       inFrame     // the frame at hand
	gathered []byte      // payload of a datagram that lies in several fragments
	seen     lastStation // spares most frames a look at the neighbors

	asked bool // the bell was asked for
	batch [port.MaxBatch]outFrame
	pages [packet.MaxFrags]pagemem.PageID

	enabled bool // written by the owner under port.mu
	closed  bool
}

func newQueue(p *Port, i int, r port.Resources) (*queue, error) {
	if r.Pool == nil {
		return nil, errors.New("no page pool to receive into")
	}
	q := &queue{port: p, index: i, arena: r.Arena, owner: r.Owner, pool: r.Pool, enabled: true}
	q.ring.held = &p.held
	if err := q.bell.Open(); err != nil {
		return nil, err
	}
	return q, nil
}

// Send never refuses a frame.
func (q *queue) Send(pkts []packet.Packet) int {
	q.admit(pkts)
	packet.Release(q.arena, pkts, q.owner)
	return len(pkts)
}

// admit takes frames through the network. A defect of the stack that a frame brings to light ends the network, not the process: what
// the stack has locked stays locked.
func (q *queue) admit(pkts []packet.Packet) {
	defer q.port.contain()
	for i := range pkts {
		if r := q.accept(&pkts[i]); r != accepted {
			q.drops.add(r)
		}
	}
}

func (q *queue) Recv(pkts []packet.Packet) (n int) {
	defer q.port.contain()
	if q.asked {
		q.asked = false
		q.bell.Disarm()
	}
	got := q.ring.pop(q.batch[:min(len(pkts), port.MaxBatch)])
	for i := range q.batch[:got] {
		f := &q.batch[i]
		if q.fill(&pkts[n], f) {
			n++
		} else {
			q.drops.add(noMemory)
		}
		f.release()
	}
	return n
}

// fill copies a frame into pages of the pool.
func (q *queue) fill(p *packet.Packet, f *outFrame) bool {
	left := f.size
	pages := q.pages[:(left+pagemem.PageSize-1)/pagemem.PageSize]
	if got := q.pool.AllocN(pages); got < len(pages) {
		q.pool.PutBulk(pages[:got], q.owner)
		return false
	}
	p.Reset()
	p.Hdr = f.hdr
	f.copyTo(func() []byte {
		i := p.NFrag
		n := min(left, pagemem.PageSize)
		left -= n
		p.Append(packet.Frag{Addr: q.arena.Addr(pages[i]), Len: n, Page: pages[i]})
		return p.Bytes(int(i))
	})
	return true
}

func (q *queue) ReadyFD() int { return q.bell.FD() }

func (q *queue) Arm() bool {
	if !q.ring.empty() {
		return true
	}
	q.asked = true
	return !q.bell.Arm() || !q.ring.empty()
}

// SetEnabled implements [port.Enabler]. Flows move to the queues that are enabled; what waits here stays until it is enabled again.
func (q *queue) SetEnabled(on bool) error {
	q.port.enable(q, on)
	return nil
}

func (q *queue) Drops(visit func(reason string, n uint64)) {
	q.drops.visit(visit)
	if q.index == 0 {
		q.port.lost.visit(visit)
	}
}

func (q *queue) Close() error {
	if q.closed {
		return nil
	}
	q.closed = true
	q.port.leave(q)
	q.ring.close()
	err := q.bell.Close()
	q.port.queues.Remove(q.index)
	return err
}

// frame makes a frame of an IP packet of ours, which view holds.
func (p *Port) frame(to [6]byte, etherType uint16, f *outFrame) {
	copy(f.eth[:], to[:])
	copy(f.eth[6:], p.mac[:])
	f.eth[12], f.eth[13] = byte(etherType>>8), byte(etherType)
	n := 0
	if f.pkt != nil {
		n = f.pkt.Size()
	} else {
		n = f.view.Size()
	}
	f.size = uint32(virtio.EthernetHdrLen + n)
}

// deliver hands a frame to the queue that flows with the hash go to. The frame is consumed in any case.
func (p *Port) deliver(f *outFrame, hash uint32) (r reason) {
	defer func() {
		if r != accepted {
			f.release()
			p.lost.add(r)
		}
	}()
	if p.failed.Load() != nil {
		return stackFailed
	}
	r = noQueue
	serving := *p.serving.Load()
	switch {
	case f.size > virtio.MaxFrame:
		return oversized
	case len(serving) > 0:
		q := serving[hash%uint32(len(serving))]
		if r = q.ring.push(f); r == accepted {
			q.bell.Ring()
		}
	}
	return r
}
