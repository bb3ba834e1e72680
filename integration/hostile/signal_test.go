package hostile

import (
	"encoding/binary"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser/frontend"
)

// fullSocket is a blocking socket that takes no byte more.
func fullSocket(t *testing.T) int {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { unix.Close(fds[0]); unix.Close(fds[1]) })
	for b := make([]byte, 1<<16); len(b) > 0; {
		if n, err := unix.SendmsgN(fds[0], b, nil, nil, unix.MSG_DONTWAIT); n <= 0 || err != nil {
			b = b[:len(b)/2]
		}
	}
	return fds[0]
}

// TestFullSocketAsCall: a descriptor whose write never ends must not hold the worker.
func TestFullSocketAsCall(t *testing.T) {
	d := serve(t, true)
	_, good := d.guest("good", frontend.Options{})
	ping(t, good)
	c, _ := d.guest("evil", frontend.Options{})
	fd := fullSocket(t)
	for i := range 2 {
		must(t, c.SetVringCall(i, fd))
		must(t, c.SetVringErr(i, fd))
	}
	if w := worst(t, good, 500*time.Millisecond); w > 2*time.Second {
		t.Errorf("the good guest waited for %v", w)
	}
	must(t, c.Sync())
}

// fullEventfd is a blocking eventfd whose counter is full.
func fullEventfd(t *testing.T) int {
	t.Helper()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
	must(t, err)
	t.Cleanup(func() { unix.Close(fd) })
	_, err = unix.Write(fd, binary.NativeEndian.AppendUint64(nil, ^uint64(1)))
	must(t, err)
	return fd
}

// refill keeps the eventfd full against everybody who reads it, until the test ends.
func refill(t *testing.T, fd int) {
	t.Helper()
	full := binary.NativeEndian.AppendUint64(nil, ^uint64(1))
	var stop atomic.Bool
	var writers sync.WaitGroup
	for range 8 {
		writers.Go(func() {
			for !stop.Load() {
				_, _ = unix.Write(fd, full) // waits until somebody reads
			}
		})
	}
	t.Cleanup(func() {
		stop.Store(true)
		done := make(chan struct{})
		go func() { writers.Wait(); close(done) }()
		for b := make([]byte, 8); ; time.Sleep(time.Millisecond) {
			select {
			case <-done:
				return
			default:
				unix.Read(fd, b)
			}
		}
	})
}

// TestFullCallsOverAndOver: a blocking call descriptor that is full costs the others a moment once, not again and again.
func TestFullCallsOverAndOver(t *testing.T) {
	d := serve(t, true)
	_, good := d.guest("good", frontend.Options{})
	ping(t, good)
	fd := fullEventfd(t)
	refill(t, fd)
	stop, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-stop:
				return
			default:
				_ = handOver(d, fd)
			}
		}
	}()
	time.Sleep(2 * time.Second) // the moment
	begin, rounds := time.Now(), 0
	for time.Since(begin) < 3*time.Second {
		ping(t, good)
		rounds++
	}
	close(stop)
	<-ended
	t.Logf("%d frames came back in %v", rounds, time.Since(begin))
	if rounds < 100 {
		t.Errorf("%d frames of the good guest came back in %v", rounds, time.Since(begin))
	}
}

// handOver connects as evil and makes the descriptor the call descriptor of all rings, many times.
func handOver(d *vhostd, fd int) error {
	mem, err := frontend.NewMemory(64 << 20)
	if err != nil {
		return err
	}
	defer mem.Close()
	c, err := frontend.Connect(filepath.Join(d.dir, "evil"), mem, frontend.Options{Features: features})
	if err != nil {
		return err
	}
	defer c.Close()
	for i := range 4 {
		if _, err := c.StartPair(i); err != nil {
			return err
		}
	}
	for i := range 160 {
		if err := c.SetVringCall(i%8, fd); err != nil {
			return err
		}
	}
	return c.Sync()
}
