package dns

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	mdns "github.com/miekg/dns"
)

// DefaultResolvConf is the file that names the host's resolvers.
const DefaultResolvConf = "/etc/resolv.conf"

// Bounds of [Config].
const (
	MaxHosts     = 1024
	MaxUpstreams = 64
)

const (
	// DefaultTimeout is how long one resolver is waited for.
	DefaultTimeout = 2 * time.Second
	// maxTries bounds how many times resolvers are asked for one answer. All of them take less than answerTime.
	maxTries = 4
	// GatewayName is the name of the host for its guests; LocalZone holds it and is never forwarded.
	GatewayName = "host.vhostd.internal"
	localZone   = "vhostd.internal."
	// localTTL is the life of the answers that are made here, in seconds.
	localTTL = 60
)

// Upstream is a resolver: of all names, or of those in a domain.
type Upstream struct {
	Domain string // without the final dot; empty is everything
	Addr   netip.AddrPort
}

// Host is a name that is answered here, and its address's reverse look-up.
type Host struct {
	Name string
	Addr netip.Addr
}

// Config says what a forwarder answers and whom it asks. It can be replaced while it runs.
type Config struct {
	// Upstreams are asked in their order. Without one for all names, those in ResolvConf are, as the file is at the time.
	Upstreams  []Upstream
	ResolvConf string // empty means DefaultResolvConf
	Hosts      []Host
	// Gateways are our addresses, of which GatewayName is the name.
	Gateways []netip.Addr
	Timeout  time.Duration // for one resolver; 0 means DefaultTimeout
	// MixCase sends names in random case and wants them back so: about one more bit for each letter that who forges an answer has to
	// guess. A few resolvers do not repeat the case, so it is off by default.
	MixCase bool
}

// ParseUpstream reads ADDR, ADDR:PORT, [ADDR6]:PORT, or one of them after /DOMAIN/.
func ParseUpstream(text string) (Upstream, error) {
	u, addr := Upstream{}, text
	if rest, ok := strings.CutPrefix(text, "/"); ok {
		u.Domain, addr, ok = strings.Cut(rest, "/")
		if u.Domain = strings.ToLower(strings.TrimSuffix(u.Domain, ".")); !ok || !validName(u.Domain) {
			return Upstream{}, fmt.Errorf("dns=%s: %q is no domain (accepted: ADDR, ADDR:PORT, [ADDR6]:PORT, also after /DOMAIN/)", text, u.Domain)
		}
	}
	if ip, err := netip.ParseAddr(addr); err == nil {
		u.Addr = netip.AddrPortFrom(ip, 53)
	} else if u.Addr, err = netip.ParseAddrPort(addr); err != nil || u.Addr.Port() == 0 {
		return Upstream{}, fmt.Errorf("dns=%s: %q is no address (accepted: ADDR, ADDR:PORT, [ADDR6]:PORT, also after /DOMAIN/)", text, addr)
	}
	if u.Addr.Addr().IsUnspecified() || u.Addr.Addr().IsMulticast() {
		return Upstream{}, fmt.Errorf("dns=%s: no resolver can have the address %v", text, u.Addr.Addr())
	}
	return u, nil
}

// ParseHost reads NAME:ADDR. An IPv6 address may stand in brackets.
func ParseHost(text string) (Host, error) {
	name, addr, ok := strings.Cut(text, ":")
	if inner, bracket := strings.CutPrefix(addr, "["); bracket && strings.HasSuffix(inner, "]") {
		addr = strings.TrimSuffix(inner, "]")
	}
	ip, err := netip.ParseAddr(addr)
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	switch {
	case !ok || !validName(name):
		return Host{}, fmt.Errorf("host=%s: %q is no name (accepted: NAME:ADDR)", text, name)
	case err != nil || ip.Zone() != "":
		return Host{}, fmt.Errorf("host=%s: %q is no address (accepted: NAME:ADDR)", text, addr)
	}
	return Host{Name: name, Addr: ip.Unmap()}, nil
}

// validName accepts names that need no escapes.
func validName(name string) bool {
	_, ok := mdns.IsDomainName(name)
	return ok && name != "" && !strings.ContainsAny(name, "\\/:,= \t\r\n\"();@$")
}

// settings are a validated Config, ready for look-ups. They do not change.
type settings struct {
	Config
	hosts   map[string][]netip.Addr // by name in lower case with the final dot
	reverse map[string]string
	domains map[string][]netip.AddrPort // by domain in lower case with the final dot; "." is everything
}

func (c Config) settle() (*settings, error) {
	if len(c.Hosts) > MaxHosts || len(c.Upstreams) > MaxUpstreams {
		return nil, fmt.Errorf("dns: %d hosts and %d upstreams, %d and %d are accepted", len(c.Hosts), len(c.Upstreams), MaxHosts, MaxUpstreams)
	}
	if c.Timeout < 0 || c.Timeout > time.Minute {
		return nil, fmt.Errorf("dns: timeout %v is not accepted (accepted: up to a minute)", c.Timeout)
	}
	if c.Timeout == 0 {
		c.Timeout = DefaultTimeout
	}
	if c.ResolvConf == "" {
		c.ResolvConf = DefaultResolvConf
	}
	s := &settings{Config: c, hosts: map[string][]netip.Addr{}, reverse: map[string]string{}, domains: map[string][]netip.AddrPort{}}
	for _, h := range c.Hosts {
		if !validName(h.Name) || !h.Addr.IsValid() {
			return nil, fmt.Errorf("dns: host %q with address %v is not accepted", h.Name, h.Addr)
		}
		s.add(h)
	}
	for _, addr := range c.Gateways {
		s.add(Host{Name: GatewayName, Addr: addr})
	}
	for _, u := range c.Upstreams {
		if !u.Addr.IsValid() || u.Domain != "" && !validName(u.Domain) {
			return nil, fmt.Errorf("dns: upstream %v for %q is not accepted", u.Addr, u.Domain)
		}
		domain := mdns.CanonicalName(u.Domain)
		s.domains[domain] = append(s.domains[domain], u.Addr)
	}
	return s, nil
}

// add makes the first name of an address the one that its reverse look-up gives.
func (s *settings) add(h Host) {
	name := mdns.CanonicalName(h.Name)
	s.hosts[name] = append(s.hosts[name], h.Addr.Unmap())
	if back, err := mdns.ReverseAddr(h.Addr.Unmap().WithZone("").String()); err == nil && s.reverse[back] == "" {
		s.reverse[back] = name
	}
}

// resolvers returns those of the longest domain that holds name, which is in lower case with the final dot. None means that the
// host's are to be asked.
func (s *settings) resolvers(name string) []netip.AddrPort {
	for {
		if list := s.domains[name]; list != nil || name == "." {
			return list
		}
		next, end := mdns.NextLabel(name, 0)
		if name = name[next:]; end {
			name = "."
		}
	}
}
