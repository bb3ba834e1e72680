package virtionet

import (
	"os"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/port/echo"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// TestStopIsExact is MIG-01: the position counts what was done, afterwards nothing of the
// ring is touched, and the next life goes on where this one ended.
func TestStopIsExact(t *testing.T) {
	for _, features := range formats(baseFeatures) {
		t.Run(features.String(), func(t *testing.T) { stopIsExact(t, features) })
	}
}

// stopIsExact: 700 chains are 0x2bc, or 188 in the third lap of a packed ring of 256.
func stopIsExact(t *testing.T, features virtio.Features) {
	want := virtqueue.Position(0x2bc)
	if features.Has(virtio.FRingPacked) {
		want = 0x80bc80bc
	}
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: features, lag: 64})
	for i := range 700 {
		r.send(plain(60, i))
		if r.tx.Free() == 0 || i == 699 {
			r.run()
			r.loop.Do(r.pair().flush)
			r.used(1)
		}
	}
	if base := r.stop(1); base != want {
		t.Errorf("stopped at %#x, want %#x", base, want)
	}
	p.take()
	signals(r.calls[1])
	r.tx.EnableCalls()
	r.send(plain(61, 1))
	r.forceKick(1)
	r.dev.EnableRing(1, true)
	time.Sleep(10 * time.Millisecond)
	if r.tx.HasUsed() || signals(r.calls[1]) > 0 || len(p.take()) > 0 {
		t.Error("a stopped ring was served")
	}
	r.start(1)
	waitFor(t, "the frame posted meanwhile", r.tx.HasUsed)
	wantSent(t, p, plain(61, 1))
	if base := r.stop(1); base != want+1 && base != want+0x10001 {
		t.Errorf("stopped at %#x, behind %#x", base, want)
	}
}

// TestRingSettlesLate is MIG-08: the used index counts when the ring first runs.
func TestRingSettlesLate(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	for i := range 200 {
		r.send(plain(60, i))
	}
	r.run()
	r.used(1)
	r.stop(1)
	r.start(1)    // still at 200
	r.tx.Reset(0) // the driver resets the ring before its first kick
	r.send(plain(60, 1))
	r.forceKick(1)
	waitFor(t, "the first frame of the second life", func() bool { return split(r.tx).PeekUsedIdx() == 1 })
	if id, _ := split(r.tx).PeekUsed(0); id != 0 {
		t.Errorf("slot 0 names head %d", id)
	}
	if base := r.stop(1); base != 1 {
		t.Errorf("stopped at %d, want 1", base)
	}
}

// TestKickBeforeStart is NTF-05: what was kicked for before the ring was started or
// enabled is served.
func TestKickBeforeStart(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	r.stop(1)
	r.send(plain(60, 1))
	r.start(1)
	waitFor(t, "a frame without kick", r.tx.HasUsed)
	r.dev.EnableRing(0, false)
	b := r.offer(1600)
	r.forceKick(0)
	p.feed(plain(60, 2))
	time.Sleep(5 * time.Millisecond)
	r.dev.EnableRing(0, true)
	waitFor(t, "a frame for the enabled ring", r.rx.HasUsed)
	r.wantReceived([]rxBuffer{b}, plain(60, 2))
}

func TestDescriptorsAreReplaced(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	r.tx.EnableCalls()
	old := r.calls[1]
	r.calls[1] = must(unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK))
	defer unix.Close(old)
	signals(old)
	r.dev.SetCall(1, r.calls[1])
	if n := signals(r.calls[1]); n != 1 {
		t.Errorf("the new call descriptor was signaled %d times, want once", n)
	}
	oldKick := r.kicks[1]
	r.kicks[1] = must(unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK))
	r.dev.SetKick(1, r.kicks[1])
	unix.Close(oldKick)
	r.loop.Do(func() {})
	r.send(plain(60, 1))
	r.kick(1)
	if !r.awaitCall(1, 5*time.Second) {
		t.Error("no call on the new descriptor")
	}
	if n := signals(old); n != 0 {
		t.Error("the old call descriptor was signaled")
	}
	r.used(1)
	r.dev.SetCall(1, -1)
	r.send(plain(60, 1))
	r.kick(1)
	waitFor(t, "a completion", r.tx.HasUsed)
	r.dev.SetKick(1, -1)
	r.loop.Do(func() {}) // the turn that the change caused is over
	r.used(1)
	r.send(plain(60, 1))
	r.forceKick(1)
	time.Sleep(5 * time.Millisecond)
	if r.tx.HasUsed() {
		t.Error("a ring without kick descriptor was served")
	}
}

