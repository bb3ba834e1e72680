package dns

import (
	"bytes"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	mdns "github.com/miekg/dns"
)

// TestNAT09_EveryType passes all record types in both directions and compares what arrives with what was sent, byte by byte.
func TestNAT09_EveryType(t *testing.T) {
	lines := []string{
		"WwW.Example.com. 60 IN A 192.0.2.1", "WwW.Example.com. 60 IN AAAA 2001:db8::1", "WwW.Example.com. 60 IN MX 10 mail.example.com.",
		`WwW.Example.com. 60 IN TXT "` + strings.Repeat("a", 255) + `" "` + strings.Repeat("b", 45) + `"`,
		"WwW.Example.com. 60 IN SRV 1 2 443 x.example.com.", "WwW.Example.com. 60 IN PTR host.example.com.",
		"WwW.Example.com. 60 IN NS ns.example.com.", "WwW.Example.com. 60 IN SOA ns.example.com. root.example.com. 1 2 3 4 5",
		`WwW.Example.com. 60 IN CAA 0 issue "ca.example"`, "WwW.Example.com. 60 IN HTTPS 1 . alpn=h2 ipv4hint=192.0.2.1",
		`WwW.Example.com. 60 IN TYPE65280 \# 4 01020304`, "WwW.Example.com. 60 IN CNAME other.example.com.",
		"WwW.Example.com. 60 IN CNAME b.example.com.\nb.example.com. 60 IN CNAME c.example.com.\nc.example.com. 60 IN A 192.0.2.3",
		"WwW.Example.com. 60 IN TXT" + strings.Repeat(` "`+strings.Repeat("c", 200)+`"`, 5),
	}
	sentBy := make(chan []byte, 1)
	r := newResolver(t, nil)
	s := newSite(t, via(r), nil)
	for _, mixed := range []bool{false, true} {
		c := via(r)
		c.MixCase = mixed
		if err := s.Configure(c); err != nil {
			t.Fatal(err)
		}
		for _, line := range lines {
			r.set(func(query []byte, stream bool) [][]byte {
				answer := records(mdns.RcodeSuccess, strings.Split(line, "\n")...)(query, stream)
				sentBy <- answer[0]
				return answer
			})
			rr, _ := mdns.NewRR(strings.Split(line, "\n")[0])
			for _, kind := range []uint16{rr.Header().Rrtype, mdns.TypeANY} {
				query, _ := new(mdns.Msg).SetQuestion("WwW.Example.com.", kind).SetEdns0(1232, true).Pack()
				got, err := s.raw(query)
				end, sent := question(query), <-sentBy
				if n := len(got); err != nil || n != len(sent) || !bytes.Equal(got[:2], query[:2]) || !bytes.Equal(got[12:end], query[12:end]) ||
					!bytes.Equal(got[2:12], sent[2:12]) || !bytes.Equal(got[end:], sent[end:]) {
					t.Errorf("%s: error %v\nsent %x\n got %x", line, err, sent, got)
				}
			}
		}
	}
}

// raw asks by a datagram.
func (s *site) raw(query []byte) ([]byte, error) {
	conn, err := net.Dial("udp", s.addr)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	if _, err := conn.Write(query); err != nil {
		return nil, err
	}
	got := make([]byte, maxAnswer)
	n, err := conn.Read(got)
	return got[:n], err
}

func TestNAT09_Codes(t *testing.T) {
	r := newResolver(t, nil)
	s := newSite(t, via(r), nil)
	for _, rcode := range []int{mdns.RcodeSuccess, mdns.RcodeNameError, mdns.RcodeServerFailure, mdns.RcodeRefused,
		mdns.RcodeNotImplemented} {
		r.set(records(rcode))
		for _, network := range []string{"udp", "tcp"} {
			if a := s.exchange(network, new(mdns.Msg).SetQuestion("x.example.", mdns.TypeAAAA)); a.Rcode != rcode || len(a.Answer) != 0 {
				t.Errorf("code %d over %s became %v", rcode, network, a)
			}
		}
	}
	// A resolver that refuses with a bare header.
	r.set(func(query []byte, _ bool) [][]byte {
		return [][]byte{append(query[:2:2], 0x80, 5, 0, 0, 0, 0, 0, 0, 0, 0)}
	})
	if a := s.ask("x.example.", mdns.TypeA); a.Rcode != mdns.RcodeRefused {
		t.Errorf("bare refusal: %v", a)
	}
}

