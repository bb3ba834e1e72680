package dns

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// UpstreamStatus is a resolver that questions go to at present.
type UpstreamStatus struct {
	Domain string         `json:"domain"` // the names it is asked for, "." for all that belong to no other domain
	Addr   netip.AddrPort `json:"addr"`
	// Resting says that it did not answer a short while ago and is asked when no other one answers.
	Resting bool `json:"resting,omitempty"`
}

// Upstreams lists the resolvers, those of resolv.conf included if they are asked, in the order of domains and of the configuration.
func (f *Forwarder) Upstreams() []UpstreamStatus {
	s := f.settings.Load()
	byDomain := maps.Clone(s.domains)
	if byDomain["."] == nil {
		byDomain["."] = f.host.resolvers(s.ResolvConf, time.Now())
	}
	now := time.Now()
	list := []UpstreamStatus{}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, domain := range slices.Sorted(maps.Keys(byDomain)) {
		for _, addr := range byDomain[domain] {
			name := strings.TrimSuffix(domain, ".")
			if name == "" {
				name = "."
			}
			list = append(list, UpstreamStatus{Domain: name, Addr: addr, Resting: now.Before(f.resting[addr])})
		}
	}
	return list
}

// Static is a name that is answered here.
type Static struct {
	Name  string       `json:"name"`
	Addrs []netip.Addr `json:"addrs"`
}

// Hosts lists the names that are answered here, the gateway's included, by name.
func (f *Forwarder) Hosts() []Static {
	hosts := f.settings.Load().hosts
	list := make([]Static, 0, len(hosts))
	for _, name := range slices.Sorted(maps.Keys(hosts)) {
		list = append(list, Static{Name: strings.TrimSuffix(name, "."), Addrs: hosts[name]})
	}
	return list
}
