package nettest

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// Counts are what a ring's driver, or a wire, did and saw.
type Counts struct {
	Frames      uint64 // sent or received
	Again       uint64 // of these sent that are to be sent again, after a reset
	Kicks       uint64
	KicksSpared uint64 // publications that the back-end wanted no kick for
	Calls       uint64
	Spurious    uint64 // wake-ups without anything new
	Sleeps      uint64
	Foreign     uint64 // frames of others
	Unset       uint64 // headers of somebody else's back-end without the num_buffers that virtio asks for
	Resets      uint64
}

func (c *Counts) each(o Counts, f func(a *uint64, b uint64)) {
	mine := [...]*uint64{&c.Frames, &c.Again, &c.Kicks, &c.KicksSpared, &c.Calls, &c.Spurious, &c.Sleeps, &c.Foreign, &c.Unset, &c.Resets}
	for i, b := range [...]uint64{o.Frames, o.Again, o.Kicks, o.KicksSpared, o.Calls, o.Spurious, o.Sleeps, o.Foreign, o.Unset, o.Resets} {
		f(mine[i], b)
	}
}

func (c *Counts) add(o Counts) { c.each(o, func(a *uint64, b uint64) { *a += b }) }

func (c Counts) minus(o Counts) Counts {
	c.each(o, func(a *uint64, b uint64) { *a -= b })
	return c
}

// queue is the driver's side of one ring with its buffers, one for each chain.
type queue struct {
	index            int
	mem              *frontend.Memory
	ring             driver.Queue
	packed           bool
	layout           driver.Layout // guest addresses
	kick, call, fail int           // eventfds
	buffers          []buffer
	tables           []uint64 // guest addresses of indirect tables
	free             []int
	inUse            []int // buffer by head
	chains           string
	delayed          bool
	random           *rand.Rand
	pieces           []driver.Buf // scratch
	counts           Counts
}

// freshPacked is the base of a packed ring that nobody has used: descriptor 0 in both halves, wrap counters of 1.
const freshPacked = 1<<15 | 1<<31

func newQueue(g *guest, index, bytes int) (*queue, error) {
	o := g.opts
	q := &queue{index: index, mem: g.mem, packed: g.features.Has(virtio.FRingPacked), kick: -1, call: -1, fail: -1,
		chains: o.Layout, delayed: o.Delayed, inUse: make([]int, o.RingSize), random: rand.New(rand.NewPCG(o.Seed, uint64(index)))}
	for _, fd := range [...]*int{&q.kick, &q.call, &q.fail} {
		n, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("eventfd: %w", err), q.close())
		}
		*fd = n
	}
	if err := q.allocate(g.features, o.RingSize, bytes); err != nil {
		return nil, errors.Join(err, q.close())
	}
	return q, nil
}

func (q *queue) allocate(features virtio.Features, size, bytes int) (err error) {
	place := driver.Paged
	if q.packed {
		place = driver.PackedFormat
	}
	l := place(size, 0)
	at, err := q.mem.Alloc(ringRegion, l.End, pageSize)
	if err != nil {
		return err
	}
	q.layout = driver.Layout{Desc: at + l.Desc, Avail: at + l.Avail, Used: at + l.Used, End: at + l.End}
	cfg := driver.Config{Size: size, Features: features,
		Desc: q.mem.Host(q.layout.Desc), Avail: q.mem.Host(q.layout.Avail), Used: q.mem.Host(q.layout.Used)}
	if q.packed {
		q.ring, err = driver.NewPacked(cfg)
	} else {
		q.ring, err = driver.New(cfg)
	}
	if err != nil {
		return err
	}
	for i := range size {
		b, err := newBuffer(q.mem, bytes)
		if err != nil {
			return err
		}
		table, err := q.mem.Alloc(bufferRegion, 16*maxPieces, 16)
		if err != nil {
			return err
		}
		q.buffers, q.tables, q.free = append(q.buffers, b), append(q.tables, table), append(q.free, size-1-i)
	}
	return nil
}

// memory is what newQueue takes of the regions of rings and of buffers.
func queueMemory(size, bytes int, packed bool) (rings, buffers uint64) {
	place := driver.Paged
	if packed {
		place = driver.PackedFormat
	}
	return (place(size, 0).End + 2*pageSize) &^ (pageSize - 1), uint64(size) * uint64((bytes+63)&^63+2*canaryLen+16*maxPieces+128)
}

