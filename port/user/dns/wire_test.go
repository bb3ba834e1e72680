package dns

import (
	"bytes"
	"net/netip"
	"strings"
	"testing"

	mdns "github.com/miekg/dns"
)

func TestParse(t *testing.T) {
	for _, tc := range []struct{ text, want string }{
		{"192.0.2.1", " 192.0.2.1:53"}, {"192.0.2.1:5353", " 192.0.2.1:5353"}, {"fd00::1", " [fd00::1]:53"}, {"[fd00::1]:5353",
			" [fd00::1]:5353"},
		{"fe80::1%eth0", " [fe80::1%eth0]:53"}, {"/Corp.Example./192.0.2.1", "corp.example 192.0.2.1:53"},
		{"/corp.example/[fd00::1]:54", "corp.example [fd00::1]:54"},
		{"", "no address"}, {"x", "no address"}, {"192.0.2.1:0", "no address"}, {"/a", "no domain"}, {"//192.0.2.1", "no domain"},
		{"/a b/192.0.2.1", "no domain"}, {"0.0.0.0", "no resolver"}, {"224.0.0.251", "no resolver"}, {"192.0.2.1:99999", "no address"},
	} {
		u, err := ParseUpstream(tc.text)
		if got := u.Domain + " " + u.Addr.String(); err == nil && got != tc.want || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q: %s, %v; want %s", tc.text, got, err, tc.want)
		}
	}
	for _, tc := range []struct{ text, want string }{
		{"db.example:10.0.0.1", "db.example 10.0.0.1"}, {"DB.:fd00::1", "db fd00::1"}, {"db:[fd00::1]", "db fd00::1"},
		{"db:::ffff:10.0.0.1", "db 10.0.0.1"},
		{"db", "no name"}, {":10.0.0.1", "no name"}, {"a b:10.0.0.1", "no name"}, {"db:x", "no address"}, {"db:fe80::1%eth0", "no address"},
	} {
		h, err := ParseHost(tc.text)
		if got := h.Name + " " + h.Addr.String(); err == nil && got != tc.want || err != nil && !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q: %s, %v; want %s", tc.text, got, err, tc.want)
		}
	}
	for _, c := range []Config{
		{Timeout: -1}, {Hosts: make([]Host, MaxHosts+1)}, {Upstreams: make([]Upstream, MaxUpstreams+1)}, {Hosts: []Host{{Name: "a b"}}},
		{Upstreams: []Upstream{{}}}, {Upstreams: []Upstream{{Domain: "a b", Addr: netip.MustParseAddrPort("192.0.2.1:53")}}},
	} {
		if _, err := New(c, Options{}); err == nil {
			t.Errorf("%+v is accepted", c)
		}
	}
}

func TestMixCase(t *testing.T) {
	query, _ := new(mdns.Msg).SetQuestion("abcdefghijklmnopqrstuvwxyz-0123456789.ABCDEFGHIJKLMNOP.example.", mdns.TypeHTTPS).Pack()
	end := question(query)
	mixed := bytes.Clone(query)
	mixCase(mixed, end)
	if bytes.Equal(mixed, query) || !bytes.EqualFold(mixed[headerLen:end-4], query[headerLen:end-4]) || !bytes.Equal(mixed[end-4:],
		query[end-4:]) {
		t.Errorf("%q became %q", query, mixed)
	}
}

// FuzzHandle feeds any message to a forwarder whose only resolver is gone.
func FuzzHandle(f *testing.F) {
	for _, m := range []*mdns.Msg{
		new(mdns.Msg).SetQuestion("x.example.", mdns.TypeA), new(mdns.Msg).SetQuestion("host.vhostd.internal.",
			mdns.TypeANY).SetEdns0(1232, true),
		new(mdns.Msg).SetAxfr("example."), new(mdns.Msg).SetUpdate("example."), new(mdns.Msg).SetQuestion("2.2.0.10.in-addr.arpa.",
			mdns.TypePTR),
	} {
		b, _ := m.Pack()
		f.Add(b, true)
		f.Add(b, false)
	}
	f.Add([]byte{0, 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0xc0, 12, 0, 1, 0, 1}, false)
	fwd, err := New(Config{
		Upstreams: []Upstream{{Addr: netip.MustParseAddrPort("127.0.0.1:1")}}, Gateways: []netip.Addr{netip.MustParseAddr("10.0.2.2")},
	}, Options{})
	if err != nil {
		f.Fatal(err)
	}
	fwd.Close() // every question to a resolver fails at once
	f.Fuzz(func(t *testing.T, query []byte, stream bool) {
		before := bytes.Clone(query)
		answer := fwd.handle(t.Context(), netip.Addr{}, query, stream)
		if !bytes.Equal(query, before) {
			t.Error("the question was changed")
		}
		silent := len(query) < headerLen || query[2]&flagQR != 0
		if silent != (answer == nil) {
			t.Fatalf("%x is answered with %x", query, answer)
		}
		if !silent && (len(answer) < headerLen || !bytes.Equal(answer[:2], query[:2]) || answer[2]&flagQR == 0 || !stream &&
			len(answer) > maxDatagram) {
			t.Errorf("%x is answered with %x", query, answer)
		}
	})
}

// FuzzAnswer feeds any answer of a resolver to what matches, judges and shortens it.
func FuzzAnswer(f *testing.F) {
	query, _ := new(mdns.Msg).SetQuestion("x.example.", mdns.TypeA).Pack()
	end := question(query)
	for _, lines := range [][]string{
		{"x.example. 60 IN A 10.0.0.1", "x.example. 60 IN A 192.0.2.1"}, {"x.example. 9 IN CNAME y.example.", "y.example. 9 IN AAAA fd00::1"},
		{"x.example. 60 IN HTTPS 1 . alpn=h2 ipv4hint=10.0.0.1 ipv6hint=fd00::1"}, {`x.example. 60 IN TXT "` + strings.Repeat("a", 255) + `"`},
	} {
		f.Add(records(mdns.RcodeSuccess, lines...)(query, false)[0], uint16(512))
	}
	f.Fuzz(func(t *testing.T, answer []byte, size uint16) {
		if !answers(answer, query[:end], false) {
			return
		}
		a := restore(bytes.Clone(answer), query, end)
		if question(a) != end || !bytes.Equal(a[headerLen:end], query[headerLen:end]) || a[0] != query[0] || a[1] != query[1] {
			t.Fatalf("%x became %x", answer, a)
		}
		limit := max(int(size), mdns.MinMsgSize)
		if short := fit(bytes.Clone(a), end, limit); len(short) > limit || len(a) <= limit && !bytes.Equal(short, a) || question(short) != end {
			t.Errorf("%x was shortened to %x", a, short)
		}
		c := &clerk{addrs: netip.MustParsePrefix("10.0.0.0/8")}
		judged, ok := judge(c, bytes.Clone(a))
		if !ok {
			return
		}
		again := &clerk{addrs: c.addrs}
		var m mdns.Msg
		if err := m.Unpack(judged); err != nil {
			t.Fatalf("%x became %x: %v", a, judged, err)
		}
		for _, rr := range append(append(m.Answer, m.Ns...), m.Extra...) {
			list, _ := addresses(rr)
			for _, addr := range list {
				if !again.Answer("", nil, addr, 0) {
					t.Errorf("%v passed", rr)
				}
			}
		}
	})
}
