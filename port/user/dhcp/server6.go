package dhcp

import (
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"
	"github.com/insomniacslk/dhcp/rfc1035label"
)

// maxIAs bounds the identity associations of one message that are answered.
const maxIAs = 8

// Config6 configures a DHCPv6 server. Lists are not changed after they were handed over.
type Config6 struct {
	Prefix  netip.Prefix // the guests' network
	Gateway netip.Addr   // our address in it
	MAC     MAC          // our Ethernet address, of which the server's DUID is made
	// First and Last are the pool. A zero First makes the server stateless: guests make their addresses themselves (SLAAC).
	First, Last netip.Addr
	Pins        []Pin
	DNS         []netip.Addr
	Search      []string
	BootURL     string
	Lease       time.Duration // 0 means DefaultLease
}

// Validate says which value is not accepted.
func (c *Config6) Validate() error {
	switch {
	case !c.Prefix.IsValid() || !c.Prefix.Addr().Is6() || c.Prefix.Addr().Is4In6() || c.Prefix.Masked() != c.Prefix || c.Prefix.Bits() > 120:
		return fmt.Errorf("dhcp: subnet %v is not accepted (accepted: an IPv6 prefix of at most 120 bits)", c.Prefix)
	case !c.host(c.Gateway):
		return fmt.Errorf("dhcp: gateway %v is not an address for a station of %v", c.Gateway, c.Prefix)
	case c.First.IsValid() && (!c.host(c.First) || !c.host(c.Last) || c.Last.Less(c.First)):
		return fmt.Errorf("dhcp: pool %v to %v is not accepted (accepted: addresses of %v)", c.First, c.Last, c.Prefix)
	case len(c.BootURL) > 255:
		return fmt.Errorf("dhcp: the boot file's URL has %d bytes, 255 are accepted", len(c.BootURL))
	case c.Lease != 0 && (c.Lease < MinLease || c.Lease > MaxLease):
		return fmt.Errorf("dhcp: lease time %v is not accepted (accepted: %v to %v)", c.Lease, MinLease, MaxLease)
	}
	if err := validatePins(c.Pins, func(a netip.Addr) bool { return c.host(a) && a != c.Gateway }); err != nil {
		return err
	}
	return validateNames(c.DNS, c.Search, func(a netip.Addr) bool { return a.Is6() && !a.Is4In6() && a.Zone() == "" })
}

// host says whether a station may have the address: the first one of a prefix is every router's (RFC 4291, 2.6.1).
func (c *Config6) host(a netip.Addr) bool {
	return a.Zone() == "" && c.Prefix.Contains(a) && a != c.Prefix.Addr()
}

// Server6 answers DHCPv6 messages. All methods are safe for concurrent use.
type Server6 struct{ server[Config6] }

// New6 makes a server with the leases that an earlier one left behind. store may be nil.
func New6(config Config6, leases []Lease, store Store) (*Server6, error) {
	s := &Server6{}
	s.init(store)
	if err := s.Configure(config); err != nil {
		return nil, err
	}
	s.leases.restore(leases)
	return s, nil
}

// Configure is [Server.Configure].
func (s *Server6) Configure(config Config6) error {
	if err := config.Validate(); err != nil {
		return err
	}
	if config.Lease == 0 {
		config.Lease = DefaultLease
	}
	config.Search = plain(config.Search)
	s.follow(config, config.First, config.Last, config.Pins, config.Gateway)
	return nil
}

// Handle answers the payload of a datagram that came to port 547 in a frame from the given station. The answer goes from the
// gateway's link-local address to port 546 of the address that the question came from. False says that there is none. message may be
// reused afterwards.
func (s *Server6) Handle(message []byte, from MAC) ([]byte, bool) {
	m, why := parse6(message, from)
	if m != nil {
		s.mu.Lock()
		var answer *dhcpv6.Message
		answer, why = s.answer(m, from)
		s.mu.Unlock()
		if answer != nil {
			return answer.ToBytes(), true
		}
	}
	s.dropped[why].Add(1)
	return nil, false
}

func parse6(message []byte, from MAC) (*dhcpv6.Message, drop) {
	switch {
	case len(message) > MaxMessage:
		return nil, tooLong
	case len(message) > 0 && (message[0] == byte(dhcpv6.MessageTypeRelayForward) || message[0] == byte(dhcpv6.MessageTypeRelayReply)):
		return nil, relayed
	case from[0]&1 != 0:
		return nil, spoofed
	}
	m, err := dhcpv6.MessageFromBytes(message)
	if err != nil {
		return nil, malformed
	}
	return m, 0
}

