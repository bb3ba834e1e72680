package virtionet

import (
	"fmt"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/pool"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/worker"
)

var _ vhostuser.Device = (*Device)(nil)

// SetFeatures implements vhostuser.Device; the network's offloads follow the guest's.
func (d *Device) SetFeatures(acked virtio.Features) error {
	d.control.Lock()
	defer d.control.Unlock()
	if err := d.opts.Port.Configure(acked); err != nil {
		return fmt.Errorf("network %s: apply features %v: %w", d.opts.Port.Kind(), acked, err)
	}
	for _, p := range d.pairs {
		if p != nil {
			p.loop.Do(func() { p.setFeatures(acked) })
		}
	}
	d.mu.Lock()
	changed := (acked^d.features)&^virtio.FVhostLogAll != 0
	d.features = acked
	d.mu.Unlock()
	if changed {
		d.forgetDriver()
	}
	return nil
}

// PrepareMemory implements vhostuser.Device.
func (d *Device) PrepareMemory(t *guestmem.Table) { d.owned.addMem(t) }

// SetMemory implements vhostuser.Device.
func (d *Device) SetMemory(t *guestmem.Table, live []vhostuser.RingAddrs) error {
	d.control.Lock()
	defer d.control.Unlock()
	d.owned.addMem(t)
	for _, a := range live {
		if c := d.controlRing(a.Index); c != nil {
			c.loop.DoFor(c, func() { c.setMemory(t, a) })
			continue
		}
		p := d.pairs[a.Index/2]
		if p == nil {
			continue
		}
		p.loop.DoFor(p, func() { p.setMemory(t, a) })
	}
	d.owned.setMem(t)
	return nil
}

// StartRing implements vhostuser.Device.
func (d *Device) StartRing(cfg vhostuser.RingConfig) error {
	d.control.Lock()
	defer d.control.Unlock()
	d.owned.setMem(cfg.Mem)
	if err := d.startAny(cfg); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sizes[cfg.Index], d.enabled[cfg.Index] = int(cfg.Size), cfg.Enabled
	return nil
}

func (d *Device) startAny(cfg vhostuser.RingConfig) error {
	if cfg.Inflight != nil {
		d.owned.setSide(cfg.Inflight.Mem)
	}
	if cfg.Control {
		return d.startControl(cfg)
	}
	p, err := d.pair(cfg.Index / 2)
	if err != nil {
		return err
	}
	started := errGuestMemory // stays if the ring's memory faults on the first touch
	p.loop.DoFor(p, func() { started = p.startRing(cfg) })
	if started != nil {
		p.loop.Do(func() { p.releaseRing(p.ring(cfg.Index)) })
	}
	return started
}

// StopRing implements vhostuser.Device.
func (d *Device) StopRing(i int) (base virtqueue.Position, err error) {
	if c := d.controlRing(i); c != nil {
		base = c.stop()
		d.ctrl = nil
		return base, nil
	}
	d.control.Lock()
	defer d.control.Unlock()
	p := d.pairs[i/2]
	if p == nil {
		return 0, fmt.Errorf("ring %d was never started", i)
	}
	p.loop.DoFor(p, func() {
		r := p.ring(i)
		if r.q != nil {
			base = r.q.Consumed() // stays if the ring's memory faults now
		}
		base = p.stopRing(r)
	})
	p.loop.Do(func() { p.releaseRing(p.ring(i)) })
	return base, nil
}

