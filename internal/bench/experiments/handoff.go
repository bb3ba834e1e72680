package experiments

import (
	"context"
	"errors"
	"math/bits"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/pagemem"
)

// handoff passes pages from one goroutine to one other, one at a time, as the ptr_ring of the kernel's tests does.
type handoff struct {
	slots []pagemem.PageID // a power of two
	_     [64]byte
	head  atomic.Uint64 // entries that the producer has filled
	seen  uint64        // of tail, the producer's
	_     [64]byte
	tail  atomic.Uint64 // entries that the consumer has taken
	_     [64]byte
}

func newHandoff(size int) *handoff {
	return &handoff{slots: make([]pagemem.PageID, 1<<bits.Len(uint(size-1)))}
}

// push is the producer's; it is false when the ring is full.
func (h *handoff) push(id pagemem.PageID) bool {
	head := h.head.Load()
	if head-h.seen == uint64(len(h.slots)) {
		if h.seen = h.tail.Load(); head-h.seen == uint64(len(h.slots)) {
			return false
		}
	}
	h.slots[head&uint64(len(h.slots)-1)] = id
	h.head.Store(head + 1)
	return true
}

// pop is the consumer's. It takes as many as there are and fit into dst.
func (h *handoff) pop(dst []pagemem.PageID) (n int) {
	tail := h.tail.Load()
	for head := h.head.Load(); tail != head && n < len(dst); n++ {
		dst[n] = h.slots[tail&uint64(len(h.slots)-1)]
		tail++
	}
	if n > 0 {
		h.tail.Store(tail)
	}
	return n
}

// wait is a turn of a loop that waits for another thread: now and then the processor is given to others, which may be
// that thread.
func wait(turn int) {
	if turn&1023 == 1023 {
		_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
	}
	spin()
}

// consumer is a thread that takes pages from a handoff and disposes of them.
type consumer struct {
	in    *handoff
	taken atomic.Uint64 // pages disposed of
	quit  atomic.Bool
	ended chan struct{}
}

// startConsumer starts the thread on a processor, -1 for any. dispose is called on it with 1 to batch pages.
func startConsumer(size, batch, cpu int, dispose func(ids []pagemem.PageID)) (*consumer, error) {
	c := &consumer{in: newHandoff(size), ended: make(chan struct{})}
	started := make(chan error)
	go func() {
		unlock, err := bench.LockThread(cpu)
		started <- err
		if err != nil {
			return
		}
		defer close(c.ended)
		defer unlock()
		c.run(make([]pagemem.PageID, batch), dispose)
	}()
	return c, <-started
}

func (c *consumer) run(ids []pagemem.PageID, dispose func([]pagemem.PageID)) {
	for turn := 0; ; turn++ {
		n := c.in.pop(ids)
		if n > 0 {
			dispose(ids[:n])
			c.taken.Add(uint64(n))
			turn = 0
			continue
		}
		if c.quit.Load() {
			return
		}
		wait(turn)
	}
}

// errStopped means that a thread that was waited for did nothing until the run was interrupted.
var errStopped = errors.New("the other thread has not taken what it was given")

// await waits until the consumer has disposed of so many pages since it began.
func (c *consumer) await(ctx context.Context, pages uint64) error {
	for turn := 1; c.taken.Load() != pages; turn++ {
		if wait(turn); turn&0xfffff == 0 && ctx.Err() != nil {
			return errors.Join(errStopped, ctx.Err())
		}
	}
	return nil
}

// give pushes a page and waits while the ring is full.
func (c *consumer) give(ctx context.Context, id pagemem.PageID) error {
	for turn := 1; !c.in.push(id); turn++ {
		if wait(turn); turn&0xfffff == 0 && ctx.Err() != nil {
			return errors.Join(errStopped, ctx.Err())
		}
	}
	return nil
}

// stop ends the thread; what was given to it is disposed of before.
func (c *consumer) stop() {
	c.quit.Store(true)
	<-c.ended
}
