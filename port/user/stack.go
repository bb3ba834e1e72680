package user

import (
	"fmt"
	"net/netip"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"
)

const nicID tcpip.NICID = 1

const (
	// minBuffer to maxBuffer is what a connection may keep in the stack in each direction; see [tcpSide.grant].
	minBuffer = 16 << 10
	maxBuffer = 4 << 20
	// timeWait is short: the last acknowledgment that it guards does not travel far.
	timeWait = time.Second
)

// startStack makes the stack and its one interface, which takes packets to any address and sends from any.
func (p *Port) startStack() error {
	o := &p.opts
	var networks []stack.NetworkProtocolFactory
	if !o.NoIPv4 {
		networks = append(networks, ipv4.NewProtocol)
	}
	if !o.NoIPv6 {
		// Neighbors, routers and groups are the port's business.
		networks = append(networks, ipv6.NewProtocolWithOptions(ipv6.Options{
			NDPConfigs: ipv6.NDPConfigurations{HandleRAs: ipv6.HandlingRAsDisabled},
		}))
	}
	p.stack = stack.New(stack.Options{
		Clock:              clock{tcpip.NewStdClock(), p},
		NetworkProtocols:   networks,
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	p.link = &link{port: p}
	if err := p.stack.CreateNIC(nicID, p.link); err != nil {
		return fmt.Errorf("make the stack's interface: %v", err)
	}
	if err := p.addAddresses(); err != nil {
		return err
	}
	_ = p.stack.SetPromiscuousMode(nicID, true) // the interface is there
	_ = p.stack.SetSpoofing(nicID, true)
	if err := p.tune(); err != nil {
		return err
	}
	for _, size := range bufferClasses {
		p.tcp.forwarders = append(p.tcp.forwarders, tcp.NewForwarder(p.stack, size, MaxMaxFlows, p.tcp.dial))
	}
	p.stack.SetTransportProtocolHandler(tcp.ProtocolNumber, p.tcp.handle)
	p.stack.SetTransportProtocolHandler(udp.ProtocolNumber, p.handleUDP)
	p.stack.SetTransportProtocolHandler(icmp.ProtocolNumber4, p.handleEcho)
	p.stack.SetTransportProtocolHandler(icmp.ProtocolNumber6, p.handleEcho)
	return nil
}

func (p *Port) addAddresses() error {
	add := func(a netip.Addr, bits int) error {
		address := tcpip.ProtocolAddress{
			Protocol:          protocolOf(a),
			AddressWithPrefix: tcpip.AddressWithPrefix{Address: addressOf(a), PrefixLen: bits},
		}
		if err := p.stack.AddProtocolAddress(nicID, address, stack.AddressProperties{}); err != nil {
			return fmt.Errorf("give the stack the address %v: %v", a, err)
		}
		p.stack.AddRoute(tcpip.Route{Destination: anywhere(a), NIC: nicID})
		return nil
	}
	if !p.opts.NoIPv4 {
		if err := add(p.opts.Gateway, p.opts.Subnet.Bits()); err != nil {
			return err
		}
	}
	if p.opts.NoIPv6 {
		return nil
	}
	if err := add(p.link6, 64); err != nil {
		return err
	}
	return add(p.opts.Gateway6, 64)
}

func anywhere(a netip.Addr) tcpip.Subnet {
	if a.Is4() {
		return header.IPv4EmptySubnet
	}
	return header.IPv6EmptySubnet
}

// tune sets what was measured to matter. Without RACK nothing is retransmitted on a link that does not lose; a receive buffer starts
// large, because it grows only by what the host has taken.
func (p *Port) tune() error {
	sack, recovery, cubic := tcpip.TCPSACKEnabled(true), tcpip.TCPRecovery(0), tcpip.CongestionControlOption("cubic")
	moderate, wait := tcpip.TCPModerateReceiveBufferOption(true), tcpip.TCPTimeWaitTimeoutOption(timeWait)
	for _, option := range []tcpip.SettableTransportProtocolOption{
		&sack, &recovery, &cubic, &moderate, &wait,
		&tcpip.TCPReceiveBufferSizeRangeOption{Min: minBuffer, Default: maxBuffer, Max: 2 * maxBuffer},
		&tcpip.TCPSendBufferSizeRangeOption{Min: minBuffer, Default: maxBuffer, Max: 2 * maxBuffer},
	} {
		if err := p.stack.SetTransportProtocolOption(tcp.ProtocolNumber, option); err != nil {
			return fmt.Errorf("set %T of the stack: %v", option, err)
		}
	}
	return nil
}

func addressOf(a netip.Addr) tcpip.Address { return tcpip.AddrFromSlice(a.AsSlice()) }

func netipOf(a tcpip.Address) netip.Addr {
	addr, _ := netip.AddrFromSlice(a.AsSlice())
	return addr
}

func addrPort(a tcpip.Address, port uint16) netip.AddrPort {
	return netip.AddrPortFrom(netipOf(a), port)
}
