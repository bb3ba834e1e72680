package dns

import (
	"net/netip"
	"time"

	mdns "github.com/miekg/dns"
)

// Filter is the policy for one guest. Its methods may be called concurrently, and must not block.
type Filter interface {
	// Query says whether the guest may look up records of name, which is in presentation format with the final dot.
	Query(name string) bool
	// Answer says whether the guest may have an address of an answer. aliases are the names that the answer's CNAME records lead
	// to. The address lasts for ttl.
	Answer(question string, aliases []string, addr netip.Addr, ttl time.Duration) bool
}

// judge has f see the addresses of an answer. What f does not want is taken out; so are addresses beside the answer proper, of which
// nobody asked. An answer that nothing is taken out of stays as it is to the byte. An answer that cannot be parsed cannot be judged:
// ok is false.
func judge(f Filter, answer []byte) (judged []byte, ok bool) {
	var m mdns.Msg
	if m.Unpack(answer) != nil || len(m.Question) != 1 {
		return nil, false
	}
	owners, aliases, ttl := chain(&m)
	keep := func(list []mdns.RR, proper bool) (kept []mdns.RR) {
		for _, rr := range list {
			addrs, given := addresses(rr)
			fits := proper && owners[mdns.CanonicalName(rr.Header().Name)]
			for _, addr := range addrs {
				fits = fits && f.Answer(m.Question[0].Name, aliases, addr, time.Duration(min(ttl, rr.Header().Ttl))*time.Second)
			}
			if fits || !given {
				kept = append(kept, rr)
			}
		}
		return kept
	}
	before := len(m.Answer) + len(m.Ns) + len(m.Extra)
	m.Answer, m.Ns, m.Extra = keep(m.Answer, true), keep(m.Ns, false), keep(m.Extra, false)
	if len(m.Answer)+len(m.Ns)+len(m.Extra) == before {
		return answer, true
	}
	m.Compress, m.AuthenticatedData = true, false
	judged, err := m.Pack()
	return judged, err == nil
}

// chain follows the answer's aliases from the question on. ttl is the shortest life of a link.
func chain(m *mdns.Msg) (owners map[string]bool, aliases []string, ttl uint32) {
	name := mdns.CanonicalName(m.Question[0].Name)
	owners, ttl = map[string]bool{name: true}, 1<<31-1
	next := map[string]*mdns.CNAME{}
	for _, rr := range m.Answer {
		if c, ok := rr.(*mdns.CNAME); ok {
			next[mdns.CanonicalName(c.Hdr.Name)] = c
		}
	}
	for c := next[name]; c != nil; c = next[name] {
		if name = mdns.CanonicalName(c.Target); owners[name] {
			break
		}
		owners[name] = true
		aliases = append(aliases, c.Target)
		ttl = min(ttl, c.Hdr.Ttl)
	}
	return owners, aliases, ttl
}

// addresses are those that a record gives to its reader; given says whether it is such a record at all.
func addresses(rr mdns.RR) (list []netip.Addr, given bool) {
	add := func(ip []byte) {
		if addr, ok := netip.AddrFromSlice(ip); ok {
			list = append(list, addr.Unmap())
		}
	}
	switch rr := rr.(type) {
	case *mdns.A:
		add(rr.A)
	case *mdns.AAAA:
		add(rr.AAAA)
	case *mdns.HTTPS:
		return hints(rr.Value)
	case *mdns.SVCB:
		return hints(rr.Value)
	default:
		return nil, false
	}
	return list, true
}

func hints(values []mdns.SVCBKeyValue) (list []netip.Addr, given bool) {
	for _, v := range values {
		var ips []byte
		var width int
		switch v := v.(type) {
		case *mdns.SVCBIPv4Hint:
			for _, ip := range v.Hint {
				ips, width = append(ips, ip.To4()...), 4
			}
		case *mdns.SVCBIPv6Hint:
			for _, ip := range v.Hint {
				ips, width = append(ips, ip.To16()...), 16
			}
		}
		for ; width > 0 && len(ips) >= width; ips = ips[width:] {
			if addr, ok := netip.AddrFromSlice(ips[:width]); ok {
				list, given = append(list, addr.Unmap()), true
			}
		}
	}
	return list, given
}