// answer does what RFC 8415, 16 and 18.3, say about each kind of message.
func (s *Server6) answer(m *dhcpv6.Message, from MAC) (*dhcpv6.Message, drop) {
	server, client := m.Options.ServerID(), m.Options.ClientID()
	if server != nil && !server.Equal(s.duid()) {
		return nil, otherServer
	}
	needServer, mayServer := false, false
	switch m.Type() {
	case dhcpv6.MessageTypeRequest, dhcpv6.MessageTypeRenew, dhcpv6.MessageTypeRelease, dhcpv6.MessageTypeDecline:
		needServer, mayServer = true, true
	case dhcpv6.MessageTypeInformationRequest:
		mayServer = true
	}
	if needServer && server == nil || server != nil && !mayServer || client == nil && m.Type() != dhcpv6.MessageTypeInformationRequest {
		return nil, malformed
	}
	kind := dhcpv6.MessageTypeReply
	switch m.Type() {
	case dhcpv6.MessageTypeSolicit:
		if m.GetOneOption(dhcpv6.OptionRapidCommit) != nil {
			return s.assign(m, from, kind, Bound), 0
		}
		return s.assign(m, from, dhcpv6.MessageTypeAdvertise, Offered), 0
	case dhcpv6.MessageTypeRequest, dhcpv6.MessageTypeRenew, dhcpv6.MessageTypeRebind:
		return s.assign(m, from, kind, Bound), 0
	case dhcpv6.MessageTypeConfirm:
		return s.confirm(m)
	case dhcpv6.MessageTypeRelease, dhcpv6.MessageTypeDecline:
		return s.giveBack(m, from), 0
	case dhcpv6.MessageTypeInformationRequest:
		if len(m.Options.IANA())+len(m.Options.IATA())+len(m.Options.IAPD()) > 0 {
			return nil, malformed
		}
		return s.reply(m, kind), 0
	}
	return nil, notClient
}

// assign gives the station's address to its first association and none to others.
func (s *Server6) assign(m *dhcpv6.Message, from MAC, kind dhcpv6.MessageType, state State) *dhcpv6.Message {
	r := s.reply(m, kind)
	if kind == dhcpv6.MessageTypeReply && m.Type() == dhcpv6.MessageTypeSolicit {
		r.AddOption(&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionRapidCommit})
	}
	if kind == dhcpv6.MessageTypeAdvertise {
		r.AddOption(&dhcpv6.OptionGeneric{OptionCode: dhcpv6.OptionPreference, OptionData: []byte{255}}) // there is no better server
	}
	for i, ia := range m.Options.IANA() {
		if i == maxIAs {
			break
		}
		answer := &dhcpv6.OptIANA{IaId: ia.IaId}
		if i > 0 || !s.fill(answer, ia, m, from, state) {
			answer.Options.Add(status(iana.StatusNoAddrsAvail, "one address for each guest"))
		}
		r.AddOption(answer)
	}
	for i, pd := range m.Options.IAPD() {
		if i == maxIAs {
			break
		}
		answer := &dhcpv6.OptIAPD{IaId: pd.IaId}
		answer.Options.Add(status(iana.StatusNoPrefixAvail, "no prefixes here"))
		r.AddOption(answer)
	}
	return r
}

// fill puts the station's address into answer, and what else the client believes to have with a lifetime of zero.
func (s *Server6) fill(answer, asked *dhcpv6.OptIANA, m *dhcpv6.Message, from MAC, state State) bool {
	if !s.config.First.IsValid() && len(s.config.Pins) == 0 {
		return false
	}
	now, name := s.now(), nameOf(m)
	var want netip.Addr
	if first := asked.Options.OneAddress(); first != nil {
		want = addrOf(first.IPv6Addr)
	}
	l := s.leases.pick(from, name, want, now)
	if l == nil {
		return false
	}
	l.DUID = identifier(m)
	life := s.config.Lease
	if state == Offered {
		s.leases.set(l, Offered, name, now.Add(offerTime))
	} else {
		s.leases.set(l, Bound, name, now.Add(life))
	}
	answer.T1, answer.T2 = life/2, life/10*8
	answer.Options.Add(&dhcpv6.OptIAAddress{IPv6Addr: l.Addr.AsSlice(), PreferredLifetime: life, ValidLifetime: life})
	for i, old := range asked.Options.Addresses() {
		if i < maxIAs && addrOf(old.IPv6Addr) != l.Addr && m.Type() != dhcpv6.MessageTypeSolicit {
			answer.Options.Add(&dhcpv6.OptIAAddress{IPv6Addr: old.IPv6Addr})
		}
	}
	return true
}

