package user

import (
	"encoding/binary"
	"net/netip"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"

	"github.com/vhostd/vhostd/port/user/dhcp"
	"github.com/vhostd/vhostd/virtio"
)

// Messages of neighbor discovery (RFC 4861).
const (
	routerSolicit     = 133
	neighborSolicit   = 135
	neighborAdvert    = 136
	ndpFirst, ndpLast = 133, 137

	ndpHops = 255 // from the link, not from beyond

	optionSource = 1
	optionTarget = 2
)

var (
	allNodes  = netip.MustParseAddr("ff02::1")
	groupMAC6 = [6]byte{0x33, 0x33, 0, 0, 0, 1}
)

const (
	routerLife  = 1800 * time.Second
	advertEvery = 600 * time.Second // MaxRtrAdvInterval
)

// linkLocal is the address that an interface makes of its hardware address (RFC 4291, appendix A).
func linkLocal(mac [6]byte) netip.Addr {
	return netip.AddrFrom16([16]byte{0xfe, 0x80, 8: mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]})
}

// ndp takes a message of neighbor discovery. What it asks and tells lies in the first bytes; options are looked at for nothing, since
// the frame itself says which station speaks.
func (q *queue) ndp(f *inFrame) reason {
	p := q.port
	if f.proto != protoICMPv6 || f.ttl != ndpHops || f.head[f.l4+1] != 0 {
		return badHeader
	}
	if r := f.transport(); r != accepted {
		return r
	}
	guest := (p.opts.Subnet6.Contains(f.src) || f.src.IsLinkLocalUnicast()) && !p.ours(f.src)
	if !guest && !f.src.IsUnspecified() {
		return foreignSource
	}
	if guest {
		q.learn(f.src, f.from())
	}
	kind := f.head[f.l4]
	if kind == routerSolicit {
		if !p.opts.NoRA {
			p.advertise(f.src, f.from())
		}
		return accepted
	}
	if kind != neighborSolicit && kind != neighborAdvert {
		return noAnswer
	}
	if f.end < f.l4+24 || f.n < f.l4+24 {
		return badHeader
	}
	target := netip.AddrFrom16([16]byte(f.head[f.l4+8:]))
	switch {
	case kind == neighborAdvert:
		if (p.opts.Subnet6.Contains(target) || target.IsLinkLocalUnicast()) && !p.ours(target) {
			p.neighbors.learn(target, f.from())
		}
	case target == p.opts.Gateway6, target == p.link6:
		p.answerSolicit(target, f.src, f.from())
	}
	return accepted
}

// answerSolicit says where the gateway is; who looks whether the address is taken, and so has none, is answered through everybody.
func (p *Port) answerSolicit(target, asker netip.Addr, mac [6]byte) {
	var b [32]byte
	b[0] = neighborAdvert
	b[4] = 0x80 | 0x60 // router, solicited, override
	if asker.IsUnspecified() {
		asker, mac, b[4] = allNodes, groupMAC6, 0x80|0x20
	}
	t := target.As16()
	copy(b[8:], t[:])
	b[24], b[25] = optionTarget, 1
	copy(b[26:], p.mac[:])
	p.sendNDP(target, asker, mac, b[:])
}

// solicit asks who has the address.
func (p *Port) solicit(a netip.Addr) {
	t := a.As16()
	group := netip.AddrFrom16([16]byte{0xff, 2, 11: 1, 0xff, t[13], t[14], t[15]}) // RFC 4291 section 2.7.1
	var b [32]byte
	b[0] = neighborSolicit
	copy(b[8:], t[:])
	b[24], b[25] = optionSource, 1
	copy(b[26:], p.mac[:])
	p.sendNDP(p.link6, group, [6]byte{0x33, 0x33, 0xff, t[13], t[14], t[15]}, b[:])
}

func (p *Port) sendNDP(src, dst netip.Addr, mac [6]byte, b []byte) {
	binary.BigEndian.PutUint16(b[2:], 0)
	binary.BigEndian.PutUint16(b[2:], ^checksum.Checksum(b, pseudoSum(protoICMPv6, src, dst, len(b))))
	v := newIP(src, dst, protoICMPv6, len(b), false)
	v.AsSlice()[7] = ndpHops
	_, _ = v.Write(b)
	p.sendView(mac, src, dst, v, virtio.NetHdr{})
}

// advertise tells a station, or all if it has no address yet, that we are a router, which prefix to make addresses of, and who knows names.
func (p *Port) advertise(to netip.Addr, mac [6]byte) {
	if !to.IsLinkLocalUnicast() && !p.opts.Subnet6.Contains(to) {
		to, mac = allNodes, groupMAC6
	}
	advert := dhcp.Advert{
		MAC: p.mac, Prefix: p.opts.Subnet6, Lifetime: routerLife, Autonomous: true, Other: p.opts.DHCP != nil, MTU: p.MTU(),
	}
	if p.opts.DNS != nil {
		advert.DNS, advert.Search = []netip.Addr{p.opts.Gateway6}, p.opts.Search
	}
	b, err := advert.Marshal(p.link6, to)
	if err != nil {
		p.log.Error("user network: no router advertisement", "error", err)
		return
	}
	p.sendNDP(p.link6, to, mac, b)
}

// advertiseSoon starts the advertisements that nobody asks for. They keep guests' routers and prefixes from running out.
func (p *Port) advertiseSoon() {
	if p.opts.NoIPv6 || p.opts.NoRA {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed {
		p.advertTimer = p.after(advertEvery, func() {
			p.advertise(netip.Addr{}, groupMAC6)
			p.advertiseSoon()
		})
	}
}
