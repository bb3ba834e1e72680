package dhcp

import (
	"net"
	"net/netip"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/iana"
)

// Reply is a datagram for a guest: from the gateway's port 67 to port 68 of Addr, in a frame for MAC.
type Reply struct {
	Payload []byte
	Addr    netip.Addr
	MAC     MAC
}

var (
	broadcastMAC  = MAC{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	broadcastAddr = netip.AddrFrom4([4]byte{255, 255, 255, 255})
)

// Server answers DHCPv4 messages. All methods are safe for concurrent use.
type Server struct{ server[Config] }

// New makes a server with the leases that an earlier one left behind. store may be nil.
func New(config Config, leases []Lease, store Store) (*Server, error) {
	s := &Server{}
	s.init(store)
	if err := s.Configure(config); err != nil {
		return nil, err
	}
	s.leases.restore(leases)
	return s, nil
}

// Configure makes the server follow another configuration. Guests learn of it when they renew their lease; leases that contradict it
// are then refused. On an error nothing changes.
func (s *Server) Configure(config Config) error {
	if err := config.Validate(); err != nil {
		return err
	}
	if config.Lease == 0 {
		config.Lease = DefaultLease
	}
	config.Search = plain(config.Search)
	if !config.Last.IsValid() {
		config.Last = lastOf(config.Subnet).Prev()
	}
	s.follow(config, config.First, config.Last, config.Pins, config.Gateway)
	return nil
}

// Handle answers the payload of a datagram that came to port 67 in a frame from the given station. False says that there is no
// answer. message may be reused afterwards.
func (s *Server) Handle(message []byte, from MAC) (Reply, bool) {
	request, why := parse4(message, from)
	if request == nil {
		s.dropped[why].Add(1)
		return Reply{}, false
	}
	s.mu.Lock()
	answer, why := s.answer(request, from)
	s.mu.Unlock()
	if answer == nil {
		s.dropped[why].Add(1)
		return Reply{}, false
	}
	reply := Reply{Payload: answer.ToBytes(), MAC: from}
	ciaddr := addrOf(request.ClientIPAddr)
	switch { // RFC 2131, 4.1
	case answer.MessageType() == dhcpv4.MessageTypeNak:
		reply.Addr, reply.MAC = broadcastAddr, broadcastMAC
	case !ciaddr.IsUnspecified():
		reply.Addr = ciaddr
	case request.IsBroadcast():
		reply.Addr, reply.MAC = broadcastAddr, broadcastMAC
	default:
		reply.Addr = addrOf(answer.YourIPAddr)
	}
	return reply, true
}

// parse4 returns a request that makes sense as such, or why there is none.
func parse4(message []byte, from MAC) (*dhcpv4.DHCPv4, drop) {
	if len(message) > MaxMessage {
		return nil, tooLong
	}
	m, err := dhcpv4.FromBytes(message)
	switch {
	case err != nil:
		return nil, malformed
	case m.OpCode != dhcpv4.OpcodeBootRequest || m.HWType != iana.HWTypeEthernet || len(m.ClientHWAddr) != len(from):
		return nil, notClient
	case !addrOf(m.GatewayIPAddr).IsUnspecified():
		return nil, relayed
	case MAC(m.ClientHWAddr) != from || from[0]&1 != 0:
		return nil, spoofed
	}
	return m, 0
}

func (s *Server) answer(m *dhcpv4.DHCPv4, from MAC) (*dhcpv4.DHCPv4, drop) {
	server := addrOf(m.ServerIdentifier())
	switch m.MessageType() {
	case dhcpv4.MessageTypeDiscover:
		return s.discover(m, from)
	case dhcpv4.MessageTypeRequest:
		if server.IsValid() && server != s.config.Gateway {
			return nil, otherServer
		}
		return s.request(m, from, server.IsValid())
	case dhcpv4.MessageTypeDecline:
		l := s.leases.byMAC[from]
		if l != nil && server == s.config.Gateway && addrOf(m.RequestedIPAddress()) == l.Addr {
			s.leases.decline(l, s.now())
		}
		return nil, noAnswer
	case dhcpv4.MessageTypeRelease:
		l := s.leases.byMAC[from]
		if l != nil && server == s.config.Gateway && addrOf(m.ClientIPAddr) == l.Addr {
			s.leases.set(l, Released, "", s.now())
		}
		return nil, noAnswer
	case dhcpv4.MessageTypeInform:
		if ciaddr := addrOf(m.ClientIPAddr); !s.config.host(ciaddr) || ciaddr == s.config.Gateway {
			return nil, malformed
		}
		return s.reply(m, dhcpv4.MessageTypeAck, nil), 0
	}
	return nil, notClient
}

func (s *Server) discover(m *dhcpv4.DHCPv4, from MAC) (*dhcpv4.DHCPv4, drop) {
	now, name := s.now(), hostName(m.HostName())
	l := s.leases.pick(from, name, addrOf(m.RequestedIPAddress()), now)
	if l == nil {
		return nil, noAddress
	}
	s.leases.set(l, Offered, name, now.Add(offerTime))
	return s.reply(m, dhcpv4.MessageTypeOffer, l), 0
}

// request serves the four kinds of request that RFC 2131, 4.3.2, tells apart. What the client wants it says in the option when it
// selects (and names the server) or reboots, and in ciaddr when it renews or rebinds; the answer is yes if it is what this server
// would give.
func (s *Server) request(m *dhcpv4.DHCPv4, from MAC, selecting bool) (*dhcpv4.DHCPv4, drop) {
	want := addrOf(m.RequestedIPAddress())
	if ciaddr := addrOf(m.ClientIPAddr); !selecting && !ciaddr.IsUnspecified() {
		want = ciaddr
	}
	if !want.IsValid() {
		return nil, malformed
	}
	now, name := s.now(), hostName(m.HostName())
	if !s.config.host(want) {
		return s.reply(m, dhcpv4.MessageTypeNak, nil), 0
	}
	l := s.leases.pick(from, name, want, now)
	if l == nil || l.Addr != want {
		return s.reply(m, dhcpv4.MessageTypeNak, nil), 0
	}
	s.leases.set(l, Bound, name, now.Add(s.config.Lease))
	return s.reply(m, dhcpv4.MessageTypeAck, l), 0
}

func addrOf(ip net.IP) netip.Addr {
	addr, _ := netip.AddrFromSlice(ip)
	return addr.Unmap()
}
