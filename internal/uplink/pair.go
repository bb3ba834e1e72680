package uplink

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/vhostd/vhostd/fragalloc"
	"github.com/vhostd/vhostd/offload"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/pool"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/worker"
)

// A turn ends after this much, as that of a guest's queue pair does.
const (
	turnFrames = 256
	turnBytes  = 512 << 10
)

// retry is the pause after a port refused frames.
const retry = time.Millisecond

const (
	batch    = 32
	bufAlign = 64
)

// pair joins two queues. It is a worker.Task; all its state belongs to the worker's thread.
type pair struct {
	loop    *worker.Loop
	pool    *pool.Pool
	frags   *fragalloc.Cache
	out, in direction // a to b, b to a
}

// direction moves frames from one queue to another.
type direction struct {
	from, to port.Queue
	accepts  virtio.Features // by the port of to
	finisher offload.Finisher

	received [batch]packet.Packet
	next     []packet.Packet // received, not looked at yet
	ready    []packet.Packet // to be sent as they are
	finished []packet.Packet // what frames became that to cannot take
	lost     atomic.Uint64   // could not be finished
}

func newPair(a, b port.Port, i int, loop *worker.Loop, arena *pagemem.Arena) (*pair, error) {
	p := &pair{loop: loop, frags: fragalloc.NewCache(arena)}
	var err error
	if p.pool, err = pool.New(pool.Config{Arena: arena, Owner: loop.Owner()}); err != nil {
		return nil, err
	}
	r := port.Resources{Arena: arena, Owner: loop.Owner(), Pool: p.pool}
	qa, err := a.OpenQueue(i, r)
	if err == nil {
		var qb port.Queue
		if qb, err = b.OpenQueue(i, r); err == nil {
			finisher := offload.Finisher{Arena: arena, Alloc: buffers{p.frags}, Owner: loop.Owner()}
			p.out = direction{from: qa, to: qb, accepts: taken(b), finisher: finisher}
			p.in = direction{from: qb, to: qa, accepts: taken(a), finisher: finisher}
			if err = p.start(); err == nil {
				return p, nil
			}
			err = errors.Join(err, qb.Close())
		}
		err = errors.Join(err, qa.Close())
	}
	loop.Do(p.pool.Destroy)
	return nil, err
}

// start puts the pair under its worker's care.
func (p *pair) start() (err error) {
	p.loop.Do(func() {
		p.loop.Add(p)
		for _, d := range [...]*direction{&p.out, &p.in} {
			if fd := d.from.ReadyFD(); fd >= 0 && err == nil {
				err = p.loop.Watch(fd, p, 0, false)
			}
		}
		if err != nil {
			p.detach()
		}
	})
	return err
}

// detach takes the pair off its worker, on its thread.
func (p *pair) detach() {
	p.loop.Unwatch(p.out.from.ReadyFD())
	p.loop.Unwatch(p.in.from.ReadyFD())
	p.loop.Remove(p)
}

func (p *pair) close() (err error) {
	p.loop.Do(func() {
		p.detach()
		p.out.release()
		p.in.release()
		p.frags.Drain()
		err = errors.Join(p.out.from.Close(), p.in.from.Close())
		p.pool.Destroy()
	})
	return err
}

// Run implements worker.Task.
func (p *pair) Run() bool {
	frames, bytes := 0, 0
	for frames < turnFrames && bytes < turnBytes {
		n, b := p.out.move()
		m, c := p.in.move()
		if n+m == 0 {
			break
		}
		frames, bytes = frames+n+m, bytes+b+c
	}
	return frames > 0
}

// Arm implements worker.Task.
func (p *pair) Arm() (r worker.Readiness) {
	for _, d := range [...]*direction{&p.out, &p.in} {
		if d.waiting() {
			r.Retry = retry
		} else if d.from.Arm() {
			r.Ready = true
		}
	}
	return r
}

// Notify implements worker.Task.
func (*pair) Notify(worker.Event) {}

// Fault implements worker.Task: no guest's memory is used here.
func (*pair) Fault(uintptr) bool { return false }

func (d *direction) waiting() bool { return len(d.ready)+len(d.next) > 0 }

// move sends a batch on and returns how many frames and bytes it moved.
func (d *direction) move() (frames, bytes int) {
	if len(d.ready) == 0 && !d.prepare() {
		return 0, 0
	}
	for i := range d.ready[:min(len(d.ready), port.MaxBatch)] {
		bytes += int(d.ready[i].Len)
	}
	frames = d.to.Send(d.ready[:min(len(d.ready), port.MaxBatch)])
	d.ready = d.ready[frames:]
	return frames, bytes
}

// prepare finds the next frames to send: those up to the next that the receiver cannot take as it is, or what that one becomes.
func (d *direction) prepare() bool {
	if len(d.next) == 0 {
		d.next = d.received[:d.from.Recv(d.received[:])]
	}
	for len(d.next) > 0 {
		n := 0
		for n < len(d.next) && !offload.Needs(&d.next[n], d.accepts) {
			n++
		}
		if n > 0 {
			d.ready, d.next = d.next[:n], d.next[n:]
			return true
		}
		if d.finish() {
			return true
		}
	}
	return false
}

// finish makes the next frame one or several that the receiver can take.
func (d *direction) finish() bool {
	if d.finished == nil {
		d.finished = make([]packet.Packet, offload.MaxSegments)
	}
	n, reason := d.finisher.Finish(&d.next[0], d.accepts, d.finished)
	d.next = d.next[1:]
	if reason != offload.OK {
		d.lost.Add(1)
		return false
	}
	d.ready = d.finished[:n]
	return true
}

// release lets go of the frames on the way.
func (d *direction) release() {
	packet.Release(d.finisher.Arena, d.ready, d.finisher.Owner)
	packet.Release(d.finisher.Arena, d.next, d.finisher.Owner)
	d.ready, d.next = nil, nil
}

// buffers lets offload build frames in a page-frag cache.
type buffers struct{ cache *fragalloc.Cache }

func (b buffers) AllocBuf(size uint32) (packet.Frag, bool) {
	f, err := b.cache.Alloc(size, bufAlign)
	if err != nil {
		return packet.Frag{}, false
	}
	return packet.Frag{Addr: f.Addr, Len: size, Page: f.Page}, true
}
