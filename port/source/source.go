// Package source is the network that sends frames to the guest as fast as the guest takes them, or at a given rate, and
// discards what the guest sends: the generator of throughput tests.
//
// The frames are written once, when a page enters the queue's pool; per frame only the marks change.
package source

import (
	"fmt"

	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
)

// features: a frame that nobody reads may be as unfinished as the guest likes, and the frames sent are complete.
const features = virtio.FNetCSum | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN

// Port generates frames. It implements [port.Port].
type Port struct {
	opts   Options
	frame  []byte // first frame of the first flow
	queues port.QueueSet
}

// New makes a network that sends frames to the guest.
func New(opts Options) (*Port, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	if opts.Size == 0 {
		opts.Size = DefaultSize
	}
	if opts.Flows == 0 {
		opts.Flows = 1
	}
	return &Port{opts: opts, frame: buildFrame(opts)}, nil
}

// Kind is "source".
func (*Port) Kind() string { return kind }

// Features are those of a network that takes unfinished frames and returns finished ones.
func (*Port) Features() virtio.Features { return features }

// MTU is 0: the size of the frames is the user's choice.
func (*Port) MTU() int { return 0 }

// SetMTU accepts anything and changes nothing.
func (*Port) SetMTU(int) error { return nil }

// Configure refuses features that were not offered.
func (*Port) Configure(acked virtio.Features) error {
	return port.CheckOffloads(kind, features, acked)
}

// OpenQueue implements [port.Port].
func (p *Port) OpenQueue(i int, r port.Resources) (port.Queue, error) {
	q, err := p.queues.Open(i, func() (port.Queue, error) { return newQueue(p, i, r) })
	if err != nil {
		return nil, fmt.Errorf("network source: %w", err)
	}
	return q, nil
}

// Announce does nothing: there is nobody to tell.
func (*Port) Announce([6]byte) error { return nil }

// Status is always up.
func (*Port) Status() port.Status { return port.Status{Up: true} }

// Close implements [port.Port].
func (p *Port) Close() error { return p.queues.Close() }
