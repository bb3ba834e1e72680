package policy

import "net/netip"

// builtin is a network that no guest reaches unless a rule names it.
type builtin struct {
	prefix netip.Prefix
	reason Reason
}

// builtins are tried in this order, so that the most telling reason comes first. The metadata services are those that the large
// clouds document: 169.254.169.254 (all), 169.254.170.2 and .23 (Amazon's containers), fd00:ec2::254 (Amazon), fd20:ce::254 (Google),
// 100.100.100.200 (Alibaba), 192.0.0.192 (Oracle). A connection to an unspecified address reaches the loopback on Linux.
var builtins = func() (list []builtin) {
	add := func(reason Reason, prefixes ...string) {
		for _, text := range prefixes {
			prefix := netip.MustParsePrefix(text)
			list = append(list, builtin{prefix, reason})
			if prefix.Addr().Is4() {
				list = append(list, builtin{embed(nat64, prefix), reason}, builtin{embed(compatible, prefix), reason})
			}
		}
	}
	add(Metadata, "169.254.169.254/32", "169.254.170.2/32", "169.254.170.23/32", "100.100.100.200/32", "192.0.0.192/32",
		"fd00:ec2::254/128", "fd20:ce::254/128")
	add(Loopback, "127.0.0.0/8", "0.0.0.0/32", "::1/128", "::/128")
	add(LinkLocal, "169.254.0.0/16", "fe80::/10")
	return list
}()

// The prefixes of 96 bits behind which IPv6 carries IPv4 addresses: RFC 6052, which a host behind NAT64 translates, and the
// deprecated one of RFC 4291. The third, ::ffff:0:0/96, is taken off every address before it is judged.
var (
	nat64      = netip.MustParseAddr("64:ff9b::")
	compatible = netip.MustParseAddr("::")
)

func embed(head netip.Addr, prefix netip.Prefix) netip.Prefix {
	bytes, v4 := head.As16(), prefix.Addr().As4()
	copy(bytes[12:], v4[:])
	return netip.PrefixFrom(netip.AddrFrom16(bytes), prefix.Bits()+96)
}

// forbidden returns the built-in deny that stands against dst, or nil. A built-in deny yields to an allow rule that matches dst and
// is no wider.
func (s *ruleSet) forbidden(dst netip.AddrPort) *builtin {
	for i := range builtins {
		b := &builtins[i]
		if b.prefix.Contains(dst.Addr()) && !s.lifts(b, dst) {
			return b
		}
	}
	return nil
}

func (s *ruleSet) lifts(b *builtin, dst netip.AddrPort) bool {
	for i := range s.rules {
		r := &s.rules[i]
		if r.action == Allow && r.matchesAddr(dst) && r.prefix.Bits() >= b.prefix.Bits() {
			return true
		}
	}
	return false
}
