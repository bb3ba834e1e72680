package dhcp

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

const (
	// MaxMessage is the longest message that is parsed, in bytes.
	MaxMessage = 1500
	// DefaultLease is how long an address is given for. A guest renews after half of it.
	DefaultLease = 24 * time.Hour
	// MinLease keeps guests from asking all the time.
	MinLease = time.Minute
	// MaxLease keeps T1 and T2 within the 32 bits of their options.
	MaxLease = 10 * 365 * 24 * time.Hour
	maxList  = 16 // of DNS servers, search domains and routes
	// maxSearch keeps a router advertisement within the smallest MTU of IPv6.
	maxSearch = 512
)

// Route is a destination that guests reach through another router of their network than the gateway.
type Route struct {
	To  netip.Prefix
	Via netip.Addr
}

// Config configures a DHCPv4 server. Lists are not changed after they were handed over.
type Config struct {
	Subnet  netip.Prefix // the guests' network
	Gateway netip.Addr   // our address in it: server identifier and default route
	// First and Last are the pool. A zero Last means the last address of Subnet that a station may have.
	First, Last netip.Addr
	Pins        []Pin
	DNS         []netip.Addr  // resolvers; none are told if it is empty
	Search      []string      // DNS search domains; the first one is also the domain name
	MTU         int           // 0 tells none
	HostName    string        // told to every guest that asks; empty tells the pin's name, if there is one
	Routes      []Route       // beside the default route
	TFTPServer  string        // address or name
	BootFile    string        // at most 127 bytes
	Lease       time.Duration // 0 means DefaultLease
}

// Validate says which value is not accepted.
func (c *Config) Validate() error {
	last := lastOf(c.Subnet)
	switch {
	case !c.Subnet.IsValid() || !c.Subnet.Addr().Is4() || c.Subnet.Masked() != c.Subnet || c.Subnet.Bits() > 30:
		return fmt.Errorf("dhcp: subnet %v is not accepted (accepted: an IPv4 prefix of at most 30 bits)", c.Subnet)
	case !c.host(c.Gateway):
		return fmt.Errorf("dhcp: gateway %v is not an address for a station of %v", c.Gateway, c.Subnet)
	case !c.host(c.First) || c.Last.IsValid() && (!c.host(c.Last) || c.Last.Less(c.First)):
		return fmt.Errorf("dhcp: pool %v to %v is not accepted (accepted: addresses after %v and before %v)", c.First, c.Last,
			c.Subnet.Addr(), last)
	case c.MTU != 0 && (c.MTU < 68 || c.MTU > 65535):
		return fmt.Errorf("dhcp: MTU %d is not accepted (accepted: 68 to 65535)", c.MTU)
	case len(c.BootFile) > 127:
		return fmt.Errorf("dhcp: the boot file's name has %d bytes, 127 are accepted", len(c.BootFile))
	case len(c.TFTPServer) > 63:
		return fmt.Errorf("dhcp: the TFTP server's name has %d bytes, 63 are accepted", len(c.TFTPServer))
	case c.HostName != "" && hostName(c.HostName) != c.HostName:
		return fmt.Errorf("dhcp: host name %q is not accepted (accepted: up to 63 lower-case letters, digits and -)", c.HostName)
	case c.Lease != 0 && (c.Lease < MinLease || c.Lease > MaxLease):
		return fmt.Errorf("dhcp: lease time %v is not accepted (accepted: %v to %v)", c.Lease, MinLease, MaxLease)
	case len(c.Routes) > maxList:
		return fmt.Errorf("dhcp: %d routes, %d are accepted", len(c.Routes), maxList)
	}
	for _, r := range c.Routes {
		if !r.To.IsValid() || !r.To.Addr().Is4() || r.To.Masked() != r.To || !c.host(r.Via) {
			return fmt.Errorf("dhcp: route to %v by %v is not accepted (accepted: an IPv4 prefix by an address of %v)", r.To, r.Via, c.Subnet)
		}
	}
	if err := validatePins(c.Pins, func(a netip.Addr) bool { return c.host(a) && a != c.Gateway }); err != nil {
		return err
	}
	return validateNames(c.DNS, c.Search, netip.Addr.Is4)
}

// host says whether a station may have the address.
func (c *Config) host(a netip.Addr) bool {
	return c.Subnet.Contains(a) && a != c.Subnet.Addr() && a != lastOf(c.Subnet)
}

func validatePins(pins []Pin, host func(netip.Addr) bool) error {
	for i, p := range pins {
		switch {
		case (p.Name == "") == (p.MAC == MAC{}):
			return fmt.Errorf("dhcp: the pin of %v needs a MAC or a name, and not both", p.Addr)
		case p.Name != hostName(p.Name):
			return fmt.Errorf("dhcp: pinned name %q is not accepted (accepted: up to 63 lower-case letters, digits and -)", p.Name)
		case !host(p.Addr):
			return fmt.Errorf("dhcp: %v cannot be pinned, it is not an address for a guest of this network", p.Addr)
		}
		for _, q := range pins[:i] {
			if p.Addr == q.Addr || p.MAC == q.MAC && p.Name == q.Name {
				return fmt.Errorf("dhcp: %v is pinned twice, or two addresses to the same guest", p.Addr)
			}
		}
	}
	return nil
}

func validateNames(dns []netip.Addr, search []string, family func(netip.Addr) bool) error {
	if len(dns) > maxList || len(search) > maxList {
		return fmt.Errorf("dhcp: %d DNS servers and %d search domains, %d of each are accepted", len(dns), len(search), maxList)
	}
	if i := slices.IndexFunc(dns, func(a netip.Addr) bool { return !family(a) }); i >= 0 {
		return fmt.Errorf("dhcp: DNS server %v is of the wrong address family", dns[i])
	}
	size := 0
	for _, domain := range search {
		size += len(domain) + 2
		for label := range strings.SplitSeq(strings.TrimSuffix(domain, "."), ".") {
			if label == "" || len(label) > 63 || len(domain) > 253 || strings.Trim(label, labelBytes) != "" {
				return fmt.Errorf("dhcp: search domain %q is not accepted (accepted: labels of up to 63 letters, digits, - and _)", domain)
			}
		}
	}
	if size > maxSearch {
		return fmt.Errorf("dhcp: the search domains have %d bytes together, %d are accepted", size, maxSearch)
	}
	return nil
}

// plain is search without final dots.
func plain(search []string) []string {
	list := make([]string, len(search))
	for i, domain := range search {
		list[i] = strings.TrimSuffix(domain, ".")
	}
	return list
}

const labelBytes = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"

// lastOf is the last address of a prefix: the broadcast address in IPv4.
func lastOf(p netip.Prefix) netip.Addr {
	if !p.IsValid() {
		return netip.Addr{}
	}
	bytes := p.Addr().AsSlice()
	for i := range bytes {
		if host := (i+1)*8 - p.Bits(); host > 0 {
			bytes[i] |= byte(1<<min(host, 8) - 1)
		}
	}
	last, _ := netip.AddrFromSlice(bytes)
	return last
}