func (q *queue) writable() bool { return q.index%2 == 0 }

// add stages the first n bytes of buffer i.
func (q *queue) add(i, n int) error {
	at := q.buffers[i].gpa
	var head uint16
	var err error
	switch q.chains {
	case "direct":
		head, err = q.ring.AddDirect(driver.Buf{Addr: at, Len: uint32(n), Write: q.writable()})
	case "chained":
		head, err = q.ring.AddChain(q.split(at, n))
	default:
		head, err = q.ring.AddIndirect(q.mem.Host(q.tables[i]), q.tables[i], q.split(at, n))
	}
	if err == nil {
		q.inUse[head] = i
	}
	return err
}

// split gives the header a descriptor of its own and cuts the rest into up to four at random places.
func (q *queue) split(at uint64, n int) []driver.Buf {
	write := q.writable()
	q.pieces = append(q.pieces[:0], driver.Buf{Addr: at, Len: virtio.NetHdrLen, Write: write})
	at, n = at+virtio.NetHdrLen, n-virtio.NetHdrLen
	for n > 0 {
		piece := n
		if len(q.pieces) < maxPieces-1 {
			piece = 1 + q.random.IntN(n)
		}
		q.pieces = append(q.pieces, driver.Buf{Addr: at, Len: uint32(piece), Write: write})
		at, n = at+uint64(piece), n-piece
	}
	return q.pieces
}

// flush shows what is staged to the back-end, and kicks it if it wants that.
func (q *queue) flush() error {
	if q.ring.Publish() == 0 {
		return nil
	}
	if !q.ring.NeedsKick() {
		q.counts.KicksSpared++
		return nil
	}
	return q.signal()
}

var one = func() (b [8]byte) {
	binary.NativeEndian.PutUint64(b[:], 1)
	return b
}()

func (q *queue) signal() error {
	q.counts.Kicks++
	_, err := unix.Write(q.kick, one[:])
	if errors.Is(err, unix.EAGAIN) {
		return nil // the counter is full, so the back-end has a signal waiting
	}
	return err
}

// take takes back one used chain.
func (q *queue) take() (buffer int, written uint32, ok bool, err error) {
	head, written, ok := q.ring.GetUsed()
	if !ok {
		if err := q.ring.Err(); err != nil {
			return 0, 0, false, fmt.Errorf("ring %d: %w", q.index, err)
		}
		return 0, 0, false, nil
	}
	return q.inUse[head], written, true, nil
}

// arm asks for a call; false means that there is something already, and none may come.
func (q *queue) arm() (sleep bool) {
	if q.ring.HasUsed() {
		return false
	}
	if q.delayed && !q.writable() {
		return !q.ring.DelayCalls()
	}
	return !q.ring.EnableCalls()
}

// called takes the calls that came; without a used chain they are spurious.
func (q *queue) called() {
	var count [8]byte
	if n, err := unix.Read(q.call, count[:]); err == nil && n == 8 {
		q.counts.Calls += binary.NativeEndian.Uint64(count[:])
		if !q.ring.HasUsed() {
			q.counts.Spurious++
		}
	}
}

func (q *queue) addr() vhostuser.VringAddr {
	return vhostuser.VringAddr{Index: uint32(q.index), Desc: q.mem.UVA(q.layout.Desc), Avail: q.mem.UVA(q.layout.Avail),
		Used: q.mem.UVA(q.layout.Used), Log: q.layout.Used}
}

// intact wants every canary as it was, and the err eventfd silent.
func (q *queue) intact() error {
	for i := range q.buffers {
		if !q.buffers[i].intact() {
			return fmt.Errorf("ring %d: the back-end wrote outside of buffer %d", q.index, i)
		}
	}
	var count [8]byte
	if n, err := unix.Read(q.fail, count[:]); err == nil && n == 8 {
		return fmt.Errorf("ring %d: the back-end reports it as broken", q.index)
	}
	return nil
}

func (q *queue) close() error {
	var errs []error
	for _, fd := range [...]*int{&q.kick, &q.call, &q.fail} {
		if *fd >= 0 {
			errs = append(errs, unix.Close(*fd))
			*fd = -1
		}
	}
	return errors.Join(errs...)
}
