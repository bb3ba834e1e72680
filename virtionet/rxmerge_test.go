package virtionet

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

func waitIdle() { time.Sleep(100 * time.Millisecond) }

// TestMergedExactFit spreads frames over buffers that they fill exactly, and by one byte
// more or less.
func TestMergedExactFit(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures, size: 1024})
	for _, size := range []int{64, 256, 1526, 4096} {
		for _, buffers := range []int{1, 2, 3, 31, 32, 33, 64, 65, 256} {
			for off := -1; off <= 1; off++ {
				n := size*buffers - 12 + off
				if n < 14 || n > virtio.MaxFrame {
					continue
				}
				var chains []rxBuffer
				for range buffers + 2 {
					chains = append(chains, r.offer(size))
				}
				want := plain(n, buffers)
				p.feed(want)
				r.run()
				got, rest := r.wantReceived(chains, want)
				if need := (n + 12 + size - 1) / size; got != need {
					t.Fatalf("%d bytes over %d buffers of %d, want %d", n, got, size, need)
				}
				for range rest { // frames that empty the ring
					p.feed(plain(14, 1))
				}
				r.run()
				for len(rest) > 0 {
					_, rest = r.wantReceived(rest, plain(14, 1))
				}
			}
		}
	}
	r.wantDrops(0, nil)
}

// TestMergedChainsOfDescriptors is MRG-01: used entries name the heads of chains of three
// descriptors each.
func TestMergedChainsOfDescriptors(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	want := plain(3000, 1)
	chains := []rxBuffer{r.offer(12, 1000, 500), r.offer(500, 500, 600)}
	p.feed(want)
	r.run()
	r.wantReceived(chains, want)
	p.feed(plain(65535+14, 2)) // MRG-04: chains of four tiny descriptors
	chains = nil
	for range 50 {
		chains = append(chains, r.offer(512, 512, 64, 8))
	}
	r.run()
	if r.rx.HasUsed() {
		t.Fatal("a part of a frame was published")
	}
	for r.rx.Free() >= 4 {
		chains = append(chains, r.offer(512, 512, 64, 8))
	}
	r.run()
	if n := (65549 + 12 + 1095) / 1096; len(chains) < n {
		t.Fatalf("the frame needs %d chains, posted are %d", n, len(chains))
	}
	r.wantReceived(chains, plain(65549, 2))
}

// TestMergedNotEnough is MRG-03: nothing is published before all of a frame fits.
func TestMergedNotEnough(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	var chains []rxBuffer
	for range 40 {
		chains = append(chains, r.offer(1526))
	}
	p.feed(plain(65549, 1), plain(60, 2))
	r.forceKick(0)
	time.Sleep(20 * time.Millisecond)
	r.run()
	if r.rx.HasUsed() {
		t.Fatal("a part of a frame was published")
	}
	if base := r.stop(0); base != 0 {
		t.Errorf("stopped at %d, want 0", base)
	}
	r.start(0)
	p.feed(plain(65549, 1), plain(60, 2)) // those from before went with the stop
	r.run()
	for range 3 {
		chains = append(chains, r.offer(1526))
	}
	r.run()
	buffers, chains := r.wantReceived(chains, plain(65549, 1))
	if buffers != 43 {
		t.Errorf("frame over %d buffers, want 43", buffers)
	}
	chains = append(chains, r.offer(1526))
	r.run()
	r.wantReceived(chains, plain(60, 2))
	r.wantDrops(0, map[string]uint64{"ring_stopped": 2})
}

// TestStuckFrame leaves a frame with too few buffers: small ones pass a second later, and
// the worker neither spins nor needs a kick for that.
func TestStuckFrame(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	chains := []rxBuffer{r.offer(1526), r.offer(1526)}
	start := time.Now()
	p.feed(plain(9000, 1), plain(60, 2))
	r.kick(0)
	waitFor(t, "the small frame", r.rx.HasUsed)
	if d := time.Since(start); d < stuckFrame/2 || d > 3*stuckFrame {
		t.Errorf("the small frame came after %v, want about %v", d, stuckFrame)
	}
	_, chains = r.wantReceived(chains, plain(60, 2))
	r.run()
	r.wantDrops(0, map[string]uint64{"rx_buffers_too_small": 1})
	p.feed(plain(61, 3))
	waitFor(t, "the next frame", r.rx.HasUsed)
	r.wantReceived(chains, plain(61, 3))
}

// TestNeverFits fills a small ring with buffers that cannot hold the frame: it is dropped
// at once and the next one flows.
func TestNeverFits(t *testing.T) {
	for _, size := range []int{4, 32, 64} {
		p := newFakePort()
		r := newRig(t, p, rigOptions{features: baseFeatures, size: size})
		var chains []rxBuffer
		for range size {
			chains = append(chains, r.offer(100))
		}
		p.feed(plain(100*size, 1), plain(60, 2), plain(150, 3))
		r.run()
		_, chains = r.wantReceived(chains, plain(60, 2))
		r.wantReceived(chains, plain(150, 3))
		r.wantDrops(0, map[string]uint64{"rx_buffers_too_small": 1})
		r.finishEarly()
	}
}

