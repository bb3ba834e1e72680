package frontend

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// Pair is a queue pair: the rings and buffers of receiveq and transmitq. One
// goroutine uses it, or one sends while another receives.
type Pair struct {
	RX, TX *Queue

	features virtio.Features
	rxLayout Layout
}

// Queue is one ring with its eventfds and buffers.
type Queue struct {
	Index int
	// Driver is the driver's side of the ring. Ring is the same if the ring is
	// split, else nil.
	Driver driver.Queue
	Ring   *driver.Ring
	// KickFD, CallFD and ErrFD are owned by the queue.
	KickFD, CallFD, ErrFD int

	mem      *Memory
	hdrLen   int
	chunk    int
	bufs     []driver.Buf  // scratch of add
	iova     uint64        // what the device's addresses exceed guest addresses by
	position uint32        // where a packed ring resumes
	layout   driver.Layout // guest addresses
	slots    []slot
	free     []int // slots not in use
	inUse    []int // slot by chain head
	ended    <-chan struct{}
}

// slot is the memory of one chain: an indirect table and a buffer.
type slot struct {
	table, buf uint64 // guest addresses
	data       []byte
}

// freshPacked is the base of a packed ring that nobody has used: descriptor 0 in
// both halves, with wrap counters of 1.
const freshPacked = 1<<15 | 1<<31

// maxPieces bounds the descriptors of one frame, header included.
const maxPieces = 136

func newPair(mem *Memory, i int, features virtio.Features, o Options) (*Pair, error) {
	rx, err := newQueue(mem, 2*i, features, o, o.RxBuf)
	if err != nil {
		return nil, err
	}
	tx, err := newQueue(mem, 2*i+1, features, o, o.TxBuf)
	if err != nil {
		return nil, errors.Join(err, rx.close())
	}
	return &Pair{RX: rx, TX: tx, features: features, rxLayout: o.RxLayout}, nil
}

func newQueue(mem *Memory, index int, features virtio.Features, o Options, buf int) (*Queue, error) {
	q := &Queue{
		Index: index, KickFD: -1, CallFD: -1, ErrFD: -1,
		mem: mem, hdrLen: features.NetHdrLen(), chunk: o.Chunk, inUse: make([]int, o.RingSize), ended: o.Ended,
	}
	if o.IOMMU != nil {
		q.iova = IOVABase
	}
	if err := q.allocate(features, o, buf); err != nil {
		return nil, errors.Join(fmt.Errorf("ring %d: %w", index, err), q.close())
	}
	return q, nil
}

func (q *Queue) allocate(features virtio.Features, o Options, buf int) error {
	for _, fd := range [...]*int{&q.KickFD, &q.CallFD, &q.ErrFD} {
		n, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			return fmt.Errorf("eventfd: %w", err)
		}
		*fd = n
	}
	packed := features.Has(virtio.FRingPacked)
	place := o.Place
	switch {
	case place != nil:
	case packed:
		place = driver.PackedFormat
	default:
		place = driver.Paged
	}
	l := place(o.RingSize, 0)
	at, err := q.mem.Alloc(o.Region, l.End, 4096)
	if err != nil {
		return err
	}
	q.layout = driver.Layout{Desc: at + l.Desc, Avail: at + l.Avail, Used: at + l.Used, End: at + l.End}
	cfg := driver.Config{
		Size: o.RingSize, Features: features,
		Desc: q.mem.Host(q.layout.Desc), Avail: q.mem.Host(q.layout.Avail), Used: q.mem.Host(q.layout.Used),
	}
	if packed {
		q.position = freshPacked
		q.Driver, err = driver.NewPacked(cfg)
	} else {
		q.Ring, err = driver.New(cfg)
		q.Driver = q.Ring
	}
	if err != nil {
		return err
	}
	return q.allocateSlots(o, buf)
}

func (q *Queue) allocateSlots(o Options, buf int) error {
	const table = 16 * maxPieces
	for i := range o.RingSize {
		at, err := q.mem.Alloc(o.Region, uint64(table+buf), 16)
		if err != nil {
			return err
		}
		q.slots = append(q.slots, slot{table: at, buf: at + table, data: q.mem.Bytes(at+table, uint64(buf))})
		q.free = append(q.free, i)
	}
	return nil
}

// base is the payload of SET_VRING_BASE: for a split ring the used index in
// memory, for a packed one what GET_VRING_BASE answered last.
func (q *Queue) base() uint32 {
	if q.Ring != nil {
		return uint32(q.Ring.PeekUsedIdx())
	}
	return q.position
}

// Addr is the payload of SET_VRING_ADDR for the ring.
func (q *Queue) Addr() vhostuser.VringAddr {
	return vhostuser.VringAddr{
		Index: uint32(q.Index), Desc: q.mem.UVA(q.layout.Desc), Avail: q.mem.UVA(q.layout.Avail),
		Used: q.mem.UVA(q.layout.Used), Log: q.layout.Used,
	}
}

