package dhcp

import (
	"encoding/binary"
	"net"
	"net/netip"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/rfc1035label"
)

const (
	// udpHeaders are what the sizes in option 57 count beside the message: an IPv4 and a UDP header.
	udpHeaders = 28
	// minDatagram is what every IPv4 station accepts, and what a client accepts that does not say (RFC 2131, 2).
	minDatagram = 576
)

// reply makes the answer to m about a lease, which is nil in a refusal and for an INFORM.
func (s *Server) reply(m *dhcpv4.DHCPv4, kind dhcpv4.MessageType, l *Lease) *dhcpv4.DHCPv4 {
	c := &s.config
	r := &dhcpv4.DHCPv4{
		OpCode: dhcpv4.OpcodeBootReply, HWType: m.HWType, TransactionID: m.TransactionID, Flags: m.Flags, ClientHWAddr: m.ClientHWAddr,
		Options: dhcpv4.OptionsFromList(dhcpv4.OptMessageType(kind), dhcpv4.OptServerIdentifier(c.Gateway.AsSlice())),
	}
	if id := m.Options.Get(dhcpv4.OptionClientIdentifier); id != nil {
		r.UpdateOption(dhcpv4.OptClientIdentifier(id)) // RFC 6842
	}
	if kind == dhcpv4.MessageTypeNak {
		r.UpdateOption(dhcpv4.OptMessage("this address is not yours"))
		return r
	}
	if kind == dhcpv4.MessageTypeAck {
		r.ClientIPAddr = m.ClientIPAddr
	}
	if server, err := netip.ParseAddr(c.TFTPServer); err == nil && server.Is4() {
		r.ServerIPAddr = server.AsSlice()
	} else if c.TFTPServer != "" {
		r.ServerHostName = c.TFTPServer
	}
	r.BootFileName = c.BootFile
	if l != nil {
		r.YourIPAddr = l.Addr.AsSlice()
		r.UpdateOption(dhcpv4.OptIPAddressLeaseTime(c.Lease))
	}
	limit := min(max(c.MTU, minDatagram), MaxMessage)
	if size, err := m.MaxMessageSize(); err == nil {
		limit = min(max(int(size), minDatagram), limit)
	} else {
		limit = minDatagram
	}
	addOptions(r, m, s.options(l), limit-udpHeaders)
	return r
}

// options are what may be told, the most important first.
func (s *Server) options(l *Lease) (list []dhcpv4.Option) {
	c := &s.config
	add := func(o dhcpv4.Option) { list = append(list, o) }
	add(dhcpv4.OptSubnetMask(net.CIDRMask(c.Subnet.Bits(), 32)))
	// A client that understands classless routes ignores the router (RFC 3442), so they hold the default route too.
	add(dhcpv4.OptRouter(c.Gateway.AsSlice()))
	if len(c.DNS) > 0 {
		add(dhcpv4.OptDNS(ips(c.DNS)...))
	}
	if l != nil {
		add(dhcpv4.OptRenewTimeValue(c.Lease / 2))
		add(dhcpv4.OptRebindingTimeValue(c.Lease / 8 * 7))
	}
	if c.MTU != 0 {
		add(dhcpv4.OptGeneric(dhcpv4.OptionInterfaceMTU, binary.BigEndian.AppendUint16(nil, uint16(c.MTU))))
	}
	if len(c.Routes) > 0 {
		add(dhcpv4.OptClasslessStaticRoute(c.routes()...))
	}
	if c.BootFile != "" {
		add(dhcpv4.OptBootFileName(c.BootFile))
	}
	if c.TFTPServer != "" {
		add(dhcpv4.OptTFTPServerName(c.TFTPServer))
	}
	if name := c.nameFor(l); name != "" {
		add(dhcpv4.OptHostName(name))
	}
	if len(c.Search) > 0 {
		add(dhcpv4.OptDomainName(c.Search[0]))
		add(dhcpv4.OptDomainSearch(&rfc1035label.Labels{Labels: c.Search}))
	}
	return append(list, dhcpv4.OptBroadcastAddress(lastOf(c.Subnet).AsSlice()))
}

func (c *Config) routes() []*dhcpv4.Route {
	list := []*dhcpv4.Route{{Dest: &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}, Router: c.Gateway.AsSlice()}}
	for _, r := range c.Routes {
		list = append(list, &dhcpv4.Route{
			Dest: &net.IPNet{IP: r.To.Addr().AsSlice(), Mask: net.CIDRMask(r.To.Bits(), 32)}, Router: r.Via.AsSlice(),
		})
	}
	return list
}

// nameFor is the host name that a guest is told.
func (c *Config) nameFor(l *Lease) string {
	if c.HostName != "" || l == nil {
		return c.HostName
	}
	for _, p := range c.Pins {
		if p.Addr == l.Addr {
			return p.Name
		}
	}
	return ""
}

// addOptions adds those options that the client asks for, as long as the message stays within limit bytes. A client without a list
// gets all.
func addOptions(r, m *dhcpv4.DHCPv4, list []dhcpv4.Option, limit int) {
	wanted := m.ParameterRequestList()
	for _, o := range list {
		if len(wanted) > 0 && !wanted.Has(o.Code) && o.Code.Code() != dhcpv4.OptionSubnetMask.Code() {
			continue
		}
		r.UpdateOption(o)
		if len(r.ToBytes()) > limit {
			r.DeleteOption(o.Code)
		}
	}
}

func ips(addrs []netip.Addr) []net.IP {
	list := make([]net.IP, len(addrs))
	for i, a := range addrs {
		list[i] = a.AsSlice()
	}
	return list
}
