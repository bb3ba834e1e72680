package bell

import (
	"os"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/testmain"
)

func TestMain(m *testing.M) { os.Exit(testmain.Run(m, testmain.Files(), testmain.Goroutines())) }

// TestBellOutlivesItsReceiver: the descriptor is closed once, by whoever leaves last.
func TestBellOutlivesItsReceiver(t *testing.T) {
	isOpen := func(b *Bell) bool {
		_, err := unix.FcntlInt(uintptr(b.fd), unix.F_GETFD, 0)
		return err == nil
	}
	newBell := func() *Bell {
		b := &Bell{}
		if err := b.Open(); err != nil {
			t.Fatal(err)
		}
		return b
	}
	b := newBell()
	b.state.Store(ringing) // a sender is about to write
	if b.Arm() {
		t.Error("armed while it rings")
	}
	if err := b.Close(); err != nil || !isOpen(b) {
		t.Fatalf("closed under a sender: %v", err)
	}
	if b.rung(); isOpen(b) || b.Arm() {
		t.Error("the last sender left it open")
	}
	for range 300 {
		b := newBell()
		var senders sync.WaitGroup
		for range 2 {
			senders.Go(func() {
				for b.state.Load() != shut {
					b.Ring()
				}
			})
		}
		for range 10 {
			b.Arm()
		}
		if err := b.Close(); err != nil {
			t.Fatal(err)
		}
		senders.Wait()
	}
}
