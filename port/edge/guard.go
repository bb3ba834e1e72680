package edge

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip/header"
)

// peek is how much of a frame is judged. Headers that end behind it make a frame unreadable.
const peek = 256

// MaxAddrs bounds a guard's addresses: each frame may be compared with all of them.
const MaxAddrs = 64

// Source is what a guest may call itself.
type Source struct {
	// MAC is the only Ethernet address that frames come from; zero allows any.
	MAC [6]byte
	// Addrs are the IP addresses and networks that packets come from; none allows any. With addresses, a guest also may
	//   - have no address yet: IPv4 0.0.0.0 for DHCP and ARP probes, IPv6 :: for neighbor discovery and multicast listening;
	//   - use IPv6 link-local addresses, which it chooses itself;
	// and may not
	//   - advertise itself as a router or redirect others, nor answer as a DHCP server;
	//   - send other protocols than ARP, IPv4 and IPv6.
	Addrs []netip.Prefix
}

// Guard drops frames that a guest sends under another's name. It is safe for concurrent use and may be changed while frames pass.
type Guard struct {
	rules atomic.Pointer[rules]
}

// NewGuard makes a guard for a source.
func NewGuard(s Source) (*Guard, error) {
	g := &Guard{}
	return g, g.Set(s)
}

// Set replaces what the guest may call itself, from the next batch on.
func (g *Guard) Set(s Source) error {
	if s.MAC[0]&1 != 0 {
		return fmt.Errorf("guard: %v is a group's address, not a guest's", net.HardwareAddr(s.MAC[:]))
	}
	if len(s.Addrs) > MaxAddrs {
		return fmt.Errorf("guard: %d addresses, %d are accepted", len(s.Addrs), MaxAddrs)
	}
	if i := slices.IndexFunc(s.Addrs, func(p netip.Prefix) bool { return !p.IsValid() || p.Addr().Is4In6() }); i >= 0 {
		return fmt.Errorf("guard: %v is no address or network", s.Addrs[i])
	}
	g.rules.Store(&rules{mac: s.MAC, anyMAC: s.MAC == [6]byte{}, addrs: slices.Clone(s.Addrs)})
	return nil
}

// open says whether anything passes.
func (r *rules) open() bool { return r.anyMAC && len(r.addrs) == 0 }

func (g *Guard) maySend(mac [6]byte) error {
	if r := g.rules.Load(); !r.anyMAC && mac != r.mac {
		return fmt.Errorf("the guest sends from %v only", net.HardwareAddr(r.mac[:]))
	}
	return nil
}

// refusal is why a frame is dropped.
type refusal int

const (
	fine        refusal = iota
	spoofedMAC          // of another Ethernet address
	spoofedIP           // of another IP address
	spoofedARP          // ARP that speaks for another
	spoofedND           // a neighbor advertisement that speaks for another
	rogueRouter         // a router advertisement or a redirect
	rogueDHCP           // an answer of a DHCP server
	protocol            // neither ARP nor IP
	unreadable          // headers cut, malformed, or too long to be judged
	refusals
)

var refusalNames = [refusals]string{"", "spoofed_mac", "spoofed_ip", "spoofed_arp", "spoofed_nd", "rogue_router", "rogue_dhcp",
	"protocol", "unreadable"}

// rules are an immutable Source.
type rules struct {
	mac    [6]byte
	anyMAC bool
	addrs  []netip.Prefix
}

const (
	etherLen  = 14
	tagLen    = 4
	maxTags   = 2
	etherIPv4 = 0x0800
	etherARP  = 0x0806
	etherVLAN = 0x8100
	etherSVLA = 0x88a8
	etherIPv6 = 0x86dd
)

// judge looks at head, a private copy of the start of a frame of the given length. It allocates nothing.
func (r *rules) judge(head []byte, length int) refusal {
	if len(head) < etherLen {
		return fine // the port counts it as too short
	}
	if !r.anyMAC && [6]byte(head[6:12]) != r.mac {
		return spoofedMAC
	}
	if len(r.addrs) == 0 && r.anyMAC {
		return fine
	}
	kind, at := binary.BigEndian.Uint16(head[12:]), etherLen
	for tags := 0; kind == etherVLAN || kind == etherSVLA; tags++ {
		if tags == maxTags || at+tagLen > len(head) {
			return unreadable
		}
		kind = binary.BigEndian.Uint16(head[at+2:])
		at += tagLen
	}
	switch kind {
	case etherARP:
		return r.arp(head[at:])
	case etherIPv4:
		if len(r.addrs) > 0 {
			return r.ipv4(head[at:])
		}
	case etherIPv6:
		if len(r.addrs) > 0 {
			return r.ipv6(head[at:])
		}
	default:
		if len(r.addrs) > 0 {
			return protocol
		}
	}
	return fine
}

// own says whether the guest may have the address.
func (r *rules) own(addr netip.Addr) bool {
	for i := range r.addrs {
		if r.addrs[i].Contains(addr) {
			return true
		}
	}
	return false
}

