package edge

import (
	"errors"

	"github.com/vhostd/vhostd/internal/capture"
	"github.com/vhostd/vhostd/internal/ratelimit"
	"github.com/vhostd/vhostd/port"
)

// Options say what stands at the edge. Each field may be nil.
type Options struct {
	// Guard judges what the guest sends.
	Guard *Guard
	// FromGuest and ToGuest limit each direction.
	FromGuest, ToGuest *ratelimit.Bucket
	// Capture gets all frames that pass. It must outlive the port and is not closed with it.
	Capture *capture.Writer
	// Batch is the largest number of frames that a queue gives to the guest at a time; 0 leaves that to who asks. What a guest has been
	// given waits in the arena until there are receive buffers, in every queue.
	Batch int
}

// Wrap returns a port that is inner with what opts ask for, or inner itself if that is nothing. Closing it closes inner.
func Wrap(inner port.Port, opts Options) port.Port {
	if opts == (Options{}) {
		return inner
	}
	return &wrapped{Port: inner, opts: opts}
}

// wrapped is a port with an edge. What it does not change is the inner port's.
type wrapped struct {
	port.Port
	opts   Options
	queues port.QueueSet
}

// OpenQueue implements [port.Port].
func (w *wrapped) OpenQueue(i int, r port.Resources) (port.Queue, error) {
	return w.queues.Open(i, func() (port.Queue, error) {
		inner, err := w.Port.OpenQueue(i, r)
		if err != nil {
			return nil, err
		}
		q := &queue{Queue: inner, opts: w.opts, arena: r.Arena, owner: r.Owner, leave: func() { w.queues.Remove(i) }}
		if w.opts.ToGuest != nil {
			if q.pause, err = newPause(inner.ReadyFD()); err != nil {
				return nil, errors.Join(err, inner.Close())
			}
		}
		if w.opts.Capture != nil {
			q.ring = w.opts.Capture.Ring()
		}
		if w.opts.Batch > 0 {
			return limited{q, w.opts.Batch}, nil
		}
		return q, nil
	})
}

// Close implements [port.Port].
func (w *wrapped) Close() error { return errors.Join(w.queues.Close(), w.Port.Close()) }

// FollowMTU implements [port.MTUFollower]: a port that does not has its MTU set, as it would be without an edge.
func (w *wrapped) FollowMTU(mtu int) error {
	if f, ok := w.Port.(port.MTUFollower); ok {
		return f.FollowMTU(mtu)
	}
	return w.Port.SetMTU(mtu)
}

// MaySend implements [port.AddressKeeper].
func (w *wrapped) MaySend(mac [6]byte) error {
	if w.opts.Guard != nil {
		if err := w.opts.Guard.maySend(mac); err != nil {
			return err
		}
	}
	if k, ok := w.Port.(port.AddressKeeper); ok {
		return k.MaySend(mac)
	}
	return nil
}
