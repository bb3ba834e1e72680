package virtionet

import (
	"time"

	"github.com/vhostd/vhostd/virtqueue"
)

// A ring waits when the next chain refers to memory that its translator does not
// know yet. It is left alone until Retry; nothing of the chain was taken. Its pair's
// other ring and the worker go on.

// serviceable reports whether chains may be taken from the ring.
func (r *ring) serviceable() bool { return r.usable() && !r.published.waiting.Load() }

// fillFailed does what the error of a Fill asks for.
func (p *pair) fillFailed(r *ring, err error) {
	if miss, ok := err.(*virtqueue.MissError); ok { // errors.As would allocate
		p.await(r, miss)
		return
	}
	p.retireRing(r, err)
}

// await asks for what is missing. The ring waits before it asks: whoever brings the
// answer after Want has looked finds it waiting.
func (p *pair) await(r *ring, miss *virtqueue.MissError) {
	r.published.waiting.Store(true)
	if r == &p.rx {
		p.waitSince = time.Time{} // the guest does have buffers, but the frame cannot have them yet
	}
	if r.via.Want(miss.Addr, miss.Len, miss.Write) {
		r.published.waiting.Store(false)
	}
}

// Retry implements vhostuser.Device.
func (d *Device) Retry() {
	for _, p := range d.waitingPairs() {
		p.loop.Do(func() {
			p.tx.published.waiting.Store(false)
			p.rx.published.waiting.Store(false)
			p.loop.Activate(p)
		})
	}
}

func (d *Device) waitingPairs() (waiting []*pair) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, p := range d.pairs {
		if p != nil && (p.tx.published.waiting.Load() || p.rx.published.waiting.Load()) {
			waiting = append(waiting, p)
		}
	}
	return waiting
}
