package hostile

import (
	"time"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

var brokenRows = []row{
	{"B12", "head_outside_the_ring", breaks(func(r *driver.Ring) { r.PokeHead(64) }, func(r *driver.Ring) { r.PokeHead(0xffff) })},
	{"B19", "available_index_ahead_by_more_than_the_ring", breaks(
		func(r *driver.Ring) { r.PokeAvailIdx(r.PeekUsedIdx() + 65) }, func(r *driver.Ring) { r.PokeAvailIdx(r.PeekUsedIdx() + 32768) })},
	{"B28", "worker_survives_malformed_descriptors", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f})
			ring := c.Mem.Bytes(p.TX.GuestAddr().Desc, 16*64)
			for seed := range 60 { // rubbish in all descriptors
				for i := range ring {
					ring[i] = byte(i*i*seed + i>>3 + seed)
				}
				if p.TX.Ring != nil {
					p.TX.Ring.PokeAvailIdx(p.TX.Ring.PeekUsedIdx() + uint16(seed))
				}
				must(a.t, p.TX.Kick())
				must(a.t, c.Sync())
				if seed%10 == 9 {
					a.restart(c, p)
				}
			}
			a.restart(c, p)
			a.flows(p)
			for _, w := range a.workers() {
				if w.Error != "" {
					a.t.Errorf("worker %s: %s", w.Name, w.Error)
				}
			}
		})
	}},
	{"C60", "impossible_packed_descriptors", func(a *attack) {
		c, p := a.running(frontend.Options{Features: features | virtio.FRingPacked})
		ring := p.TX.Driver.(*driver.PackedRing)
		// An id means nothing to the device, which returns what it was given.
		ring.PokeChain(bufAt, 72, 0xffff, 0)
		ring.Publish()
		must(a.t, p.TX.Kick())
		eventually(a.t, "the id is returned", func() bool {
			_, _, id, flags := ring.PeekDesc(0)
			return id == 0xffff && flags&driver.DescFUsed != 0
		})
		ring.Attach(ring.AvailIdx())
		a.receives(p, make([]byte, 60))
		for name, wreck := range map[string]func(){
			"a chain without an end": func() {
				for range 64 {
					ring.PokeChain(bufAt, 1, 0, next)
				}
				ring.Publish()
			},
			"a chain that ends in what is not available": func() {
				ring.PokeChain(bufAt, 12, 0, next)
				ring.Publish()
			},
			"a descriptor that looks used in a lap to come": func() { ring.PokeDesc(0, bufAt, 72, 0, driver.DescFAvail|driver.DescFUsed) },
		} {
			a.restart(c, p)
			wreck()
			must(a.t, p.TX.Kick())
			a.t.Logf("%s", name)
			a.broken(p.TX)
			a.restart(c, p)
			a.flows(p)
		}
	}},
	{"C61", "event_suppression_that_makes_no_sense", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f | virtio.FRingEventIdx})
			for i := range uint16(100) {
				if ring := p.TX.Ring; ring != nil {
					ring.PokeUsedEvent(i * 7919)
					ring.PokeAvailFlags(0xffff - i%3)
				} else {
					p.TX.Driver.(*driver.PackedRing).PokeDriverEvent(i*7919, i%5+1) // flags 3 and more, places behind the ring
				}
				frame := frameOf(60, byte(i))
				must(a.t, p.Stage(virtio.NetHdr{}, frame, frontend.Direct))
				p.TX.Driver.Publish()
				must(a.t, p.TX.Kick())
				_, err := p.PostRx(1)
				must(a.t, err)
				_, _, err = p.RecvFrame(patience)
				must(a.t, err)
				eventually(a.t, "the chain is returned", func() bool { n, err := p.ReapTx(); must(a.t, err); return n == 1 })
			}
			must(a.t, c.Sync())
		})
	}},
	{"C62", "available_index_goes_backwards", breaks(func(r *driver.Ring) { r.PokeAvailIdx(r.PeekUsedIdx() - 1) },
		func(r *driver.Ring) { r.PokeAvailIdx(r.PeekUsedIdx() - 300) })},
	{"C63", "used_ring_overwritten", func(a *attack) {
		c, p := a.running(frontend.Options{})
		used := c.Mem.Bytes(p.TX.GuestAddr().Used, 6+8*64)
		for i := range 100 {
			store(c.Mem, bufAt, append(make([]byte, 12), frameOf(60, byte(i))...))
			for k := range used {
				used[k] = byte(i * k)
			}
			p.TX.Ring.PokeDesc(0, bufAt, 72, 0, 0)
			p.TX.Ring.PokeHead(0)
			p.TX.Ring.Publish()
			must(a.t, p.TX.Kick())
			_, err := p.PostRx(1)
			must(a.t, err)
			_, _, err = p.RecvFrame(patience)
			must(a.t, err)
			eventually(a.t, "the index is the device's own", func() bool { return p.TX.Ring.PeekUsedIdx() == uint16(i+1) })
		}
		p.TX.Ring.Attach(100)
		a.flows(p)
	}},
}

// breaks wrecks one ring of a pair in each of the ways: that ring is reported, the pair beside it goes on, and a restart repairs it.
func breaks(ways ...func(r *driver.Ring)) func(a *attack) {
	return func(a *attack) {
		c, p := a.running(frontend.Options{})
		second := a.pair(c, 1)
		for _, wreck := range ways {
			for _, q := range []*frontend.Queue{p.TX, p.RX} {
				if q == p.RX { // heads are looked at when a frame needs them
					must(a.t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
					must(a.t, p.DrainTx(patience))
				}
				wreck(q.Ring)
				q.Ring.Publish()
				must(a.t, q.Kick())
				a.broken(q)
				a.flows(second)
				a.restart(c, p)
				if q == p.RX {
					a.drainRx(p)
				}
				a.flows(p)
			}
		}
	}
}

// drainRx takes what waited for buffers.
func (a *attack) drainRx(p *frontend.Pair) {
	a.t.Helper()
	for {
		_, err := p.PostRx(64)
		must(a.t, err)
		if _, _, err := p.RecvFrame(50 * time.Millisecond); err != nil {
			break
		}
	}
}