// arp wants the sender to be the guest. A probe (RFC 5227) has no sender's address; about others' addresses it would have them give up theirs.
func (r *rules) arp(b []byte) refusal {
	a := header.ARP(b)
	if len(b) < header.ARPSize || !a.IsValid() {
		return unreadable
	}
	if !r.anyMAC && [6]byte(a.HardwareAddressSender()) != r.mac {
		return spoofedARP
	}
	sender := netip.AddrFrom4([4]byte(a.ProtocolAddressSender()))
	if sender.IsUnspecified() {
		sender = netip.AddrFrom4([4]byte(a.ProtocolAddressTarget()))
	}
	if len(r.addrs) > 0 && !r.own(sender) {
		return spoofedARP
	}
	return fine
}

func (r *rules) ipv4(b []byte) refusal {
	ip := header.IPv4(b)
	if len(b) < header.IPv4MinimumSize || header.IPVersion(b) != header.IPv4Version {
		return unreadable
	}
	n := int(ip.HeaderLength())
	if n < header.IPv4MinimumSize || n > len(b) {
		return unreadable
	}
	udp := portsOf(ip.Protocol(), ip.FragmentOffset() != 0, b[n:])
	src := netip.AddrFrom4([4]byte(b[12:16]))
	switch {
	case udp.dst == 68: // only servers send there, and clients do not look where from
		return rogueDHCP
	case src.IsUnspecified() && udp == ports{68, 67}, r.own(src):
		return fine
	}
	return spoofedIP
}

// ports are those of a UDP datagram, zero for anything else.
type ports struct{ src, dst uint16 }

func portsOf(proto uint8, later bool, b []byte) ports {
	if proto != uint8(header.UDPProtocolNumber) || later || len(b) < 4 {
		return ports{}
	}
	return ports{binary.BigEndian.Uint16(b), binary.BigEndian.Uint16(b[2:])}
}

func (r *rules) ipv6(b []byte) refusal {
	if len(b) < header.IPv6MinimumSize || header.IPVersion(b) != header.IPv6Version {
		return unreadable
	}
	src := netip.AddrFrom16([16]byte(b[8:24]))
	proto, rest, later, ok := upper(b[6], b[header.IPv6MinimumSize:])
	if !ok {
		return unreadable // what cannot be found cannot be judged (RFC 7113)
	}
	if proto == uint8(header.UDPProtocolNumber) && !later {
		if len(rest) < header.UDPMinimumSize {
			return unreadable // the first fragment has all headers (RFC 7112)
		}
		if portsOf(proto, later, rest).dst == 546 {
			return rogueDHCP
		}
	}
	if proto == uint8(header.ICMPv6ProtocolNumber) && !later {
		if why := r.icmpv6(rest, src); why != fine || src.IsUnspecified() {
			return why
		}
	}
	if r.own(src) || src.IsLinkLocalUnicast() {
		return fine
	}
	return spoofedIP
}

// upper walks to the upper layer's header. later says that it is in an earlier fragment.
func upper(proto byte, b []byte) (found byte, rest []byte, later, ok bool) {
	const hopByHop, routing, fragment, authentication, options, none = 0, 43, 44, 51, 60, 59
	for {
		switch proto {
		case hopByHop, routing, options, fragment, authentication:
		case none:
			return proto, nil, false, true
		default:
			return proto, b, false, true
		}
		if len(b) < 8 {
			return 0, nil, false, false
		}
		n := (int(b[1]) + 1) * 8
		switch proto {
		case fragment:
			n = 8
			if binary.BigEndian.Uint16(b[2:])>>3 != 0 {
				return b[0], nil, true, true
			}
		case authentication:
			n = (int(b[1]) + 2) * 4
		}
		if len(b) < n {
			return 0, nil, false, false
		}
		proto, b = b[0], b[n:]
	}
}

// icmpv6 judges neighbor discovery. A packet from :: may only be of the kinds that are sent before there is an address.
func (r *rules) icmpv6(b []byte, src netip.Addr) refusal {
	if len(b) < header.ICMPv6HeaderSize {
		return unreadable
	}
	const listenerReport2 = 143 // RFC 3810
	switch kind := header.ICMPv6(b).Type(); kind {
	case header.ICMPv6RouterAdvert, header.ICMPv6RedirectMsg:
		return rogueRouter
	case header.ICMPv6NeighborAdvert, header.ICMPv6NeighborSolicit:
		asks := kind == header.ICMPv6NeighborSolicit
		if asks && !src.IsUnspecified() {
			break // who asks is judged by its address
		}
		if len(b) < header.ICMPv6NeighborAdvertMinimumSize {
			return unreadable
		}
		// A solicitation from :: is about an address that its sender means to take (RFC 4862): others with that address would give it up.
		target := netip.AddrFrom16([16]byte(b[8:24]))
		if !r.own(target) && !target.IsLinkLocalUnicast() {
			return spoofedND
		}
		if asks {
			return fine
		}
	case header.ICMPv6RouterSolicit, header.ICMPv6MulticastListenerReport, header.ICMPv6MulticastListenerDone,
		listenerReport2:
		return fine
	}
	if src.IsUnspecified() {
		return spoofedIP
	}
	return fine
}
