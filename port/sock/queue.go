package sock

import (
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/internal/stock"
	"github.com/vhostd/vhostd/virtio"
)

// queue is one queue of the network. It implements [port.Queue].
//
// The peer comes and goes, but a worker watches the same descriptor as long as the queue is open: an epoll set that holds the
// connection, and an eventfd that says that there is another one.
type queue struct {
	port     *Port
	index    int
	receives bool
	arena    *pagemem.Arena
	owner    pagemem.OwnerID

	epfd, bell int          // of a queue that receives, else -1
	offered    atomic.Int32 // a connection for the owner to take, -1 for none
	conn       int          // the owner's, -1 for none

	stock   stock.Stock
	vec     [packet.MaxFrags]stock.Iovec
	msg     unix.Msghdr
	drained bool // the last read found nothing: whatever comes makes the descriptor ready
	closed  bool
	drops   drops
}

func newQueue(p *Port, index int, r port.Resources) (*queue, error) {
	q := &queue{port: p, index: index, receives: index == 0, arena: r.Arena, owner: r.Owner, epfd: -1, bell: -1, conn: -1}
	q.offered.Store(-1)
	if !q.receives {
		return q, nil
	}
	if r.Pool == nil {
		return nil, stock.ErrNoPool
	}
	q.stock = stock.New(r, 0)
	if err := q.watch(); err != nil {
		return nil, errors.Join(err, q.closeSet())
	}
	return q, nil
}

func (q *queue) watch() (err error) {
	if q.epfd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return fmt.Errorf("create epoll set: %w", err)
	}
	if q.bell, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		return fmt.Errorf("create eventfd: %w", err)
	}
	return q.control(unix.EPOLL_CTL_ADD, q.bell)
}

func (q *queue) control(op, fd int) error {
	return unix.EpollCtl(q.epfd, op, fd, &unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(fd)})
}

func (q *queue) closeSet() error {
	var errs []error
	for _, fd := range [...]*int{&q.epfd, &q.bell} {
		if *fd >= 0 {
			errs = append(errs, unix.Close(*fd))
			*fd = -1
		}
	}
	return errors.Join(errs...)
}

// offer hands a connection to the owner, who gets the last one that was offered. The caller holds the port's lock and gives fd
// up, -1 for none.
func (q *queue) offer(fd int) {
	if old := q.offered.Swap(int32(fd)); old >= 0 {
		_ = unix.Close(int(old))
	}
	if q.receives {
		one := [8]byte{1}
		_, _ = unix.Write(q.bell, one[:]) // full is as good: the owner looks
	}
}

// adopt takes the connection that was offered last.
func (q *queue) adopt() {
	if q.offered.Load() < 0 {
		return
	}
	if q.receives {
		// ORDER: the bell is emptied before the offer is taken, so that a later offer rings again.
		var count [8]byte
		_, _ = unix.Read(q.bell, count[:])
	}
	fd := int(q.offered.Swap(-1))
	if fd < 0 {
		return
	}
	q.hangUp()
	q.conn, q.drained = fd, false
	if q.receives && q.control(unix.EPOLL_CTL_ADD, fd) != nil {
		q.hangUp() // the kernel has no memory for it
	}
}

// hangUp forgets the connection. Its file lives on in other descriptors, so it must leave the set explicitly.
func (q *queue) hangUp() {
	if q.conn < 0 {
		return
	}
	if q.receives {
		_ = q.control(unix.EPOLL_CTL_DEL, q.conn)
	}
	_ = unix.Close(q.conn)
	q.conn = -1
}

func (q *queue) Send(pkts []packet.Packet) (n int) {
	q.adopt()
	for n < len(pkts) && q.write(&pkts[n]) {
		n++
	}
	packet.Release(q.arena, pkts[:n], q.owner)
	return n
}

// write hands one frame to the socket, or counts why not; false means that the peer has to read first.
func (q *queue) write(p *packet.Packet) bool {
	switch {
	case p.Len < virtio.EthernetHdrLen:
		q.drops.add(tooShort)
		return true
	case q.conn < 0:
		q.drops.add(noPeer)
		return true
	}
	n := int(p.NFrag)
	for i := range p.Frags[:n] {
		q.vec[i] = stock.Iovec{Base: p.Frags[i].Addr, Len: uint64(p.Frags[i].Len)}
	}
	switch errno := sendmsg(q.conn, &q.msg, q.vec[:n]); errno {
	case 0:
	case unix.EAGAIN, unix.EINTR:
		return false
	case unix.EMSGSIZE:
		q.drops.add(tooLong)
	case unix.EPIPE, unix.ECONNRESET, unix.ENOTCONN:
		q.drops.add(noPeer)
		if !q.receives {
			q.hangUp() // what is unread the receiving queue reads first
		}
	case unix.ENOBUFS, unix.ENOMEM:
		q.drops.add(noBuffers)
	default:
		q.drops.add(writeError)
	}
	return true
}

func (q *queue) Recv(pkts []packet.Packet) (n int) {
	if !q.receives {
		return 0
	}
	q.adopt()
	// Every read counts, also of a frame that is dropped, so that a call is bounded.
	for range min(len(pkts), port.MaxBatch) {
		if q.conn < 0 {
			return n
		}
		if !q.stock.Fill() {
			q.discard()
			continue
		}
		size, more := q.read(q.stock.Window())
		if !more {
			return n
		}
		if q.take(&pkts[n], size) {
			n++
		}
	}
	return n
}

// discard throws the next frame away, for which there is no memory.
func (q *queue) discard() {
	if _, more := q.read(nil); more {
		q.drops.add(noMemory)
	}
}

// read reads the next message; more is false when there is none now.
func (q *queue) read(into []stock.Iovec) (size int, more bool) {
	size, errno := recvmsg(q.conn, &q.msg, into)
	switch {
	case errno == unix.EINTR:
		return 0, false // q.drained stays false: Arm sends the worker back here
	case errno == unix.EAGAIN:
		q.drained = true
		return 0, false
	case errno != 0, size == 0 && ended(q.conn):
		// A message without bytes reads like the end.
		q.hangUp()
		return 0, false
	}
	q.drained = false
	return size, true
}

// take makes a packet of the message in the stock's window, or counts why not.
func (q *queue) take(p *packet.Packet, size int) bool {
	switch {
	case size < virtio.EthernetHdrLen:
		q.drops.add(tooShort)
		return false
	case size > virtio.MaxFrame:
		// The window is larger than MaxFrame, so a message that the kernel cut to the window ends here too.
		q.drops.add(tooLong)
		return false
	}
	p.Hdr = virtio.NetHdr{}
	q.stock.Take(p, uint32(size))
	return true
}

func (q *queue) ReadyFD() int { return q.epfd }

func (q *queue) Arm() bool {
	if !q.receives {
		return false
	}
	q.adopt()
	return q.conn >= 0 && !q.drained
}

func (q *queue) Drops(visit func(reason string, n uint64)) { q.drops.visit(visit) }

func (q *queue) Close() error {
	if q.closed {
		return nil
	}
	q.closed = true
	q.port.left(q) // nothing is offered from here on
	if fd := q.offered.Swap(-1); fd >= 0 {
		_ = unix.Close(int(fd))
	}
	q.hangUp()
	if q.receives {
		q.stock.GiveBack()
	}
	return q.closeSet()
}
