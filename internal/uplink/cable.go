// Package uplink wires one port to another: what the network behind the one delivers is sent to the other, as if a guest with two
// devices passed it on. It is how a switch reaches the network outside.
package uplink

import (
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/worker"
)

// Options configure a [Cable].
type Options struct {
	Arena *pagemem.Arena
	// Workers serve the cable: queue pair i of both ports runs on worker First+i modulo their number.
	Workers []*worker.Loop
	First   int
	// Pairs is the number of queue pairs, the same on both sides.
	Pairs int
}

// Cable joins two ports, which stay the caller's.
type Cable struct {
	pairs []*pair
}

// Connect joins a and b, whose queues nobody else may open. Each side is asked to leave unfinished what the other one can take; what it
// cannot take nevertheless, the cable finishes.
func Connect(a, b port.Port, o Options) (*Cable, error) {
	for _, side := range [...]struct{ from, to port.Port }{{a, b}, {b, a}} {
		if err := side.from.Configure(side.from.Features() & taken(side.to)); err != nil {
			return nil, fmt.Errorf("uplink: %w", err)
		}
	}
	c := &Cable{}
	for i := range o.Pairs {
		p, err := newPair(a, b, i, o.Workers[(o.First+i)%len(o.Workers)], o.Arena)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("uplink: queue pair %d: %w", i, err), c.Close())
		}
		c.pairs = append(c.pairs, p)
	}
	return c, nil
}

// taken is what a port's network can be sent, by the features of a guest that can receive it.
func taken(p port.Port) (rx virtio.Features) {
	f := p.Features()
	for _, o := range [...]struct{ sent, received virtio.Features }{
		{virtio.FNetCSum, virtio.FNetGuestCSum}, {virtio.FNetHostTSO4, virtio.FNetGuestTSO4},
		{virtio.FNetHostTSO6, virtio.FNetGuestTSO6}, {virtio.FNetHostECN, virtio.FNetGuestECN},
	} {
		if f.Has(o.sent) {
			rx |= o.received
		}
	}
	return rx
}

// Drops visits the counters of the frames that disappeared in the queues of both ports or in the cable. It is safe from any goroutine.
func (c *Cable) Drops(visit func(reason string, n uint64)) {
	for _, p := range c.pairs {
		for _, d := range [...]*direction{&p.out, &p.in} {
			d.from.Drops(visit)
			visit("unfinishable", d.lost.Load())
		}
	}
}

// Close takes the cable off its workers, closes the queues and releases what is on the way. It is idempotent.
func (c *Cable) Close() error {
	var errs []error
	for _, p := range c.pairs {
		errs = append(errs, p.close())
	}
	c.pairs = nil
	return errors.Join(errs...)
}
