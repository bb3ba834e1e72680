package user

import (
	"crypto/sha256"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strconv"
	"strings"

	"github.com/vhostd/vhostd/port"
)

const kind = "user"

// Bounds and defaults of [Options].
const (
	MinMTU          = 1280 // RFC 8200, section 5
	MaxMTU          = 65520
	DefaultMTU      = 1500
	DefaultMaxFlows = 65536
	MaxMaxFlows     = 1 << 20
)

// Default addresses, those of QEMU's user network, which guests may have written down.
var (
	DefaultSubnet  = netip.MustParsePrefix("10.0.2.0/24")
	DefaultGateway = netip.MustParseAddr("10.0.2.2")
	DefaultGuest   = netip.MustParseAddr("10.0.2.15")
)

// Options configure a network. The zero value is a dual-stack network with all defaults.
type Options struct {
	// Name tells this network from others: it goes into the default IPv6 prefix, so that a guest keeps its addresses.
	Name string
	// Subnet, Gateway and Guest are the IPv4 network, our address in it and the address that published ports lead to. Invalid values stand
	// for the defaults; with a Subnet of one's own, Gateway is its second and Guest its fifteenth address unless given.
	Subnet         netip.Prefix
	Gateway, Guest netip.Addr
	// Subnet6 is the IPv6 network, of 64 bits, and Gateway6 our address in it. The defaults are a unique local prefix made of the
	// machine's id and Name (RFC 4193), and its second address.
	Subnet6  netip.Prefix
	Gateway6 netip.Addr
	// NoIPv4 and NoIPv6 leave a protocol out, NoRA the router advertisements.
	NoIPv4, NoIPv6, NoRA bool
	// HostLoopback lets connections to the gateway's addresses reach the loopback of the host.
	HostLoopback bool
	// Publish are the ports of the host that lead to the guest. [Port.Publish] adds more.
	Publish []Publication
	// MTU is the guests' MTU; 0 means DefaultMTU.
	MTU int
	// MaxFlows bounds the TCP and datagram flows that exist at a time; 0 means DefaultMaxFlows.
	MaxFlows int
	// Search are DNS search domains, which router advertisements carry.
	Search []string
	// Hooks are the services of other packages.
	Hooks
	// Logger receives changes of condition at a bounded rate; nil means slog.Default.
	Logger *slog.Logger

	services *services // of NewWith
}

