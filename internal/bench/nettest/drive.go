package nettest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// watchdog is how long nothing may arrive.
	watchdog = 10 * time.Second
	// spinFor is how long an adaptive guest looks before it sleeps, as a worker does by default.
	spinFor = 50 * time.Microsecond
	// lookEvery is how many fruitless passes a polling guest makes between two looks at the clock.
	lookEvery = 1024
)

// phase is one direction of a run.
type phase struct {
	name       string
	out, in    *flow // the same frames, as sender and receiver see them
	from       source
	to         sink
	guest      *guest // whose rings are reset
	resetsTx   bool   // of the guest: the transmitq, else the receiveq
	depth      int
	batch      func() int // frames a publication; 0: as many as there is room for
	wake       string
	resetEvery int
	tell       func(received int)
}

// batches makes Options.Batch a function.
func (o Options) batches() func() int {
	if o.Batch == "random" {
		random := rand.New(rand.NewPCG(o.Seed, 7))
		return func() int { return 1 + random.IntN(o.Depth) }
	}
	n, _ := strconv.Atoi(o.Batch)
	return func() int { return n }
}

// run moves n frames from the source to the sink, at most depth of them under way, and returns when all have arrived and come back.
func (p *phase) run(ctx context.Context, n int) error {
	sent, received, sinceReset := 0, 0, 0
	last := time.Now()
	batch, idle := p.batch(), 0
	for received < n {
		progress := false
		if room := min(p.depth-(sent-received), n-sent); room > 0 && room >= min(batch, n-sent) {
			if batch > 0 {
				room = min(room, batch)
			}
			took, err := p.from.send(p.out, room)
			if err != nil {
				return p.failed(err, sent, received, n)
			}
			sent += took
			progress = took > 0
			batch = p.batch()
		}
		got, err := p.to.receive(p.in)
		if err != nil {
			return p.failed(err, sent, received, n)
		}
		if _, err := p.from.reap(); err != nil {
			return p.failed(err, sent, received, n)
		}
		if got > 0 {
			received += got
			sinceReset += got
			p.tell(received)
			if p.resetEvery > 0 && sinceReset >= p.resetEvery && (p.resetsTx || sent == received) {
				again, err := p.reset()
				if err != nil {
					return p.failed(err, sent, received, n)
				}
				sent -= again
				p.out.next -= uint64(again)
				sinceReset = 0
			}
			last, idle = time.Time{}, 0
			continue
		}
		if progress {
			idle = 0
			continue
		}
		idle++
		if p.wake == "poll" && idle%lookEvery != 0 {
			continue
		}
		if last.IsZero() {
			last = time.Now()
		}
		if err := p.idle(ctx, last); err != nil {
			return p.failed(err, sent, received, n)
		}
	}
	return p.settle(ctx)
}

// idle is called when a pass has moved nothing since the given time: it sleeps as the mode says, until something comes.
func (p *phase) idle(ctx context.Context, since time.Time) error {
	waited := time.Since(since)
	if waited > watchdog {
		return fmt.Errorf("nothing moved for %v", watchdog)
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if p.wake == "poll" || p.wake == "adaptive" && waited < spinFor {
		return nil
	}
	if !p.to.arm() {
		return nil
	}
	fds := [2]unix.PollFd{{Fd: int32(p.to.waitFD()), Events: unix.POLLIN}}
	n := 1
	if p.from.full() {
		if !p.from.arm() {
			return nil
		}
		fds[1] = unix.PollFd{Fd: int32(p.from.waitFD()), Events: unix.POLLIN}
		if w, ok := p.from.(*wire); ok {
			fds[1] = unix.PollFd{Fd: int32(w.fd), Events: unix.POLLOUT}
		}
		n = 2
	}
	p.to.stats().Sleeps++
	_, err := unix.Poll(fds[:n], int((watchdog / 10).Milliseconds()))
	if err != nil && !errors.Is(err, unix.EINTR) {
		return os.NewSyscallError("poll", err)
	}
	if fds[0].Revents != 0 {
		p.to.called()
	}
	if fds[1].Revents != 0 {
		p.from.called()
	}
	return nil
}

// settle waits until the back-end has given everything back.
func (p *phase) settle(ctx context.Context) error {
	tx, ok := p.from.(txQueue)
	if !ok {
		return nil
	}
	for end := time.Now().Add(watchdog); ; {
		if _, err := tx.reap(); err != nil {
			return err
		}
		if tx.ring.Outstanding() == 0 {
			return nil
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return errors.Join(fmt.Errorf("%s: all frames have arrived, but %d did not come back to the sender", p.name, tx.ring.Outstanding()), ctx.Err())
		}
		if p.wake != "poll" && tx.arm() {
			fds := []unix.PollFd{{Fd: int32(tx.call), Events: unix.POLLIN}}
			tx.counts.Sleeps++
			if _, err := unix.Poll(fds, 1000); err == nil && fds[0].Revents != 0 {
				tx.called()
			}
		}
	}
}

func (p *phase) reset() (again int, err error) {
	if p.resetsTx {
		return p.guest.tx.reset(p.guest)
	}
	return 0, p.guest.rx.reset(p.guest)
}

func (p *phase) failed(err error, sent, received, n int) error {
	return fmt.Errorf("%s: %w (%d of %d frames sent, %d received)", p.name, err, sent, n, received)
}
