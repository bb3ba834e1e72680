package attach

import (
	"errors"
	"fmt"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/worker"
)

// Bounds of a turn in each direction.
const (
	turnFrames = 64
	turnBytes  = 512 << 10
)

// Events of a pair's descriptors.
const (
	tapReady worker.Event = 1 << iota
	rxCalled
	txCalled
	ringFailed
)

// pair moves frames between a queue of the tap and two rings. It is a task of its own worker, on whose thread everything but newPair,
// start, stop and close happens.
type pair struct {
	loop   *worker.Loop
	tap    int // the descriptor is the attachment's
	rx, tx *queue

	hdrLen  int
	accepts virtio.Features // of what the back-end marks, in the words of a sender
	merges  bool
	marks   bool // the back-end reads the headers of what is sent

	polls   bool // the worker never sleeps, and does not look at descriptors either
	drained bool // the last read found nothing: whatever comes makes the tap ready
	calling bool // calls were asked for, as a new ring does
	broken  bool
	failed  func(error) // tells once why the pair ended

	hdr    *[virtio.NetHdrLen]byte // of the frame that is written, in the heap
	pieces []iovec                 // that frame: hdr, then its buffers
}

// maxPieces bounds the buffers of one merged frame: the smallest ones, filled with the longest frame.
const maxPieces = virtio.MaxFrame/minRxBuffer + 2

func newPair(rx, tx *queue, tap int, f virtio.Features, failed func(error)) *pair {
	return &pair{rx: rx, tx: tx, tap: tap, hdrLen: f.NetHdrLen(), accepts: asSender(f), merges: f.Has(virtio.FNetMrgRxBuf),
		marks: f.Has(virtio.FNetCSum), failed: failed, hdr: new([virtio.NetHdrLen]byte),
		pieces: make([]iovec, 0, 1+maxPieces), calling: true}
}

// asSender puts GUEST_* features into the words of the other direction, for CheckTx.
func asSender(f virtio.Features) (sender virtio.Features) {
	for _, same := range [...][2]virtio.Features{
		{virtio.FNetGuestCSum, virtio.FNetCSum}, {virtio.FNetGuestTSO4, virtio.FNetHostTSO4},
		{virtio.FNetGuestTSO6, virtio.FNetHostTSO6}, {virtio.FNetGuestECN, virtio.FNetHostECN},
	} {
		if f.Has(same[0]) {
			sender |= same[1]
		}
	}
	return sender
}

// start puts receive buffers on the ring and gives the pair to a worker, which close ends.
func (p *pair) start(o *Options) (err error) {
	name := fmt.Sprint("pair", p.rx.index/2)
	p.polls = o.Wake == worker.Poll
	p.loop, err = worker.New(worker.Options{Name: name, CPU: -1, Wake: o.Wake, Spin: o.Spin, Logger: o.Logger})
	if err != nil {
		return err
	}
	p.loop.Do(func() {
		p.loop.Add(p)
		for _, w := range [...]struct {
			fd    int
			event worker.Event
			drain bool
		}{
			{p.tap, tapReady, false}, {p.rx.call, rxCalled, true}, {p.tx.call, txCalled, true},
			{p.rx.fail, ringFailed, true}, {p.tx.fail, ringFailed, true},
		} {
			err = errors.Join(err, p.loop.Watch(w.fd, p, w.event, w.drain))
		}
		p.refill()
	})
	return err
}

// stop ends the pair's work; what is on the rings stays there.
func (p *pair) stop() error {
	if p.loop == nil {
		return nil
	}
	p.loop.Do(func() {
		for _, fd := range [...]int{p.tap, p.rx.call, p.tx.call, p.rx.fail, p.tx.fail} {
			p.loop.Unwatch(fd)
		}
		p.loop.Remove(p)
	})
	err := p.loop.Close()
	p.loop = nil
	return err
}

// abandon counts the frames that a back-end has that is gone.
func (p *pair) abandon() {
	p.reap()
	p.tx.count.drops[underWay].Add(uint64(p.tx.ring.Outstanding()))
}

func (p *pair) close() error { return errors.Join(p.stop(), p.rx.close(), p.tx.close()) }

// Run implements [worker.Task].
func (p *pair) Run() (progress bool) {
	if p.broken {
		return false
	}
	if p.calling {
		p.rx.ring.DisableCalls()
		p.tx.ring.DisableCalls()
		p.calling = false
	}
	progress = p.receive()
	return p.send() || progress
}

// Arm implements [worker.Task].
func (p *pair) Arm() (r worker.Readiness) {
	if p.broken {
		return r
	}
	p.calling = true
	r.Ready = p.rx.ring.EnableCalls() || p.full() && p.tx.ring.DelayCalls() || !p.full() && !p.drained
	return r
}

// Notify implements [worker.Task].
func (p *pair) Notify(e worker.Event) {
	switch e {
	case tapReady:
		p.drained = false
	case rxCalled:
		p.rx.count.calls.Add(1)
	case txCalled:
		p.tx.count.calls.Add(1)
	case ringFailed:
		p.fail(errCalledBroken)
	}
}

// Fault implements [worker.Task]: the memory's file is sealed, so that a fault is a defect.
func (p *pair) Fault(uintptr) bool { return false }

var errCalledBroken = errors.New("the back-end calls a ring broken (err eventfd)")

func (p *pair) fail(err error) {
	if !p.broken {
		p.broken = true
		p.failed(fmt.Errorf("queue pair %d: %w", p.rx.index/2, err))
	}
}

// gone says whether an error of the tap means that the interface was deleted (tun_chr_read_iter, drivers/net/tun.c).
func gone(errno unix.Errno) bool {
	return errno == unix.EBADFD || errno == unix.ENXIO || errno == unix.ENODEV
}

// errDeleted ends the attachment also with Options.Reconnect.
var errDeleted = errors.New("the interface was deleted")

// failure keeps the first error of the pairs of one connection.
type failure struct {
	told atomic.Bool
	ch   chan error // one element
}

func newFailure() *failure { return &failure{ch: make(chan error, 1)} }

func (f *failure) tell(err error) {
	if f.told.CompareAndSwap(false, true) {
		f.ch <- err
	}
}