// GuestAddr is Addr where GPA_ADDRESSES was acknowledged.
func (q *Queue) GuestAddr() vhostuser.VringAddr {
	return vhostuser.VringAddr{
		Index: uint32(q.Index), Desc: q.layout.Desc, Avail: q.layout.Avail, Used: q.layout.Used, Log: q.layout.Used,
	}
}

// IOVAAddr is Addr behind an IOMMU.
func (q *Queue) IOVAAddr() vhostuser.VringAddr {
	a := q.GuestAddr()
	for _, addr := range [...]*uint64{&a.Desc, &a.Avail, &a.Used, &a.Log} {
		*addr += q.iova
	}
	return a
}

// Buffers is the guest memory of the queue's buffers, which a driver of a receiveq that
// posts them directly only reads.
func (q *Queue) Buffers() (gpa, n uint64) {
	last := q.slots[len(q.slots)-1]
	return q.slots[0].table, last.buf + uint64(len(last.data)) - q.slots[0].table
}

// UsedRing is the guest memory that the device of a split ring writes.
func (q *Queue) UsedRing() (gpa, n uint64) { return q.layout.Used, q.layout.End - q.layout.Used }

func (q *Queue) takeSlot() (int, bool) {
	if len(q.free) == 0 {
		return 0, false
	}
	i := q.free[len(q.free)-1]
	q.free = q.free[:len(q.free)-1]
	return i, true
}

// collect takes back one used chain.
func (q *Queue) collect() (slot int, written uint32, ok bool, err error) {
	head, written, ok := q.Driver.GetUsed()
	if !ok {
		return 0, 0, false, q.Driver.Err()
	}
	return q.inUse[head], written, true, nil
}

// Flush shows staged chains to the device and kicks it if it wants that.
func (q *Queue) Flush() error {
	if q.Driver.Publish() == 0 || !q.Driver.NeedsKick() {
		return nil
	}
	return q.Kick()
}

// Kick signals the device in any case.
func (q *Queue) Kick() error {
	_, err := unix.Write(q.KickFD, binary.NativeEndian.AppendUint64(nil, 1))
	if errors.Is(err, unix.EAGAIN) {
		return nil // the counter is full, so the device has a signal waiting
	}
	return err
}

// WaitUsed waits until the device has used a chain, and relies on its calls: a
// used chain without the call that was asked for is a timeout. The error then
// matches os.ErrDeadlineExceeded.
func (q *Queue) WaitUsed(timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	for {
		if q.Driver.HasUsed() || q.Driver.EnableCalls() {
			return q.Driver.Err()
		}
		if err := q.waitEvent(q.CallFD, time.Until(deadline)); err != nil {
			return fmt.Errorf("ring %d: no call (used chains are there: %v): %w", q.Index, q.Driver.HasUsed(), err)
		}
	}
}

// WaitCall waits for the next call of the device, whatever the ring holds.
func (q *Queue) WaitCall(timeout time.Duration) error { return q.waitEvent(q.CallFD, timeout) }

// WaitErr waits for the device to report the ring as broken.
func (q *Queue) WaitErr(timeout time.Duration) error { return q.waitEvent(q.ErrFD, timeout) }

// waitEvent is waitEvent that looks now and then whether the back-end is still there.
func (q *Queue) waitEvent(fd int, timeout time.Duration) error {
	const pause = 100 * time.Millisecond
	for deadline := time.Now().Add(timeout); ; {
		left := time.Until(deadline)
		if q.ended == nil || left <= pause {
			return waitEvent(fd, left)
		}
		if err := waitEvent(fd, pause); !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		select {
		case <-q.ended:
			return ErrEnded
		default:
		}
	}
}

// waitEvent waits for an eventfd and takes its count.
func waitEvent(fd int, timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	for {
		left := max(0, time.Until(deadline))
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int((left+time.Millisecond-1)/time.Millisecond))
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return err
		case n == 0:
			return os.ErrDeadlineExceeded
		default:
			var count [8]byte
			if _, err := unix.Read(fd, count[:]); err == nil || !errors.Is(err, unix.EAGAIN) {
				return err
			}
		}
	}
}

func (q *Queue) close() error {
	var errs []error
	for _, fd := range [...]*int{&q.KickFD, &q.CallFD, &q.ErrFD} {
		if *fd >= 0 {
			errs = append(errs, unix.Close(*fd))
			*fd = -1
		}
	}
	return errors.Join(errs...)
}

// Close closes the eventfds. The memory stays allocated.
func (p *Pair) Close() error { return errors.Join(p.RX.close(), p.TX.close()) }