func TestLargeAnswers(t *testing.T) {
	var lines []string
	for i := range 200 {
		lines = append(lines, fmt.Sprintf("big.example. 60 IN A 192.0.2.%d", i))
	}
	// The resolver truncates datagrams, as real ones do.
	r := newResolver(t, func(query []byte, stream bool) [][]byte {
		var m mdns.Msg
		_ = m.Unpack(records(mdns.RcodeSuccess, lines...)(query, stream)[0])
		m.Compress = true
		if !stream {
			m.Truncate(512)
		}
		b, _ := m.Pack()
		return [][]byte{b}
	})
	s := newSite(t, via(r), nil)
	if a := s.ask("big.example.", mdns.TypeA); !a.Truncated || len(a.Answer) == 0 {
		t.Errorf("512 bytes: %d records, truncated %v", len(a.Answer), a.Truncated)
	}
	if a := s.exchange("udp", new(mdns.Msg).SetQuestion("big.example.", mdns.TypeA).SetEdns0(4096, false)); a.Truncated ||
		len(a.Answer) != 200 {
		t.Errorf("4096 bytes: %d records, truncated %v", len(a.Answer), a.Truncated)
	}
	if a := s.exchange("tcp", new(mdns.Msg).SetQuestion("big.example.", mdns.TypeA)); a.Truncated || len(a.Answer) != 200 {
		t.Errorf("TCP: %d records, truncated %v", len(a.Answer), a.Truncated)
	}
	if st := s.Stats(); st.Truncated != 1 || st.Streams != 3 {
		t.Errorf("%+v", st)
	}
}

func TestFailover(t *testing.T) {
	dead, broken := newResolver(t, silence), newResolver(t, records(mdns.RcodeServerFailure))
	good := newResolver(t, records(mdns.RcodeSuccess, "x.example. 60 IN A 192.0.2.1"))
	hasty := func(resolvers ...*resolver) Config {
		c := via(resolvers...)
		c.Timeout = 300 * time.Millisecond
		return c
	}
	s := newSite(t, hasty(dead, broken, good), nil)
	for range 3 {
		if a := s.ask("x.example.", mdns.TypeA); len(a.Answer) != 1 {
			t.Errorf("answer %v", a)
		}
	}
	if dead.asked.Load() != 1 || broken.asked.Load() != 3 {
		t.Errorf("the silent resolver was asked %d times, the broken one %d times", dead.asked.Load(), broken.asked.Load())
	}
	if !strings.Contains(s.log.String(), "does not answer") || strings.Count(s.log.String(), "\n") != 1 {
		t.Errorf("log: %s", s.log)
	}
	if a := newSite(t, hasty(broken), nil).ask("x.example.", mdns.TypeA); a.Rcode != mdns.RcodeServerFailure {
		t.Errorf("one resolver that fails: %v", a)
	}
	begin := time.Now()
	nobody := newSite(t, hasty(dead), nil)
	if a := nobody.ask("x.example.", mdns.TypeA); a.Rcode != mdns.RcodeServerFailure || nobody.Stats().Failed != 1 {
		t.Errorf("no resolver: %v", a)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("it took %v to say so", took)
	}
	// The resolver comes back.
	dead.set(records(mdns.RcodeSuccess, "x.example. 60 IN A 192.0.2.1"))
	if a := nobody.ask("x.example.", mdns.TypeA); len(a.Answer) != 1 || !strings.Contains(nobody.log.String(), "answers again") {
		t.Errorf("after it came back: %v", a)
	}
}

// TestRefusedPort: nobody listens at the resolver's port, which the kernel says at once.
func TestRefusedPort(t *testing.T) {
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := conn.LocalAddr().(*net.UDPAddr).AddrPort()
	conn.Close()
	good := newResolver(t, records(mdns.RcodeSuccess, "x.example. 60 IN A 192.0.2.1"))
	c := via(good)
	c.Upstreams, c.Timeout = append([]Upstream{{Addr: at}}, c.Upstreams...), 20*time.Second
	begin := time.Now()
	if a := newSite(t, c, nil).ask("x.example.", mdns.TypeA); len(a.Answer) != 1 || time.Since(begin) > 5*time.Second {
		t.Errorf("%v after %v", a, time.Since(begin))
	}
}