// confirm says whether what the client has still belongs to this link.
func (s *Server6) confirm(m *dhcpv6.Message) (*dhcpv6.Message, drop) {
	found, code, text := false, iana.StatusSuccess, "on link"
	for _, ia := range m.Options.IANA() {
		for _, a := range ia.Options.Addresses() {
			found = true
			if !s.config.host(addrOf(a.IPv6Addr)) {
				code, text = iana.StatusNotOnLink, "not on link"
			}
		}
	}
	if !found {
		return nil, malformed
	}
	r := s.reply(m, dhcpv6.MessageTypeReply)
	r.AddOption(status(code, text))
	return r, 0
}

// giveBack serves a release or a decline.
func (s *Server6) giveBack(m *dhcpv6.Message, from MAC) *dhcpv6.Message {
	r := s.reply(m, dhcpv6.MessageTypeReply)
	now := s.now()
	for i, ia := range m.Options.IANA() {
		if i == maxIAs {
			break
		}
		l, own := s.leases.byMAC[from], false
		for _, a := range ia.Options.Addresses() {
			own = own || l != nil && addrOf(a.IPv6Addr) == l.Addr
		}
		switch {
		case !own:
			answer := &dhcpv6.OptIANA{IaId: ia.IaId}
			answer.Options.Add(status(iana.StatusNoBinding, "not yours"))
			r.AddOption(answer)
		case m.Type() == dhcpv6.MessageTypeDecline:
			s.leases.decline(l, now)
		default:
			s.leases.set(l, Released, "", now)
		}
	}
	r.AddOption(status(iana.StatusSuccess, "given back"))
	return r
}

// reply makes an answer with what the client asks to be told. A client without a list gets all.
func (s *Server6) reply(m *dhcpv6.Message, kind dhcpv6.MessageType) *dhcpv6.Message {
	c := &s.config
	r := &dhcpv6.Message{MessageType: kind, TransactionID: m.TransactionID}
	r.AddOption(dhcpv6.OptServerID(s.duid()))
	if id := m.GetOneOption(dhcpv6.OptionClientID); id != nil {
		r.AddOption(id)
	}
	list := m.Options.RequestedOptions()
	wants := func(code dhcpv6.OptionCode) bool { return len(list) == 0 || list.Contains(code) }
	if len(c.DNS) > 0 && wants(dhcpv6.OptionDNSRecursiveNameServer) {
		r.AddOption(dhcpv6.OptDNS(ips(c.DNS)...))
	}
	if len(c.Search) > 0 && wants(dhcpv6.OptionDomainSearchList) {
		r.AddOption(dhcpv6.OptDomainSearchList(&rfc1035label.Labels{Labels: c.Search}))
	}
	if c.BootURL != "" && wants(dhcpv6.OptionBootfileURL) {
		r.AddOption(dhcpv6.OptBootFileURL(c.BootURL))
	}
	if m.Type() == dhcpv6.MessageTypeInformationRequest && wants(dhcpv6.OptionInformationRefreshTime) {
		r.AddOption(dhcpv6.OptInformationRefreshTime(c.Lease))
	}
	return r
}

func (s *Server6) duid() dhcpv6.DUID {
	return &dhcpv6.DUIDLL{HWType: iana.HWTypeEthernet, LinkLayerAddr: net.HardwareAddr(s.config.MAC[:])}
}

// maxDUID is the most that an identifier has, in bytes (RFC 8415, 11.1).
const maxDUID = 130

// identifier is the client's, for people.
func identifier(m *dhcpv6.Message) string {
	option := m.GetOneOption(dhcpv6.OptionClientID)
	if option == nil {
		return ""
	}
	b := option.ToBytes()
	return hex.EncodeToString(b[:min(len(b), maxDUID)])
}

// nameOf is the host name that the client sends, if it is one.
func nameOf(m *dhcpv6.Message) string {
	if fqdn := m.Options.FQDN(); fqdn != nil && fqdn.DomainName != nil && len(fqdn.DomainName.Labels) > 0 {
		return hostName(fqdn.DomainName.Labels[0])
	}
	return ""
}

func status(code iana.StatusCode, text string) dhcpv6.Option {
	return &dhcpv6.OptStatusCode{StatusCode: code, StatusMessage: text}
}
