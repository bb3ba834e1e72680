package attach

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
	"github.com/vhostd/vhostd/worker"
)

// freshPacked is the base of a packed ring that nobody has used: descriptor 0 in both halves, with wrap counters of 1.
const freshPacked = 1<<15 | 1<<31

// After so many frames or bytes they are shown to the back-end, which begins with them while more are read.
const (
	publishFrames = 16
	publishBytes  = 128 << 10
)

// queue is one ring with its eventfds and buffers. Its worker owns it while it runs.
type queue struct {
	index            int
	ring             driver.Queue
	kick, call, fail int // eventfds, shared with the back-end
	layout           driver.Layout
	position         uint32 // where the back-end is to begin

	slots  []slot
	free   []uint16 // slots that are not on the ring, the last one used on top: its memory is in the cache
	slotOf []uint16 // by chain head
	apart  int      // bytes of the header in a descriptor of its own, 0: one descriptor holds both
	chain  [2]driver.Buf

	async bool // the back-end has held up a write to kick
	count *direction
}

// slot is the buffer of one chain.
type slot struct {
	gpa  uint64
	data []byte
}

// bufferStride keeps buffers on lines of their own, and their beginnings from sharing the same few sets of a cache.
func bufferStride(size int) uint64 {
	stride := (uint64(size) + 63) &^ 63
	if stride%4096 == 0 {
		stride += 64
	}
	return stride
}

// place is where the parts of a ring lie.
func place(size int, packed bool) driver.Layout {
	if packed {
		return driver.PackedFormat(size, 0)
	}
	return driver.Paged(size, 0)
}

// queueBytes is the memory that newQueue takes.
func queueBytes(o *Options, packed bool, buffer int) uint64 {
	return place(o.RingSize, packed).End + 2*4096 + uint64(o.RingSize)*bufferStride(buffer)
}

// newQueue makes a ring with as many buffers of so many bytes as it has descriptors for.
func newQueue(mem *frontend.Memory, index int, f virtio.Features, o *Options, buffer int, count *direction) (q *queue, err error) {
	q = &queue{index: index, kick: -1, call: -1, fail: -1, slotOf: make([]uint16, o.RingSize), count: count}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("ring %d: %w", index, err), q.close())
		}
	}()
	for _, fd := range [...]*int{&q.kick, &q.call, &q.fail} {
		n, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
		if err != nil {
			return q, fmt.Errorf("eventfd: %w", err)
		}
		*fd = n
	}
	packed := f.Has(virtio.FRingPacked)
	l := place(o.RingSize, packed)
	at, err := mem.Alloc(0, l.End, 4096)
	if err != nil {
		return q, err
	}
	q.layout = driver.Layout{Desc: at + l.Desc, Avail: at + l.Avail, Used: at + l.Used, End: at + l.End}
	cfg := driver.Config{Size: o.RingSize, Features: f,
		Desc: mem.Host(q.layout.Desc), Avail: mem.Host(q.layout.Avail), Used: mem.Host(q.layout.Used)}
	if packed {
		q.position = freshPacked
		q.ring, err = driver.NewPacked(cfg)
	} else {
		q.ring, err = driver.New(cfg)
	}
	if err != nil {
		return q, err
	}
	chains := o.RingSize
	if !f.Any(virtio.FVersion1 | virtio.FAnyLayout) {
		// A legacy device may want the header alone in the first descriptor (virtio 1.3 section 2.7.4.3).
		q.apart = f.NetHdrLen()
		chains /= 2
	}
	return q, q.allocate(mem, chains, buffer)
}

func (q *queue) allocate(mem *frontend.Memory, chains, size int) error {
	q.slots, q.free = make([]slot, chains), make([]uint16, chains)
	for i := range chains {
		at, err := mem.Alloc(0, bufferStride(size), 64)
		if err != nil {
			return err
		}
		q.slots[i] = slot{gpa: at, data: mem.Bytes(at, uint64(size))}
		q.free[i] = uint16(i)
	}
	return nil
}

// addr is the payload of SET_VRING_ADDR.
func (q *queue) addr(mem *frontend.Memory) vhostuser.VringAddr {
	return vhostuser.VringAddr{Index: uint32(q.index),
		Desc: mem.UVA(q.layout.Desc), Avail: mem.UVA(q.layout.Avail), Used: mem.UVA(q.layout.Used)}
}

// put stages the first n bytes of a slot. The ring has room for every slot.
func (q *queue) put(i uint16, n int, write bool) {
	s := &q.slots[i]
	var head uint16
	var err error
	if q.apart == 0 {
		head, err = q.ring.AddDirect(driver.Buf{Addr: s.gpa, Len: uint32(n), Write: write})
	} else {
		q.chain[0] = driver.Buf{Addr: s.gpa, Len: uint32(q.apart), Write: write}
		q.chain[1] = driver.Buf{Addr: s.gpa + uint64(q.apart), Len: uint32(n - q.apart), Write: write}
		head, err = q.ring.AddChain(q.chain[:])
	}
	if err != nil {
		panic(err) // a defect: slots and descriptors are counted here alone
	}
	q.slotOf[head] = i
}

// take takes back the next used chain.
func (q *queue) take() (i uint16, written uint32, ok bool) {
	head, written, ok := q.ring.GetUsed()
	if !ok {
		return 0, 0, false
	}
	return q.slotOf[head], written, true
}

// show publishes what is staged and wakes the back-end if it wants that.
func (q *queue) show(l *worker.Loop) {
	if q.ring.Publish() == 0 || !q.ring.NeedsKick() {
		return
	}
	q.count.kicks.Add(1)
	// The eventfd is ours, but who shares it can make it block and fill it.
	if q.async {
		l.SignalAsync(q.kick)
	} else if !l.Signal(q.kick) {
		q.async = true
	}
}

func (q *queue) close() (err error) {
	for _, fd := range [...]*int{&q.kick, &q.call, &q.fail} {
		if *fd >= 0 {
			err = errors.Join(err, unix.Close(*fd))
			*fd = -1
		}
	}
	return err
}
