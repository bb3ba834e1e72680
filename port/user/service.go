package user

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"

	"github.com/vhostd/vhostd/virtio"
)

// Ports of the gateway's services.
const (
	dnsPort         = 53
	dhcpServerPort  = 67
	dhcpClientPort  = 68
	dhcp6ClientPort = 546
	dhcp6ServerPort = 547
)

// service is something that ends when it is closed.
type service = io.Closer

// startServices opens port 53 of the gateway's addresses.
func (p *Port) startServices() error {
	if p.opts.DNS == nil {
		return nil
	}
	for _, a := range p.opts.gateways() {
		at := tcpip.FullAddress{NIC: nicID, Addr: addressOf(a), Port: dnsPort}
		conn, err := gonet.DialUDP(p.stack, &at, nil, protocolOf(a))
		if err != nil {
			return fmt.Errorf("open port 53 of the gateway: %w", err)
		}
		p.gateways = append(p.gateways, conn)
		l, err := p.listenService(at, protocolOf(a))
		if err != nil {
			return fmt.Errorf("the gateway's DNS: %w", err)
		}
		p.gateways = append(p.gateways, l)
		p.serve53(conn, nil)
		p.serve53(nil, l)
	}
	return nil
}

func (p *Port) serve53(conn net.PacketConn, l net.Listener) {
	p.serves.Go(func() {
		defer p.contain()
		p.opts.DNS.ServeDNS(conn, l)
	})
}

// dhcp4 answers a message to the port of DHCP servers, whatever address it was sent to.
func (q *queue) dhcp4(f *inFrame) reason {
	p := q.port
	if p.opts.DHCP == nil || !f.src.IsUnspecified() && !p.opts.isHost4(f.src) {
		return noAnswer
	}
	if f.dst.IsValid() && f.dst != p.opts.Gateway && f.dst != lastOf(p.opts.Subnet) && f.dst != broadcast4 {
		return badDestination
	}
	reply, dst, to := p.opts.DHCP.Answer4(f.bytes(f.l4+udpLen, f.end, &q.gathered), f.from(), f.src)
	if reply == nil {
		return accepted
	}
	if !dst.Is4() || !p.opts.isHost4(dst) {
		dst, to = broadcast4, broadcast
	} else {
		p.neighbors.learn(dst, to)
	}
	p.sendUDPTo(to, netip.AddrPortFrom(p.opts.Gateway, dhcpServerPort), netip.AddrPortFrom(dst, dhcpClientPort), reply)
	return accepted
}

var broadcast4 = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// dhcp6 answers a message to the port of DHCPv6 servers.
func (q *queue) dhcp6(f *inFrame) reason {
	p := q.port
	if p.opts.DHCP == nil || !f.src.IsLinkLocalUnicast() && !p.opts.Subnet6.Contains(f.src) {
		return noAnswer
	}
	if reply := p.opts.DHCP.Answer6(f.bytes(f.l4+udpLen, f.end, &q.gathered), f.src, f.from()); reply != nil {
		p.sendUDPTo(f.from(), netip.AddrPortFrom(p.link6, dhcp6ServerPort), netip.AddrPortFrom(f.src, dhcp6ClientPort), reply)
	}
	return accepted
}

// sendUDPTo sends a datagram to a station.
func (p *Port) sendUDPTo(mac [6]byte, src, dst netip.AddrPort, payload []byte) reason {
	length := udpLen + len(payload)
	if length+ipv6Len > p.MTU() {
		p.lost.add(oversized)
		return oversized
	}
	var head [udpLen]byte
	binary.BigEndian.PutUint16(head[:], src.Port())
	binary.BigEndian.PutUint16(head[2:], dst.Port())
	binary.BigEndian.PutUint16(head[4:], uint16(length))
	binary.BigEndian.PutUint16(head[6:], pseudoSum(protoUDP, src.Addr(), dst.Addr(), length))
	v := newIP(src.Addr(), dst.Addr(), protoUDP, length, false)
	_, _ = v.Write(head[:])
	_, _ = v.Write(payload)
	return p.sendView(mac, src.Addr(), dst.Addr(), v, virtio.NetHdr{
		Flags: virtio.HdrFNeedsCsum, CsumStart: uint16(virtio.EthernetHdrLen + ipLen(src.Addr())), CsumOffset: udpChecksumOffset,
	})
}
