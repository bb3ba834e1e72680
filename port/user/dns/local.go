package dns

import (
	"net/netip"
	"time"

	mdns "github.com/miekg/dns"
)

// local answers what is known here, or returns nil.
func (s *settings) local(query *mdns.Msg, f Filter) []byte {
	q := query.Question[0]
	name := mdns.CanonicalName(q.Name)
	addrs, known := s.hosts[name]
	target, back := s.reverse[name]
	if !known && !back && !mdns.IsSubDomain(localZone, name) {
		return nil
	}
	m := reply(query)
	header := mdns.RR_Header{Name: q.Name, Class: mdns.ClassINET, Ttl: localTTL}
	switch {
	case known && q.Qclass == mdns.ClassINET:
		m.Answer = hostRecords(q, header, addrs, f)
	case back && q.Qclass == mdns.ClassINET && (q.Qtype == mdns.TypePTR || q.Qtype == mdns.TypeANY):
		header.Rrtype = mdns.TypePTR
		m.Answer = []mdns.RR{&mdns.PTR{Hdr: header, Ptr: target}}
	case !known && !back && name != localZone:
		m.Rcode = mdns.RcodeNameError
	}
	return pack(m)
}

func hostRecords(q mdns.Question, header mdns.RR_Header, addrs []netip.Addr, f Filter) (list []mdns.RR) {
	for _, addr := range addrs {
		header.Rrtype = mdns.TypeAAAA
		if addr.Is4() {
			header.Rrtype = mdns.TypeA
		}
		if q.Qtype != header.Rrtype && q.Qtype != mdns.TypeANY || f != nil && !f.Answer(q.Name, nil, addr, localTTL*time.Second) {
			continue
		}
		if addr.Is4() {
			list = append(list, &mdns.A{Hdr: header, A: addr.AsSlice()})
		} else {
			list = append(list, &mdns.AAAA{Hdr: header, AAAA: addr.AsSlice()})
		}
	}
	return list
}

// refusal is what a guest gets that may not look up a name: no such name, which resolvers do not ask others about, with the reason for
// who understands it (RFC 8914).
func refusal(query *mdns.Msg) []byte {
	m := reply(query)
	m.Rcode = mdns.RcodeNameError
	if opt := m.IsEdns0(); opt != nil {
		opt.Option = append(opt.Option, &mdns.EDNS0_EDE{InfoCode: mdns.ExtendedErrorCodeFiltered, ExtraText: "refused by policy"})
	}
	return pack(m)
}

func reply(query *mdns.Msg) *mdns.Msg {
	m := new(mdns.Msg).SetReply(query)
	m.RecursionAvailable = true
	if query.IsEdns0() != nil {
		m.SetEdns0(mdns.DefaultMsgSize, false)
	}
	return m
}

// pack returns nil for a message that cannot be packed.
func pack(m *mdns.Msg) []byte {
	m.Compress = true
	b, err := m.Pack()
	if err != nil {
		return nil
	}
	return b
}
