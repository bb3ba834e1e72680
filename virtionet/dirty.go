package virtionet

import (
	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/worker"
)

// dirtyLog is where a pair marks the guest's pages that it writes while the guest
// migrates. It belongs to the worker's thread. Buffers are marked by their host
// address, whatever address the guest has for them.
type dirtyLog struct {
	log  *guestmem.Log   // nil: nothing is marked
	poke int             // eventfd to write after marks, or -1
	mem  *guestmem.Table // of the receiveq
	rx   guestmem.Marker
}

// SetLog implements vhostuser.Device.
func (d *Device) SetLog(l *guestmem.Log, fd int) {
	d.owned.addLog(l)
	d.logFD = fd
	for _, p := range d.pairs {
		if p != nil {
			p.loop.DoFor(p, func() { p.setLog(l, fd) })
		}
	}
	if c := d.ctrl; c != nil {
		c.loop.DoFor(c, func() { c.setLog(l) })
	}
	d.owned.setLog(l)
}

// SetRingLog implements vhostuser.Device.
func (d *Device) SetRingLog(i int, l vhostuser.RingLog) {
	log := d.owned.dirtyLog()
	d.withRing(i, func(r *ring, _ *worker.Loop) { r.logTo(log, l) })
}

func (p *pair) setLog(l *guestmem.Log, fd int) {
	p.dirty.log, p.dirty.poke = l, fd
	p.logReceived(p.dirty.mem)
	p.rx.logTo(l, p.rx.log)
	p.tx.logTo(l, p.tx.log)
}

// logReceived sets where receive buffers lie.
func (p *pair) logReceived(t *guestmem.Table) {
	p.dirty.mem, p.dirty.rx = t, guestmem.NewMarker(p.dirty.log, t)
}

// logTo lets the ring mark its own memory in the log, or not.
func (r *ring) logTo(log *guestmem.Log, l vhostuser.RingLog) {
	r.log = l
	if r.q == nil {
		return
	}
	used := virtqueue.UsedLog{}
	if l.On {
		used = virtqueue.UsedLog{Log: log, Used: l.Used, Desc: l.Desc}
	}
	r.q = virtqueue.WithLog(r.q, used)
}

// markReceived marks what was written into the chains of the rx batch. It comes after
// the copies and the headers.
func (p *pair) markReceived() {
	b := &p.rxBatch
	for i := range b.Chains[:b.N] {
		p.markSegs(b.ChainSegs(i), b.Chains[i].Written)
	}
}

// markSegs marks the first n bytes of segments.
func (p *pair) markSegs(segs []virtqueue.Seg, n uint32) {
	for i := range segs {
		if n == 0 {
			return
		}
		m := min(n, segs[i].Len)
		p.dirty.rx.Mark(segs[i].Host, uint64(m))
		n -= m
	}
}

// setLog is a pair's, for the control queue. It runs on the worker's thread.
func (c *controlQueue) setLog(l *guestmem.Log) {
	c.answers = guestmem.NewMarker(l, c.mem)
	c.logTo(l, c.log)
}

// markAnswer marks the page of a command's one byte of answer.
func (c *controlQueue) markAnswer(segs []virtqueue.Seg) {
	for i := range segs {
		if segs[i].Len > 0 {
			c.answers.Mark(segs[i].Host, 1)
			return
		}
	}
}

// pokeLog tells the front-end of marks, if it wants to know.
func (p *pair) pokeLog() {
	if p.dirty.poke >= 0 && p.dirty.log != nil {
		p.rx.write(p.loop, p.dirty.poke)
	}
}
