package dns

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
)

// clerk is a filter that writes down what it is asked.
type clerk struct {
	mu    sync.Mutex
	notes []string
	names string // look-ups below it are refused
	addrs netip.Prefix
}

func (c *clerk) Query(name string) bool { return !strings.HasSuffix(strings.ToLower(name), c.names) }

func (c *clerk) Answer(question string, aliases []string, addr netip.Addr, ttl time.Duration) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.notes = append(c.notes, fmt.Sprintf("%s%v%v %v", question, aliases, addr, ttl))
	return !c.addrs.Contains(addr)
}

func (c *clerk) take() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	notes := strings.Join(c.notes, "; ")
	c.notes = nil
	return notes
}

func TestFilter(t *testing.T) {
	c := &clerk{names: ".bad.example.", addrs: netip.MustParsePrefix("10.0.0.0/8")}
	r := newResolver(t, nil)
	config := via(r)
	config.Hosts = []Host{{"local.example", netip.MustParseAddr("192.0.2.9")}, {"hidden.example", netip.MustParseAddr("10.0.0.9")}}
	s := newSite(t, config, c)
	for _, tc := range []struct {
		name    string
		kind    uint16
		answer  string
		records int
		notes   string
	}{
		{"w.example.", mdns.TypeA, "w.example. 100 IN A 192.0.2.1|w.example. 90 IN A 10.0.0.1|w.example. 80 IN A 192.0.2.2", 2,
			"w.example.[]192.0.2.1 1m40s; w.example.[]10.0.0.1 1m30s; w.example.[]192.0.2.2 1m20s"},
		{"W.example.", mdns.TypeA, "w.example. 100 IN CNAME x.example.|X.example. 30 IN CNAME y.example.|y.example. 80 IN A 192.0.2.1", 3,
			"W.example.[x.example. y.example.]192.0.2.1 30s"},
		{"w.example.", mdns.TypeA, "w.example. 100 IN A 192.0.2.1|other.example. 100 IN A 192.0.2.7", 1, "w.example.[]192.0.2.1 1m40s"},
		{"w.example.", mdns.TypeA, "w.example. 9 IN CNAME v.example.|v.example. 9 IN CNAME w.example.", 2, ""},
		{"w.example.", mdns.TypeHTTPS, "w.example. 60 IN HTTPS 1 . ipv4hint=192.0.2.1,192.0.2.2 ipv6hint=2001:db8::1", 1,
			"w.example.[]192.0.2.1 1m0s; w.example.[]192.0.2.2 1m0s; w.example.[]2001:db8::1 1m0s"},
		{"w.example.", mdns.TypeHTTPS, "w.example. 60 IN HTTPS 1 . ipv4hint=10.0.0.1", 0, "w.example.[]10.0.0.1 1m0s"},
		{"w.example.", mdns.TypeHTTPS, "w.example. 60 IN HTTPS 1 . alpn=h2", 1, ""},
		{"w.example.", mdns.TypeMX, "w.example. 60 IN MX 1 m.example.", 1, ""},
		{"local.example.", mdns.TypeA, "", 1, "local.example.[]192.0.2.9 1m0s"},
		{"hidden.example.", mdns.TypeA, "", 0, "hidden.example.[]10.0.0.9 1m0s"},
	} {
		r.set(records(mdns.RcodeSuccess, strings.FieldsFunc(tc.answer, func(r rune) bool { return r == '|' })...))
		a := s.ask(tc.name, tc.kind)
		if len(a.Answer) != tc.records || a.Rcode != mdns.RcodeSuccess {
			t.Errorf("%s %s: %v", tc.name, tc.answer, a)
		}
		if notes := c.take(); notes != tc.notes {
			t.Errorf("%s: the filter was asked %s, want %s", tc.answer, notes, tc.notes)
		}
	}
	before := r.asked.Load()
	a := s.exchange("udp", new(mdns.Msg).SetQuestion("x.BAD.example.", mdns.TypeTXT).SetEdns0(1232, false))
	if a.Rcode != mdns.RcodeNameError || r.asked.Load() != before || !strings.Contains(a.String(), "refused by policy") {
		t.Errorf("a refused look-up: %v", a)
	}
	if a := s.ask("x.bad.example.", mdns.TypeTXT); a.Rcode != mdns.RcodeNameError || len(a.Extra) != 0 {
		t.Errorf("a refused look-up without EDNS: %v", a)
	}
	if n := s.Stats().Refused; n != 2 {
		t.Errorf("%d refusals are counted", n)
	}
	// Addresses that nobody asked for do not pass.
	r.set(func(query []byte, stream bool) [][]byte {
		var m mdns.Msg
		_ = m.Unpack(records(mdns.RcodeSuccess, "w.example. 60 IN MX 1 m.example.")(query, stream)[0])
		rr, _ := mdns.NewRR("m.example. 60 IN A 10.0.0.1")
		m.Extra = append(m.Extra, rr)
		b, _ := m.Pack()
		return [][]byte{b}
	})
	if a := s.ask("w.example.", mdns.TypeMX); len(a.Extra) != 0 || len(a.Answer) != 1 {
		t.Errorf("addresses beside the answer: %v", a)
	}
	// What cannot be parsed cannot be judged.
	r.set(func(query []byte, stream bool) [][]byte {
		b := records(mdns.RcodeSuccess, "w.example. 60 IN A 10.0.0.1")(query, stream)[0]
		return [][]byte{b[:len(b)-1]}
	})
	if a := s.ask("w.example.", mdns.TypeA); a.Rcode != mdns.RcodeServerFailure {
		t.Errorf("an answer that is cut: %v", a)
	}
}
