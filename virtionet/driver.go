package virtionet

import (
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
)

// The pairs follow what the driver asked for on the control queue. All methods here
// need d.control unless they say otherwise.

// controlRing returns the control queue if it is started and has this index. The
// session's goroutine calls it, with or without d.control.
func (d *Device) controlRing(index int) *controlQueue {
	if d.ctrl != nil && d.ctrl.index == index {
		return d.ctrl
	}
	return nil
}

// firstMAC is the address that the device has before a driver sets another, zero if
// it has none. It needs no lock.
func (d *Device) firstMAC() (mac [6]byte) {
	copy(mac[:], d.opts.MAC)
	return mac
}

// takeControl begins to follow a control queue. A driver that has just begun finds
// the state of a device that was reset.
func (d *Device) takeControl(fresh bool, index int) {
	if fresh {
		d.state = newDriverState(d.firstMAC())
	}
	d.gated = true
	d.mu.Lock()
	d.ctrlAt = index
	d.mu.Unlock()
	d.follow()
}

// forgetDriver lets the pairs serve a driver without a control queue again.
func (d *Device) forgetDriver() {
	d.state, d.gated = newDriverState(d.firstMAC()), false
	d.follow()
}

func (d *Device) commandRules() commandRules {
	rules := commandRules{acked: d.features, maxPairs: d.opts.QueuePairs}
	if k, ok := d.opts.Port.(port.AddressKeeper); ok {
		rules.maySend = k.MaySend
	}
	return rules
}

// follow makes every pair and the configuration space follow the state, with one call
// to each worker however many pairs it has.
func (d *Device) follow() {
	orders := d.orders()
	for w, loop := range d.opts.Workers {
		loop.Do(func() {
			for i := w; i < len(d.pairs); i += len(d.opts.Workers) {
				if p := d.pairs[i]; p != nil {
					orders.give(p)
				}
			}
		})
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mac = d.state.mac
}

// orders are what the pairs have to follow.
type orders struct {
	used       int // pairs that the driver uses
	acked, off virtio.Features
	filter     *rxFilter
}

func (d *Device) orders() orders {
	o := orders{used: len(d.pairs), acked: d.features}
	if !d.gated {
		return o
	}
	if d.features.Has(virtio.FNetMQ) {
		o.used = d.state.pairs
	}
	o.off, o.filter = d.state.off, newRxFilter(&d.state, d.features)
	return o
}

// give makes one pair follow, on its worker's thread.
func (o *orders) give(p *pair) { p.obey(p.index < o.used, o.acked, o.off, o.filter) }

// obey takes over whether the driver uses the pair, which of the acknowledged offloads
// it has switched off and which frames it wants.
func (p *pair) obey(used bool, acked, off virtio.Features, filter *rxFilter) {
	p.filter = filter
	if p.off != off {
		p.off = off
		p.setFeatures(acked)
	}
	if p.idle == !used {
		return
	}
	p.idle = !used
	p.setEnabled(&p.rx, p.wanted)
	if p.idle {
		p.dropPending(dropDisabled)
	}
	p.followEnabled()
	p.loop.Activate(p)
}

// setEnabled sets a ring's enabled state. A receiveq also needs the driver's word that
// it uses the pair; what is still in its transmitq goes out in any case (virtio 1.2
// section 5.1.6.5.5).
func (p *pair) setEnabled(r *ring, on bool) {
	if r == &p.rx {
		p.wanted = on
		on = on && !p.idle
	}
	r.enabled = on
}
