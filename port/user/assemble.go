package user

import (
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"

	"github.com/vhostd/vhostd/port/user/dhcp"
	"github.com/vhostd/vhostd/port/user/dns"
	"github.com/vhostd/vhostd/port/user/policy"
)

// Services are what a network offers its guests, and asks of them, beside the way out.
type Services struct {
	// NoDHCP and NoDNS leave a service out.
	NoDHCP, NoDNS bool
	// Rules are the egress policy. Without any the built-in denies hold.
	Rules []policy.Rule
	// Upstreams and Hosts are those of [dns.Config]; without upstreams the host's resolvers are asked.
	Upstreams []dns.Upstream
	Hosts     []dns.Host
	// ResolvConf is a file in place of /etc/resolv.conf.
	ResolvConf string
	// Pins are addresses of certain guests, of both protocols.
	Pins []dhcp.Pin
	// LeaseFile keeps the leases of DHCP over restarts; "" for none. A file that cannot be used is logged, and the network does without.
	LeaseFile string
}

// services are those of a network that runs.
type services struct {
	port    *Port
	policy  *policy.Policy
	dhcp4   *dhcp.Server
	config4 dhcp.Config // guarded by mu once the port is there, as config6
	dhcp6   *dhcp.Server6
	config6 dhcp.Config6
	kept    *dhcp.File // nil without
	names   *dns.Forwarder
	// configNames is what the forwarder was made with.
	configNames dns.Config

	rules  atomic.Uint64 // times that the policy's rules were replaced
	ending sync.Once
	mu     sync.Mutex
	guests map[[6]byte]*policy.Guest
}

// maxViews bounds the guests of a network whose looked-up names are remembered.
const maxViews = 1024

// NewWith is [New] with the services of the packages below this one. The hooks of o that are set take precedence.
func NewWith(o Options, with Services) (*Port, error) {
	o, err := o.Complete()
	if err != nil {
		return nil, err
	}
	s := &services{guests: map[[6]byte]*policy.Guest{}}
	if err := s.make(&o, with); err != nil {
		s.close()
		return nil, fmt.Errorf("network user: %w", err)
	}
	o.services = s
	p, err := New(o)
	if err != nil {
		s.close()
		return nil, err
	}
	return p, nil
}

// make makes the services and hooks them in.
func (s *services) make(o *Options, with Services) (err error) {
	if s.policy, err = policy.New(with.Rules, o.Logger); err != nil {
		return err
	}
	if o.Policy == nil {
		o.Policy = s
	}
	if o.DHCP == nil && !with.NoDHCP {
		if err := s.makeDHCP(*o, with); err != nil {
			return err
		}
		o.DHCP = s
	}
	if o.DNS == nil && !with.NoDNS {
		s.configNames = dns.Config{Upstreams: with.Upstreams, ResolvConf: with.ResolvConf, Hosts: with.Hosts, Gateways: o.gateways()}
		if s.names, err = dns.New(s.configNames, dns.Options{Filter: s.filter, Logger: o.Logger, Fail: s.fail}); err != nil {
			return err
		}
		o.DNS = s
	}
	return nil
}

func (s *services) makeDHCP(o Options, with Services) (err error) {
	var servers4, servers6 []netip.Addr
	if !with.NoDNS {
		servers4, servers6 = []netip.Addr{o.Gateway}, []netip.Addr{o.Gateway6}
	}
	pins4, pins6 := byFamily(with.Pins)
	leases4, leases6 := s.openLeases(o, with.LeaseFile)
	var store dhcp.Store
	if s.kept != nil {
		store = s.kept
	}
	if !o.NoIPv4 {
		s.config4 = dhcp.Config{
			Subnet: o.Subnet, Gateway: o.Gateway, First: o.Guest, Pins: pins4, DNS: servers4, Search: o.Search, MTU: o.MTU,
		}
		if s.dhcp4, err = dhcp.New(s.config4, leases4, store); err != nil {
			return err
		}
	}
	if o.NoIPv6 {
		return nil
	}
	first := nth(o.Subnet6, 0x1000)
	s.config6 = dhcp.Config6{
		Prefix: o.Subnet6, Gateway: o.Gateway6, MAC: o.mac(), First: first, Last: nth(netip.PrefixFrom(first, 64), 0xfff), Pins: pins6,
		DNS: servers6, Search: o.Search,
	}
	s.dhcp6, err = dhcp.New6(s.config6, leases6, store)
	return err
}

