package cases

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// suppression are the two ways in which the sides of a ring tell each other that they want no signal.
func suppression() map[string]frontend.Options {
	flags := ordinary()
	flags.Features &^= virtio.FRingEventIdx
	return map[string]frontend.Options{"flags": flags, "event index": ordinary()}
}

// pauses returns a function that wastes 0 to 20 microseconds, in the same way in every run.
func pauses() func() {
	random := rand.New(rand.NewPCG(1, 1))
	return func() {
		for end := time.Now().Add(time.Duration(random.IntN(20000))); time.Now().Before(end); {
		}
	}
}

func TestNTF01_NoLostWakeUp(t *testing.T) {
	for name, opts := range suppression() {
		for _, wake := range []string{"block", "adaptive"} {
			t.Run(name+", "+wake+", transmit", func(t *testing.T) {
				testLoneTransmits(t, newGuest(t, "null", opts, "--wake", wake), rounds(12500, 1000000))
			})
			t.Run(name+", "+wake+", receive", func(t *testing.T) {
				testLoneReceives(t, newGuest(t, "echo", opts, "--wake", wake), rounds(12500, 250000))
			})
		}
	}
}

// testLoneTransmits sends one frame after the other. In every second round the driver waits for a call, in the others it polls.
func testLoneTransmits(t *testing.T, g *guest, n int) {
	pause, frame := pauses(), frameOf(60, 1)
	for i := range n {
		must(t, g.SendTx(virtio.NetHdr{}, frame, frontend.Direct))
		if i%2 == 0 {
			for end := time.Now().Add(patience); !g.TX.Ring.HasUsed(); {
				if time.Now().After(end) {
					t.Fatalf("frame %d is not used after %v", i, patience)
				}
				pause()
			}
		}
		must(t, g.DrainTx(patience))
		pause()
	}
	s := g.d.ring(1)
	t.Logf("%d frames, %d kicks, %d calls", n, s.Kicks, s.Calls)
}

// testLoneReceives has one receive buffer and one frame at a time; the buffer is late in every second round.
func testLoneReceives(t *testing.T, g *guest, n int) {
	pause, frame := pauses(), frameOf(60, 1)
	post := func() {
		if posted, err := g.PostRx(1); posted != 1 || err != nil {
			t.Fatalf("%d buffers posted: %v", posted, err)
		}
		pause()
	}
	for i := range n {
		if i%2 == 0 {
			post()
		}
		must(t, g.SendTx(virtio.NetHdr{}, frame, frontend.Direct))
		pause()
		if i%2 == 1 {
			post()
		}
		if _, _, err := g.RecvFrame(patience); err != nil {
			t.Fatalf("frame %d: %v", i, err)
		}
		if _, err := g.ReapTx(); err != nil {
			t.Fatal(err)
		}
	}
	must(t, g.DrainTx(patience))
}

// TestNTF01_FewerKicksThanFrames keeps the transmitq filled: while the program works, it wants no kicks.
func TestNTF01_FewerKicksThanFrames(t *testing.T) {
	for name, opts := range suppression() {
		t.Run(name, func(t *testing.T) {
			g := newGuest(t, "null", opts)
			n := rounds(50000, 1000000)
			testFlood(t, g, n)
			if kicks := g.d.ring(1).Kicks; kicks >= uint64(n) {
				t.Errorf("%d kicks for %d frames", kicks, n)
			}
		})
	}
}

// testFlood sends n frames as fast as the ring takes them.
func testFlood(t *testing.T, g *guest, n int) {
	t.Helper()
	frame := frameOf(60, 1)
	for sent := 0; sent < n; {
		err := g.Stage(virtio.NetHdr{}, frame, frontend.Direct)
		if err == nil {
			if sent++; sent%16 == 0 {
				must(t, g.TX.Flush())
			}
			continue
		}
		must(t, g.TX.Flush())
		must(t, g.TX.WaitUsed(patience))
	}
	must(t, g.TX.Flush())
	must(t, g.DrainTx(patience))
}

func TestNTF03_CompletionsJumpOverTheEvent(t *testing.T) {
	g := newGuest(t, "null", ordinary())
	for _, c := range []struct {
		old, to, event uint16
		want           bool
	}{
		{3, 9, 5, true}, {3, 9, 3, true}, {3, 9, 8, true}, {3, 9, 9, false}, {3, 9, 2, false},
		{0xfffe, 3, 0xffff, true}, {0xfffe, 3, 1, true}, {0xfffe, 3, 3, false}, {0xfffe, 3, 0xfffd, false},
		{3, 3, 3, false}, {3, 3, 2, false},
	} {
		t.Run(fmt.Sprintf("%#x to %#x, event %#x", c.old, c.to, c.event), func(t *testing.T) {
			_, _, err := g.c.Stop(0)
			must(t, err)
			g.TX.Ring.Reset(c.old - 1)
			_, err = g.c.StartPair(0)
			must(t, err)
			must(t, g.c.Sync())
			// The first comparison of a ring's life lacks an old index, so one frame goes first.
			g.t = t
			frame := g.put(frameOf(60, 1))
			g.add(g.TX, frame)
			g.take(g.TX, 1)
			g.TX.Ring.PokeUsedEvent(c.event)
			time.Sleep(10 * time.Millisecond)
			signals(t, g.TX.CallFD)

			for range c.to - c.old {
				g.add(g.TX, frame)
			}
			g.TX.Ring.Publish()
			must(t, g.TX.Kick())
			eventually(t, "the batch is used", func() bool { return g.TX.Ring.PeekUsedIdx() == c.to })
			if c.want {
				must(t, g.TX.WaitCall(patience))
			} else if g.TX.WaitCall(quiet) == nil {
				t.Error("a call that was not asked for")
			}
			for range c.to - c.old {
				_, _, ok := g.TX.Ring.GetUsed()
				if !ok {
					t.Fatal("a chain is missing in the used ring")
				}
			}
		})
	}
}

