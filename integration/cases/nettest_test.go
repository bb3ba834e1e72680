package cases

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"testing"

	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/bench/nettest"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// throughput is a run against vhostd without the race detector.
func throughput(t *testing.T, program string, change func(*nettest.Options)) nettest.Measurement {
	t.Helper()
	o := nettest.Defaults()
	o.Program, o.Wake, o.Depth = program, "adaptive", 64
	change(&o)
	m, err := nettest.Run(context.Background(), o, nil)
	if err != nil {
		t.Fatalf("%v: %v", o, err)
	}
	return m
}

// TestVNIndexesWrap moves more than 2^17 frames through rings that are kept full, so that every index goes round more than once
// while all descriptors are in use (vhost: signalled_used, vhost_add_used_n).
func TestVNIndexesWrap(t *testing.T) {
	plain, err := rig.Build(t.TempDir(), false)
	must(t, err)
	for _, ring := range []string{"split", "packed"} {
		for _, events := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, event index %v", ring, events), func(t *testing.T) {
				throughput(t, plain, func(o *nettest.Options) {
					o.N, o.Wire, o.Ring, o.EventIdx, o.Depth, o.Frame = 1<<17+1000, nettest.Reflect, ring, events, o.RingSize, "60"
				})
			})
		}
	}
}

// TestVNResets stops and starts a ring after every 1000 frames, of which those that were not taken are sent again.
func TestVNResets(t *testing.T) {
	n := rounds(10_000, 1<<20)
	for _, wire := range []string{nettest.Sock, nettest.Pair, nettest.Reflect} {
		for _, ring := range []string{"split", "packed"} {
			t.Run(wire+", "+ring, func(t *testing.T) {
				m := throughput(t, program, func(o *nettest.Options) { o.N, o.Wire, o.Ring, o.Reset = n, wire, ring, 1000 })
				// A turn that sees frames come back may see all that are under way.
				if want := uint64(n/(1000+64) - 1); m.Driver.Resets < want {
					t.Errorf("%d resets, want %d", m.Driver.Resets, want)
				}
			})
		}
	}
}

// TestVNCompletedBeforeSpinning: a worker that spins, and so needs no kicks, gives back what it has done before it does so, however
// little that is (vhost_net: used entries were published after the busy loop, and forgotten there).
func TestVNCompletedBeforeSpinning(t *testing.T) {
	for _, wake := range [][]string{{"--wake", "poll"}, {"--wake", "adaptive", "--spin", "10s"}} {
		for _, features := range []virtio.Features{plain, plain | virtio.FRingEventIdx, plain | virtio.FRingPacked} {
			t.Run(fmt.Sprint(wake, features), func(t *testing.T) {
				g := newGuest(t, "null", frontend.Options{Features: features}, wake...)
				for _, burst := range []int{1, 2, 31, 32, 33, 63, 64, 65} {
					for range burst {
						must(t, g.Stage(virtio.NetHdr{}, make([]byte, 60), frontend.Direct))
					}
					must(t, g.TX.Flush())
					must(t, g.DrainTx(patience))
				}
			})
		}
	}
}

// TestVNSendErrorsLeaveTheRingAlive lets the peer of a socket network go and come while the guest sends: every frame comes back to the
// guest, and the next peer receives the next frame.
func TestVNSendErrorsLeaveTheRingAlive(t *testing.T) {
	path := filepath.Join(t.TempDir(), "net")
	g := newGuest(t, "sock,path="+path, ordinary())
	for round := range rounds(20, 500) {
		peer, err := net.Dial("unixpacket", path)
		must(t, err)
		eventually(t, "the network is up", func() bool { return g.d.status().NetworkUp })
		frame := make([]byte, 60)
		frame[20] = byte(round)
		must(t, g.SendTx(virtio.NetHdr{}, frame, frontend.Direct))
		got := make([]byte, 100)
		if n, err := peer.Read(got); n != 60 || got[20] != byte(round) || err != nil {
			t.Fatalf("round %d: %d bytes, % x, %v", round, n, got[:n], err)
		}
		gone := make(chan error, 1)
		go func() { gone <- peer.Close() }()
		for range 200 {
			must(t, g.SendTx(virtio.NetHdr{}, frame, frontend.Direct))
			must(t, g.DrainTx(patience))
		}
		must(t, <-gone)
	}
	if g.d.drops(1) == 0 {
		t.Error("frames without a peer are not counted")
	}
}
