package vswitch

import (
	"cmp"
	"fmt"
	"math/bits"
	"net"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/internal/waiting"
	"github.com/vhostd/vhostd/virtio"
)

// features: a frame crosses the switch as unfinished as it was sent, and the device finishes it for a guest that cannot take it.
const features = virtio.FNetCSum | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN |
	virtio.FNetGuestCSum | virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6 | virtio.FNetGuestECN

// Port is one port of a switch. It implements [port.Port].
type Port struct {
	sw      *Switch
	index   uint16 // in the table; set when the port joins
	pinned  uint64 // the only source address, 0 = any
	backlog int
	uplink  port.Port // nil for a guest's port
	mtu     int       // of the uplink
	account waiting.Account

	queues  port.QueueSet
	serving atomic.Pointer[[]*queue] // the enabled queues, by index; never nil
	mu      sync.Mutex               // one change of open and serving at a time
	open    []*queue
}

func newPort(s *Switch, opts PortOptions) *Port {
	p := &Port{sw: s, backlog: 1 << bits.Len(uint(cmp.Or(opts.Backlog, DefaultBacklog)-1)), uplink: opts.Uplink}
	p.account.Budget = s.budget
	if opts.MAC != nil {
		p.pinned = macOf(opts.MAC)
	}
	if opts.Uplink != nil {
		p.mtu = opts.Uplink.MTU()
	}
	p.serving.Store(new([]*queue))
	return p
}

func (p *Port) isUplink() bool { return p.uplink != nil }

// stations is how many stations the port may have in the table.
func (p *Port) stations() int32 {
	if p.isUplink() {
		return uplinkStations
	}
	return guestStations
}

// source is the port's number in inboxes.
func (p *Port) source() uint8 { return uint8(p.index % sources) }

// Kind is "switch".
func (*Port) Kind() string { return kind }

// Features are all offloads, in both directions.
func (*Port) Features() virtio.Features { return features }

// MTU is that of the switch's uplink, 0 without one.
func (p *Port) MTU() int {
	if up := p.sw.view.Load().uplink; up != nil {
		return up.mtu
	}
	return 0
}

// SetMTU accepts anything: the switch carries any frame, and the uplink's MTU is set where the uplink is described.
func (*Port) SetMTU(int) error { return nil }

// Configure refuses features that were not offered.
func (*Port) Configure(acked virtio.Features) error {
	return port.CheckOffloads(kind, features, acked)
}

// OpenQueue implements [port.Port].
func (p *Port) OpenQueue(i int, r port.Resources) (port.Queue, error) {
	q, err := p.queues.Open(i, func() (port.Queue, error) {
		if err := p.sw.useArena(r.Arena); err != nil {
			return nil, err
		}
		q, err := newQueue(p, i, r)
		if err != nil {
			return nil, err
		}
		p.join(q)
		return q, nil
	})
	if err != nil {
		return nil, fmt.Errorf("network switch %s: %w", p.sw.name, err)
	}
	return q, nil
}

// join makes an open queue one of the port's.
func (p *Port) join(q *queue) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open = append(p.open, q)
	slices.SortFunc(p.open, func(a, b *queue) int { return cmp.Compare(a.index, b.index) })
	p.steer()
}

// leave forgets a queue.
func (p *Port) leave(q *queue) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open = slices.DeleteFunc(p.open, func(other *queue) bool { return other == q })
	p.steer()
}

// enable makes a queue one that receives, or not.
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

// receiver is the queue for a frame with the header, nil if the port receives nothing.
func (p *Port) receiver(header []byte) *queue {
	switch serving := *p.serving.Load(); len(serving) {
	case 0:
		return nil
	case 1:
		return serving[0]
	default:
		return serving[share(flowOf(header), len(serving))]
	}
}

// MaySend implements [port.AddressKeeper]: a pinned port has its one address, and nobody has that of another.
func (p *Port) MaySend(mac [6]byte) error {
	if owner := p.sw.view.Load().ownerOf(macOf(mac[:])); owner != p && (owner != nil || p.pinned != 0) {
		return fmt.Errorf("network switch %s: the port may not send from %v", p.sw.name, net.HardwareAddr(mac[:]))
	}
	return nil
}

// Announce implements [port.Port]. Without a queue anywhere there is nobody to tell.
func (p *Port) Announce(mac [6]byte) error {
	if err := p.MaySend(mac); err != nil {
		return fmt.Errorf("announce: %w", err)
	}
	arena := p.sw.memory()
	if arena == nil {
		return nil
	}
	page, ok := arena.Alloc(0, pagemem.NoReserve)
	if !ok {
		return fmt.Errorf("network switch %s: announce: no memory", p.sw.name)
	}
	var lost drops
	frame := port.RARP(mac)
	pkts := make([]packet.Packet, 1)
	pkts[0].Append(packet.Frag{Addr: arena.Addr(page), Len: port.RARPLen, Page: page})
	copy(pkts[0].Bytes(0), frame[:])
	from := sender{port: p, arena: arena, drops: &lost}
	from.send(pkts)
	return nil
}

// Status is always up, unless there is an uplink that is not.
func (p *Port) Status() port.Status {
	v := p.sw.view.Load()
	s := port.Status{Up: true, Detail: fmt.Sprintf("switch %s with %d ports", p.sw.name, len(v.ports))}
	if v.uplink != nil && v.uplink != p {
		up := v.uplink.uplink.Status()
		s.Up = up.Up
		s.Detail += ", uplink " + v.uplink.uplink.Kind()
		if up.Detail != "" {
			s.Detail += ": " + up.Detail
		}
	}
	return s
}

// Close implements [port.Port]. The port leaves the switch.
func (p *Port) Close() error {
	err := p.queues.Close()
	p.sw.remove(p)
	return err
}
