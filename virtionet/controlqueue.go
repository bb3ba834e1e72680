package virtionet

import (
	"fmt"
	"time"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/worker"
)

// A guest that sends commands without pause is served at this pace, so that the
// workers that apply them remain with the frames.
const (
	commandBurst = 256
	commandEvery = 500 * time.Microsecond
)

// controlQueue serves the control queue that a front-end passes. The ring belongs
// to the first worker's thread as the rings of a pair do. What a command does
// concerns pairs of several workers, which a worker must not wait for; so a
// goroutine takes one command after the other, applies it and completes it.
type controlQueue struct {
	ring
	dev      *Device
	loop     *worker.Loop
	features virtio.Features

	wake chan struct{} // the ring may have commands
	quit chan struct{}
	done chan struct{}

	// The fields below belong to the worker's thread. Between take and finish, which
	// run there for the goroutine, no one else touches the ring: dev.control is held.
	answers guestmem.Marker // of a dirty log
	mem     *guestmem.Table

	busy   bool // the goroutine looks at the ring by itself
	fresh  bool // no command was completed before the one in batch
	served bool // the first command since the start has come
	batch  virtqueue.Batch

	command [maxCommand]byte
	length  int // of the command; more than maxCommand if it is too long
	logged  bool
}

// startControl starts the control queue.
func (d *Device) startControl(cfg vhostuser.RingConfig) error {
	if d.ctrl != nil {
		return fmt.Errorf("ring %d: ring %d is the control queue already", cfg.Index, d.ctrl.index)
	}
	if cfg.Via != nil {
		return fmt.Errorf("ring %d: a control queue behind an IOMMU is not served; front-ends with one serve it themselves", cfg.Index)
	}
	c := &controlQueue{
		dev: d, loop: d.opts.Workers[0], features: cfg.Features,
		wake: make(chan struct{}, 1), quit: make(chan struct{}), done: make(chan struct{}),
	}
	c.index, c.ringCounters, c.held = cfg.Index, &d.controlCounters, &d.held
	c.kickFD, c.callFD, c.errFD = -1, -1, -1
	var err error
	c.q, err = virtqueue.New(virtqueue.Config{
		Size: cfg.Size, Desc: cfg.Desc, Avail: cfg.Avail, Used: cfg.Used, Features: cfg.Features,
		Base: cfg.Base, Mem: cfg.Mem, BothWays: true,
	})
	if err != nil {
		return fmt.Errorf("ring %d: %w", cfg.Index, err)
	}
	c.callFD, c.errFD, c.enabled = cfg.CallFD, cfg.ErrFD, cfg.Enabled
	started := errGuestMemory // stays if the memory faults on the first touch
	c.loop.Do(func() { c.loop.Add(c) })
	c.loop.DoFor(c, func() {
		c.fresh = isFresh(c.q, cfg.Features)
		c.mem, c.log = cfg.Mem, cfg.Log
		c.setLog(d.owned.dirtyLog())
		if started = c.setKick(cfg.KickFD); started == nil {
			c.started = true
			c.publishState()
			c.loop.Activate(c)
		}
	})
	if started != nil {
		c.leave()
		return fmt.Errorf("ring %d: %w", cfg.Index, started)
	}
	d.ctrl = c
	d.takeControl(c.fresh, cfg.Index)
	go c.serve()
	return nil
}

// isFresh reports whether a ring is at its beginning, as that of a driver is that
// has just reset the device. A ring that goes on had commands, whose effects stay.
func isFresh(q virtqueue.Ring, f virtio.Features) bool {
	if f.Has(virtio.FRingPacked) {
		return q.Position() == virtqueue.FreshPacked
	}
	return q.Position() == 0
}

// stop ends the goroutine and takes the ring off its worker. It must not be called
// with dev.control held.
func (c *controlQueue) stop() (base virtqueue.Position) {
	close(c.quit)
	<-c.done
	base = c.q.Consumed() // stays if the ring's memory faults now
	c.loop.DoFor(c, func() {
		usable := c.usable()
		c.started = false
		if !usable {
			return
		}
		if c.q.Publish(0) > 0 && c.q.NeedsCall() {
			c.signal(c.loop)
		}
		base = c.q.Position()
	})
	c.leave()
	return base
}

// leave takes the task off its worker.
func (c *controlQueue) leave() {
	c.loop.Do(func() {
		c.loop.Unwatch(c.kickFD)
		c.loop.Remove(c)
		c.started, c.broken, c.parked = false, false, false
		c.publishState()
	})
}

// serve is the goroutine.
func (c *controlQueue) serve() {
	defer close(c.done)
	var credit rate
	for {
		select {
		case <-c.quit:
			return
		case <-c.wake:
		}
		for c.one() {
			if !credit.spend(c.quit) {
				return
			}
		}
	}
}

// one serves one command and reports whether there was one.
func (c *controlQueue) one() bool {
	d := c.dev
	d.control.Lock()
	defer d.control.Unlock()
	taken := false
	c.loop.DoFor(c, func() { taken = c.take() })
	if !taken {
		return false
	}
	err := c.execute()
	if err != nil && !c.logged {
		c.logged = true
		d.log.Warn("command on the control queue refused", "reason", err, "note", "further ones are not logged")
	}
	c.loop.DoFor(c, func() { c.finish(err) })
	return true
}

