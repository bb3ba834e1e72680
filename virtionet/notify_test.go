package virtionet

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
	"github.com/vhostd/vhostd/worker"
)

// notifyRig is one way to notify: flags or event indexes, and how the worker waits.
type notifyRig struct {
	features virtio.Features
	wake     worker.Wake
}

func (n notifyRig) String() string {
	kind := "flags"
	if n.features.Has(virtio.FRingEventIdx) {
		kind = "event"
	}
	if n.features.Has(virtio.FRingPacked) {
		kind = "packed " + kind
	}
	return fmt.Sprintf("%s/%v", kind, n.wake)
}

func eachNotify(t *testing.T, wakes []worker.Wake, f func(t *testing.T, n notifyRig)) {
	for _, features := range []virtio.Features{
		baseFeatures, baseFeatures | virtio.FRingEventIdx,
		baseFeatures | virtio.FRingPacked, baseFeatures | virtio.FRingPacked | virtio.FRingEventIdx,
	} {
		for _, w := range wakes {
			n := notifyRig{features, w}
			t.Run(n.String(), func(t *testing.T) { f(t, n) })
		}
	}
}

var allWakes = []worker.Wake{worker.Block, worker.Adaptive, worker.Poll}

// spinOrSleep waits for a completion by looking for a while, then by the call descriptor.
func (r *rig) spinOrSleep(t *testing.T, i int) {
	t.Helper()
	for range 200 {
		if r.rings[i].HasUsed() {
			return
		}
	}
	for !r.rings[i].HasUsed() {
		if r.rings[i].EnableCalls() {
			return
		}
		if !r.awaitCall(i, 5*time.Second) && !r.rings[i].HasUsed() {
			t.Fatalf("no call: %s", r.ringState(i))
		}
	}
}

// TestOneAtATime is NTF-01 and NTF-03: post one chain, kick only if asked, wait for it,
// sleeping only if the rule allows.
func TestOneAtATime(t *testing.T) {
	rounds := 20000
	if testing.Short() {
		rounds = 2000
	}
	eachNotify(t, allWakes, func(t *testing.T, n notifyRig) {
		if n.wake != worker.Block {
			rounds = min(rounds, 3000)
		}
		p := newFakePort()
		p.quiet = true
		r := newRig(t, p, rigOptions{features: n.features, wake: n.wake})
		kicks := 0
		for i := range rounds {
			pause(i)
			ring := i & 1
			if ring == 1 {
				r.tx.AddDirect(r.buf(0, 100, false))
			} else {
				p.feed(frame{data: []byte("a frame for a guest")})
				r.rx.AddDirect(r.buf(1, 100, true))
			}
			r.rings[ring].Publish()
			if r.kick(ring) {
				kicks++
			}
			r.spinOrSleep(t, ring)
			if _, _, ok := r.rings[ring].GetUsed(); !ok {
				t.Fatal(r.rings[ring].Err())
			}
			r.rings[ring].DisableCalls()
		}
		t.Logf("%d kicks for %d chains", kicks, rounds)
		if n.wake == worker.Poll && !n.features.Has(virtio.FRingEventIdx) && kicks > 2 {
			t.Errorf("a polling worker asked for %d kicks", kicks)
		}
	})
}

// pause waits up to 20 us now and then, so that posts meet the worker at every point of
// its way to sleep.
func pause(i int) {
	if i%4 != 0 {
		return
	}
	for end := time.Now().Add(time.Duration(rand.IntN(20)) * time.Microsecond); time.Now().Before(end); {
	}
}

