package experiments

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/fragalloc"
	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/pool"
)

const (
	maxMessage  = 1 << 20
	messagesOut = 4 // messages that were sent and are not completed
)

// fragment is a piece of a message under way.
type fragment struct {
	memory []byte // a mapping of its own, nil: page has it
	page   pagemem.PageID
	addr   uintptr
	size   int
	from   int // offset in the message
}

// sender copies messages into fragments, as a socket does, and completes them in order, a few messages later. It is its own
// completing worker, with a pool of its own.
type sender struct {
	sendSetting
	arena  *pagemem.Arena
	owner  pagemem.OwnerID
	pool   *pool.Pool
	frags  *pool.FragPool
	maps   uint64 // fresh buffers
	source []byte
	out    [messagesOut][]fragment
	next   int
	ops    []fragalloc.CopyOp
}

func newSender(s sendSetting) (f *sender, err error) {
	f = &sender{sendSetting: s, owner: pagemem.NewOwnerID()}
	if f.source, err = mapMemory(s.msg); err != nil {
		return nil, err
	}
	for i := range f.source {
		f.source[i] = byte(i * 7 >> 3)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, f.close())
		}
	}()
	// A short message takes a page of the arena without the pool.
	if f.arena, err = pagemem.NewArena(pagemem.Config{Bytes: 64 << 20, Name: "vhostd-bench"}); err != nil {
		return nil, err
	}
	// In the pool a page is mapped once, when it enters.
	f.pool, err = pool.New(pool.Config{Arena: f.arena, Owner: f.owner, RingSize: 2048, Init: func(uintptr, int) { f.maps++ }})
	if err != nil {
		return nil, err
	}
	var workers pool.Workers
	if err = workers.Register(f.pool); err != nil {
		return nil, err
	}
	f.frags = pool.NewFragPool(f.arena, f.owner, nil)
	if !f.frags.Follow(&workers, f.owner) {
		return nil, errors.New("the worker's pool is not followed")
	}
	return f, nil
}

// sent is what a flow did in an observation.
type sent struct {
	bytes, fragments, maps uint64
	best                   float64 // ns/KiB of the fastest slice
	cpu, elapsed           time.Duration
}

// run sends on a thread of its own.
func (f *sender) run(ctx context.Context, variant string, cpu int, s *sent) error {
	unlock, err := bench.LockThread(cpu)
	if err != nil {
		return err
	}
	defer unlock()
	// What rests in pool and cache afterwards is what the steady state needs.
	if err := f.messages(variant, 4*messagesOut, s); err != nil {
		return err
	}
	*s = sent{}
	f.maps = 0
	began, before := time.Now(), threadCPU()
	if f.rate > 0 {
		err = f.paced(ctx, variant, s)
	} else {
		const slices = 15
		n := max(1, f.bytes/slices/f.msg)
		s.best, err = bench.Timed(slices, n*f.msg, func() error { return f.messages(variant, n, s) })
		s.best *= 1024
	}
	if err != nil {
		return err
	}
	s.elapsed, s.cpu, s.maps = time.Since(began), threadCPU()-before, f.maps
	if err := f.check(); err != nil {
		return err
	}
	return f.drain()
}

// paced sends at the flow's share of the rate.
func (f *sender) paced(ctx context.Context, variant string, s *sent) error {
	share := float64(f.rate) / float64(f.flows)
	burst := max(messagesOut, int(share/1000)/f.msg) // a millisecond's worth
	begin := time.Now()
	for time.Since(begin) < time.Duration(f.seconds)*time.Second && ctx.Err() == nil {
		if err := f.messages(variant, burst, s); err != nil {
			return err
		}
		due := time.Duration(float64(s.bytes) / share * 1e9)
		if rest := due - time.Since(begin); rest > 0 {
			t := unix.NsecToTimespec(rest.Nanoseconds())
			_ = unix.Nanosleep(&t, nil) // a signal only makes the next burst early
		}
	}
	return ctx.Err()
}

// threadCPU is the processor time of the calling thread.
func threadCPU() time.Duration {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(os.NewSyscallError("clock_gettime", err)) // the clock has been there since Linux 2.6.12
	}
	return time.Duration(t.Nano())
}

// messages sends n messages and completes as many old ones.
func (f *sender) messages(variant string, n int, s *sent) error {
	for range n {
		slot := &f.out[f.next%messagesOut]
		f.next++
		if err := f.complete(*slot); err != nil {
			return err
		}
		*slot = (*slot)[:0]
		f.ops = f.ops[:0]
		src := addressOf(f.source)
		for at := 0; at < f.msg; {
			p, err := f.take(variant, f.msg-at)
			if err != nil {
				return err
			}
			p.from = at
			f.ops = append(f.ops, fragalloc.CopyOp{Dst: p.addr, Src: src + uintptr(at), N: uint64(p.size)})
			*slot = append(*slot, p)
			at += p.size
		}
		fragalloc.CopyVec(f.ops)
		s.bytes += uint64(f.msg)
		s.fragments += uint64(len(*slot))
	}
	return nil
}

// take gets a buffer for up to want bytes.
func (f *sender) take(variant string, want int) (p fragment, err error) {
	p.size = min(want, pagemem.PageSize)
	switch variant {
	case "mapped":
		f.maps++
		p.memory, err = unix.Mmap(-1, 0, pagemem.PageSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return p, os.NewSyscallError("mmap", err)
		}
		p.addr = addressOf(p.memory)
	case "arena":
		id, ok := f.arena.Alloc(0, pagemem.NoReserve)
		if !ok {
			return p, errExhausted
		}
		p.page, p.addr = id, f.arena.Addr(id)
	default:
		part, ok := f.frags.Prepare(pool.MinRest, pagemem.Line)
		if !ok {
			return p, errExhausted
		}
		p.size = min(want, int(part.Size))
		if f.frags.Commit(part, uint32(p.size), false) == 0 {
			return p, fmt.Errorf("the commit of %d bytes of %+v was refused", p.size, part)
		}
		p.page, p.addr = part.Page, part.Addr
	}
	return p, nil
}

// complete is the end of a transmission.
func (f *sender) complete(message []fragment) (err error) {
	for _, p := range message {
		if p.memory != nil {
			err = errors.Join(err, unix.Munmap(p.memory))
			continue
		}
		f.arena.Release(p.page, 1, f.owner)
	}
	return err
}

// check wants the messages that are under way to be what was sent.
func (f *sender) check() error {
	for _, message := range f.out {
		for i, p := range message {
			part := bytesOf(pagemem.Frag{Page: p.page, Addr: p.addr, Size: uint32(p.size)})
			if string(part) != string(f.source[p.from:p.from+p.size]) {
				return fmt.Errorf("fragment %d of a message is not what was sent", i)
			}
		}
	}
	return nil
}

// drain completes everything.
func (f *sender) drain() (err error) {
	for i := range f.out {
		err = errors.Join(err, f.complete(f.out[i]))
		f.out[i] = f.out[i][:0]
	}
	return err
}

func (f *sender) close() error {
	errs := []error{f.drain()}
	if f.frags != nil {
		f.frags.Flush()
	}
	switch {
	case f.pool != nil:
		errs = append(errs, closePool(f.pool, f.arena))
	case f.arena != nil:
		errs = append(errs, f.arena.Close())
	}
	return errors.Join(append(errs, unix.Munmap(f.source))...)
}
