package worker

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/pagemem"
)

// pollEvery is how many turns an active loop takes between two looks at its
// descriptors, so that a busy task cannot keep the others' notifications waiting.
const pollEvery = 8

// Options configure a [Loop].
type Options struct {
	// Name appears in logs and statistics.
	Name string
	// CPU pins the thread to one processor; -1 leaves it to the scheduler.
	CPU int
	// Wake is how the loop waits for work.
	Wake Wake
	// Spin is how long an Adaptive loop polls after the last progress.
	Spin time.Duration
	// Logger receives the rare events of the loop; nil means slog.Default.
	Logger *slog.Logger
}

// Loop is a worker thread. Its methods are safe for concurrent use except where
// they say that they belong to the loop's own thread.
type Loop struct {
	opts  Options
	log   *slog.Logger
	owner pagemem.OwnerID

	epfd, wakefd int
	tid          int

	mu      sync.Mutex // guards jobs, closed
	jobs    []job
	closed  bool
	pending atomic.Bool
	done    chan struct{}
	failure atomic.Pointer[error]
	inline  sync.Mutex // one function at a time after the thread's end

	// The fields below belong to the loop's thread.
	slots   []*slot
	active  int
	watches map[int]*watch
	current Task
	stop    bool
	events  [64]unix.EpollEvent

	aio       aioRing
	aioFailed bool // logged

	signal signaller
	stats  counters
}

type job struct {
	task Task
	f    func()
	done chan struct{}
}

type slot struct {
	task     Task
	active   bool
	lastWork time.Duration // loop time of the last progress
	deadline time.Duration // loop time of a wanted retry, 0 = none
}

type watch struct {
	fd    int
	slot  *slot
	event Event
	drain bool
}

var epoch = time.Now()

func now() time.Duration { return time.Since(epoch) }

// New starts a loop on its own locked thread.
func New(opts Options) (*Loop, error) {
	l := &Loop{opts: opts, log: opts.Logger, owner: pagemem.NewOwnerID(), watches: map[int]*watch{}, done: make(chan struct{})}
	if l.log == nil {
		l.log = slog.Default()
	}
	var err error
	if l.epfd, err = unix.EpollCreate1(unix.EPOLL_CLOEXEC); err != nil {
		return nil, fmt.Errorf("worker %s: create epoll set: %w", opts.Name, err)
	}
	if l.wakefd, err = unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK); err != nil {
		unix.Close(l.epfd)
		return nil, fmt.Errorf("worker %s: create eventfd: %w", opts.Name, err)
	}
	ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(l.wakefd)}
	if err := unix.EpollCtl(l.epfd, unix.EPOLL_CTL_ADD, l.wakefd, &ev); err != nil {
		l.closeFDs()
		return nil, fmt.Errorf("worker %s: watch own eventfd: %w", opts.Name, err)
	}
	started := make(chan error, 1)
	go l.thread(started)
	if err := <-started; err != nil {
		<-l.done
		return nil, err
	}
	l.signal.start()
	return l, nil
}

// Owner is the identity under which the loop's thread owns page pools.
func (l *Loop) Owner() pagemem.OwnerID { return l.owner }

// Name returns the name given in [Options].
func (l *Loop) Name() string { return l.opts.Name }

// Wake returns how the loop waits for work.
func (l *Loop) Wake() Wake { return l.opts.Wake }

// Tasks is how many tasks the loop has. Loop's thread only.
func (l *Loop) Tasks() int { return len(l.slots) }

// Alive returns nil while the thread runs, otherwise why it ended.
func (l *Loop) Alive() error {
	select {
	case <-l.done:
		if p := l.failure.Load(); p != nil {
			return *p
		}
		return errors.New("worker " + l.opts.Name + " is closed")
	default:
		return nil
	}
}

// Do runs f on the loop's thread between two turns and returns when it is done. On a
// closed loop f runs on the caller's goroutine: nothing else runs there any more.
func (l *Loop) Do(f func()) { l.DoFor(nil, f) }

// DoFor is Do for a function that may touch the guest memory of task t: a memory
// fault in f is reported to t.Fault and ends f early, DoFor still returns.
func (l *Loop) DoFor(t Task, f func()) {
	j := job{task: t, f: f, done: make(chan struct{})}
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		<-l.done
		l.inline.Lock()
		defer l.inline.Unlock()
		l.guarded(t, f)
		return
	}
	l.enqueue(j)
	l.mu.Unlock()
	<-j.done
}

// enqueue hands a job to the thread. The caller holds mu, so that the thread cannot
// end, and its eventfd's number be used for another file, in between.
func (l *Loop) enqueue(j job) {
	l.jobs = append(l.jobs, j)
	l.pending.Store(true)
	l.wakeUp()
}

