package virtionet

import (
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// TestBackPressureGivesChainsBack lets the network take a few frames at a time, with bad
// frames in between: nothing is lost, duplicated or counted twice, and whenever the ring
// is stopped its position is the number of chains that came back.
func TestBackPressureGivesChainsBack(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		p := newFakePort()
		lag := rapid.SampledFrom([]int{0, 1, 64}).Draw(rt, "lag")
		r := newRig(t, p, rigOptions{features: baseFeatures | virtio.FNetCSum, lag: lag})
		defer r.finishEarly()
		p.allow(0)
		var heads []uint16
		var good []frame
		bad := uint64(0)
		total := rapid.IntRange(1, 200).Draw(rt, "frames")
		for i := range total {
			switch rapid.IntRange(0, 5).Draw(rt, "kind") {
			case 0:
				heads = append(heads, r.post(1, []driver.Buf{{Addr: r.bufs, Len: 20}}))
				bad++
			case 1:
				f := plain(60, i)
				f.hdr = virtio.NetHdr{Flags: 1, CsumStart: 60, CsumOffset: 2}
				heads = append(heads, r.send(f))
				bad++
			default:
				good = append(good, plain(60+i, i))
				heads = append(heads, r.send(good[len(good)-1]))
			}
		}
		var got []frame
		var came []usedEntry
		for len(got) < len(good) {
			p.allow(rapid.IntRange(0, 40).Draw(rt, "credit"))
			r.loop.Do(func() { r.pair().Run() })
			got = append(got, p.take()...)
			came = append(came, r.used(1)...)
			if rapid.IntRange(0, 9).Draw(rt, "stop") == 0 {
				base := r.stop(1)
				came = append(came, r.used(1)...)
				if int(base) != len(came) {
					rt.Fatalf("stopped at %d with %d chains back", base, len(came))
				}
				r.start(1)
			}
		}
		p.allow(-1)
		r.run()
		r.loop.Do(r.pair().flush)
		came = append(came, r.used(1)...)
		if len(came) != total || len(got) != len(good) {
			rt.Fatalf("%d chains back of %d, %d frames sent of %d", len(came), total, len(got), len(good))
		}
		for i, u := range came {
			if u.head != heads[i] || u.written != 0 {
				rt.Fatalf("used entry %d is %+v, want head %d", i, u, heads[i])
			}
		}
		for i := range got {
			if string(got[i].data) != string(good[i].data) {
				rt.Fatalf("frame %d differs", i)
			}
		}
		r.stop(1)
		n := uint64(0)
		for _, count := range r.drops(1) {
			n += count
		}
		if n != bad {
			rt.Fatalf("%d drops counted, want %d", n, bad)
		}
		r.start(1)
	})
}

// TestBackPressureIsRetried leaves a refused frame to the worker: it offers it again by
// itself, without a kick, and does not spin meanwhile.
func TestBackPressureIsRetried(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	p.allow(0)
	r.send(plain(60, 1))
	r.forceKick(1)
	before := r.loop.Stats().Sleeps
	time.Sleep(100 * time.Millisecond)
	if n := r.loop.Stats().Sleeps - before; n > 30 {
		t.Errorf("the worker woke %d times in 100 ms while the network was blocked", n)
	}
	p.allow(-1)
	waitFor(t, "the refused frame", func() bool { s, _, _ := p.counts(); return s == 1 })
	waitFor(t, "its completion", r.tx.HasUsed)
}

// TestStaleBackPressure stops a blocked ring: its next life must start without waiting
// for the network, and an idle one must not be retried for ever.
func TestStaleBackPressure(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	p.allow(0)
	r.send(plain(60, 1))
	r.forceKick(1)
	waitFor(t, "back-pressure", func() (blocked bool) {
		r.loop.Do(func() { blocked = r.pair().txBlocked })
		return blocked
	})
	if base := r.stop(1); base != 0 {
		t.Errorf("stopped at %d, want 0: the frame was not sent", base)
	}
	r.tx.Reset(0)
	r.start(1)
	p.allow(-1)
	time.Sleep(20 * time.Millisecond)
	before := r.loop.Stats().Sleeps
	time.Sleep(100 * time.Millisecond)
	if n := r.loop.Stats().Sleeps - before; n > 2 {
		t.Errorf("an idle worker woke %d times in 100 ms", n)
	}
	if !r.tx.NeedsKick() {
		r.tx.AddDirect(driver.Buf{Addr: r.bufs, Len: 100})
		r.tx.Publish()
		if !r.tx.NeedsKick() {
			t.Error("an idle ring does not ask for kicks")
		}
	}
}