// openLeases opens the file of leases, if there is to be one, and returns those of each protocol.
func (s *services) openLeases(o Options, path string) (leases4, leases6 []dhcp.Lease) {
	if path == "" {
		return nil, nil
	}
	kept, leases, err := dhcp.OpenFile(path)
	if err != nil {
		o.Logger.Warn("leases are not kept over a restart", "error", err)
		return nil, nil
	}
	s.kept = kept
	for _, l := range leases {
		if l.Addr.Is4() {
			leases4 = append(leases4, l)
		} else {
			leases6 = append(leases6, l)
		}
	}
	return leases4, leases6
}

// close ends the services. The port is closed, or never was.
func (s *services) close() {
	s.ending.Do(func() {
		if s.policy != nil {
			s.policy.Close()
		}
		if s.names != nil {
			_ = s.names.Close() // what it serves is closed, or about to be
		}
		if s.kept != nil {
			if err := s.kept.Close(); err != nil && s.port != nil {
				s.port.log.Warn("leases were not kept", "error", err)
			}
		}
	})
}

// changeMTU tells of it who asks from now on.
func (s *services) changeMTU(mtu int) {
	if s.dhcp4 == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.config4.MTU = mtu
	_ = s.dhcp4.Configure(s.config4) // differs in a good MTU from one that was good
}

// fail ends the network.
func (s *services) fail(cause any) { s.port.fail(cause) }

// view is the policy for a guest, which is known by its station: what it has looked up over IPv4 it may connect to over IPv6.
func (s *services) view(guest netip.Addr) *policy.Guest {
	mac, _ := s.port.neighbors.lookup(guest)
	s.mu.Lock()
	defer s.mu.Unlock()
	if g := s.guests[mac]; g != nil {
		return g
	}
	if len(s.guests) >= maxViews {
		for other := range s.guests {
			delete(s.guests, other)
			break
		}
	}
	g := s.policy.Guest(net.HardwareAddr(mac[:]).String())
	s.guests[mac] = g
	return g
}

// Check implements [Policy].
func (s *services) Check(guest netip.Addr, dst netip.AddrPort) (bool, string) {
	d := s.view(guest).Check(dst)
	return d.Allowed, d.Reason.String()
}

// filter is the policy for a guest's look-ups.
func (s *services) filter(guest netip.Addr) dns.Filter { return nameFilter{s.view(guest)} }

type nameFilter struct{ *policy.Guest }

func (f nameFilter) Query(name string) bool { return f.Guest.Query(name).Allowed }

// Answer4 implements [DHCP].
func (s *services) Answer4(message []byte, mac [6]byte, _ netip.Addr) (reply []byte, dst netip.Addr, to [6]byte) {
	if s.dhcp4 == nil {
		return nil, dst, to
	}
	r, ok := s.dhcp4.Handle(message, mac)
	if !ok {
		return nil, dst, to
	}
	return r.Payload, r.Addr, r.MAC
}

// Answer6 implements [DHCP].
func (s *services) Answer6(message []byte, _ netip.Addr, mac [6]byte) []byte {
	if s.dhcp6 == nil {
		return nil
	}
	reply, _ := s.dhcp6.Handle(message, mac)
	return reply
}

// ServeDNS implements [DNS].
func (s *services) ServeDNS(conn net.PacketConn, l net.Listener) {
	var err error
	if conn != nil {
		err = s.names.ServePacket(conn)
	} else {
		err = s.names.ServeStream(l)
	}
	if err != nil && !s.port.closing.Load() {
		s.port.log.Error("user network: DNS has stopped", "error", err)
	}
}
