package user

import (
	"encoding/binary"
	"net/netip"
	"sync"

	"gvisor.dev/gvisor/pkg/buffer"

	"github.com/vhostd/vhostd/virtio"
)

// maxNeighbors bounds the addresses that are known. A guest that makes up addresses loses its own; those of the guests of one switch
// share the table, unless the switch pins their addresses.
const maxNeighbors = 4096

// neighbors knows behind which hardware address the guests' addresses are. Everything a guest sends teaches it.
type neighbors struct {
	mu     sync.RWMutex
	byAddr map[netip.Addr]*neighbor
	clock  uint64
}

type neighbor struct {
	mac  [6]byte
	used uint64
}

// learn remembers an address. Of a full table the one heard of longest ago, among a few, is forgotten.
func (n *neighbors) learn(a netip.Addr, mac [6]byte) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.clock++
	if e := n.byAddr[a]; e != nil {
		e.mac, e.used = mac, n.clock
		return
	}
	if n.byAddr == nil {
		n.byAddr = map[netip.Addr]*neighbor{}
	}
	if len(n.byAddr) >= maxNeighbors {
		n.forget()
	}
	n.byAddr[a] = &neighbor{mac: mac, used: n.clock}
}

// forget makes room. Maps are walked from a random place, so that a few entries are a sample.
func (n *neighbors) forget() {
	const sample = 16
	var oldest netip.Addr
	seen, used := 0, uint64(0)
	for a, e := range n.byAddr {
		if seen == 0 || e.used < used {
			oldest, used = a, e.used
		}
		if seen++; seen == sample {
			break
		}
	}
	delete(n.byAddr, oldest)
}

func (n *neighbors) lookup(a netip.Addr) (mac [6]byte, ok bool) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if e := n.byAddr[a]; e != nil {
		return e.mac, true
	}
	return mac, false
}

func (n *neighbors) count() int {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return len(n.byAddr)
}

// newest is the address of the prefix that was heard of last, of one station if mac is given.
func (n *neighbors) newest(in netip.Prefix, mac *[6]byte) (a netip.Addr, ok bool) {
	n.mu.RLock()
	defer n.mu.RUnlock()
	used := uint64(0)
	for addr, e := range n.byAddr {
		if in.Contains(addr) && e.used >= used && (mac == nil || e.mac == *mac) {
			a, used, ok = addr, e.used, true
		}
	}
	return a, ok
}

const (
	arpLen     = 28
	arpRequest = 1
	arpReply   = 2
)

// arp answers who asks for the gateway, and learns from the others.
func (p *Port) arp(f *inFrame) reason {
	const at = virtio.EthernetHdrLen
	if f.n < at+arpLen {
		return badHeader
	}
	b := f.head[at : at+arpLen]
	if binary.BigEndian.Uint32(b) != 1<<16|etherIPv4 || b[4] != 6 || b[5] != 4 {
		return badHeader
	}
	op, sender, target := binary.BigEndian.Uint16(b[6:]), netip.AddrFrom4([4]byte(b[14:18])), netip.AddrFrom4([4]byte(b[24:28]))
	if [6]byte(b[8:14]) != f.from() {
		return foreignSource
	}
	if p.opts.isHost4(sender) && sender != p.opts.Gateway {
		p.neighbors.learn(sender, f.from())
	}
	if op == arpRequest && target == p.opts.Gateway {
		p.sendARP(arpReply, f.from(), sender)
	}
	return accepted
}

// sendARP sends a request for, or our reply to, the station with the address.
func (p *Port) sendARP(op uint16, to [6]byte, target netip.Addr) {
	v := buffer.NewViewSize(arpLen)
	b := v.AsSlice()
	binary.BigEndian.PutUint32(b, 1<<16|etherIPv4)
	b[4], b[5] = 6, 4
	binary.BigEndian.PutUint16(b[6:], op)
	copy(b[8:], p.mac[:])
	gateway, other := p.opts.Gateway.As4(), target.As4()
	copy(b[14:], gateway[:])
	if op == arpReply {
		copy(b[18:], to[:])
	}
	copy(b[24:], other[:])
	f := outFrame{view: v}
	p.frame(to, etherARP, &f)
	p.deliver(&f, 0)
}

// ask looks for the station of an address that nobody knows. Whoever has it answers, and the sender tries again.
func (p *Port) ask(a netip.Addr) {
	switch {
	case a.Is4() && p.opts.isHost4(a):
		p.sendARP(arpRequest, broadcast, a)
	case a.Is6() && (p.opts.Subnet6.Contains(a) || a.IsLinkLocalUnicast()):
		p.solicit(a)
	}
}
