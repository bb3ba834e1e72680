package worker

import (
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/testmain"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Goroutines()))
}

// counter is a task that consumes units of work from an atomic counter.
type counter struct {
	work, done, notified, armed, faults atomic.Int64
	retry                               time.Duration
	onRun                               func()
	ownsFaults                          bool
}

func (c *counter) Run() bool {
	if c.onRun != nil {
		c.onRun()
	}
	if c.work.Load() == 0 {
		return false
	}
	c.work.Add(-1)
	c.done.Add(1)
	return true
}

func (c *counter) Arm() Readiness {
	c.armed.Add(1)
	return Readiness{Ready: c.work.Load() > 0, Retry: c.retry}
}

func (c *counter) Notify(Event) { c.notified.Add(1) }

func (c *counter) Fault(uintptr) bool {
	c.faults.Add(1)
	c.onRun = nil
	return c.ownsFaults
}

func newLoop(t *testing.T, w Wake) *Loop {
	t.Helper()
	l, err := New(Options{Name: t.Name(), CPU: -1, Wake: w, Spin: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func eventfd(t *testing.T, flags int) int {
	t.Helper()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|flags)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

func waitFor(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s did not happen within 5 s", what)
		}
	}
}

func kick(fd int) { unix.Write(fd, []byte{1, 0, 0, 0, 0, 0, 0, 0}) }

func TestKickWakesTask(t *testing.T) {
	for _, w := range []Wake{Block, Adaptive} {
		t.Run(w.String(), func(t *testing.T) {
			l, c, fd := newLoop(t, w), &counter{}, eventfd(t, 0)
			l.Do(func() {
				l.Add(c)
				if err := l.Watch(fd, c, 1, true); err != nil {
					t.Error(err)
				}
			})
			for i := int64(1); i <= 100; i++ {
				c.work.Add(1)
				kick(fd)
				waitFor(t, "the work", func() bool { return c.done.Load() == i })
			}
			l.Do(func() { l.Unwatch(fd); l.Remove(c) })
		})
	}
}

func TestPollNeedsNoKick(t *testing.T) {
	l, c := newLoop(t, Poll), &counter{}
	l.Do(func() { l.Add(c) })
	c.work.Store(1000)
	waitFor(t, "the work", func() bool { return c.done.Load() == 1000 })
	l.Do(func() { l.Remove(c) })
	if c.armed.Load() != 0 {
		t.Error("a polling loop armed its task")
	}
}

func TestRetryGivesTurnWithoutEvent(t *testing.T) {
	l, c := newLoop(t, Block), &counter{retry: 2 * time.Millisecond}
	l.Do(func() { l.Add(c) })
	waitFor(t, "ten retries", func() bool { return c.armed.Load() >= 10 })
	l.Do(func() { l.Remove(c) })
}

func TestIdleLoopSleeps(t *testing.T) {
	l, c := newLoop(t, Block), &counter{}
	l.Do(func() { l.Add(c) })
	waitFor(t, "going idle", func() bool { return c.armed.Load() == 1 })
	time.Sleep(50 * time.Millisecond)
	if n := c.armed.Load(); n != 1 {
		t.Errorf("an idle task was armed %d times, want once", n)
	}
}

func TestFaultIsChargedToTask(t *testing.T) {
	l := newLoop(t, Block)
	mem, err := unix.Mmap(-1, 0, 4096, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mem)
	bad := &counter{ownsFaults: true, onRun: func() { mem[0] = 1 }}
	good := &counter{}
	l.Do(func() { l.Add(bad); l.Add(good) })
	waitFor(t, "the fault", func() bool { return bad.faults.Load() == 1 })
	good.work.Store(1)
	l.Do(func() { l.Activate(good) })
	waitFor(t, "the other task's work", func() bool { return good.done.Load() == 1 })
	ran := false
	l.DoFor(bad, func() { mem[0] = 1; ran = true })
	if ran || bad.faults.Load() != 2 {
		t.Errorf("a fault in DoFor: ran on = %v, faults = %d, want false and 2", ran, bad.faults.Load())
	}
	if err := l.Alive(); err != nil {
		t.Error(err)
	}
}

// TestNTF10_BlockingCallDescriptor: a peer may hand over a blocking call eventfd
// whose counter is full; that must not hold the worker.
func TestNTF10_BlockingCallDescriptor(t *testing.T) {
	l, fd := newLoop(t, Block), eventfd(t, 0)
	if _, err := unix.Write(fd, []byte{0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}); err != nil {
		t.Fatal(err)
	}
	start, ok := time.Now(), true
	l.Do(func() { ok = l.Signal(fd) })
	if ok || time.Since(start) > 5*time.Second {
		t.Errorf("Signal on a full blocking eventfd = %v after %v, want false within a second", ok, time.Since(start))
	}
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFL, unix.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.Read(fd, make([]byte, 8)); err != nil {
		t.Errorf("the notification was lost with what stood in its way: %v", err)
	}
	full := eventfd(t, unix.EFD_NONBLOCK)
	unix.Write(full, []byte{0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	l.Do(func() { ok = l.Signal(full) })
	if !ok {
		t.Error("a full counter of a non-blocking eventfd must count as delivered")
	}
}

// TestSignalAsync: nothing that the peer does to its eventfd makes the worker wait.
func TestSignalAsync(t *testing.T) {
	for _, flags := range []int{0, unix.EFD_NONBLOCK} {
		l, fd := newLoop(t, Block), eventfd(t, flags)
		var count [8]byte
		for range 1000 {
			l.Do(func() { l.SignalAsync(fd) })
		}
		if _, err := unix.Read(fd, count[:]); err != nil || count != [8]byte{0xe8, 3} {
			t.Errorf("1000 signals counted as % x, %v", count, err)
		}
		unix.Write(fd, []byte{0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
		start := time.Now()
		for range 1000 {
			l.Do(func() { l.SignalAsync(fd) })
		}
		// Had each of them to wait for the watchdog, this would take minutes.
		if d := time.Since(start); d > 10*time.Second {
			t.Errorf("1000 signals to a full eventfd took %v", d)
		}
		l.Do(func() { l.SignalAsync(1 << 20); l.SignalAsync(l.epfd) })
		if l.Stats().Stuck != 0 {
			t.Error("a signal was stuck")
		}
	}
}

// TestContendedCallDescriptor: other writers who wait for room in the same counter do not keep the worker for long.
func TestContendedCallDescriptor(t *testing.T) {
	l, fd := newLoop(t, Block), eventfd(t, 0)
	full := []byte{0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	unix.Write(fd, full)
	var stop atomic.Bool
	var writers sync.WaitGroup
	for range 50 {
		writers.Go(func() {
			for !stop.Load() {
				unix.Write(fd, full)
			}
		})
	}
	start, ok := time.Now(), true
	l.Do(func() { ok = l.Signal(fd) })
	if d := time.Since(start); ok || d > 5*time.Second {
		t.Errorf("Signal against 50 writers = %v after %v, want false within a second", ok, d)
	}
	t.Logf("%v", time.Since(start))
	stop.Store(true)
	ended := make(chan struct{})
	go func() { writers.Wait(); close(ended) }()
	for open := true; open; {
		select {
		case <-ended:
			open = false
		default:
			drain(fd)
		}
	}
}

func TestKickThroughPipeDoesNotFill(t *testing.T) {
	l, c := newLoop(t, Block), &counter{}
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		t.Fatal(err)
	}
	defer unix.Close(p[0])
	defer unix.Close(p[1])
	l.Do(func() {
		l.Add(c)
		if err := l.Watch(p[0], c, 1, true); err != nil {
			t.Error(err)
		}
	})
	for range 64 << 10 {
		if _, err := unix.Write(p[1], make([]byte, 8)); err == unix.EAGAIN {
			time.Sleep(time.Millisecond)
		}
	}
	waitFor(t, "an empty pipe", func() bool {
		_, err := unix.Write(p[1], make([]byte, 8))
		return err == nil
	})
	l.Do(func() { l.Unwatch(p[0]); l.Remove(c) })
}

func TestWatchRefusesRegularFile(t *testing.T) {
	l, c := newLoop(t, Block), &counter{}
	f, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	l.Do(func() {
		l.Add(c)
		if err := l.Watch(int(f.Fd()), c, 1, true); err == nil {
			t.Error("a regular file was accepted as a kick descriptor")
		}
	})
}

func TestDoAfterClose(t *testing.T) {
	l := newLoop(t, Block)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	ran := false
	l.Do(func() { ran = true })
	if !ran {
		t.Error("Do after Close did not run the function")
	}
	if l.Alive() == nil {
		t.Error("a closed loop says that it is alive")
	}
}

func TestPinToMissingCPU(t *testing.T) {
	if l, err := New(Options{Name: "x", CPU: 1000}); err == nil {
		l.Close()
		t.Error("pinning to CPU 1000 succeeded")
	}
}

func TestParseWake(t *testing.T) {
	for _, w := range []Wake{Block, Adaptive, Poll} {
		if got, err := ParseWake(w.String()); err != nil || got != w {
			t.Errorf("ParseWake(%q) = %v, %v", w, got, err)
		}
	}
	if _, err := ParseWake("sometimes"); err == nil {
		t.Error("ParseWake accepted nonsense")
	}
}