// TestFailedStart gives StartRing a kick descriptor that cannot be watched: the ring stays
// stopped, holds no descriptor, and starts later.
func TestFailedStart(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	r.stop(1)
	file := must(os.CreateTemp(t.TempDir(), ""))
	defer file.Close()
	cfg := r.config(1)
	cfg.KickFD = int(file.Fd())
	if err := r.dev.StartRing(cfg); err == nil {
		t.Fatal("a regular file was accepted as kick descriptor")
	}
	if s := r.dev.Snapshot().Rings[1]; s.Started {
		t.Error("the ring counts as started")
	}
	r.loop.Do(func() {
		if q := r.pair().tx; q.q != nil || q.callFD != -1 || q.kickFD != -1 {
			t.Error("the ring kept something")
		}
	})
	r.start(1)
	r.send(plain(60, 1))
	r.kick(1)
	waitFor(t, "a frame", r.tx.HasUsed)
}

// TestBrokenRing breaks each ring in each way: its err descriptor is written once, the
// other ring goes on, a restart brings it back.
func TestBrokenRing(t *testing.T) {
	onSplit := func(i int, do func(*driver.Ring)) func(*rig) {
		return func(r *rig) { do(split(r.rings[i])) }
	}
	impossible := func(i int) func(*rig) {
		return func(r *rig) {
			q := r.rings[i].(*driver.PackedRing)
			q.PokeDesc(int(q.AvailIdx()&0x7fff), 0, 0, 0, driver.DescFAvail|driver.DescFUsed)
		}
	}
	endless := func(i int) func(*rig) {
		return func(r *rig) {
			for range 256 {
				r.rings[i].(*driver.PackedRing).PokeChain(r.bufs, 60, 0, driver.DescFNext|uint16(1-i)<<1)
			}
			r.rings[i].Publish()
		}
	}
	for _, test := range []struct {
		name   string
		ring   int
		packed bool
		do     func(*rig)
	}{
		{"tx index", 1, false, onSplit(1, func(d *driver.Ring) { d.PokeAvailIdx(d.AvailIdx() + 5000) })},
		{"tx index backwards", 1, false, onSplit(1, func(d *driver.Ring) { d.PokeAvailIdx(d.AvailIdx() - 1) })},
		{"tx head", 1, false, onSplit(1, func(d *driver.Ring) { d.PokeHead(256); d.Publish() })},
		{"rx index", 0, false, onSplit(0, func(d *driver.Ring) { d.PokeAvailIdx(d.AvailIdx() + 257) })},
		{"rx head", 0, false, onSplit(0, func(d *driver.Ring) { d.PokeHead(0xffff); d.Publish() })},
		{"tx flags", 1, true, impossible(1)},
		{"rx flags", 0, true, impossible(0)},
		{"tx chain without end", 1, true, endless(1)},
		{"rx chain without end", 0, true, endless(0)},
		{"tx half a chain", 1, true, func(r *rig) { r.breakRing(1) }},
	} {
		for _, features := range []virtio.Features{baseFeatures, modernSingle} {
			if test.packed {
				features |= virtio.FRingPacked
			}
			t.Run(test.name+"/"+features.String(), func(t *testing.T) {
				p := newFakePort()
				r := newRig(t, p, rigOptions{features: features})
				b := r.offer(1600)
				p.feed(plain(60, 1))
				r.send(plain(60, 2))
				r.forceKick(0)
				r.forceKick(1)
				waitFor(t, "traffic", func() bool { return r.rx.HasUsed() && r.tx.HasUsed() })
				r.wantReceived([]rxBuffer{b}, plain(60, 1))
				r.used(1)

				test.do(r)
				for i := range 20 {
					p.feed(plain(60, i))
					r.forceKick(0)
					r.forceKick(1)
					r.loop.Do(func() {})
				}
				waitFor(t, "the err descriptor", func() bool { return r.dev.Snapshot().Rings[test.ring].Broken })
				if n := signals(r.errs[test.ring]); n != 1 {
					t.Errorf("err was written %d times, want once", n)
				}
				if s := r.dev.Snapshot().Rings[test.ring]; s.BrokenReason == "" {
					t.Error("no reason is shown")
				}
				other := 1 - test.ring
				if other == 1 {
					r.send(plain(60, 3))
				} else {
					r.offer(1600)
				}
				r.forceKick(other)
				waitFor(t, "the other ring", r.rings[other].HasUsed)

				if base := r.stop(test.ring); base&0x7fff != 1 {
					t.Errorf("stopped at %#x, want 1", base)
				}
				r.reset(test.ring)
				r.start(test.ring)
				if r.dev.Snapshot().Rings[test.ring].Broken {
					t.Error("the ring is still broken")
				}
				if test.ring == 1 {
					r.send(plain(60, 4))
				} else {
					p.feed(plain(60, 4))
					r.offer(1600)
				}
				r.forceKick(test.ring)
				waitFor(t, "the ring's second life", r.rings[test.ring].HasUsed)
				select {
				case err := <-r.fatal:
					t.Errorf("a broken ring ended the connection: %v", err)
				default:
				}
			})
		}
	}
}