// Close ends the thread after the jobs already queued; the tasks are not run again.
func (l *Loop) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		<-l.done
		return nil
	}
	l.closed = true
	l.enqueue(job{f: func() { l.stop = true }, done: make(chan struct{})})
	l.mu.Unlock()
	<-l.done
	l.signal.close()
	return nil
}

func (l *Loop) wakeUp() {
	one := [8]byte{1}
	for {
		// EAGAIN means that the counter is full, which wakes the thread as well.
		if _, err := unix.Write(l.wakefd, one[:]); err != unix.EINTR {
			return
		}
	}
}

// closeFDs closes the loop's descriptors and forgets their numbers, which functions
// that run after the end would otherwise take for theirs.
func (l *Loop) closeFDs() {
	l.mu.Lock()
	defer l.mu.Unlock()
	unix.Close(l.epfd)
	unix.Close(l.wakefd)
	l.epfd, l.wakefd = -1, -1
}

func (l *Loop) thread(started chan<- error) {
	runtime.LockOSThread() // never unlocked: the thread ends with the goroutine, and its affinity with it
	debug.SetPanicOnFault(true)
	defer close(l.done)
	defer l.closeFDs()
	defer l.aio.close()
	l.tid = unix.Gettid()
	if l.opts.CPU >= 0 {
		var set unix.CPUSet
		set.Set(l.opts.CPU)
		if err := unix.SchedSetaffinity(0, &set); err != nil {
			started <- fmt.Errorf("worker %s: pin to CPU %d: %w (is the CPU online and allowed for this process?)", l.opts.Name, l.opts.CPU, err)
			return
		}
	}
	started <- nil
	for !l.stop {
		l.protect(l.run)
	}
}

// protect runs f and turns a memory fault that belongs to the current task into
// that task's Fault; everything else goes on panicking.
func (l *Loop) protect(f func()) {
	defer func() {
		r := recover()
		if r == nil {
			return
		}
		t := l.current
		l.current = nil
		if addr, ok := asFault(r); ok && t != nil && t.Fault(addr) {
			l.stats.faults++
			return
		}
		err := fmt.Errorf("worker %s: panic: %v", l.opts.Name, r)
		l.failure.Store(&err)
		panic(r)
	}()
	f()
}

func (l *Loop) guarded(t Task, f func()) {
	was := debug.SetPanicOnFault(true)
	defer debug.SetPanicOnFault(was)
	l.protect(func() {
		l.current = t
		f()
		l.current = nil
	})
}

// run is the loop proper; it returns only to stop or by a panic.
func (l *Loop) run() {
	for turn := 0; ; turn++ {
		if l.pending.Load() {
			l.runJobs()
		}
		if l.stop {
			return
		}
		if l.opts.Wake == Poll {
			l.pollTurn()
			continue
		}
		progress := l.activeTurn()
		switch {
		case l.active == 0:
			l.wait(l.sleepTime())
		case !progress || turn%pollEvery == 0:
			l.wait(0)
		}
	}
}

func (l *Loop) runJobs() {
	l.mu.Lock()
	jobs := l.jobs
	l.jobs = nil
	l.pending.Store(false)
	l.mu.Unlock()
	for _, j := range jobs {
		l.guarded(j.task, j.f)
		close(j.done)
	}
}

// pollTurn gives every task a turn and never sleeps.
func (l *Loop) pollTurn() {
	for _, s := range l.slots {
		l.current = s.task
		s.task.Run()
		l.current = nil
	}
	if len(l.slots) == 0 {
		l.wait(-1) // nothing to poll: only control can change that
	}
}

// activeTurn runs every active task once and lets those without progress go idle.
func (l *Loop) activeTurn() (progress bool) {
	if l.active == 0 {
		return false
	}
	for _, s := range l.slots {
		if !s.active {
			continue
		}
		l.current = s.task
		if s.task.Run() {
			progress = true
			if l.opts.Wake == Adaptive {
				s.lastWork = now()
			}
		} else if l.opts.Wake != Adaptive || now()-s.lastWork >= l.opts.Spin {
			l.goIdle(s)
		}
		l.current = nil
	}
	return progress
}

func (l *Loop) goIdle(s *slot) {
	r := s.task.Arm()
	s.deadline = 0
	if r.Ready {
		return
	}
	if r.Retry > 0 {
		s.deadline = now() + r.Retry
	}
	s.active = false
	l.active--
}

func (l *Loop) activate(s *slot) {
	s.deadline = 0
	if !s.active {
		s.active = true
		l.active++
	}
}
