package network

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/vhostd/vhostd/internal/netspec"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/user"
	"github.com/vhostd/vhostd/port/user/dhcp"
	"github.com/vhostd/vhostd/port/user/dns"
	"github.com/vhostd/vhostd/port/user/policy"
)

// userKind is the network that needs sockets of the host.
const userKind = "user"

// userSpec is the opener of a user network.
type userSpec struct {
	opts     user.Options
	services user.Services
}

func parseUser(s *netspec.Spec) (opener, error) {
	spec := &userSpec{opts: user.Options{
		NoIPv4:       !s.Bool("ipv4", true),
		NoIPv6:       !s.Bool("ipv6", true),
		NoRA:         !s.Bool("ra", true),
		HostLoopback: s.Bool("host-loopback", false),
		MTU:          s.Int("mtu", user.DefaultMTU, user.MinMTU, user.MaxMTU),
		MaxFlows:     s.Int("max-flows", user.DefaultMaxFlows, 1, user.MaxMaxFlows),
	}}
	spec.services.NoDHCP = !s.Bool("dhcp", true)
	for _, read := range []func(*netspec.Spec) error{spec.addresses, spec.names, spec.ways} {
		if err := read(s); err != nil {
			return nil, err
		}
	}
	_, err := spec.opts.Complete()
	return spec, err
}

func userError(format string, args ...any) error {
	return fmt.Errorf("network user: "+format, args...)
}

// addresses reads the networks, and the leases that are pinned.
func (u *userSpec) addresses(s *netspec.Spec) (err error) {
	for _, p := range []struct {
		key string
		to  *netip.Prefix
	}{{"subnet", &u.opts.Subnet}, {"subnet6", &u.opts.Subnet6}} {
		if text := s.String(p.key, ""); text != "" {
			if *p.to, err = netip.ParsePrefix(text); err != nil {
				return userError("%s=%s: accepted are prefixes such as 10.0.2.0/24 and fd00:1::/64", p.key, text)
			}
		}
	}
	for _, a := range []struct {
		key string
		to  *netip.Addr
	}{{"gateway", &u.opts.Gateway}, {"guest", &u.opts.Guest}, {"gateway6", &u.opts.Gateway6}} {
		if text := s.String(a.key, ""); text != "" {
			if *a.to, err = netip.ParseAddr(text); err != nil {
				return userError("%s=%s: accepted are addresses", a.key, text)
			}
		}
	}
	for _, p := range s.List("lease") {
		pin, err := parsePin(p.Value)
		if err != nil {
			return err
		}
		u.services.Pins = append(u.services.Pins, pin)
	}
	return nil
}

// parsePin reads MAC=ADDR or NAME=ADDR.
func parsePin(text string) (pin dhcp.Pin, err error) {
	who, addr, ok := strings.Cut(text, "=")
	if ok {
		if pin.MAC.UnmarshalText([]byte(who)) != nil {
			pin.Name = who
		}
		pin.Addr, err = netip.ParseAddr(addr)
	}
	if !ok || who == "" || err != nil {
		return pin, userError("lease=%s: accepted are MAC=ADDR and NAME=ADDR, such as 52:54:00:12:34:56=10.0.2.20", text)
	}
	return pin, nil
}

// names reads what DNS answers. dns is a switch, or resolvers.
func (u *userSpec) names(s *netspec.Spec) error {
	for _, p := range s.List("search") {
		u.opts.Search = append(u.opts.Search, p.Value)
	}
	for _, p := range s.List("host") {
		host, err := dns.ParseHost(p.Value)
		if err != nil {
			return userError("%w", err)
		}
		u.services.Hosts = append(u.services.Hosts, host)
	}
	for _, p := range s.List("dns") {
		switch p.Value {
		case "on":
			u.services.NoDNS = false
			continue
		case "off":
			u.services.NoDNS = true
			continue
		}
		for text := range strings.SplitSeq(p.Value, ",") {
			upstream, err := dns.ParseUpstream(text)
			if err != nil {
				return userError("%w", err)
			}
			u.services.Upstreams = append(u.services.Upstreams, upstream)
		}
	}
	return nil
}

// ways reads which connections there may be, in and out.
func (u *userSpec) ways(s *netspec.Spec) error {
	for _, p := range s.List("publish") {
		what, err := user.ParsePublication(p.Value)
		if err != nil {
			return userError("%w", err)
		}
		u.opts.Publish = append(u.opts.Publish, what)
	}
	for _, p := range s.List("allow", "deny") {
		action := policy.Allow
		if p.Key == "deny" {
			action = policy.Deny
		}
		rule, err := policy.ParseRule(action, p.Value)
		if err != nil {
			return userError("%w", err)
		}
		u.services.Rules = append(u.services.Rules, rule)
	}
	return nil
}

func (u *userSpec) open(with Options) (port.Port, error) {
	o := u.opts
	o.Name, o.Logger = with.Name, with.Logger
	services := u.services
	services.LeaseFile = with.LeaseFile
	return user.NewWith(o, services)
}

// PublishPaths are the network's Unix sockets.
func (n Network) PublishPaths() (paths []string) {
	u := n.user()
	if u == nil {
		return nil
	}
	for _, what := range u.opts.Publish {
		if what.Path != "" {
			paths = append(paths, what.Path)
		}
	}
	return paths
}

// WithPublish returns the network with further ports that lead to the guest, as its parameter publish takes them. Only the user network
// has such ports.
func (n Network) WithPublish(ports []string) (Network, error) {
	if len(ports) == 0 {
		return n, nil
	}
	kind, _, _ := strings.Cut(n.text, ",")
	if kind != userKind {
		return n, fmt.Errorf("%s: the network %s publishes no ports: accepted with the network %s, and as uplink-publish= of a switch with "+
			"uplink=%s", ports[0], kind, userKind, userKind)
	}
	text := n.text
	for _, p := range ports {
		if _, err := user.ParsePublication(p); err != nil {
			return n, err
		}
		if strings.Contains(p, `"`) {
			return n, fmt.Errorf("publish=%s: a quote is not accepted", p)
		}
		text += `,publish="` + p + `"`
	}
	return Parse(text)
}

// UsesSockets says whether the network, or the uplink of the switch, reaches the networks of the host through sockets.
func (n Network) UsesSockets() bool { return n.user() != nil }

// user is the user network that the guest has, or its switch as an uplink; nil if there is none.
func (n Network) user() *userSpec {
	switch o := n.opener.(type) {
	case *userSpec:
		return o
	case *switchSpec:
		u, _ := o.openUplink.(*userSpec)
		return u
	}
	return nil
}