// TestBlockedThenDisabled disables a ring that waits for the network: it is discarded at
// once and the ring asks for kicks again.
func TestBlockedThenDisabled(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	p.allow(0)
	r.send(plain(60, 1))
	r.forceKick(1)
	time.Sleep(5 * time.Millisecond)
	r.dev.EnableRing(1, false)
	waitFor(t, "the discarded frame", r.tx.HasUsed)
	time.Sleep(20 * time.Millisecond)
	head, _ := r.tx.AddDirect(driver.Buf{Addr: r.bufs, Len: 100})
	r.tx.Publish()
	if !r.kick(1) {
		t.Error("the disabled ring does not ask for kicks")
	}
	waitFor(t, "the second frame", func() bool { return split(r.tx).PeekUsedIdx() == 2 })
	r.wantUsed(1, 0, head)
	wantSent(t, p)
}

// TestOutOfMemory takes the arena away: chains stay in the ring and are sent, complete and
// in order, when there is memory again.
func TestOutOfMemory(t *testing.T) {
	for _, a := range allTxAllocs {
		t.Run(a.String(), func(t *testing.T) { outOfMemory(t, a) })
	}
}

func outOfMemory(t *testing.T, a TxAlloc) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures, arena: 1 << 20, alloc: a})
	var hoard []pagemem.PageID
	for {
		id, ok := r.arena.Alloc(0, pagemem.NoReserve)
		if !ok {
			break
		}
		hoard = append(hoard, id)
	}
	free := func(n int) {
		for _, id := range hoard[:n] {
			r.arena.Unref(id, 1)
		}
		hoard = hoard[n:]
	}
	small := plain(60, 7) // takes the shortest path through the code
	first := r.send(small)
	r.run()
	if sent, _, _ := p.counts(); sent != 0 || !r.noMem() {
		t.Fatalf("%d frames sent without memory", sent)
	}
	free(4)
	r.run()
	wantSent(t, p, small)
	r.wantUsed(1, first)
	good := []frame{plain(60, 0)}
	heads := []uint16{r.send(good[0])}
	for i := range 8 {
		good = append(good, plain(60000, i))
		heads = append(heads, r.send(good[i+1]))
	}
	r.run()
	if sent, _, _ := p.counts(); sent != 2 || !r.noMem() {
		t.Fatalf("%d frames sent, want the small ones only; out of memory: %v", sent, r.noMem())
	}
	sent, _, _ := p.counts()
	if base := r.stop(1); int(base) != sent {
		t.Errorf("stopped at %d with %d frames sent", base, sent)
	}
	r.start(1)
	r.forceKick(1)
	time.Sleep(20 * time.Millisecond)
	free(len(hoard))
	waitFor(t, "the frames that waited for memory", func() bool { s, _, _ := p.counts(); return s == 1+len(good) })
	r.run()
	wantSent(t, p, good...)
	r.wantUsed(1, heads...)
	r.wantDrops(1, nil)
}

func (r *rig) noMem() (is bool) {
	r.loop.Do(func() { is = r.pair().txNoMem })
	return is
}

// TestLag checks that the newest completions are held back while traffic flows and
// published at idle and at the stop.
func TestLag(t *testing.T) {
	for _, features := range formats(baseFeatures) {
		t.Run(features.String(), func(t *testing.T) { lag(t, features) })
	}
}

func lag(t *testing.T, features virtio.Features) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: features, lag: 64})
	turn := func() { r.loop.Do(func() { r.pair().Run() }) }
	for i := range 100 {
		r.send(plain(60, i))
	}
	turn()
	if n := len(r.used(1)); n != 36 {
		t.Errorf("%d completions published under traffic, want 36", n)
	}
	turn()
	if n := len(r.used(1)); n != 64 {
		t.Errorf("%d completions published at idle, want 64", n)
	}
	for i := range 10 {
		r.send(plain(60, i))
	}
	turn()
	if n := len(r.used(1)); n != 0 {
		t.Errorf("%d completions published under traffic, want 0", n)
	}
	if base := r.stop(1); base&0x7fff != 110 {
		t.Errorf("stopped at %#x, want 110", base)
	}
	if n := len(r.used(1)); n != 10 {
		t.Errorf("%d completions published by the stop, want 10", n)
	}
}

