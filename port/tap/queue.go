package tap

import (
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/internal/stock"
	"github.com/vhostd/vhostd/virtio"
)

// maxStale bounds how many waiting frames are thrown away at once; no txqueuelen in use is longer.
const maxStale = 1 << 16

// queue is one queue of the tap. It implements [port.Queue] and [port.Enabler].
//
// A pair beyond the tap's queues gets one that only sends, through the first queue's descriptor: the guest may spread its
// frames over more pairs than the tap has queues, and what comes back arrives at those it has.
type queue struct {
	port  *Port
	index int
	fd    int
	multi bool
	sends bool // only
	arena *pagemem.Arena
	owner pagemem.OwnerID

	scratch pagemem.PageID // holds hdr, out of the Go heap's reach
	hdr     uintptr        // header of the frame that is being read or written
	send    [1 + packet.MaxFrags]stock.Iovec
	stock   stock.Stock

	enabled bool
	dead    bool // the interface was deleted
	failing bool // the last frame was refused because the interface is down
	drained bool // the last read found nothing: whatever comes makes the descriptor ready
	closed  bool
	drops   drops
}

func newQueue(p *Port, index int, r port.Resources) (*queue, error) {
	q := &queue{port: p, index: index, fd: p.fds[0], multi: p.multi, sends: index >= len(p.fds), arena: r.Arena, owner: r.Owner}
	if !q.sends {
		q.fd = p.fds[index]
	}
	if err := q.setUp(r); err != nil {
		return nil, err
	}
	if err := q.start(); err != nil {
		q.release()
		return nil, err
	}
	return q, nil
}

// setUp takes the memory that the queue keeps.
func (q *queue) setUp(r port.Resources) error {
	if r.Pool == nil {
		return stock.ErrNoPool
	}
	page, ok := r.Arena.Alloc(0, pagemem.NoReserve)
	if !ok {
		return stock.ErrNoPage
	}
	q.scratch, q.hdr = page, r.Arena.Addr(page)
	q.send[0] = stock.Iovec{Base: q.hdr, Len: virtio.NetHdrLen}
	q.stock = stock.New(r, q.hdr)
	return nil
}

// start makes frames come to the queue, none of them older than the call.
func (q *queue) start() error {
	if q.sends {
		return nil
	}
	if q.multi {
		if err := steer(q.fd, true); err != nil {
			return err
		}
	} else {
		q.flush()
	}
	q.enabled, q.drained = true, false
	return nil
}

// flush throws away the frames that wait.
func (q *queue) flush() {
	for range maxStale {
		// An error other than these two also consumes a frame.
		if _, errno := readv(q.fd, q.send[:1]); errno == unix.EAGAIN || gone(errno) {
			return
		}
	}
}

// SetEnabled implements [port.Enabler]. While the queue is disabled a multi-queue tap spreads its frames over the others, and
// any other tap throws away at enabling what came in between.
func (q *queue) SetEnabled(on bool) error {
	if on == q.enabled || q.dead || q.closed {
		return nil
	}
	if on {
		return q.ifAlive(q.start())
	}
	return q.stop()
}

func (q *queue) stop() error {
	q.enabled = false
	q.stock.GiveBack()
	if !q.multi {
		return nil
	}
	return q.ifAlive(steer(q.fd, false))
}

// ifAlive passes an error on unless its cause is that the interface was deleted, which Status tells. A detached queue of a
// deleted tap answers EINVAL.
func (q *queue) ifAlive(err error) error {
	if err == nil {
		return nil
	}
	if _, deleted := q.port.currentName(); deleted != nil {
		q.die(err)
		return nil
	}
	return err
}

func (q *queue) Send(pkts []packet.Packet) int {
	for i := range pkts {
		q.write(&pkts[i])
	}
	packet.Release(q.arena, pkts, q.owner)
	return len(pkts)
}

