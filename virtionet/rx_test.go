package virtionet

import (
	"fmt"
	"testing"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

const (
	modernSingle = virtio.FVersion1 | virtio.FRingIndirectDesc
	legacyMerged = virtio.FNetMrgRxBuf | virtio.FRingIndirectDesc
)

// TestReceiveLayouts delivers frames into every layout of a receive chain (MRG-05), with
// all header lengths, mergeable and not, direct and indirect.
func TestReceiveLayouts(t *testing.T) {
	layouts := []struct {
		name string
		cut  func(hdr, n int) []int
	}{
		{"exact", func(hdr, n int) []int { return []int{hdr + n} }},
		{"one byte more", func(hdr, n int) []int { return []int{hdr + n + 1} }},
		{"roomy", func(hdr, n int) []int { return []int{hdr + n + 1000} }},
		{"header alone", func(hdr, n int) []int { return []int{hdr, n} }},
		{"header alone, then empty, then the rest", func(hdr, n int) []int { return []int{hdr, 0, n + 3} }},
		{"header in single bytes", func(hdr, n int) []int { return append(repeat(1, hdr), n+1) }},
		{"header in three", func(hdr, n int) []int { return []int{5, hdr - 6, 1, n} }},
		{"split in the header", func(hdr, n int) []int { return []int{hdr - 1, n + 1} }},
		{"split in the Ethernet header", func(hdr, n int) []int { return []int{hdr + 7, n} }},
		{"two bytes each", func(hdr, n int) []int { return repeat(2, min(600, (hdr+n+1)/2)) }},
		{"nineteen entries", func(hdr, n int) []int { return append(append([]int{hdr}, repeat(4096, 17)...), 4096) }},
	}
	for _, features := range append(formats(baseFeatures), modernSingle, modernSingle|virtio.FRingPacked, legacyFeatures, legacyMerged) {
		for _, piece := range []int{0, 1000} {
			t.Run(fmt.Sprintf("%v/%d", features, piece), func(t *testing.T) {
				p := newFakePort()
				p.piece = piece
				r := newRig(t, p, rigOptions{features: features, size: 1024})
				hdr := features.NetHdrLen()
				for _, l := range layouts {
					for seed, n := range []int{14, 60, 61, 1000, 1514, 4084, 9000} {
						want := plain(n, seed)
						lengths := l.cut(hdr, n)
						if sum(lengths) < hdr+n {
							continue
						}
						chains := []rxBuffer{r.offer(lengths...)}
						p.feed(want)
						r.run()
						if _, rest := r.wantReceived(chains, want); len(rest) != 0 {
							t.Fatalf("%s, %d bytes: %d chains left", l.name, n, len(rest))
						}
						table := r.offerIndirect(lengths...)
						p.feed(want)
						r.run()
						r.wantReceived([]rxBuffer{table}, want)
					}
				}
				r.wantDrops(0, nil)
			})
		}
	}
}

func sum(v []int) (s int) {
	for _, n := range v {
		s += n
	}
	return s
}

// offerIndirect is offer through an indirect table.
func (r *rig) offerIndirect(lengths ...int) rxBuffer {
	poisoned := make([]byte, sum(lengths))
	for i := range poisoned {
		poisoned[i] = poison
	}
	bufs := cut(r.place(poisoned), len(poisoned), true, lengths...)
	return rxBuffer{r.postIndirect(0, bufs), bufs}
}

// TestReceiveLargest delivers the largest frame into a chain that it fits exactly.
func TestReceiveLargest(t *testing.T) {
	for _, features := range []virtio.Features{baseFeatures, modernSingle, legacyFeatures} {
		p := newFakePort()
		r := newRig(t, p, rigOptions{features: features})
		want := plain(virtio.MaxFrame, 1)
		b := r.offer(features.NetHdrLen() + virtio.MaxFrame)
		p.feed(want)
		r.run()
		r.wantReceived([]rxBuffer{b}, want)
		r.finishEarly()
	}
}

// TestReceiveAcrossRegions puts the seam between two regions into header and payload.
func TestReceiveAcrossRegions(t *testing.T) {
	for _, features := range []virtio.Features{baseFeatures, legacyFeatures} {
		p := newFakePort()
		r := newRig(t, p, rigOptions{features: features})
		for off := range 40 {
			for i := range 200 {
				r.mem.Bytes(rigSeam-100+uint64(i), 1)[0] = poison
			}
			want := plain(80, off)
			// The content is gathered from the two sides of the seam.
			at := uint64(rigSeam - off)
			head := r.post(0, []driver.Buf{{Addr: at, Len: 100, Write: true}})
			b := rxBuffer{head, cut(at, 100, true, off)}
			p.feed(want)
			r.run()
			r.wantReceived([]rxBuffer{b}, want)
		}
		r.finishEarly()
	}
}

// TestReceiveBadChains posts every kind of unusable chain among good ones: each comes back
// with length 0, the frame goes into the next good one.
func TestReceiveBadChains(t *testing.T) {
	for _, features := range []virtio.Features{baseFeatures, modernSingle} {
		t.Run(features.String(), func(t *testing.T) {
			p := newFakePort()
			r := newRig(t, p, rigOptions{features: features})
			at := r.place(make([]byte, 4096))
			bad := []struct {
				reason string
				bufs   []driver.Buf
			}{
				{"rx_buffer_unusable", []driver.Buf{{Addr: at, Len: 0, Write: true}}},
				{"rx_buffer_unusable", []driver.Buf{{Addr: at, Len: 11, Write: true}}},
				{"rx_buffer_unusable", []driver.Buf{{Addr: at, Len: 5, Write: true}, {Addr: at, Len: 6, Write: true}}},
				{"address", []driver.Buf{{Addr: 1 << 40, Len: 2000, Write: true}}},
				{"address", []driver.Buf{{Addr: at, Len: 12, Write: true}, {Addr: ^uint64(0) - 5, Len: 2000, Write: true}}},
				{"direction", []driver.Buf{{Addr: at, Len: 2000}}},
				{"direction", []driver.Buf{{Addr: at, Len: 12, Write: true}, {Addr: at, Len: 2000}}},
			}
			want := map[string]uint64{}
			for i, b := range bad {
				head := r.post(0, b.bufs)
				good := r.offer(2000)
				f := plain(100+i, i)
				p.feed(f)
				r.run()
				got, _, ok := r.rx.GetUsed()
				if !ok || got != head {
					t.Fatalf("chain %d: head %d came back (%v), want %d", i, got, ok, head)
				}
				want[b.reason]++
				r.wantReceived([]rxBuffer{good}, f)
			}
			r.wantDrops(0, want)
		})
	}
}

// TestBadChainsAreCalledFor returns chains without any frame: the driver, which waits for
// a call before it posts more, must get one.
func TestBadChainsAreCalledFor(t *testing.T) {
	for _, features := range []virtio.Features{baseFeatures, modernSingle, baseFeatures | virtio.FRingEventIdx} {
		t.Run(features.String(), func(t *testing.T) {
			p := newFakePort()
			r := newRig(t, p, rigOptions{features: features})
			r.rx.EnableCalls()
			for i := range 40 {
				r.post(0, []driver.Buf{{Addr: 1 << 40, Len: uint32(1000 + i), Write: true}})
			}
			p.feed(plain(60, 1))
			if !r.awaitCall(0, 5*1e9) {
				t.Fatal("no call for chains that were returned empty")
			}
			waitFor(t, "the return of all chains", func() bool { return split(r.rx).PeekUsedIdx() == 40 })
			if n := len(r.used(0)); n != 40 {
				t.Fatalf("%d chains came back, want 40", n)
			}
			b := r.offer(1600)
			r.kick(0)
			waitFor(t, "the frame", r.rx.HasUsed)
			r.wantReceived([]rxBuffer{b}, plain(60, 1))
		})
	}
}

// TestSingleTooSmall is C70: without MRG_RXBUF a frame that does not fit the next chain is
// dropped, the chain stays for the next frame.
func TestSingleTooSmall(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: modernSingle})
	chains := []rxBuffer{r.offer(1526), r.offer(1526)}
	p.feed(plain(9000, 1), plain(1514, 2), plain(1515, 3), plain(60, 4))
	r.run()
	_, chains = r.wantReceived(chains, plain(1514, 2))
	r.wantReceived(chains, plain(60, 4))
	r.wantDrops(0, map[string]uint64{"rx_buffers_too_small": 2})
}

// TestNoBuffersNoSpin is PERF-01: without receive buffers, or with the ring disabled,
// frames stay at the network and the worker sleeps.
func TestNoBuffersNoSpin(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	quiet := func(why string) {
		t.Helper()
		time := r.loop.Stats().Sleeps
		waitIdle()
		if n := r.loop.Stats().Sleeps - time; n > 3 {
			t.Errorf("%s: the worker woke %d times in 100 ms", why, n)
		}
		if _, taken, _ := p.counts(); taken != 0 {
			t.Errorf("%s: the device took %d frames", why, taken)
		}
	}
	for i := range 100 {
		p.feed(plain(60, i))
	}
	quiet("no buffers")
	r.dev.EnableRing(0, false)
	var chains []rxBuffer
	for range 100 {
		chains = append(chains, r.offer(1526))
	}
	r.forceKick(0)
	quiet("disabled")
	r.dev.EnableRing(0, true)
	waitFor(t, "the frames", func() bool { return split(r.rx).PeekUsedIdx() == 100 })
	for i := range 100 {
		_, chains = r.wantReceived(chains, plain(60, i))
	}
}
