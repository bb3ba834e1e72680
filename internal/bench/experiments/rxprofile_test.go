package experiments

import (
	"context"
	"testing"
	"time"

	"github.com/vhostd/vhostd/pool"
)

// TestProfileSeesTheAllocator: names that are no longer the arena's would make the allocator invisible. One profile has few samples,
// and with the race detector most of them are the detector's.
func TestProfileSeesTheAllocator(t *testing.T) {
	drop, err := newDropRunner(pool.Config{}, 64, 0)
	if err != nil {
		t.Fatal(err)
	}
	r := &profileRunner{drop, 300 * time.Millisecond}
	defer func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	}()
	for range 30 {
		s, err := r.Run(context.Background(), "off")
		if err != nil {
			t.Fatal(err)
		}
		if s.Cost > 0 {
			return
		}
	}
	t.Error("the arena is in no profile of a receiver that does not recycle")
}