// TestMoreBuffersThanOneFrameTakes is MRG-04 and C71: a frame that needs more buffers than
// are allowed for one is dropped, whatever the ring could hold.
func TestMoreBuffersThanOneFrameTakes(t *testing.T) {
	for _, size := range []int{1024, 2048} {
		p := newFakePort()
		r := newRig(t, p, rigOptions{features: baseFeatures, size: size})
		var chains []rxBuffer
		for range size {
			chains = append(chains, r.offer(64))
		}
		p.feed(plain(65549, 1), plain(64*1024-12, 2))
		r.run()
		buffers, _ := r.wantReceived(chains, plain(64*1024-12, 2))
		if buffers != maxMerged {
			t.Errorf("ring of %d: frame over %d buffers, want %d", size, buffers, maxMerged)
		}
		r.wantDrops(0, map[string]uint64{"rx_buffers_too_small": 1})
		r.finishEarly()
	}
}

// TestBadChainInsideFrame puts a faulty chain at every position of a frame of few and of
// many chains: what is in front of it comes back empty, then the frame arrives whole. The
// worker does not wait for a kick that is not due.
func TestBadChainInsideFrame(t *testing.T) {
	for _, buffers := range []int{3, 31, 32, 33, 40, 70} {
		for _, at := range []int{0, 1, buffers / 2, buffers - 1} {
			p := newFakePort()
			r := newRig(t, p, rigOptions{features: baseFeatures})
			want := plain(500*buffers-12, at)
			for i := range buffers {
				if i == at {
					r.post(0, []driver.Buf{{Addr: 1 << 40, Len: 500, Write: true}})
					break
				}
				r.offer(500)
			}
			var chains []rxBuffer
			for range buffers {
				chains = append(chains, r.offer(500))
			}
			start := time.Now()
			p.feed(want)
			waitFor(t, "the frame", func() bool { return int(split(r.rx).PeekUsedIdx()) == at+1+buffers })
			if d := time.Since(start); d > 5*stuckFrame {
				t.Errorf("%d buffers, bad one at %d: the frame took %v", buffers, at, d)
			}
			for range at + 1 {
				if _, written, ok := r.rx.GetUsed(); !ok || written != 0 {
					t.Fatalf("%d buffers, bad one at %d: length %d (%v), want 0", buffers, at, written, ok)
				}
			}
			r.wantReceived(chains, want)
			r.wantDrops(0, map[string]uint64{"address": 1})
			r.finishEarly()
		}
	}
}

// TestMergedObserver is MRG-07 and PKD-07: a driver that polls never sees a part of a frame.
func TestMergedObserver(t *testing.T) {
	for _, o := range []rigOptions{{features: baseFeatures}, {features: baseFeatures | virtio.FRingPacked, size: 250}} {
		t.Run(o.features.String(), func(t *testing.T) { mergedObserver(t, o) })
	}
}

func mergedObserver(t *testing.T, o rigOptions) {
	p := newFakePort()
	r := newRig(t, p, o)
	const frames = 3000
	frame9k := plain(9000, 1)
	var chains []rxBuffer
	for range 200 {
		chains = append(chains, r.offer(1526))
	}
	for range 20 {
		p.feed(frame9k)
	}
	fed := 20
	r.forceKick(0)
	for got := 0; got < frames; {
		visible := r.done(0)
		if visible == 0 {
			continue
		}
		for visible > 0 {
			before := len(chains)
			_, chains = r.wantReceived(chains, frame9k)
			visible -= before - len(chains)
			if visible < 0 {
				t.Fatal("less than a frame became visible")
			}
			got++
			for range before - len(chains) {
				chains = append(chains, r.offer(1526))
			}
			if fed < frames {
				p.feed(frame9k)
				fed++
			}
		}
		r.kick(0)
	}
}

// TestReceiveModel delivers random frames into random chains, good and bad, posted a few
// at a time, and compares with what the rules say must arrive.
func TestReceiveModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		features := rapid.SampledFrom(append(formats(baseFeatures), legacyMerged)).Draw(rt, "features")
		p := newFakePort()
		p.piece = rapid.SampledFrom([]int{0, 64 << 10 / 17}).Draw(rt, "piece")
		r := newRig(t, p, rigOptions{features: features, size: 128})
		defer r.finishEarly()
		var frames []frame
		for i := range rapid.IntRange(1, 20).Draw(rt, "frames") {
			frames = append(frames, plain(rapid.IntRange(14, 30000).Draw(rt, "length"), i))
		}
		p.feed(frames...)
		var chains []rxBuffer
		bad := map[uint16]bool{}
		for len(frames) > 0 {
			for range rapid.IntRange(1, 60).Draw(rt, "chains") {
				if r.rx.Free() < 3 {
					break
				}
				switch rapid.IntRange(0, 20).Draw(rt, "kind") {
				case 0:
					head := r.post(0, []driver.Buf{{Addr: 1 << 40, Len: 1, Write: true}})
					bad[head] = true
					chains = append(chains, rxBuffer{head: head})
				case 1:
					chains = append(chains, r.offer(12, rapid.IntRange(0, 2).Draw(rt, "n")))
				default:
					chains = append(chains, r.offer(rapid.IntRange(0, 14).Draw(rt, "a"), rapid.IntRange(700, 4000).Draw(rt, "b")))
				}
			}
			r.run()
			for r.rx.HasUsed() {
				if r.nextWritten(0) == 0 {
					head, _, _ := r.rx.GetUsed()
					if head != chains[0].head {
						rt.Fatalf("head %d came back, want %d", head, chains[0].head)
					}
					chains = chains[1:]
					continue
				}
				_, chains = r.wantReceived(chains, frames[0])
				frames = frames[1:]
			}
		}
	})
}