// TestLagOfBrokenRing breaks a ring that holds completions back: the driver gets them, so
// that a restart sends nothing twice.
func TestLagOfBrokenRing(t *testing.T) {
	for _, features := range formats(baseFeatures) {
		t.Run(features.String(), func(t *testing.T) { lagOfBrokenRing(t, features) })
	}
}

func lagOfBrokenRing(t *testing.T, features virtio.Features) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: features, lag: 64})
	for i := range 10 {
		r.send(plain(60, i))
	}
	r.loop.Do(func() { r.pair().Run() })
	r.breakRing(1)
	r.run()
	if !r.dev.Snapshot().Rings[1].Broken {
		t.Fatal("the ring is not broken")
	}
	if n := len(r.used(1)); n != 10 {
		t.Errorf("%d completions of frames that were sent, want 10", n)
	}
	if base := r.stop(1); base&0x7fff != 10 {
		t.Errorf("stopped at %d, want 10", base)
	}
}

// TestTurnIsBounded is PERF-07: a ring that is always full does not keep the worker.
func TestTurnIsBounded(t *testing.T) {
	for _, test := range []struct {
		name  string
		frame int
		limit int
	}{
		{"small", 60, turnPackets + 32},
		{"large", 65000, turnBytes/65000 + 10},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := newFakePort()
			p.quiet = true
			r := newRig(t, p, rigOptions{features: baseFeatures, size: 1024})
			raw := r.raw(virtio.NetHdr{}, pattern(test.frame, 1))
			at := r.place(raw)
			for r.tx.Free() > 0 {
				r.tx.AddDirect(driver.Buf{Addr: at, Len: uint32(len(raw))})
			}
			r.tx.Publish()
			r.loop.Do(func() { r.pair().Run() })
			if sent, _, _ := p.counts(); sent > test.limit || sent == 0 {
				t.Errorf("one turn sent %d frames, want at most %d", sent, test.limit)
			}
		})
	}
}

// TestFairness lets one guest refill its transmitq endlessly: another on the same worker
// and control messages are served meanwhile.
func TestFairness(t *testing.T) {
	// As serve does: with as many processors of the runtime as there are spinning
	// goroutines, this one would wait for its preemption, not for the worker.
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(4))
	busyPort, p := newFakePort(), newFakePort()
	busyPort.quiet = true
	busy := newRig(t, busyPort, rigOptions{features: baseFeatures})
	r := newRig(t, p, rigOptions{features: baseFeatures, beside: busy})
	raw := busy.raw(virtio.NetHdr{}, pattern(60, 1))
	at := busy.place(raw)
	quit, ended := make(chan struct{}), make(chan struct{})
	end := sync.OnceFunc(func() { close(quit); <-ended })
	defer end() // before the memory goes away
	go func() {
		defer close(ended)
		for {
			select {
			case <-quit:
				return
			default:
			}
			for busy.tx.Free() > 0 {
				busy.tx.AddDirect(driver.Buf{Addr: at, Len: uint32(len(raw))})
			}
			busy.tx.Publish()
			busy.kick(1)
			for {
				if _, _, ok := busy.tx.GetUsed(); !ok {
					break
				}
			}
		}
	}()
	var took []time.Duration
	for i := range 50 {
		start := time.Now()
		p.feed(plain(60, i))
		b := r.offer(1600)
		r.kick(0)
		waitFor(t, "a frame for the other guest", r.rx.HasUsed)
		r.wantReceived([]rxBuffer{b}, plain(60, i))
		took = append(took, time.Since(start))
	}
	start := time.Now()
	r.stop(1)
	if d := time.Since(start); d > time.Second {
		t.Errorf("stopping a ring took %v", d)
	}
	r.start(1)
	end()
	slices.Sort(took)
	// Ten times PERF-07's 20 ms, to be judged in passing; integration/cases judges those.
	if d := took[len(took)/2]; d > 200*time.Millisecond {
		t.Errorf("half of the frames took more than %v beside a busy guest", d)
	}
	if n, _, _ := busyPort.counts(); n < 1000 {
		t.Errorf("the busy guest sent only %d frames", n)
	}
}