// EnableRing implements vhostuser.Device.
func (d *Device) EnableRing(i int, on bool) {
	d.control.Lock()
	defer d.control.Unlock()
	if c := d.controlRing(i); c != nil {
		c.loop.DoFor(c, func() { c.enabled = on; c.loop.Activate(c) })
	} else if p := d.pairs[i/2]; p != nil {
		p.loop.DoFor(p, func() { p.enableRing(p.ring(i), on) })
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.enabled[i] = on
}

// SetKick implements vhostuser.Device.
func (d *Device) SetKick(i, fd int) {
	var err error
	if c := d.controlRing(i); c != nil {
		c.loop.DoFor(c, func() {
			err = c.setKick(fd)
			c.loop.Activate(c)
		})
	} else if p := d.pairs[i/2]; p != nil {
		p.loop.DoFor(p, func() {
			err = p.watchKick(p.ring(i), fd)
			p.loop.Activate(p)
		})
	}
	if err != nil {
		d.log.Warn("kick descriptor cannot be watched: the ring waits for the next one", "ring", i, "error", err)
	}
}

// SetCall implements vhostuser.Device. A new descriptor is signaled once, because a
// signal on the old one may have been lost.
func (d *Device) SetCall(i, fd int) {
	d.withRing(i, func(r *ring, l *worker.Loop) {
		r.callFD = fd
		if r.started {
			r.signal(l)
		}
	})
}

// SetErr implements vhostuser.Device.
func (d *Device) SetErr(i, fd int) {
	d.withRing(i, func(r *ring, _ *worker.Loop) { r.errFD = fd })
}

func (d *Device) withRing(i int, f func(*ring, *worker.Loop)) {
	if c := d.controlRing(i); c != nil {
		c.loop.DoFor(c, func() { f(&c.ring, c.loop) })
	} else if p := d.pairs[i/2]; p != nil {
		p.loop.DoFor(p, func() { f(p.ring(i), p.loop) })
	}
}

// SendRARP implements vhostuser.Device.
func (d *Device) SendRARP(mac [6]byte) error { return d.opts.Port.Announce(mac) }

// SetStatus implements vhostuser.Device. Status 0 must not touch ring positions: QEMU
// before 8.1 sends it in front of GET_VRING_BASE.
func (d *Device) SetStatus(status uint8) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.status = status
}