// execute carries out the command that was taken; the caller holds dev.control.
func (c *controlQueue) execute() error {
	d := c.dev
	chain := &c.batch.Chains[0]
	switch {
	case chain.Fault != 0:
		return fmt.Errorf("descriptor chain: %v", chain.Fault)
	case chain.Readable == chain.N:
		return fmt.Errorf("no room for the answer")
	case c.length > maxCommand:
		return fmt.Errorf("command of %d bytes, at most %d are accepted", c.length, maxCommand)
	}
	if c.fresh {
		// The driver has zeroed a ring that the device found in use.
		c.fresh = false
		d.state = newDriverState(d.firstMAC())
	}
	if err := d.state.execute(c.command[:c.length], d.commandRules()); err != nil {
		return err
	}
	d.follow()
	return nil
}

// take copies the next command. It runs on the worker's thread.
func (c *controlQueue) take() bool {
	if !c.usable() || !c.enabled {
		c.busy = false
		return false
	}
	c.batch.Reset()
	n, err := c.q.Fill(&c.batch, 1)
	if err != nil {
		c.fail(err)
	}
	if n == 0 {
		c.busy = false
		c.loop.Activate(c) // to ask for kicks
		return false
	}
	if !c.served {
		c.fresh, c.served = !c.fresh && isFresh(c.q, c.features), true
	}
	chain := &c.batch.Chains[0]
	c.length = 0
	for _, s := range c.batch.ChainSegs(0)[:chain.Readable] {
		c.length += int(min(s.Len, maxCommand+1))
	}
	gather(c.command[:min(c.length, maxCommand)], c.batch.ChainSegs(0)[:chain.Readable])
	return true
}

// finish answers the command. It runs on the worker's thread.
func (c *controlQueue) finish(err error) {
	if !c.usable() {
		return
	}
	chain, written := &c.batch.Chains[0], uint32(0)
	answer := virtio.CtrlOK
	if err != nil {
		answer = virtio.CtrlErr
		c.dropped(dropCommand)
	}
	if chain.Fault != 0 {
		c.faulted(chain.Fault)
	} else if chain.Readable < chain.N {
		// The answer is one byte, the first that the device may write.
		scatter(c.batch.ChainSegs(0)[chain.Readable:], []byte{answer})
		c.markAnswer(c.batch.ChainSegs(0)[chain.Readable:])
		written = 1
	}
	c.packets++
	c.bytes += uint64(c.length)
	c.batches++
	c.q.Complete(chain.Head, written)
	c.q.Publish(0)
	c.call(c.loop)
	c.publish()
}

// rate lets a burst pass and then one command each commandEvery.
type rate struct {
	left int
	last time.Time
}

// spend waits until another command may be served; false means that quit came first.
func (r *rate) spend(quit <-chan struct{}) bool {
	now := time.Now()
	if r.last.IsZero() || now.Sub(r.last) >= commandBurst*commandEvery {
		r.left = commandBurst
	} else {
		r.left = min(commandBurst, r.left+int(now.Sub(r.last)/commandEvery))
	}
	r.last = now
	if r.left > 0 {
		r.left--
		return true
	}
	select {
	case <-quit:
		return false
	case <-time.After(commandEvery):
		return true
	}
}

// Run implements worker.Task: it only tells the goroutine.
func (c *controlQueue) Run() bool {
	if c.busy || !c.usable() || !c.enabled || c.q.Empty() {
		return false
	}
	c.busy = true
	select {
	case c.wake <- struct{}{}:
	default:
	}
	return false
}

// Arm implements worker.Task.
func (c *controlQueue) Arm() worker.Readiness {
	if c.busy || !c.usable() || !c.enabled {
		return worker.Readiness{}
	}
	return worker.Readiness{Ready: c.q.EnableKicks()}
}

// Notify implements worker.Task.
func (c *controlQueue) Notify(worker.Event) { c.kicks++ }

// Fault implements worker.Task: guest memory vanished under the ring.
func (c *controlQueue) Fault(addr uintptr) bool {
	err := c.dev.owned.vanished(addr)
	if err == nil {
		return false
	}
	c.breakDown(err)
	c.dev.fatal(err)
	return true
}

// fail breaks the ring, whose memory is still there.
func (c *controlQueue) fail(err error) {
	c.q.Publish(0)
	c.call(c.loop)
	c.breakDown(err)
}

func (c *controlQueue) breakDown(err error) {
	if !c.started || c.broken {
		return
	}
	c.broken = true
	c.published.reason.Store(&err)
	if c.errFD >= 0 {
		c.write(c.loop, c.errFD)
	}
	c.publishState()
	c.dev.ringBroken(c.index, err)
}

// setKick replaces the kick descriptor.
func (c *controlQueue) setKick(fd int) error {
	c.loop.Unwatch(c.kickFD)
	c.kickFD = -1
	if fd < 0 {
		return nil
	}
	if err := c.loop.Watch(fd, c, eventTxKick, true); err != nil {
		return err
	}
	c.kickFD = fd
	return nil
}

// setMemory moves the ring to another memory table, or parks it.
func (c *controlQueue) setMemory(t *guestmem.Table, a vhostuser.RingAddrs) {
	if !a.OK {
		c.parked = true
		return
	}
	c.q.SetMemory(t, a.Desc, a.Avail, a.Used)
	c.mem, c.log = t, a.Log
	c.setLog(c.dev.owned.dirtyLog())
	c.parked = false
	c.loop.Activate(c)
}
