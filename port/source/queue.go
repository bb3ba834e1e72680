package source

import (
	"fmt"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/pool"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
)

// queue generates the frames of one queue pair from a pool of its own.
type queue struct {
	arena *pagemem.Arena
	base  uintptr // address of the arena's page 0
	owner pagemem.OwnerID
	pool  *pool.Pool

	size      uint32
	perFrame  int     // pages a frame
	colorMask uintptr // see colorsOf
	layout    layout
	head      [headLen]byte // start of a frame of several pages
	body      [headLen]byte // start of its further pages

	seq         uint32
	flow, flows uint32

	limited bool
	epoch   time.Time
	bucket  bucket
	timer   int // timerfd, -1 without a rate
	spec    unix.ItimerSpec

	pages     [port.MaxBatch]pagemem.PageID
	discarded atomic.Uint64
	set       *port.QueueSet
	index     int
	closed    bool
}

func newQueue(p *Port, index int, r port.Resources) (*queue, error) {
	size := p.opts.Size
	q := &queue{
		arena: r.Arena, base: r.Arena.Base(), owner: r.Owner,
		size: uint32(size), perFrame: pagesOf(size), colorMask: colorsOf(size) - 1, layout: layoutOf(size),
		flows: uint32(p.opts.Flows), epoch: time.Now(), timer: -1, set: &p.queues, index: index,
	}
	copy(q.head[:], p.frame)
	for i := range q.body {
		q.body[i] = pattern(i)
	}
	var err error
	if q.pool, err = pool.New(pool.Config{Arena: r.Arena, Owner: r.Owner, Init: q.pageFiller(p.frame)}); err != nil {
		return nil, fmt.Errorf("make page pool: %w", err)
	}
	if p.opts.Rate > 0 {
		q.limited, q.bucket = true, newBucket(p.opts.Rate, 0)
		if q.timer, err = unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_CLOEXEC|unix.TFD_NONBLOCK); err != nil {
			q.pool.Destroy()
			return nil, fmt.Errorf("make timer: %w", err)
		}
	}
	return q, nil
}

// pageFiller returns the pool's callback: it writes what all frames have in common into a page that enters the pool.
func (q *queue) pageFiller(frame []byte) func(addr uintptr, n int) {
	if q.perFrame == 1 {
		return func(addr uintptr, _ int) { writeBytes(q.place(addr), frame) }
	}
	page := make([]byte, pagemem.PageSize)
	for i := range page {
		page[i] = pattern(i)
	}
	return func(addr uintptr, _ int) { writeBytes(addr, page) }
}

// place is where in the page at addr a frame of one page starts.
func (q *queue) place(addr uintptr) uintptr {
	return addr + (addr/pagemem.PageSize&q.colorMask)*headLen
}

func (q *queue) Send(pkts []packet.Packet) int {
	packet.Release(q.arena, pkts, q.owner)
	q.discarded.Add(uint64(len(pkts)))
	return len(pkts)
}

func (q *queue) Recv(pkts []packet.Packet) int {
	want := min(len(pkts), port.MaxBatch)
	if q.limited {
		want = min(want, q.bucket.refill(time.Since(q.epoch)))
	}
	if want == 0 {
		return 0
	}
	var n int
	if q.perFrame == 1 {
		n = q.fillSmall(pkts[:want])
	} else {
		n = q.fillLarge(pkts[:want])
	}
	if q.limited {
		q.bucket.take(n)
	}
	return n
}

// fillSmall makes frames of one page each.
func (q *queue) fillSmall(pkts []packet.Packet) int {
	n := q.pool.AllocN(q.pages[:len(pkts)])
	pkts, pages := pkts[:n], q.pages[:n]
	for i, page := range pages {
		addr := q.place(q.base + uintptr(page)*pagemem.PageSize)
		p := &pkts[i]
		p.Hdr = virtio.NetHdr{}
		p.Len, p.NFrag, p.Flags = q.size, 1, 0
		f := &p.Frags[0]
		f.Addr, f.Len, f.Page = addr, q.size, page
	}
	q.markAll(pkts)
	return n
}

// fillLarge makes frames of several pages, as many as there is memory for.
func (q *queue) fillLarge(pkts []packet.Packet) int {
	for n := range pkts {
		pages := q.pages[:q.perFrame]
		if got := q.pool.AllocN(pages); got < len(pages) {
			q.pool.PutBulk(pages[:got], q.owner)
			return n
		}
		p := &pkts[n]
		p.Reset()
		left := q.size
		for i, page := range pages {
			addr := q.base + uintptr(page)*pagemem.PageSize
			f := packet.Frag{Addr: addr, Len: min(left, pagemem.PageSize), Page: page}
			if i == 0 {
				writeBytes(addr, q.head[:])
				q.mark(addr)
			} else {
				writeBytes(addr, q.body[:min(f.Len, headLen)])
			}
			left -= f.Len
			p.Append(f)
		}
	}
	return len(pkts)
}

func (q *queue) ReadyFD() int { return q.timer }

// Arm reports frames that are due and otherwise sets the timer for the next one, which also ends the readiness that the
// timer's last expiry left.
func (q *queue) Arm() bool {
	if !q.limited || q.bucket.refill(time.Since(q.epoch)) > 0 {
		return true
	}
	q.spec.Value = unix.NsecToTimespec(q.bucket.wait().Nanoseconds())
	// It fails only for a bad descriptor or time; then the worker polls instead of waiting for ever.
	return unix.TimerfdSettime(q.timer, 0, &q.spec, nil) != nil
}

func (q *queue) Drops(visit func(reason string, n uint64)) {
	visit("discarded", q.discarded.Load())
}

func (q *queue) Close() error {
	if q.closed {
		return nil
	}
	q.closed = true
	q.pool.Destroy()
	var err error
	if q.timer >= 0 {
		err = unix.Close(q.timer)
	}
	q.set.Remove(q.index)
	return err
}
