package experiments

import (
	"context"
	"testing"
	"time"

	"github.com/vhostd/vhostd/pool"
)

// TestProfileSeesTheAllocator: names that are no longer the arena's would make the allocator invisible.
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
	share := map[string]float64{}
	for _, variant := range []string{"off", "on"} {
		s, err := r.Run(context.Background(), variant)
		if err != nil {
			t.Fatal(err)
		}
		share[variant] = s.Cost
	}
	if share["off"] == 0 || share["on"] >= share["off"] {
		t.Errorf("the arena's part of the samples is %.1f %% without recycling and %.1f %% with it", share["off"], share["on"])
	}
}