func TestNTF07_TransmitCompletionsAreSignaled(t *testing.T) {
	for name, opts := range suppression() {
		t.Run(name, func(t *testing.T) {
			opts.RingSize = 64
			g := newGuest(t, "null", opts)
			frame := g.put(frameOf(60, 1))
			for round := range rounds(1000, 1000) {
				for range opts.RingSize {
					g.add(g.TX, frame)
				}
				g.TX.Ring.PokeAvailFlags(0)
				g.TX.Ring.PokeUsedEvent(g.TX.Ring.AvailIdx() - 1)
				must(t, g.TX.Flush())
				for back := 0; back < opts.RingSize; {
					if err := g.TX.WaitCall(patience); err != nil {
						t.Fatalf("round %d: %d of %d frames came back: %v", round, back, opts.RingSize, err)
					}
					for _, _, ok := g.TX.Ring.GetUsed(); ok; _, _, ok = g.TX.Ring.GetUsed() {
						back++
					}
				}
			}
		})
	}
}

const (
	burst   = 600
	buffers = 100
)

func TestNTF09_ReceiveAfterABurst(t *testing.T) {
	for name, opts := range suppression() {
		t.Run(name, func(t *testing.T) {
			opts.RingSize = 1024
			g := newGuest(t, "echo", opts)
			_, err := g.PostRx(buffers)
			must(t, err)
			for i := range burst {
				must(t, g.Stage(virtio.NetHdr{}, frameNo(i), frontend.Direct))
			}
			must(t, g.TX.Flush())
			must(t, g.DrainTx(patience))
			testRefill(t, g, func(i int, frame []byte) bool { return bytes.Equal(frame, swapped(frameNo(i))) })
			flows(t, g.Pair)
		})
	}
}

// testRefill takes the burst, which waits for more buffers than were posted, with refills that follow the suppression rule.
func testRefill(t *testing.T, g *guest, right func(i int, frame []byte) bool) {
	t.Helper()
	for i := range burst {
		_, frame, err := g.RecvFrame(patience)
		if err != nil {
			t.Fatalf("frame %d: %v", i, err)
		}
		if !right(i, frame) {
			t.Fatalf("frame %d is wrong: % x", i, head(frame))
		}
		if (i+1)%buffers != 0 {
			continue
		}
		g.none()
		eventually(t, "kicks are asked for", func() bool {
			if g.c.Features.Has(virtio.FRingEventIdx) {
				return g.RX.Ring.PeekAvailEvent() == g.RX.Ring.AvailIdx()
			}
			return g.RX.Ring.PeekUsedFlags() == 0
		})
		_, err = g.PostRx(buffers)
		must(t, err)
	}
}

// frameNo is a frame that says which it is.
func frameNo(i int) []byte {
	b := frameOf(60, byte(i))
	b[14], b[15] = byte(i>>8), byte(i)
	return b
}

func TestNTF11_LoneFramesAreCompleted(t *testing.T) {
	for name, opts := range suppression() {
		for _, lag := range []string{"0", "32"} {
			t.Run(name+", lag "+lag, func(t *testing.T) {
				g := newGuest(t, "null", opts, "--tx-lag", lag)
				for _, n := range []int{1, 2, 3, 31, 33} {
					testLoneBurst(t, g, n)
				}
			})
		}
	}
}

// testLoneBurst sends n frames and then nothing, and measures until the last is used and signaled. The fastest of some rounds
// tells: a machine that is busy makes rounds slow, a completion that is held back makes all of them slow.
func testLoneBurst(t *testing.T, g *guest, n int) {
	t.Helper()
	var times []time.Duration
	for range 30 {
		for range n {
			must(t, g.Stage(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
		}
		begin := time.Now()
		must(t, g.TX.Flush())
		must(t, g.DrainTx(patience))
		times = append(times, time.Since(begin))
		time.Sleep(time.Millisecond)
	}
	slices.Sort(times)
	if times[0] > time.Millisecond {
		t.Errorf("%d frames: signaled after %v at best, want 1 ms", n, times[0])
	}
	t.Logf("%d frames: %v at best, %v in the middle, %v at worst", n, times[0], times[len(times)/2], times[len(times)-1])
}