// Complete returns the options with every default filled in, or a [port.OptionError].
func (o Options) Complete() (Options, error) {
	wrong := func(option, value, accept string) (Options, error) {
		return o, &port.OptionError{Kind: kind, Option: option, Value: value, Accept: accept}
	}
	if o.MTU == 0 {
		o.MTU = DefaultMTU
	}
	if o.MaxFlows == 0 {
		o.MaxFlows = DefaultMaxFlows
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	switch {
	case o.MTU < MinMTU || o.MTU > MaxMTU:
		return wrong("mtu", strconv.Itoa(o.MTU), fmt.Sprintf("%d to %d bytes", MinMTU, MaxMTU))
	case o.MaxFlows < 1 || o.MaxFlows > MaxMaxFlows:
		return wrong("max-flows", strconv.Itoa(o.MaxFlows), fmt.Sprintf("1 to %d", MaxMaxFlows))
	case o.NoIPv4 && o.NoIPv6:
		return wrong("ipv6", "off", "on, because ipv4=off")
	}
	if err := o.completeV4(); err != nil {
		return o, err
	}
	if err := o.completeV6(); err != nil {
		return o, err
	}
	return o, nil
}

func (o *Options) completeV4() error {
	wrong := func(option string, value fmt.Stringer, accept string) error {
		return &port.OptionError{Kind: kind, Option: option, Value: value.String(), Accept: accept}
	}
	if o.Subnet == (netip.Prefix{}) {
		o.Subnet = DefaultSubnet
		if o.Gateway == (netip.Addr{}) && o.Guest == (netip.Addr{}) {
			o.Gateway, o.Guest = DefaultGateway, DefaultGuest
		}
	}
	if !o.Subnet.IsValid() || !o.Subnet.Addr().Is4() || o.Subnet.Bits() > 29 || o.Subnet.Bits() < 8 || o.Subnet != o.Subnet.Masked() ||
		!usable(o.Subnet.Addr()) {
		return wrong("subnet", o.Subnet, "an IPv4 prefix of 8 to 29 bits with zeros behind them, such as 10.0.2.0/24")
	}
	if o.Gateway == (netip.Addr{}) {
		o.Gateway = nth(o.Subnet, 2)
	}
	if o.Guest == (netip.Addr{}) {
		n := 15
		if o.Subnet.Bits() > 27 {
			n = 3
		}
		o.Guest = nth(o.Subnet, n)
	}
	if !o.isHost4(o.Gateway) {
		return wrong("gateway", o.Gateway, "an address of a host in "+o.Subnet.String())
	}
	if !o.isHost4(o.Guest) || o.Guest == o.Gateway {
		return wrong("guest", o.Guest, "an address of a host in "+o.Subnet.String()+" other than the gateway's")
	}
	return nil
}

func (o *Options) completeV6() error {
	wrong := func(option string, value fmt.Stringer, accept string) error {
		return &port.OptionError{Kind: kind, Option: option, Value: value.String(), Accept: accept}
	}
	if o.Subnet6 == (netip.Prefix{}) {
		o.Subnet6 = uniqueLocal(o.Name)
		if o.Gateway6.IsValid() {
			o.Subnet6 = netip.PrefixFrom(o.Gateway6, 64).Masked()
		}
	}
	if !o.Subnet6.IsValid() || !o.Subnet6.Addr().Is6() || o.Subnet6.Bits() != 64 || o.Subnet6 != o.Subnet6.Masked() || !usable(o.Subnet6.Addr()) ||
		o.Subnet6.Addr().Is4In6() || o.Subnet6.Addr().IsUnspecified() {
		return wrong("subnet6", o.Subnet6, "an IPv6 prefix of 64 bits, as address configuration wants it (RFC 4862), such as fd00:1::/64")
	}
	if o.Gateway6 == (netip.Addr{}) {
		o.Gateway6 = nth(o.Subnet6, 2)
	}
	if !o.Subnet6.Contains(o.Gateway6) || o.Gateway6 == o.Subnet6.Addr() || o.Gateway6.Zone() != "" {
		return wrong("gateway6", o.Gateway6, "an address in "+o.Subnet6.String()+" other than its first")
	}
	return nil
}

// gateways are our addresses that guests know.
func (o *Options) gateways() (list []netip.Addr) {
	if !o.NoIPv4 {
		list = append(list, o.Gateway)
	}
	if !o.NoIPv6 {
		list = append(list, o.Gateway6)
	}
	return list
}

// mac is our hardware address, a locally administered one.
func (o *Options) mac() [6]byte {
	g := o.Gateway.As4()
	return [6]byte{0x52, 0x56, g[0], g[1], g[2], g[3]}
}

// usable says whether guests can have addresses of the network that begins with a.
func usable(a netip.Addr) bool {
	return !a.IsLoopback() && !a.IsMulticast() && !a.IsLinkLocalUnicast() && !(a.Is4() && (a.As4()[0] == 0 || a.As4()[0] >= 224))
}

// isHost4 says whether a host of the IPv4 network can have the address.
func (o *Options) isHost4(a netip.Addr) bool {
	return o.Subnet.Contains(a) && a != o.Subnet.Addr() && a != lastOf(o.Subnet)
}

// nth is the n-th address of a prefix, counted from its first, which is 0.
func nth(p netip.Prefix, n int) netip.Addr {
	a := p.Addr()
	for range n {
		a = a.Next()
	}
	return a
}

// lastOf is the last address of an IPv4 prefix, that of broadcasts.
func lastOf(p netip.Prefix) netip.Addr {
	b := p.Addr().As4()
	for i := p.Bits(); i < 32; i++ {
		b[i/8] |= 0x80 >> (i % 8)
	}
	return netip.AddrFrom4(b)
}

// machineID is a variable for the tests.
var machineID = "/etc/machine-id"

// uniqueLocal makes a prefix of fd00::/8 from what stays the same: the machine and the network's name. The machine's id itself is
// not to be exposed (machine-id(5)), a hash of it may be.
func uniqueLocal(name string) netip.Prefix {
	id, err := os.ReadFile(machineID)
	if err != nil {
		host, _ := os.Hostname() // the name alone has to do then
		id = []byte(host)
	}
	sum := sha256.Sum256([]byte("vhostd user network\n" + strings.TrimSpace(string(id)) + "\n" + name))
	var b [16]byte
	b[0] = 0xfd
	copy(b[1:8], sum[:]) // global id of 40 bits and subnet id of 16
	return netip.PrefixFrom(netip.AddrFrom16(b), 64)
}