func (r *rig) live(t *guestmem.Table, ok bool) (live []vhostuser.RingAddrs) {
	for i := range 2 {
		a := vhostuser.RingAddrs{Index: i}
		if ok {
			a = r.addrs(t, i)
		}
		live = append(live, a)
	}
	return live
}

// swap replaces the memory table and unmaps the old one.
func (r *rig) swap(ok bool) {
	r.t.Helper()
	fresh := r.newTable()
	if r.o.via != nil {
		r.o.via.use(fresh)
	}
	if err := r.dev.SetMemory(fresh, r.live(fresh, ok)); err != nil {
		r.t.Fatal(err)
	}
	if err := r.table.Close(); err != nil {
		r.t.Error(err)
	}
	r.table = fresh
}

// TestMemoryIsReplaced swaps the table under traffic, also one that lacks the rings, and
// unmaps the old one each time: nothing is lost and no old address is used.
func TestMemoryIsReplaced(t *testing.T) {
	for _, lag := range []int{0, 64} {
		p := must(echo.New(echo.Options{}))
		r := newRig(t, p, rigOptions{features: baseFeatures | virtio.FRingEventIdx, lag: lag})
		quit, ended := make(chan struct{}), make(chan struct{})
		var sent, got int
		var abort atomic.Bool
		go func() {
			defer close(ended)
			for stopping := false; !abort.Load() && (!stopping || got < sent); {
				select {
				case <-quit:
					stopping = true
				default:
				}
				for !stopping && r.tx.Free() > 0 && sent-got < 200 {
					r.tx.AddDirect(r.buf(sent%256, 200, false))
					sent++
				}
				for r.rx.Free() > 0 {
					r.rx.AddDirect(r.buf(512, 1600, true))
				}
				r.tx.Publish()
				r.rx.Publish()
				r.kick(0)
				r.kick(1)
				for _, _, ok := r.tx.GetUsed(); ok; _, _, ok = r.tx.GetUsed() {
				}
				for _, _, ok := r.rx.GetUsed(); ok; _, _, ok = r.rx.GetUsed() {
					got++
				}
				time.Sleep(10 * time.Microsecond)
			}
		}()
		for i := range 200 {
			r.swap(i%5 != 0)
		}
		r.swap(true)
		close(quit)
		select {
		case <-ended:
		case <-time.After(10 * time.Second):
			abort.Store(true)
			<-ended
			for i := range r.rings {
				t.Errorf("ring stopped: %s", r.ringState(i))
			}
			t.Fatalf("traffic did not resume: %d frames sent, %d came back, %v", sent, got, r.dev.Snapshot().Rings)
		}
		if sent != got || sent == 0 {
			t.Errorf("%d frames sent, %d came back", sent, got)
		}
		r.finishEarly()
	}
}

// TestParkedRing stops a ring whose memory left the table: what was completed before had
// been published.
func TestParkedRing(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures, lag: 64})
	for i := range 10 {
		r.send(plain(60, i))
	}
	r.loop.Do(func() { r.pair().Run() })
	r.swap(false)
	if n := split(r.tx).PeekUsedIdx(); n != 10 {
		t.Errorf("%d completions are published, want 10", n)
	}
	r.send(plain(60, 11))
	r.forceKick(1)
	time.Sleep(5 * time.Millisecond)
	if n, _, _ := p.counts(); n != 10 {
		t.Error("a parked ring was served")
	}
	if base := r.stop(1); base != 10 {
		t.Errorf("stopped at %d, want 10", base)
	}
	r.start(1)
	waitFor(t, "the frame posted meanwhile", func() bool { return split(r.tx).PeekUsedIdx() == 11 })
}

func TestMTURange(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	for mtu, ok := range map[uint64]bool{0: false, 67: false, 68: true, 1500: true, 65535: true, 65536: false, 1 << 40: false} {
		if err := r.dev.SetMTU(mtu); (err == nil) != ok {
			t.Errorf("MTU %d: %v", mtu, err)
		} else if ok && p.mtu != int(mtu) {
			t.Errorf("MTU %d reached the network as %d", mtu, p.mtu)
		}
	}
	if err := r.dev.SendRARP([6]byte{2, 1}); err != nil || p.announced != [6]byte{2, 1} {
		t.Errorf("announced %v: %v", p.announced, err)
	}
}