// TestForgedAnswers: nothing but the answer to the question counts.
func TestForgedAnswers(t *testing.T) {
	good := records(mdns.RcodeSuccess, "x.example. 60 IN A 192.0.2.1")
	r := newResolver(t, func(query []byte, stream bool) [][]byte {
		evil := records(mdns.RcodeSuccess, "x.example. 60 IN A 6.6.6.6")(query, stream)[0]
		forge := func(change func(b []byte)) []byte {
			b := bytes.Clone(evil)
			change(b)
			return b
		}
		end := question(query)
		return [][]byte{
			forge(func(b []byte) { b[0]++ }),         // another identifier
			forge(func(b []byte) { b[13] = 'y' }),    // another name
			forge(func(b []byte) { b[end-3] = 28 }),  // another type
			forge(func(b []byte) { b[2] &^= 0x80 }),  // no answer
			forge(func(b []byte) { b[2] |= 5 << 3 }), // another operation
			evil[:3], {}, good(query, stream)[0],
		}
	})
	s := newSite(t, via(r), nil)
	a := s.ask("x.example.", mdns.TypeA)
	if len(a.Answer) != 1 || a.Answer[0].(*mdns.A).A.String() != "192.0.2.1" {
		t.Errorf("got %v", a)
	}
	if n := s.Stats().Stray; n != 7 {
		t.Errorf("%d stray datagrams", n)
	}
	// With mixed case, an answer whose letters differ is forged.
	c := via(r)
	c.MixCase, c.Timeout = true, 300*time.Millisecond
	if err := s.Configure(c); err != nil {
		t.Fatal(err)
	}
	r.set(func(query []byte, stream bool) [][]byte {
		b := good(query, stream)[0]
		b[13] ^= 0x20
		return [][]byte{b}
	})
	if a := s.ask("abcdefgh.example.", mdns.TypeA); a.Rcode != mdns.RcodeServerFailure {
		t.Errorf("another case: %v", a)
	}
}

func TestNotQuestions(t *testing.T) {
	r := newResolver(t, records(mdns.RcodeSuccess))
	s := newSite(t, via(r), nil)
	good, _ := new(mdns.Msg).SetQuestion("x.example.", mdns.TypeA).Pack()
	with := func(at int, b byte) []byte {
		c := bytes.Clone(good)
		c[at] = b
		return c
	}
	transfer, _ := new(mdns.Msg).SetAxfr("example.").Pack()
	loop := append(bytes.Clone(good[:12]), 0xc0, 12, 0, 1, 0, 1)
	long := bytes.Clone(good[:12])
	for range 128 {
		long = append(append(long, 63), bytes.Repeat([]byte{'a'}, 63)...)
	}
	for _, c := range []struct {
		what    string
		message []byte
		rcode   int // -1 is silence
	}{
		{"short", good[:11], -1}, {"answer", with(2, 0x81), -1}, {"update", with(2, 5<<3), mdns.RcodeNotImplemented},
		{"no question", with(5, 0), mdns.RcodeFormatError}, {"two questions", with(5, 2), mdns.RcodeFormatError},
		{"cut", good[:len(good)-1], mdns.RcodeFormatError}, {"pointer loop", loop, mdns.RcodeFormatError}, {"long name", long,
			mdns.RcodeFormatError},
		{"records that are not there", with(11, 9), -2}, {"65535 answers", with(6, 255), -2}, {"transfer", transfer, mdns.RcodeNotImplemented},
	} {
		answer := s.handle(t.Context(), netip.Addr{}, c.message, false)
		switch {
		case c.rcode == -2 && answer == nil || c.rcode == -1 && answer != nil:
			t.Errorf("%s: answer %x", c.what, answer)
		case c.rcode >= 0 && (len(answer) < 12 || int(answer[3]&15) != c.rcode || answer[2]&0x80 == 0 || !bytes.Equal(answer[:2],
			c.message[:2])):
			t.Errorf("%s: answer %x, want code %d", c.what, answer, c.rcode)
		}
	}
}