// TestFullRingIsCalledFor is NTF-07: the driver fills the ring and asks for a call for the
// last chain only.
func TestFullRingIsCalledFor(t *testing.T) {
	eachNotify(t, allWakes, func(t *testing.T, n notifyRig) {
		for _, lag := range []int{0, 64} {
			p := newFakePort()
			p.quiet = true
			r := newRig(t, p, rigOptions{features: n.features, wake: n.wake, size: 64, lag: lag})
			for round := range 200 {
				for r.tx.Free() > 0 {
					r.tx.AddDirect(r.buf(0, 100, false))
				}
				r.callAt(1, -1)
				signals(r.calls[1])
				r.tx.Publish()
				r.kick(1)
				for r.done(1) != r.tx.Outstanding() {
					if !r.awaitCall(1, 5*time.Second) && r.done(1) != r.tx.Outstanding() {
						t.Fatalf("round %d: no call, %d of 64 completed", round, r.done(1))
					}
				}
				r.used(1)
			}
			r.finishEarly()
		}
	})
}

// TestRefillRestartsReceive is NTF-09: a burst meets too few buffers; refills alone bring
// the rest, by kicks that were asked for.
func TestRefillRestartsReceive(t *testing.T) {
	eachNotify(t, allWakes, func(t *testing.T, n notifyRig) {
		p := newFakePort()
		r := newRig(t, p, rigOptions{features: n.features, wake: n.wake})
		const burst = 600
		for i := range burst {
			p.feed(plain(60+i, i))
		}
		var chains []rxBuffer
		for got := 0; got < burst; {
			time.Sleep(time.Duration(rand.IntN(300)) * time.Microsecond)
			for range 100 {
				chains = append(chains, r.offer(800))
			}
			r.kick(0)
			waitFor(t, "100 frames", func() bool { return r.done(0) == 100 })
			for range 100 {
				_, chains = r.wantReceived(chains, plain(60+got, got))
				got++
			}
		}
	})
}

// TestWaitingFrameAsksForKicks posts the buffers of a large frame one by one, each with a
// kick only if asked for.
func TestWaitingFrameAsksForKicks(t *testing.T) {
	eachNotify(t, []worker.Wake{worker.Block, worker.Adaptive}, func(t *testing.T, n notifyRig) {
		p := newFakePort()
		r := newRig(t, p, rigOptions{features: n.features, wake: n.wake})
		want := plain(65549, 1)
		p.feed(want)
		var chains []rxBuffer
		start := time.Now()
		for range 43 {
			time.Sleep(time.Duration(rand.IntN(200)) * time.Microsecond)
			chains = append(chains, r.offer(1526))
			r.kick(0)
		}
		waitFor(t, "the frame", r.rx.HasUsed)
		if d := time.Since(start); d > stuckFrame/2 {
			t.Errorf("the frame came %v after its last buffer", d)
		}
		r.wantReceived(chains, want)
	})
}

// TestLoneFrames is NTF-11: completions do not wait for later traffic.
func TestLoneFrames(t *testing.T) {
	eachNotify(t, allWakes, func(t *testing.T, n notifyRig) {
		for _, lag := range []int{0, 64} {
			p := newFakePort()
			p.quiet = true
			r := newRig(t, p, rigOptions{features: n.features, wake: n.wake, lag: lag})
			best := time.Hour // the fastest of several: the machine may be busy
			for range 5 {
				for _, count := range []int{1, 2, 3, 31, 33} {
					r.callAt(1, count-1)
					signals(r.calls[1])
					for range count {
						r.tx.AddDirect(r.buf(0, 100, false))
					}
					start := time.Now()
					r.tx.Publish()
					r.kick(1)
					for r.done(1) != r.tx.Outstanding() {
						if !r.awaitCall(1, 5*time.Second) {
							t.Fatalf("%d frames: no call", count)
						}
					}
					best = min(best, time.Since(start))
					r.used(1)
				}
			}
			if best > 5*time.Millisecond {
				t.Errorf("lag %d: completions take %v", lag, best)
			}
			r.finishEarly()
		}
	})
}

