package worker

import (
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// stuckAfter is how long a write to a call eventfd may take before the watchdog
// empties the eventfd: a peer can hand over a blocking one and fill its counter.
const stuckAfter = 200 * time.Millisecond

// freeEvery is the pause between two attempts to free a write.
const freeEvery = 100 * time.Microsecond

// signaller writes call eventfds. The write happens on the loop's thread; a watchdog
// frees it if the peer made the descriptor block.
type signaller struct {
	busy   atomic.Int64 // descriptor + 1 while a write is under way
	serial atomic.Uint64
	stuck  atomic.Uint64
	frees  atomic.Bool // the watchdog is emptying a descriptor
	quit   chan struct{}
	ended  chan struct{}
}

func (s *signaller) start() {
	s.quit, s.ended = make(chan struct{}), make(chan struct{})
	go s.watch()
}

func (s *signaller) close() {
	close(s.quit)
	<-s.ended
}

func (s *signaller) watch() {
	defer close(s.ended)
	tick := time.NewTicker(stuckAfter)
	defer tick.Stop()
	var seen uint64
	for {
		select {
		case <-s.quit:
			return
		case <-tick.C:
		}
		fd, serial := s.busy.Load()-1, s.serial.Load()
		if fd >= 0 && serial == seen {
			s.frees.Store(true)
			s.stuck.Add(1)
			s.free(fd, serial)
			s.frees.Store(false)
		}
		seen = serial
	}
}

// free empties a descriptor until the write comes to its end: other writers may wait for
// room as well, and the peer can have many.
func (s *signaller) free(fd int64, serial uint64) {
	for s.busy.Load()-1 == fd && s.serial.Load() == serial {
		drain(int(fd))
		time.Sleep(freeEvery)
	}
}

// Signal adds one to a call eventfd. A full counter counts as delivered. It returns
// false when the peer's descriptor had to be unblocked by force, or seemed to: use
// [Loop.SignalAsync] for that peer from then on. Loop's thread only.
func (l *Loop) Signal(fd int) bool {
	one := [8]byte{1}
	before := l.signal.stuck.Load()
	l.signal.serial.Add(1)
	l.signal.busy.Store(int64(fd) + 1)
	_, _ = unix.Write(fd, one[:]) // EAGAIN: a notification is already pending
	l.signal.busy.Store(0)
	if l.signal.stuck.Load() == before {
		return true
	}
	// A thread that was only kept from running looks stuck as well. The watchdog may have
	// taken the notification away with what was in its way, so another one follows.
	for l.signal.frees.Load() {
		time.Sleep(freeEvery)
	}
	l.SignalAsync(fd)
	return false
}

// SignalAsync is Signal for a peer that is known to hold up writers. It never waits and
// is several times as expensive; nothing is signaled where the kernel has no
// asynchronous I/O. Loop's thread only.
func (l *Loop) SignalAsync(fd int) {
	if l.wakefd < 0 {
		return // the loop is closed
	}
	if err := l.aio.setUp(); err != nil {
		if !l.aioFailed {
			l.aioFailed = true
			l.log.Warn("a guest whose call descriptor has held the worker gets no more signals", "error", err)
		}
		return
	}
	l.aio.signal(fd, l.wakefd)
}