// TestNetworkFollowsEnable checks what the network is told of the guest's active queues.
func TestNetworkFollowsEnable(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	expect := func(why string, on bool) {
		t.Helper()
		r.loop.Do(func() {
			if p.enabled != on {
				t.Errorf("%s: network queue enabled is %v", why, p.enabled)
			}
		})
	}
	expect("started", true)
	r.dev.EnableRing(0, false)
	expect("disabled", false)
	r.dev.EnableRing(0, true)
	expect("enabled", true)
	r.stop(0)
	expect("stopped", false)
	r.start(0)
	expect("started again", true)
}

// TestConnections comes and goes a thousand times with traffic: nothing accumulates.
func TestConnections(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures, lag: 16})
	testmain.Check(t, testmain.Files(), testmain.Goroutines())
	quit, ended := make(chan struct{}), make(chan struct{})
	defer func() { close(quit); <-ended }()
	go func() { // somebody looks all the time
		defer close(ended)
		for {
			select {
			case <-quit:
				return
			case <-time.After(100 * time.Microsecond):
				r.dev.Snapshot()
				r.loop.Stats()
			}
		}
	}()
	rounds := 1000
	if testing.Short() {
		rounds = 100
	}
	for i := range rounds {
		r.disconnect()
		if n := r.arena.InUse(); n != 0 {
			t.Fatalf("%d pages in use after %d connections", n, i)
		}
		r.dev.Connected("again")
		if err := r.dev.SetFeatures(r.o.features); err != nil {
			t.Fatal(err)
		}
		for q := range 2 {
			r.rings[q].Reset(uint16(i * 40))
			r.start(q)
		}
		want := plain(100+i%1400, i)
		b := r.offer(800, 800)
		p.feed(want, plain(60, 1), plain(60, 2)) // two of them stay without a buffer
		for n := range 5 {
			r.send(plain(60+i, n))
		}
		r.run()
		r.wantReceived([]rxBuffer{b}, want)
		if n := len(p.take()); n != 5 {
			t.Fatalf("connection %d: %d frames sent, want 5", i, n)
		}
		p.mu.Lock()
		p.incoming = nil
		p.mu.Unlock()
	}
	if p.closed != rounds {
		t.Errorf("%d network queues closed, want %d", p.closed, rounds)
	}
	s := r.dev.Snapshot()
	if n := s.Rings[1].Packets; n != uint64(5*rounds) {
		t.Errorf("%d frames counted over all connections, want %d", n, 5*rounds)
	}
}

// TestPeersDescriptors is NTF-10: kick descriptors of every kind work, and call descriptors
// that are full, or that block, keep nobody from working.
func TestPeersDescriptors(t *testing.T) {
	pipe := make([]int, 2)
	if err := unix.Pipe2(pipe, unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	blocking := must(unix.Eventfd(0, unix.EFD_CLOEXEC))
	semaphore := must(unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK|unix.EFD_SEMAPHORE))
	defer func() {
		for _, fd := range append(pipe, blocking, semaphore) {
			unix.Close(fd)
		}
	}()
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	n := 0
	for _, kick := range [][2]int{{blocking, blocking}, {semaphore, semaphore}, {pipe[0], pipe[1]}} {
		r.dev.SetKick(1, kick[0])
		for range 50 {
			n++
			r.send(plain(60, n))
			_, _ = unix.Write(kick[1], []byte{1, 0, 0, 0, 0, 0, 0, 0})
			waitFor(t, "a frame", r.tx.HasUsed)
			r.used(1)
		}
	}
	r.dev.SetKick(1, r.kicks[1])
	r.tx.EnableCalls()
	for _, call := range []int{r.calls[1], blocking} {
		r.dev.SetCall(1, call)
		_, _ = unix.Read(call, make([]byte, 8))
		_, _ = unix.Write(call, []byte{0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
		for range 50 {
			n++
			r.send(plain(60, n))
			r.forceKick(1)
			waitFor(t, "a frame", r.tx.HasUsed)
			r.used(1)
		}
	}
	wantCount(t, p, n)
}

func TestErrDescriptorAndStatus(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	old := r.errs[1]
	r.errs[1] = must(unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK))
	r.dev.SetErr(1, r.errs[1])
	unix.Close(old)
	r.send(plain(60, 1))
	r.run()
	split(r.tx).PokeAvailIdx(3000)
	r.run()
	if n := signals(r.errs[1]); n != 1 {
		t.Errorf("err was written %d times, want once", n)
	}
	base := r.stop(1)
	r.dev.SetStatus(0) // QEMU before 8.1 sends it in front of GET_VRING_BASE
	if s := r.dev.Snapshot(); base != 1 || s.Status != 0 || !s.Connected {
		t.Errorf("position %d, status %d", base, s.Status)
	}
	r.tx.Reset(uint16(base))
	r.start(1)
	r.send(plain(60, 2))
	r.kick(1)
	waitFor(t, "a frame", r.tx.HasUsed)
}