// write hands one frame to the kernel, or counts why not.
func (q *queue) write(p *packet.Packet) {
	switch {
	case q.dead:
		q.drops.add(tapDeleted)
		return
	case p.Len < virtio.EthernetHdrLen:
		q.drops.add(tooShort)
		return
	}
	storeHeader(q.hdr, &p.Hdr)
	n := int(p.NFrag)
	for i := range p.Frags[:n] {
		q.send[1+i] = stock.Iovec{Base: p.Frags[i].Addr, Len: uint64(p.Frags[i].Len)}
	}
	_, errno := writev(q.fd, q.send[:1+n])
	if errno == 0 && !q.failing {
		return
	}
	q.written(errno)
}

// written follows a change of the interface's condition.
func (q *queue) written(errno unix.Errno) {
	if errno == 0 {
		q.failing = false
		q.port.down.Store(false)
		q.port.events.report(q.port.name, eventUp, nil)
		return
	}
	r := writeReason(errno)
	q.drops.add(r)
	switch r {
	case tapDown:
		if !q.failing {
			q.failing = true
			q.port.down.Store(true)
			q.port.events.report(q.port.name, eventDown, errno)
		}
	case tapDeleted:
		q.die(errno)
	case writeError, noBuffers:
		q.port.events.report(q.port.name, eventIO, errno)
	}
}

// die ends the queue's traffic: the interface does not come back under this descriptor.
func (q *queue) die(err error) {
	q.dead = true
	q.port.deleted.Store(true)
	q.port.events.report(q.port.name, eventDeleted, err)
}

func (q *queue) Recv(pkts []packet.Packet) (n int) {
	if !q.enabled || q.dead {
		return 0
	}
	// Every read counts, also of a frame that is dropped, so that a call is bounded.
	for range min(len(pkts), port.MaxBatch) {
		if !q.stock.Fill() {
			q.port.events.report(q.port.name, eventNoMemory, nil)
			if _, more := q.readFrame(q.send[:1]); !more {
				return n
			}
			q.drops.add(noMemory)
			continue
		}
		got, more := q.readFrame(q.stock.Window())
		if !more {
			return n
		}
		if q.take(&pkts[n], got) {
			n++
		}
	}
	return n
}

// readFrame reads the next frame into iov and returns the bytes read, header included, 0 after an error that consumed the
// frame. more is false when there is nothing more to read now.
func (q *queue) readFrame(iov []stock.Iovec) (got int, more bool) {
	got, errno := readv(q.fd, iov)
	switch {
	case errno == 0:
		q.drained = false
		return got, true
	case errno == unix.EINTR:
		return 0, false // q.drained stays false: Arm sends the worker back here
	case errno == unix.EAGAIN:
		q.drained = true
	case gone(errno):
		q.die(errno)
	default:
		q.drops.add(readError)
		q.port.events.report(q.port.name, eventIO, errno)
		return 0, true
	}
	return 0, false
}

// take makes a packet of the got bytes in the stock's window, or counts why not.
func (q *queue) take(p *packet.Packet, got int) bool {
	size := got - virtio.NetHdrLen
	switch {
	case got == 0:
		return false // counted by readFrame
	case size < virtio.EthernetHdrLen:
		q.drops.add(tooShort)
		return false
	case size > virtio.MaxFrame:
		// The window is larger than MaxFrame, so a frame that the kernel cut to the window ends here too.
		q.drops.add(tooLong)
		return false
	}
	loadHeader(&p.Hdr, q.hdr)
	p.Hdr.NumBuffers = 0 // the kernel leaves it as it was
	if !admit(&p.Hdr, q.port.accepted) {
		q.drops.add(staleOffload)
		return false
	}
	q.stock.Take(p, uint32(size))
	return true
}

func (q *queue) ReadyFD() int {
	if q.sends {
		return -1
	}
	return q.fd
}

func (q *queue) Arm() bool { return q.enabled && !q.dead && !q.drained }

func (q *queue) Drops(visit func(reason string, n uint64)) { q.drops.visit(visit) }

func (q *queue) Close() error {
	if q.closed {
		return nil
	}
	q.closed = true
	err := q.stopIfRunning()
	q.release()
	q.port.queues.Remove(q.index)
	return err
}

func (q *queue) stopIfRunning() error {
	if !q.enabled || q.dead {
		return nil
	}
	return q.stop()
}

// release gives the queue's memory back.
func (q *queue) release() {
	q.stock.GiveBack()
	q.arena.Unref(q.scratch, 1)
}