// pair returns queue pair i, putting it to work first if it is new.
func (d *Device) pair(i int) (*pair, error) {
	if p := d.pairs[i]; p != nil {
		return p, nil
	}
	w := i % len(d.opts.Workers)
	loop := d.opts.Workers[w]
	if d.pools[w] == nil {
		pl, err := pool.New(pool.Config{Arena: d.opts.Arena, Owner: loop.Owner()})
		if err != nil {
			return nil, fmt.Errorf("page pool of pair %d: %w", i, err)
		}
		if err := d.addPool(w, pl); err != nil {
			loop.Do(pl.Destroy)
			return nil, fmt.Errorf("page pool of pair %d: %w", i, err)
		}
	}
	q, err := d.opts.Port.OpenQueue(i, port.Resources{Arena: d.opts.Arena, Owner: loop.Owner(), Pool: d.pools[w]})
	if err != nil {
		return nil, fmt.Errorf("network %s: open queue %d: %w", d.opts.Port.Kind(), i, err)
	}
	p := newPair(d, i, loop, d.pools[w])
	p.queue, p.enabled = q, true
	p.setCopy(d.copying())
	var watched error
	orders := d.orders()
	loop.Do(func() {
		p.setFeatures(d.features)
		orders.give(p)
		p.setLog(d.owned.dirtyLog(), d.logFD)
		loop.Add(p)
		if fd := q.ReadyFD(); fd >= 0 {
			watched = loop.Watch(fd, p, eventPort, false)
		}
		p.followEnabled()
	})
	if watched != nil {
		p.dissolve()
		return nil, fmt.Errorf("network %s: queue %d: %w", d.opts.Port.Kind(), i, watched)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.pairs[i] = p
	return p, nil
}

// dissolve takes the pair off its worker and gives back everything it holds.
func (p *pair) dissolve() {
	p.loop.Do(func() {
		p.loop.Unwatch(p.tx.kickFD)
		p.loop.Unwatch(p.rx.kickFD)
		p.loop.Unwatch(p.queue.ReadyFD())
		p.loop.Remove(p)
		p.dropPending(dropStopped)
		p.alloc.drain()
		p.tx.publishState()
		p.rx.publishState()
		if err := p.queue.Close(); err != nil {
			p.dev.log.Warn("network queue did not close cleanly", "pair", p.index, "error", err)
		}
	})
}

func (p *pair) ring(index int) *ring {
	if index%2 == 0 {
		return &p.rx
	}
	return &p.tx
}

// startRing runs on the worker's thread.
func (p *pair) startRing(cfg vhostuser.RingConfig) error {
	r := p.ring(cfg.Index)
	q, err := virtqueue.New(virtqueue.Config{
		Size: cfg.Size, Desc: cfg.Desc, Avail: cfg.Avail, Used: cfg.Used, Features: cfg.Features,
		Base: cfg.Base, Record: cfg.Record, Inflight: cfg.Inflight, Mem: cfg.Mem, Via: cfg.Via, DeviceWrites: r == &p.rx,
	})
	if err != nil {
		return fmt.Errorf("ring %d: %w", cfg.Index, err)
	}
	p.setFeatures(cfg.Features)
	r.q, r.broken, r.parked, r.via = q, false, false, cfg.Via
	r.published.waiting.Store(false)
	if r == &p.tx {
		p.txBlocked, p.txNoMem = false, false
	}
	r.callFD, r.errFD = cfg.CallFD, cfg.ErrFD
	if err := p.watchKick(r, cfg.KickFD); err != nil {
		return fmt.Errorf("ring %d: %w", cfg.Index, err)
	}
	r.started = true
	p.setEnabled(r, cfg.Enabled)
	if r == &p.rx {
		p.logReceived(cfg.Mem)
	}
	r.logTo(p.dirty.log, cfg.Log)
	if p.lag = p.dev.opts.TxLag; p.tx.q != nil {
		p.lag = min(p.lag, p.tx.q.Size()/4)
	}
	r.q.DisableKicks()
	if r.callFD >= 0 && !isFresh(q, cfg.Features) {
		r.signal(p.loop) // an earlier life may have published without calling
	}
	r.publishState()
	p.followEnabled()
	p.loop.Activate(p) // a kick from before this moment is lost, so look at once
	return nil
}

// watchKick replaces the kick descriptor.
func (p *pair) watchKick(r *ring, fd int) error {
	p.loop.Unwatch(r.kickFD)
	r.kickFD = -1
	if fd < 0 {
		return nil
	}
	event := eventTxKick
	if r == &p.rx {
		event = eventRxKick
	}
	if err := p.loop.Watch(fd, p, event, true); err != nil {
		return err
	}
	r.kickFD = fd
	return nil
}

// stopRing drains and stops a ring; its position is exact because nothing is taken
// from a ring between two turns.
func (p *pair) stopRing(r *ring) (base virtqueue.Position) {
	if r.q == nil {
		return 0
	}
	p.loop.Unwatch(r.kickFD)
	r.kickFD = -1
	wasUsable := r.usable()
	r.started = false
	p.followEnabled()
	if r == &p.rx {
		p.dropPending(dropStopped)
	}
	if !wasUsable {
		return r.q.Consumed()
	}
	if r.q.Publish(0) > 0 && r.q.NeedsCall() {
		r.signal(p.loop)
	}
	p.pokeLog()
	return r.q.Position()
}

// releaseRing lets go of a ring that does not run, and of its descriptors, which are
// about to be closed. It touches no guest memory.
func (p *pair) releaseRing(r *ring) {
	p.loop.Unwatch(r.kickFD)
	r.started, r.broken, r.parked = false, false, false
	r.published.waiting.Store(false)
	r.publishState()
	r.q, r.via, r.kickFD, r.callFD, r.errFD = nil, nil, -1, -1, -1
	r.log = vhostuser.RingLog{}
	if r == &p.rx {
		p.logReceived(nil)
	}
}

func (p *pair) enableRing(r *ring, on bool) {
	p.setEnabled(r, on)
	p.followEnabled()
	p.loop.Activate(p)
}

// followEnabled tells a port that spreads flows over its queues whether the guest
// receives on this one.
func (p *pair) followEnabled() {
	on := p.rx.started && p.rx.enabled
	e, ok := p.queue.(port.Enabler)
	if !ok || on == p.enabled {
		return
	}
	p.enabled = on
	if err := e.SetEnabled(on); err != nil {
		p.dev.log.Warn("network queue did not follow the guest's active queues", "pair", p.index, "enabled", on, "error", err)
	}
}

// setMemory moves a running ring to a new memory table, or parks it.
func (p *pair) setMemory(t *guestmem.Table, a vhostuser.RingAddrs) {
	r := p.ring(a.Index)
	if r.q == nil {
		return
	}
	if r.usable() && r.q.Publish(0) > 0 {
		r.call(p.loop) // the old memory goes away
	}
	if !a.OK {
		if !r.parked && r.via == nil { // behind an IOMMU it happens all the time
			p.dev.log.Warn("ring parked: its memory left the table", "ring", a.Index)
		}
		r.parked = true
		return
	}
	r.q.SetMemory(t, a.Desc, a.Avail, a.Used)
	if r == &p.rx {
		p.logReceived(t)
	}
	r.logTo(p.dirty.log, a.Log)
	r.parked = false
	r.published.waiting.Store(false)
	p.armed = true // the next turn withdraws the request for kicks in the new memory
	p.loop.Activate(p)
}
