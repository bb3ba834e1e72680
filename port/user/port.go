package user

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/vhostd/vhostd/internal/ratelog"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
)

// features: segments and checksums of TCP pass unfinished in both directions. A datagram that is to be segmented would have to be cut
// here, so USO is not offered.
const features = virtio.FNetCSum | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN |
	virtio.FNetGuestCSum | virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6 | virtio.FNetGuestECN

// Port is a user-mode network. It implements [port.Port]; beyond that, all its exported methods are safe for concurrent use.
type Port struct {
	opts  Options
	log   *slog.Logger
	limit *ratelog.Handler
	mac   [6]byte    // ours
	link6 netip.Addr // our link-local address
	mtu   atomic.Int32

	queues  port.QueueSet
	serving atomic.Pointer[[]*queue] // the enabled queues, by index; never nil
	held    atomic.Int64             // bytes in all rings
	lost    drops                    // of frames that belong to no queue

	neighbors neighbors
	stack     *stack.Stack
	link      *link
	poller    *poller
	flows     flows
	traffic   [numKinds]traffic
	tcp       tcpSide
	published publications
	pings     pingState
	gateways  []service      // what listens on the gateway's addresses
	serves    sync.WaitGroup // goroutines of the services
	lingering atomic.Int64   // connections of guests to services that were closed and are not acknowledged

	lingerTime time.Duration // as the constant, but for tests

	failed  atomic.Pointer[string] // why nothing passes any more
	closing atomic.Bool
	begun   chan struct{} // closed when the start has ended
	down    chan struct{} // closed when everything has ended

	lastID      atomic.Uint32 // of datagrams in pieces
	advertTimer *time.Timer   // guarded by mu

	mu     sync.Mutex // guards open, enabled of queues and closed
	open   []*queue
	closed bool
}

// New makes a network and opens its published ports. On error nothing is left.
func New(opts Options) (*Port, error) {
	opts, err := opts.Complete()
	if err != nil {
		return nil, err
	}
	p := &Port{opts: opts, begun: make(chan struct{}), down: make(chan struct{}), limit: ratelog.New(opts.Logger.Handler()),
		lingerTime: lingerTime}
	p.log = slog.New(p.limit)
	p.mtu.Store(int32(opts.MTU))
	p.serving.Store(new([]*queue))
	p.mac = opts.mac()
	p.link6 = linkLocal(p.mac)
	if opts.services != nil {
		opts.services.port = p
	}
	err = p.start()
	close(p.begun)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("network user: %w", err), p.Close())
	}
	return p, nil
}

func (p *Port) start() (err error) {
	if p.poller, err = newPoller(p.fail); err != nil {
		return err
	}
	p.flows.init(p)
	p.tcp.init(p)
	p.published.init(p)
	if err := p.startStack(); err != nil {
		return err
	}
	if err := p.startServices(); err != nil {
		return err
	}
	for _, what := range p.opts.Publish {
		if err := p.Publish(what); err != nil {
			return err
		}
	}
	p.advertiseSoon()
	return nil
}

// Kind is "user".
func (*Port) Kind() string { return kind }

// Features are the offloads of TCP, in both directions.
func (*Port) Features() virtio.Features { return features }

// MTU is that of the options or of the last SetMTU.
func (p *Port) MTU() int { return int(p.mtu.Load()) }

// SetMTU changes the MTU of everything that is sent from now on; guests learn it from DHCP and advertisements.
func (p *Port) SetMTU(mtu int) error {
	if mtu < MinMTU || mtu > MaxMTU {
		return fmt.Errorf("network user: MTU %d is not accepted (accepted: %d to %d)", mtu, MinMTU, MaxMTU)
	}
	p.mtu.Store(int32(mtu))
	if p.opts.services != nil {
		p.opts.services.changeMTU(mtu)
	}
	return nil
}

// Configure refuses features that were not offered. Nothing has to change: the device finishes what the guest cannot take.
func (*Port) Configure(acked virtio.Features) error {
	return port.CheckOffloads(kind, features, acked)
}

// OpenQueue implements [port.Port].
func (p *Port) OpenQueue(i int, r port.Resources) (port.Queue, error) {
	q, err := p.queues.Open(i, func() (port.Queue, error) {
		q, err := newQueue(p, i, r)
		if err != nil {
			return nil, err
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.open = append(p.open, q)
		slices.SortFunc(p.open, func(a, b *queue) int { return cmp.Compare(a.index, b.index) })
		p.steer()
		return q, nil
	})
	if err != nil {
		return nil, fmt.Errorf("network user: %w", err)
	}
	return q, nil
}

func (p *Port) leave(q *queue) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open = slices.DeleteFunc(p.open, func(other *queue) bool { return other == q })
	p.steer()
}

func (p *Port) enable(q *queue, on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	q.enabled = on
	p.steer()
}

// steer lets senders see which queues receive. The caller holds mu.
func (p *Port) steer() {
	serving := make([]*queue, 0, len(p.open))
	for _, q := range p.open {
		if q.enabled {
			serving = append(serving, q)
		}
	}
	p.serving.Store(&serving)
}

// Announce does nothing: there is nobody to tell but us, who learn from the guest's frames.
func (*Port) Announce([6]byte) error { return nil }

// Status is up until the stack has panicked.
func (p *Port) Status() port.Status {
	if why := p.failed.Load(); why != nil {
		return port.Status{Detail: *why}
	}
	return port.Status{Up: true, Detail: p.describe()}
}

func (p *Port) describe() string {
	text := ""
	if !p.opts.NoIPv4 {
		text = fmt.Sprintf("gateway %v, guest %v", p.opts.Gateway, p.opts.Guest)
	}
	if !p.opts.NoIPv6 {
		if text != "" {
			text += ", "
		}
		text += fmt.Sprintf("gateway %v", p.opts.Gateway6)
	}
	return text
}

// fail ends the network after a panic inside it: nothing passes any more, and the sockets of the host are closed as far as the defect lets
// us. What it has locked stays locked.
func (p *Port) fail(cause any) {
	why := fmt.Sprintf("a defect of the network's TCP/IP stack has shown (%v): remove the guest and add it again", cause)
	if !p.failed.CompareAndSwap(nil, &why) {
		return
	}
	p.log.Error("user network failed", "cause", fmt.Sprint(cause), "stack", string(debug.Stack()))
	go func() {
		<-p.begun // what is not there yet could not be closed
		p.shutDown()
	}()
}

// closeWithin bounds the wait for goroutines of the stack, which a defect may hold.
const closeWithin = 900 * time.Millisecond

// Close implements [port.Port]. Connections are reset, published ports and their files removed.
func (p *Port) Close() error {
	err := p.queues.Close()
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return err
	}
	p.closed = true
	if p.advertTimer != nil {
		p.advertTimer.Stop()
	}
	p.mu.Unlock()
	go p.shutDown()
	select {
	case <-p.down:
	case <-time.After(closeWithin):
		err = errors.Join(err, errors.New("network user: the stack did not stop in time"))
	}
	p.limit.Close()
	return err
}

// shutDown ends everything that the network has started. It does so once, for Close or after a defect.
func (p *Port) shutDown() {
	if !p.closing.CompareAndSwap(false, true) {
		return
	}
	defer close(p.down)
	defer p.contain()
	if p.poller == nil {
		return
	}
	p.published.close()
	p.flows.close()
	p.tcp.close()
	for _, s := range p.gateways {
		s.Close()
	}
	if p.opts.services != nil {
		p.opts.services.close()
	}
	p.serves.Wait()
	p.poller.close()
	if p.stack != nil {
		p.stack.Destroy()
	}
}
