package worker

import (
	"sync"
	"testing"
)

// TestDoWhileClosing queues functions from many goroutines while the loop is closed: each
// runs exactly once, one at a time, and Do returns.
func TestDoWhileClosing(t *testing.T) {
	for range 50 {
		l := newLoop(t, Block)
		ran := 0 // the race detector watches it
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range 20 {
					l.Do(func() { ran++ })
				}
			})
		}
		l.Close()
		wg.Wait()
		l.Do(func() {
			if ran != 160 {
				t.Errorf("%d functions ran, want 160", ran)
			}
		})
	}
}

// TestWatchesAfterClose ends the watches of a closed loop: its descriptors' numbers may
// belong to other files by then.
func TestWatchesAfterClose(t *testing.T) {
	l := newLoop(t, Block)
	fd, c := eventfd(t, 0), &counter{}
	l.Do(func() {
		l.Add(c)
		if err := l.Watch(fd, c, 1, true); err != nil {
			t.Error(err)
		}
		if n := l.Tasks(); n != 1 {
			t.Errorf("%d tasks, want 1", n)
		}
	})
	l.Close()
	reused := newLoop(t, Block)
	r := &counter{}
	reused.Do(func() {
		reused.Add(r)
		if err := reused.Watch(fd, r, 1, true); err != nil {
			t.Error(err)
		}
	})
	l.Do(func() { l.Unwatch(fd) })
	kick(fd)
	waitFor(t, "the notification of the loop that still watches", func() bool { return r.notified.Load() > 0 })
}
