package user

import (
	"errors"

	"github.com/vhostd/vhostd/port/user/dhcp"
	"github.com/vhostd/vhostd/port/user/dns"
	"github.com/vhostd/vhostd/port/user/policy"
)

// LeaseView is what DHCP knows, both protocols, in the order of the addresses.
type LeaseView struct {
	Serving   bool              `json:"serving"`
	Leases    []dhcp.Lease      `json:"leases"`    // at most dhcp.MaxLeases of each protocol
	Neighbors int               `json:"neighbors"` // addresses that guests were heard from
	Drops     map[string]uint64 `json:"drops,omitempty"`
}

// Leases tells what DHCP has given out.
func (p *Port) Leases() LeaseView {
	v := LeaseView{Leases: []dhcp.Lease{}, Neighbors: p.neighbors.count(), Drops: map[string]uint64{}}
	s := p.opts.services
	if s == nil {
		return v
	}
	count := func(reason string, n uint64) {
		if n > 0 {
			v.Drops[reason] += n
		}
	}
	if s.dhcp4 != nil {
		v.Serving = true
		v.Leases = append(v.Leases, s.dhcp4.Leases()...)
		s.dhcp4.Drops(count)
	}
	if s.dhcp6 != nil {
		v.Serving = true
		v.Leases = append(v.Leases, s.dhcp6.Leases()...)
		s.dhcp6.Drops(count)
	}
	return v
}

// DNSView is what the forwarder counts, whom it asks and what it answers itself. It keeps no answers of others.
type DNSView struct {
	Serving   bool                 `json:"serving"`
	Stats     dns.Stats            `json:"stats"`
	Upstreams []dns.UpstreamStatus `json:"upstreams"`
	Hosts     []dns.Static         `json:"hosts"`
}

// DNS tells of the forwarder on the gateway's addresses.
func (p *Port) DNS() DNSView {
	s := p.opts.services
	if s == nil || s.names == nil {
		return DNSView{Upstreams: []dns.UpstreamStatus{}, Hosts: []dns.Static{}}
	}
	return DNSView{Serving: true, Stats: s.names.Stats(), Upstreams: s.names.Upstreams(), Hosts: s.names.Hosts()}
}

// PolicyView is the egress policy: rules in their order, what they decided, and what was refused and ended for each reason.
type PolicyView struct {
	Rules    []policy.RuleStatus `json:"rules"`
	Rest     string              `json:"rest"`     // allow or deny: what no rule matches
	Refusals map[string]uint64   `json:"refusals"` // flows at their beginning, and look-ups
	Ended    map[string]uint64   `json:"ended"`    // flows that were denied later
}

// Policy tells of the egress policy.
func (p *Port) Policy() PolicyView {
	v := PolicyView{Rules: []policy.RuleStatus{}, Rest: policy.Allow.String(), Refusals: map[string]uint64{}, Ended: map[string]uint64{}}
	s := p.opts.services
	if s == nil {
		return v
	}
	v.Rules = append(v.Rules, s.policy.Rules()...)
	if s.policy.DeniesRest() {
		v.Rest = policy.Deny.String()
	}
	s.policy.Refusals(func(reason string, n uint64) { v.Refusals[reason] = n })
	s.policy.EndedFlows(func(reason string, n uint64) { v.Ended[reason] = n })
	return v
}

// PublishedPort describes one publication.
type PublishedPort struct {
	Publish string `json:"publish"` // as the configuration writes it
	Proto   string `json:"proto"`
	Host    string `json:"host"`  // address and ports, or a path; * stands for all addresses
	Guest   string `json:"guest"` // address and first port; * stands for the guest that was heard of last
}

// PublishView lists what is published, in the order in which it came.
type PublishView struct {
	Published []PublishedPort `json:"published"`
}

// Publications tells which ports of the host lead to guests.
func (p *Port) Publications() PublishView {
	v := PublishView{Published: []PublishedPort{}}
	without := "*"
	if !p.opts.NoIPv4 {
		without = hostText(p.opts.Guest)
	}
	for _, what := range p.Published() {
		v.Published = append(v.Published, PublishedPort{
			Publish: what.String(), Proto: what.Proto, Host: what.host(), Guest: what.guest(without),
		})
	}
	return v
}

// SetNames replaces the resolvers and the static names of DNS. On an error nothing changes.
func (p *Port) SetNames(upstreams []dns.Upstream, hosts []dns.Host) error {
	s := p.opts.services
	if s == nil || s.names == nil {
		return errors.New("network user: it does not serve DNS")
	}
	config := s.configNames
	config.Upstreams, config.Hosts = upstreams, hosts
	return s.names.Configure(config)
}

// SetPins replaces the addresses that are kept for certain guests; each learns of it when it asks the next time. On an error nothing
// changes.
func (p *Port) SetPins(pins []dhcp.Pin) error {
	s := p.opts.services
	if s == nil || s.dhcp4 == nil && s.dhcp6 == nil {
		return errors.New("network user: it does not serve DHCP")
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	config4, config6 := s.config4, s.config6
	config4.Pins, config6.Pins = byFamily(pins)
	if s.dhcp6 != nil {
		if err := config6.Validate(); err != nil {
			return err
		}
	}
	if s.dhcp4 != nil {
		if err := s.dhcp4.Configure(config4); err != nil {
			return err
		}
	}
	s.config4, s.config6 = config4, config6
	if s.dhcp6 != nil {
		return s.dhcp6.Configure(config6)
	}
	return nil
}

// SetMaxFlows changes the bound of flows; those beyond it stay until they end or give way to others.
func (p *Port) SetMaxFlows(n int) { p.flows.most.Store(int64(n)) }

// byFamily sorts pins by protocol.
func byFamily(pins []dhcp.Pin) (pins4, pins6 []dhcp.Pin) {
	for _, pin := range pins {
		if pin.Addr.Is4() {
			pins4 = append(pins4, pin)
		} else {
			pins6 = append(pins6, pin)
		}
	}
	return pins4, pins6
}
