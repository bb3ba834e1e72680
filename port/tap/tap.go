// Package tap is the network behind a Linux tap interface (drivers/net/tun.c): each queue pair is one queue of the tap, and
// checksums and segments pass unfinished in both directions as far as the guest and the kernel agree.
//
// # When frames are lost
//
// Towards the network a frame is dropped, and counted under the reason, when the kernel refuses it: the interface is down
// ("tap_down"), the virtio header does not fit the frame ("bad_header"), the kernel has no memory for it now ("no_buffers":
// EAGAIN, ENOBUFS or ENOMEM; a tap's send buffer is unlimited, so there is nothing else to wait for), or the interface was
// deleted ("tap_deleted"). Send never reports back-pressure. None of these is fatal: an interface that comes up again
// carries traffic again at once, and a deleted one is made again by closing the port and calling [New].
//
// From the network, frames that nobody reads wait in the kernel, as many as the interface's txqueuelen, and the newest are
// lost. The port drops a frame longer than virtio.MaxFrame ("too_long"), one that needs an offload which the guest gave up
// while the frame was waiting ("stale_offload"), and any frame while the arena is exhausted ("no_memory").
package tap

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
)

// Port is one tap interface. It implements [port.Port].
type Port struct {
	name     string
	index    int // interface index, which survives renaming
	multi    bool
	features virtio.Features
	events   events
	queues   port.QueueSet

	// offload sets the TUN_F_* flags: what may come unfinished from the network.
	offload func(fd, flags int) error
	// accepted are the GUEST_* features of which that consists now. Queues read it; Configure writes it while they are
	// quiescent.
	accepted virtio.Features

	deleted atomic.Bool
	down    atomic.Bool // the kernel refused the last frame because of it
	mtu     atomic.Int64

	mu     sync.Mutex // guards link, fds and closed against Status
	link   *netlink.Handle
	fds    []int // one a queue; in a multi-queue tap, detached while the queue is not open
	closed bool
}

// New creates the interface, or attaches to an existing one, in the network namespace of the calling thread. On error
// nothing that it created is left.
func New(opts Options) (*Port, error) { return newPort(opts, setOffload) }

func newPort(opts Options, offload func(fd, flags int) error) (*Port, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	if opts.Name == "" {
		opts.Name = DefaultName
	}
	if opts.Queues == 0 {
		opts.Queues = 1
	}
	p := &Port{name: opts.Name, offload: offload}
	p.events.log = opts.Logger
	if err := p.setUp(opts); err != nil {
		_ = p.Close() // the first error tells more
		return nil, fmt.Errorf("network tap %s: %w", p.name, err)
	}
	return p, nil
}

// Kind is "tap".
func (*Port) Kind() string { return kind }

// Name is the interface's name when it was created or attached to.
func (p *Port) Name() string { return p.name }

// Features are the offloads that the kernel accepted when the port was made.
func (p *Port) Features() virtio.Features { return p.features }

// MTU is the interface's MTU as of New or SetMTU.
func (p *Port) MTU() int { return int(p.mtu.Load()) }

// SetMTU sets the interface's MTU, MinMTU to MaxMTU.
func (p *Port) SetMTU(mtu int) error { return p.changeMTU(mtu, false) }

// FollowMTU implements [port.MTUFollower]: an interface in a bridge keeps its MTU. The bridge takes the smallest one of its
// ports (br_mtu_auto_adjust, net/bridge/br_if.c), and below 1280 the host loses its IPv6 addresses on it.
func (p *Port) FollowMTU(mtu int) error { return p.changeMTU(mtu, true) }

func (p *Port) changeMTU(mtu int, unlessShared bool) error {
	if !validMTU(mtu) {
		return fmt.Errorf("network tap %s: MTU %d is not accepted (accepted: %d to %d)", p.name, mtu, MinMTU, MaxMTU)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return fmt.Errorf("network tap %s: set MTU: %w", p.name, port.ErrClosed)
	}
	if unlessShared && p.hasMaster() {
		return nil
	}
	if err := p.setLinkMTU(mtu); err != nil {
		return fmt.Errorf("network tap %s: %w", p.name, err)
	}
	return nil
}

// Configure implements [port.Port]: what the guest can finish comes unfinished from the kernel.
func (p *Port) Configure(acked virtio.Features) error {
	if err := port.CheckOffloads(kind, p.features, acked); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return fmt.Errorf("network tap %s: set offloads: %w", p.name, port.ErrClosed)
	}
	accepted := receivable(acked)
	if accepted == p.accepted {
		return nil
	}
	if err := p.offload(p.fds[0], offloadFlags(accepted)); err != nil && !gone(err) {
		return fmt.Errorf("network tap %s: set offloads %v: %w", p.name, accepted, err)
	}
	p.accepted = accepted
	return nil
}

// OpenQueue implements [port.Port]. Until it is called, and after the queue's Close, a multi-queue tap steers no frame to
// the pair; what waits in the only queue of another tap is thrown away here. A pair beyond the tap's queues only sends.
func (p *Port) OpenQueue(i int, r port.Resources) (port.Queue, error) {
	q, err := p.queues.Open(i, func() (port.Queue, error) {
		q, err := newQueue(p, i, r)
		if err != nil {
			return nil, err
		}
		return q, nil
	})
	if err != nil {
		return nil, fmt.Errorf("network tap %s: %w", p.name, err)
	}
	return q, nil
}

// Announce implements [port.Port].
func (p *Port) Announce(mac [6]byte) error {
	frame := port.RARP(mac)
	buf := make([]byte, virtio.NetHdrLen, virtio.NetHdrLen+len(frame))
	buf = append(buf, frame[:]...)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return fmt.Errorf("network tap %s: announce: %w", p.name, port.ErrClosed)
	}
	if _, err := unix.Write(p.fds[0], buf); err != nil {
		return fmt.Errorf("network tap %s: announce: %w", p.name, explainWrite(err))
	}
	return nil
}

// Close implements [port.Port]. The interface disappears unless it is persistent.
func (p *Port) Close() error {
	err := p.queues.Close()
	p.mu.Lock()
	defer p.mu.Unlock()
	p.closed = true
	for _, fd := range p.fds {
		err = errors.Join(err, unix.Close(fd))
	}
	p.fds = nil
	if p.link != nil {
		p.link.Close()
		p.link = nil
	}
	p.events.wait()
	if err != nil {
		return fmt.Errorf("network tap %s: close: %w", p.name, err)
	}
	return nil
}