// TestCallsAreBatched is PERF-05: at saturation at most one call for ten frames, although
// the driver suppresses none.
func TestCallsAreBatched(t *testing.T) {
	const frames = 50000
	eachNotify(t, []worker.Wake{worker.Block, worker.Poll}, func(t *testing.T, n notifyRig) {
		p := newFakePort()
		p.quiet = true
		r := newRig(t, p, rigOptions{features: n.features, wake: n.wake, size: 1024})
		before := r.dev.Snapshot().Rings[1]
		for sent := 0; sent < frames; {
			for r.tx.Free() > 512 {
				for range 256 {
					r.tx.AddDirect(r.buf(0, 100, false))
					sent++
				}
				r.tx.Publish()
				r.kick(1)
			}
			for _, _, ok := r.tx.GetUsed(); ok; _, _, ok = r.tx.GetUsed() {
			}
			r.tx.EnableCalls()
		}
		waitFor(t, "the last completion", func() bool { return r.done(1) == r.tx.Outstanding() })
		waitFor(t, "the counters", func() bool { return r.dev.Snapshot().Rings[1].Packets >= before.Packets+frames })
		after := r.dev.Snapshot().Rings[1]
		calls, count := after.Calls-before.Calls, after.Packets-before.Packets
		if count < frames || calls*10 > count {
			t.Errorf("%d calls for %d frames, want at most a tenth", calls, count)
		}
	})
}

// TestReceiveCallsAreBatched is PERF-05 for the receive side.
func TestReceiveCallsAreBatched(t *testing.T) {
	const frames = 20000
	eachNotify(t, []worker.Wake{worker.Block, worker.Adaptive}, func(t *testing.T, n notifyRig) {
		p := newFakePort()
		r := newRig(t, p, rigOptions{features: n.features, wake: n.wake, size: 1024})
		burst := make([]frame, frames)
		for i := range burst {
			burst[i] = frame{data: burstData}
		}
		r.rx.EnableCalls()
		p.feed(burst...)
		for got := 0; got < frames; {
			for r.rx.Free() > 0 {
				r.rx.AddDirect(r.buf(1, 100, true))
			}
			r.rx.Publish()
			r.kick(0)
			for _, _, ok := r.rx.GetUsed(); ok; _, _, ok = r.rx.GetUsed() {
				got++
			}
			if got < frames && r.rx.Outstanding() > 0 && !r.rx.EnableCalls() && !r.awaitCall(0, 5*time.Second) && !r.rx.HasUsed() {
				t.Fatalf("no call after %d frames", got)
			}
		}
		waitFor(t, "the counters", func() bool { return r.dev.Snapshot().Rings[0].Packets == frames })
		if s := r.dev.Snapshot().Rings[0]; s.Calls*10 > frames {
			t.Errorf("%d calls for %d frames, want at most a tenth", s.Calls, s.Packets)
		}
	})
}

var burstData = pattern(64, 1)

// TestEventGarbage is C61: what the driver writes into the event words matters for
// notifications only.
func TestEventGarbage(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures | virtio.FRingEventIdx})
	for i := range 200 {
		split(r.tx).PokeUsedEvent(uint16(rand.Uint32()))
		split(r.tx).PokeAvailFlags(uint16(rand.Uint32()))
		head := r.send(plain(60, i))
		r.forceKick(1)
		waitFor(t, "a frame", r.tx.HasUsed)
		r.wantUsed(1, head)
	}
	wantCount(t, p, 200)
}

// TestEventGarbagePacked is C61 for the driver's event suppression structure.
func TestEventGarbagePacked(t *testing.T) {
	for _, features := range []virtio.Features{0, virtio.FRingEventIdx} {
		p := newFakePort()
		r := newRig(t, p, rigOptions{features: baseFeatures | virtio.FRingPacked | features})
		for i := range 600 {
			r.tx.(*driver.PackedRing).PokeDriverEvent(uint16(rand.Uint32()), uint16(rand.Uint32()))
			head := r.send(plain(60, i))
			r.forceKick(1)
			waitFor(t, "a frame", r.tx.HasUsed)
			r.wantUsed(1, head)
		}
		wantCount(t, p, 600)
	}
}

func wantCount(t testing.TB, p *fakePort, want int) {
	t.Helper()
	if n, _, _ := p.counts(); n != want {
		t.Errorf("%d frames were sent, want %d", n, want)
	}
}
