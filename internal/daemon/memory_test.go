package daemon

import (
	"testing"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/internal/network"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtqueue"
)

// TestFairBatch: whatever the number of its queue pairs, what a guest has received and has no buffers for is its share of the arena at most, as long
// as that is a frame for each.
func TestFairBatch(t *testing.T) {
	const mib = 1 << 20
	for _, arena := range []uint64{16 * mib, 64 * mib, 256 * mib, 1 << 30, 64 << 30} {
		for pairs := 1; pairs <= config.MaxQueuePairs; pairs++ {
			n := fairBatch(arena, pairs)
			queues := min(2*pairs, config.MaxQueuePairs)
			held := func(n int) uint64 { return uint64(n * queues * frameBytes) }
			switch {
			case n == 0 && held(virtqueue.MaxBatch) > arena/guestShare:
				t.Errorf("%d MiB, %d pairs: no limit, %d bytes", arena/mib, pairs, held(virtqueue.MaxBatch))
			case n > 1 && held(n) > arena/guestShare:
				t.Errorf("%d MiB, %d pairs: %d frames, %d bytes", arena/mib, pairs, n, held(n))
			case n > 0 && held(n+1) <= arena/guestShare:
				t.Errorf("%d MiB, %d pairs: %d frames, one more would do", arena/mib, pairs, n)
			}
		}
	}
	for _, pairs := range []int{config.DefaultGuest().QueuePairs, 16} {
		if n := fairBatch(256*mib, pairs); n != 0 {
			t.Errorf("%d queue pairs and the default arena: %d frames at a time", pairs, n)
		}
	}
}

// TestBatchOfNetworks: networks of every kind keep to the number of frames at a time, and are otherwise what they were.
func TestBatchOfNetworks(t *testing.T) {
	for _, text := range []string{"source", "source,rate=0"} {
		n, err := network.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		rig := porttest.NewRig(t)
		p, err := n.Open(network.Options{QueuePairs: 1, Batch: 3})
		if err != nil {
			t.Fatal(err)
		}
		q := rig.Open(t, p, 0)
		var pkts [port.MaxBatch]packet.Packet
		if got := q.Recv(pkts[:]); got != 3 {
			t.Errorf("%s: %d frames at a time, want 3", text, got)
		} else {
			rig.Release(pkts[:got])
		}
		if p.Kind() != "source" {
			t.Errorf("%s became %s", text, p.Kind())
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	}
}