func TestHostsAndDomains(t *testing.T) {
	general := newResolver(t, records(mdns.RcodeSuccess, "x. 60 IN A 192.0.2.1"))
	corp := newResolver(t, records(mdns.RcodeSuccess, "x. 60 IN A 192.0.2.2"))
	lab := newResolver(t, records(mdns.RcodeSuccess, "x. 60 IN A 192.0.2.3"))
	c := via(general)
	c.Upstreams = append(c.Upstreams, Upstream{"corp.example", corp.at}, Upstream{"lab.corp.example", lab.at})
	c.Hosts = []Host{{"db.example", netip.MustParseAddr("10.0.2.7")}, {"DB.example", netip.MustParseAddr("fd00::7")}}
	c.Gateways = []netip.Addr{netip.MustParseAddr("10.0.2.2"), netip.MustParseAddr("fd00::2")}
	s := newSite(t, c, nil)
	for _, tc := range []struct {
		name  string
		kind  uint16
		want  string
		rcode int
	}{
		{"www.example.", mdns.TypeA, "192.0.2.1", 0},
		{"corp.example.", mdns.TypeA, "192.0.2.2", 0},
		{"a.b.CORP.example.", mdns.TypeA, "192.0.2.2", 0},
		{"notcorp.example.", mdns.TypeA, "192.0.2.1", 0},
		{"a.lab.corp.example.", mdns.TypeA, "192.0.2.3", 0},
		{".", mdns.TypeNS, "192.0.2.1", 0},
		{"Db.example.", mdns.TypeA, "10.0.2.7", 0},
		{"db.example.", mdns.TypeAAAA, "fd00::7", 0},
		{"db.example.", mdns.TypeANY, "10.0.2.7 fd00::7", 0},
		{"db.example.", mdns.TypeMX, "", 0},
		{"host.vhostd.internal.", mdns.TypeA, "10.0.2.2", 0},
		{"host.vhostd.internal.", mdns.TypeAAAA, "fd00::2", 0},
		{"vhostd.internal.", mdns.TypeA, "", 0},
		{"other.vhostd.internal.", mdns.TypeA, "", mdns.RcodeNameError},
		{"2.2.0.10.in-addr.arpa.", mdns.TypePTR, "host.vhostd.internal.", 0},
		{"7.2.0.10.in-addr.arpa.", mdns.TypePTR, "db.example.", 0},
		{"7.2.0.10.in-addr.arpa.", mdns.TypeA, "", 0},
		{"2." + strings.Repeat("0.", 27) + "0.d.f.ip6.arpa.", mdns.TypePTR, "", 0}, // malformed: fewer parts; forwarded
	} {
		a := s.ask(tc.name, tc.kind)
		var got []string
		for _, rr := range a.Answer {
			switch rr := rr.(type) {
			case *mdns.A:
				got = append(got, rr.A.String())
			case *mdns.AAAA:
				got = append(got, rr.AAAA.String())
			case *mdns.PTR:
				got = append(got, rr.Ptr)
			}
		}
		if strings.Contains(tc.name, "ip6.arpa") {
			continue
		}
		if strings.Join(got, " ") != tc.want || a.Rcode != tc.rcode {
			t.Errorf("%s %s: %v, code %d", tc.name, mdns.TypeToString[tc.kind], got, a.Rcode)
		}
	}
	back, _ := mdns.ReverseAddr("fd00::2")
	if a := s.ask(back, mdns.TypePTR); len(a.Answer) != 1 || a.Answer[0].(*mdns.PTR).Ptr != "host.vhostd.internal." {
		t.Errorf("reverse look-up of the IPv6 gateway: %v", a)
	}
}

// TestResolvConf replaces the file in all ways that systems do.
func TestResolvConf(t *testing.T) {
	folder := t.TempDir()
	path := filepath.Join(folder, "resolv.conf")
	put := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	var r resolvConf
	now := time.Now()
	expect := func(what, want string) {
		t.Helper()
		now = now.Add(2 * lookInterval)
		if got := fmt.Sprint(r.resolvers(path, now)); got != want {
			t.Errorf("%s: %s, want %s", what, got, want)
		}
	}
	expect("no file", "[127.0.0.1:53]")
	put("resolv.conf", "nameserver 192.0.2.1\nnameserver 192.0.2.1\nnameserver fe80::1%lo\nnameserver nonsense\nnameserver 0.0.0.0\n")
	expect("written", "[192.0.2.1:53 [fe80::1%lo]:53]")
	put("resolv.conf", "nameserver 192.0.2.2\n")
	expect("written again", "[192.0.2.2:53]")
	put("next", "nameserver 192.0.2.3\n")
	os.Rename(filepath.Join(folder, "next"), path)
	expect("renamed onto", "[192.0.2.3:53]")
	os.Remove(path)
	expect("gone for a moment", "[192.0.2.3:53]")
	put("stub", "nameserver 127.0.0.53\n")
	os.Symlink("stub", path)
	expect("link", "[127.0.0.53:53]")
	put("other", "nameserver 192.0.2.4\n")
	os.Remove(path)
	os.Symlink("other", path)
	expect("link to another", "[192.0.2.4:53]")
	put("other", "# nobody\n")
	expect("nobody", "[127.0.0.1:53]")
	put("other", "nameserver 192.0.2.5\n")
	if got := r.resolvers(path, now); got[0].String() != "127.0.0.1:53" {
		t.Errorf("the file was looked at again after no time: %v", got)
	}
}

func TestResolvConfIsFollowed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	if err := os.WriteFile(path, []byte("nameserver 192.0.2.1\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	s := newSite(t, Config{ResolvConf: path}, nil)
	if got := fmt.Sprint(s.Resolvers()); got != "[192.0.2.1:53]" {
		t.Error(got)
	}
	if err := os.WriteFile(path, []byte("nameserver 192.0.2.2\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(10 * time.Second); fmt.Sprint(s.Resolvers()) != "[192.0.2.2:53]"; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still %v", s.Resolvers())
		}
	}
}
