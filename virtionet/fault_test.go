package virtionet

import (
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// shrink cuts the memory file of region i to nothing: every access to it faults.
func (r *rig) shrink(i int) {
	r.t.Helper()
	if err := unix.Ftruncate(r.mem.Regions[i].FD, 0); err != nil {
		r.t.Fatal(err)
	}
}

// wantFatal checks that the connection was given up, once.
func (r *rig) wantFatal() {
	r.t.Helper()
	select {
	case <-r.fatal:
	case <-time.After(5 * time.Second):
		r.t.Fatal("the fault was not reported")
	}
	r.forceKick(0)
	r.forceKick(1)
	r.loop.Do(func() {})
	r.loop.Do(func() {})
	select {
	case err := <-r.fatal:
		r.t.Errorf("a second report: %v", err)
	case <-time.After(5 * time.Millisecond):
	}
}

// serves checks that a guest has working rings.
func (r *rig) serves(p *fakePort) {
	r.t.Helper()
	r.used(0)
	r.used(1)
	p.take()
	b := r.offer(1600)
	p.feed(plain(200, 1))
	r.send(plain(100, 2))
	r.kick(0)
	r.kick(1)
	waitFor(r.t, "traffic of the other guest", func() bool { return r.rx.HasUsed() && r.tx.HasUsed() })
	r.wantReceived([]rxBuffer{b}, plain(200, 1))
	wantSent(r.t, p, plain(100, 2))
}

// TestMemoryVanishes truncates the guest's memory in every stage of the work. The device
// gives that guest up, once, keeps nothing of it, and serves its neighbor on the same
// worker.
func TestMemoryVanishes(t *testing.T) {
	far := func(off, n int, write bool) driver.Buf {
		return driver.Buf{Addr: rigSeam + uint64(off), Len: uint32(n), Write: write}
	}
	for _, test := range []struct {
		name     string
		features virtio.Features
		region   int
		prepare  func(r *rig, p *fakePort)
	}{
		{"tx payload", 0, 1, func(r *rig, _ *fakePort) {
			for i := range 20 {
				r.send(plain(100+i, i))
			}
			r.post(1, []driver.Buf{far(0, 1000, false)})
		}},
		{"tx header", virtio.FNetCSum, 1, func(r *rig, _ *fakePort) {
			r.send(plain(9000, 1))
			r.post(1, []driver.Buf{far(0, 1000, false)})
		}},
		{"tx copies in the middle of a batch", 0, 1, func(r *rig, _ *fakePort) {
			for i := range 20 {
				r.post(1, []driver.Buf{far(4096*i, 65000, false)})
			}
		}},
		{"tx small copies in the middle of a batch", 0, 1, func(r *rig, _ *fakePort) {
			r.post(1, pieces(rigSeam, 4000, 50, false))
			r.post(1, []driver.Buf{far(0, 1000, false)})
		}},
		{"tx one copy per frame", 0, 1, func(r *rig, _ *fakePort) {
			r.post(1, pieces(rigSeam, 63*50, 50, false))
			for i := range 31 {
				r.post(1, []driver.Buf{far(4096*i, 1000, false)})
			}
		}},
		{"tx indirect table", 0, 1, func(r *rig, _ *fakePort) {
			r.send(plain(100, 1))
			head, _ := r.tx.AddDirect(driver.Buf{})
			split(r.tx).PokeDesc(head, rigSeam, 32, driver.DescFIndirect, 0)
			r.tx.Publish()
		}},
		{"tx ring", 0, 0, func(*rig, *fakePort) {}},
		{"rx payload", 0, 1, func(r *rig, p *fakePort) {
			r.offer(1600)
			r.post(0, []driver.Buf{far(0, 1600, true)})
			p.feed(plain(100, 1), plain(1000, 2), plain(100, 3))
		}},
		{"rx header over descriptors", 0, 1, func(r *rig, p *fakePort) {
			r.post(0, []driver.Buf{far(0, 5, true), far(5, 1600, true)})
			p.feed(plain(100, 1))
		}},
		{"rx many chains", 0, 1, func(r *rig, p *fakePort) {
			for i := range 100 {
				r.post(0, []driver.Buf{far(1000*i, 1000, true)})
			}
			p.feed(plain(60000, 1), plain(100, 2))
		}},
		{"rx finished in software", 0, 1, func(r *rig, p *fakePort) {
			for i := range 10 {
				r.post(0, []driver.Buf{far(2000*i, 2000, true)})
			}
			p.feed(frame{virtio.NetHdr{Flags: 1, CsumStart: 34, CsumOffset: 6}, pattern(100, 1)}, plain(60, 2))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			neighborPort, p := newFakePort(), newFakePort()
			neighbor := newRig(t, neighborPort, rigOptions{features: baseFeatures})
			r := newRig(t, p, rigOptions{features: baseFeatures | test.features, beside: neighbor, lag: 8})
			neighbor.serves(neighborPort)
			r.loop.Do(func() {
				test.prepare(r, p)
				r.shrink(test.region)
			})
			r.forceKick(0)
			r.forceKick(1)
			r.wantFatal()
			for i := range 2 {
				if n := signals(r.errs[i]); n != 1 {
					t.Errorf("err of ring %d was written %d times, want once", i, n)
				}
			}
			neighbor.serves(neighborPort)
			r.disconnect()
			neighbor.serves(neighborPort)
		})
	}
}

// TestMemoryVanishesUnderControl truncates the memory in front of each control call.
func TestMemoryVanishesUnderControl(t *testing.T) {
	// swap hands over a table whose files shrank after they were judged.
	swap := func(ok bool) func(*rig, *guestmem.Table) {
		return func(r *rig, fresh *guestmem.Table) {
			if err := r.dev.SetMemory(fresh, r.live(fresh, ok)); err != nil {
				r.t.Error(err)
			}
		}
	}
	for name, do := range map[string]func(r *rig, fresh *guestmem.Table){
		"stop":       func(r *rig, _ *guestmem.Table) { r.stop(1) },
		"stop twice": func(r *rig, _ *guestmem.Table) { r.stop(1); r.stop(1) },
		"swap":       swap(true),
		"park":       swap(false),
		"enable":     func(r *rig, _ *guestmem.Table) { r.dev.EnableRing(1, false) },
		"kick":       func(r *rig, _ *guestmem.Table) { r.dev.SetKick(1, r.kicks[1]) },
		"start": func(r *rig, _ *guestmem.Table) {
			r.stop(1)
			if err := r.dev.StartRing(r.config(1)); err == nil {
				r.t.Error("a ring in vanished memory started")
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			neighborPort, p := newFakePort(), newFakePort()
			neighbor := newRig(t, neighborPort, rigOptions{features: baseFeatures})
			r := newRig(t, p, rigOptions{features: baseFeatures, beside: neighbor, lag: 8})
			r.loop.Do(func() {
				r.send(plain(100, 1))
				r.pair().Run() // its completion is held back
			})
			fresh := r.newTable()
			defer fresh.Close()
			r.shrink(0)
			do(r, fresh)
			r.wantFatal()
			neighbor.serves(neighborPort)
		})
	}
}

// TestNewMemoryVanishes hands over a table of other files, one of which shrinks before
// the rings are moved to it one by one: the fault belongs to the guest although the
// device does not use the new table alone yet.
func TestNewMemoryVanishes(t *testing.T) {
	neighborPort, p := newFakePort(), newFakePort()
	neighbor := newRig(t, neighborPort, rigOptions{features: baseFeatures})
	r := newRig(t, p, rigOptions{features: baseFeatures, beside: neighbor})
	other := must(frontend.NewMemory(rigSeam, rigRegion))
	specs, fds := other.Table()
	fresh := must(guestmem.NewTable(specs, fds))
	if err := unix.Ftruncate(fds[0], 0); err != nil {
		t.Fatal(err)
	}
	if err := r.dev.SetMemory(fresh, r.live(fresh, true)); err != nil {
		t.Error(err)
	}
	r.wantFatal()
	neighbor.serves(neighborPort)
	r.disconnect()
	for _, c := range []interface{ Close() error }{fresh, other} {
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestMemoryVanishesUnderPairs faults two pairs of one device: it is given up once.
func TestMemoryVanishesUnderPairs(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures | virtio.FNetMQ, pairs: 2})
	for i := range 2 {
		l := r.layout()
		at := must(r.mem.Alloc(1, l.End, 64))
		host, _ := r.table.Lookup(at, l.End)
		cfg := r.config(i)
		cfg.Index, cfg.KickFD, cfg.CallFD, cfg.ErrFD = 2+i, -1, -1, -1
		cfg.Desc, cfg.Avail, cfg.Used = host+uintptr(l.Desc), host+uintptr(l.Avail), host+uintptr(l.Used)
		if err := r.dev.StartRing(cfg); err != nil {
			t.Fatal(err)
		}
	}
	r.shrink(0)
	r.shrink(1)
	for i := range 4 {
		r.dev.EnableRing(i, true)
	}
	r.wantFatal()
	for _, s := range r.dev.Snapshot().Rings {
		if !s.Broken || s.BrokenReason == "" {
			t.Errorf("ring %d is not broken", s.Index)
		}
	}
	for i := 2; i < 4; i++ {
		if _, err := r.dev.StopRing(i); err != nil {
			t.Error(err)
		}
	}
}
