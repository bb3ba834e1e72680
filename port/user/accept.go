package user

import (
	"net/netip"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/virtio"
)

var broadcast = [6]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}

// accept takes one frame, which stays the caller's to release.
func (q *queue) accept(pkt *packet.Packet) reason {
	p, f := q.port, &q.in
	if p.failed.Load() != nil {
		return stackFailed
	}
	if r := f.load(pkt); r != accepted {
		return r
	}
	if to := f.to(); to != p.mac && to[0]&1 == 0 {
		return otherStation
	}
	if from := f.from(); from[0]&1 != 0 || from == [6]byte{} || from == p.mac {
		return foreignSource
	}
	switch t := f.etherType(); {
	case t == etherIPv4 && !p.opts.NoIPv4, t == etherIPv6 && !p.opts.NoIPv6:
		if r := f.parse(); r != accepted {
			return r
		}
		if t == etherIPv4 {
			return q.acceptV4(f)
		}
		return q.acceptV6(f)
	case t == etherARP && !p.opts.NoIPv4:
		return p.arp(f)
	}
	return otherProtocol
}

func (q *queue) acceptV4(f *inFrame) reason {
	p := q.port
	if f.proto == protoUDP && !f.fragment && f.n >= f.l4+udpLen && port16(f.head[f.l4+2:]) == dhcpServerPort {
		if r := f.transport(); r != accepted {
			return r
		}
		return q.dhcp4(f)
	}
	if !p.opts.isHost4(f.src) || f.src == p.opts.Gateway {
		return foreignSource
	}
	q.learn(f.src, f.from())
	if f.dst.IsMulticast() || f.dst == lastOf(p.opts.Subnet) || f.to()[0]&1 != 0 || f.dst.IsLoopback() || f.dst.As4()[0] == 0 || f.dst.As4()[0] >= 240 {
		return badDestination
	}
	if p.opts.Subnet.Contains(f.dst) && f.dst != p.opts.Gateway {
		return q.unreachable(f, errorHost)
	}
	return q.route(f)
}

func (q *queue) acceptV6(f *inFrame) reason {
	p := q.port
	if f.proto == protoICMPv6 && !f.fragment && f.n > f.l4 {
		if t := f.head[f.l4]; t >= ndpFirst && t <= ndpLast {
			return q.ndp(f)
		}
	}
	inside := p.opts.Subnet6.Contains(f.src)
	if !inside && !f.src.IsLinkLocalUnicast() || f.src == p.opts.Gateway6 || f.src == p.link6 || f.src == p.opts.Subnet6.Addr() {
		return foreignSource
	}
	q.learn(f.src, f.from())
	if f.proto == protoUDP && !f.fragment && f.n >= f.l4+udpLen && port16(f.head[f.l4+2:]) == dhcp6ServerPort {
		if r := f.transport(); r != accepted {
			return r
		}
		return q.dhcp6(f)
	}
	ours := f.dst == p.opts.Gateway6 || f.dst == p.link6
	switch {
	case f.dst.IsMulticast(), f.to()[0]&1 != 0, f.dst.IsLoopback(), f.dst.IsUnspecified(), f.dst.Is4In6(), f.dst.IsLinkLocalUnicast() && !ours:
		return badDestination
	case !inside && !ours:
		return foreignSource // a link-local address is not known beyond the link
	case p.opts.Subnet6.Contains(f.dst) && !ours:
		return q.unreachable(f, errorHost)
	}
	return q.route(f)
}

// ours says whether an address is one of the gateway's.
func (p *Port) ours(a netip.Addr) bool {
	return a == p.opts.Gateway || a == p.opts.Gateway6 || a == p.link6
}

// route takes a packet for the gateway or for somewhere outside.
func (q *queue) route(f *inFrame) reason {
	if !f.fragment {
		if r := f.transport(); r != accepted {
			return r
		}
	}
	ours := q.port.ours(f.dst)
	if f.ttl <= 1 && !ours {
		return q.unreachable(f, errorTTL)
	}
	if f.fragment {
		return q.toStack(f, f.l4)
	}
	switch f.proto {
	case protoTCP:
		return q.toStack(f, f.l4+f.tcpHeader())
	case protoUDP:
		if ours && q.port.serving53(f) {
			return q.toStack(f, f.l4+udpLen)
		}
		return q.port.datagram(q.udpOf(f))
	}
	return q.icmp(f)
}

// toStack copies the packet into buffers of the stack: the headers up to split, which the stack edits, apart from what follows.
func (q *queue) toStack(f *inFrame, split int) reason {
	head := buffer.NewView(split - virtio.EthernetHdrLen)
	f.eachPiece(virtio.EthernetHdrLen, split, func(b []byte) { _, _ = head.Write(b) })
	var packet buffer.Buffer
	if n := f.end - split; n > 0 {
		body := buffer.NewView(n)
		f.eachPiece(split, f.end, func(b []byte) { _, _ = body.Write(b) })
		packet = buffer.MakeWithView(body)
		_ = packet.Prepend(head) // fails for foreign memory only
	} else {
		packet = buffer.MakeWithView(head)
	}
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: packet})
	q.port.link.inject(protocolOf(f.src), pkt)
	pkt.DecRef()
	return accepted
}

func protocolOf(a netip.Addr) tcpip.NetworkProtocolNumber {
	if a.Is4() {
		return header.IPv4ProtocolNumber
	}
	return header.IPv6ProtocolNumber
}

func port16(b []byte) uint16 { return uint16(b[0])<<8 | uint16(b[1]) }

// lastStation is what the last frame of a queue taught.
type lastStation struct {
	addr netip.Addr
	mac  [6]byte
	age  int
}

// refresh is how many frames of one station pass before the neighbors hear of it again.
const refresh = 1024

// learn tells the neighbors where an address is.
func (q *queue) learn(a netip.Addr, mac [6]byte) {
	if s := &q.seen; s.addr != a || s.mac != mac || s.age >= refresh {
		q.seen = lastStation{addr: a, mac: mac}
		q.port.neighbors.learn(a, mac)
	}
	q.seen.age++
}
