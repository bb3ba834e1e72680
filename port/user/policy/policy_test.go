package policy

import (
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestOrderAndDefault(t *testing.T) {
	for _, tc := range []struct {
		rules string
		yes   string
		no    string
	}{
		{"", "192.0.2.1:80 [2001:db8::1]:80 10.0.0.1:0", ""},
		{"deny=10.0.0.0/8", "192.0.2.1:80 [2001:db8::1]:80", "10.0.0.1:80 10.255.0.1:0 [::ffff:10.0.0.1]:80"},
		{"deny=10.0.0.0/8:25", "10.0.0.1:80 10.0.0.1:0", "10.0.0.1:25"},
		{"allow=10.0.0.0/8", "10.0.0.1:80 [::ffff:10.0.0.1]:80", "192.0.2.1:80 [2001:db8::1]:80"},
		{"allow=10.0.0.0/8:443", "10.0.0.1:443", "10.0.0.1:80 10.0.0.1:0 192.0.2.1:443"},
		{"deny=10.1.0.0/16 allow=10.0.0.0/8", "10.2.0.1:80", "10.1.0.1:80 192.0.2.1:80"},
		{"allow=10.0.0.0/8 deny=10.1.0.0/16", "10.2.0.1:80 10.1.0.1:80", "192.0.2.1:80"},
		{"deny=[fd00::/8]:53 allow=::/0", "[fd00::1]:80 [2001:db8::1]:53", "[fd00::1]:53 192.0.2.1:80"},
		{"allow=0.0.0.0/0 allow=::/0", "192.0.2.1:80 [2001:db8::1]:53", ""},
		{"allow=example.com", "", "192.0.2.1:80"},
	} {
		w := newWorld(t, strings.Fields(tc.rules)...)
		for _, dst := range strings.Fields(tc.yes) {
			w.check(t, dst, true)
		}
		for _, dst := range strings.Fields(tc.no) {
			w.check(t, dst, false)
		}
	}
}

// TestNAT17_BuiltinDenies tries the guises of what no guest may reach by default.
func TestNAT17_BuiltinDenies(t *testing.T) {
	guises := []string{"169.254.169.254", "::ffff:169.254.169.254", "64:ff9b::169.254.169.254", "::169.254.169.254",
		"169.254.170.2", "169.254.7.7", "100.100.100.200", "fd00:ec2::254",
		"127.0.0.1", "127.0.0.2", "::1", "::ffff:127.0.0.1", "64:ff9b::127.0.0.1", "0.0.0.0", "::",
		"::ffff:0.0.0.0", "fe80::1", "fe80::1%2"}
	for _, lines := range []string{"", "allow=0.0.0.0/0 allow=::/0",
		"allow=169.254.0.0/15 allow=100.100.0.0/16 allow=126.0.0.0/7 allow=fc00::/6"} {
		w := newWorld(t, strings.Fields(lines)...)
		for _, addr := range guises {
			for _, port := range []uint16{0, 80} {
				if d := w.guest.Check(netip.AddrPortFrom(netip.MustParseAddr(addr), port)); d.Allowed {
					t.Errorf("rules %q: %s port %d: %v", lines, addr, port, d)
				}
			}
		}
		w.check(t, "[64:ff9b::192.0.2.1]:80", !strings.Contains(lines, "fc00"))
	}
}

func TestLifted(t *testing.T) {
	w := newWorld(t, "allow=169.254.169.254:80", "allow=169.254.0.0/16", "allow=127.0.0.1")
	w.check(t, "169.254.169.254:80", true)
	w.check(t, "169.254.169.254:443", false) // the network around it is not its name
	w.check(t, "169.254.7.7:443", true)
	w.check(t, "127.0.0.1:1", true)
	w.check(t, "127.0.0.2:1", false)
	w = newWorld(t, "deny=127.0.0.1:22", "allow=127.0.0.1")
	w.check(t, "127.0.0.1:22", false)
	w.check(t, "127.0.0.1:23", true)
	w = newWorld(t, "allow=metadata.internal")
	w.guest.Answer("metadata.internal.", nil, netip.MustParseAddr("169.254.169.254"), time.Hour)
	w.check(t, "169.254.169.254:80", false) // a name that anyone may point there does not name it
}

func TestNames(t *testing.T) {
	w := newWorld(t, "allow=*.example.com", "deny=bad.example.net", "allow=example.net")
	addr := netip.MustParseAddr("192.0.2.7")
	w.check(t, "192.0.2.7:80", false)
	if !w.guest.Query("WWW.Example.COM.").Allowed || w.guest.Query("other.org.").Allowed {
		t.Error("look-ups are judged wrongly")
	}
	if !w.guest.Answer("WWW.Example.COM.", nil, addr, 5*time.Second) {
		t.Error("an allowed answer was refused")
	}
	w.check(t, "192.0.2.7:80", true)
	w.check(t, "[::ffff:192.0.2.7]:80", true)
	if d := w.view("g2").Check(netip.MustParseAddrPort("192.0.2.7:80")); d.Allowed {
		t.Error("the answer counts for another guest")
	}
	w.clock = w.clock.Add(MinNameLife - time.Nanosecond)
	w.check(t, "192.0.2.7:80", true)
	w.clock = w.clock.Add(time.Nanosecond)
	w.check(t, "192.0.2.7:80", false)
	w.guest.Answer("www.example.com", nil, addr, time.Hour)
	w.guest.Answer("www.example.com", nil, addr, time.Second) // does not shorten
	w.clock = w.clock.Add(time.Hour - time.Second)
	w.check(t, "192.0.2.7:80", true)
	w.clock = w.clock.Add(time.Second)
	w.check(t, "192.0.2.7:80", false)
	if list := w.guest.Names(); len(list) != 0 {
		t.Errorf("%v is still known", list)
	}
	if w.guest.Answer("other.org", nil, addr, time.Hour) {
		t.Error("the answer to a refused look-up is accepted")
	}
}

func TestAliases(t *testing.T) {
	w := newWorld(t, "allow=first.example", "deny=tracker.example", "deny=10.0.0.0/8")
	addr := netip.MustParseAddr("192.0.2.1")
	if !w.guest.Answer("first.example", []string{"tracker.example."}, addr, 0) {
		t.Error("an earlier rule for the question did not win")
	}
	w.check(t, "192.0.2.1:1", true)
	w = newWorld(t, "deny=tracker.example")
	if w.guest.Answer("alias.example", []string{"x.example", "Tracker.Example."}, addr, 0) {
		t.Error("an alias hides a denied name")
	}
	if w.guest.Answer("alias.example", make([]string, 9), addr, 0) {
		t.Error("a chain longer than what is judged is accepted")
	}
	w = newWorld(t, "allow=target.example")
	if w.guest.Answer("alias.example", []string{"target.example"}, addr, 0) {
		t.Error("an alias to an allowed name allows")
	}
	// A rule that comes later denies what was answered under an alias.
	w = newWorld(t)
	w.guest.Answer("alias.example", []string{"target.example"}, addr, 0)
	w.check(t, "192.0.2.1:1", true)
	if err := w.Replace(rules(t, "deny=target.example")); err != nil {
		t.Fatal(err)
	}
	w.check(t, "192.0.2.1:1", false)
}

// TestAnswersByAddress: no rule knows the name, but some addresses may be reached.
func TestAnswersByAddress(t *testing.T) {
	w := newWorld(t, "deny=10.9.0.0/16", "deny=10.8.0.0/16:25", "allow=10.0.0.0/8:443", "deny=evil.corp")
	if !w.guest.Query("db.corp").Allowed || w.guest.Query("evil.corp").Allowed {
		t.Error("look-ups are judged wrongly")
	}
	for text, want := range map[string]bool{"10.1.1.1": true, "10.9.1.1": false, "10.8.1.1": true, "192.0.2.1": false} {
		if got := w.guest.Answer("db.corp", nil, netip.MustParseAddr(text), 0); got != want {
			t.Errorf("answer %s: %v, want %v", text, got, want)
		}
	}
}

func TestReplaceKeepsCountersAndNames(t *testing.T) {
	w := newWorld(t, "deny=10.0.0.0/8")
	w.check(t, "10.0.0.1:1", false)
	w.check(t, "192.0.2.1:1", true)
	w.guest.Answer("host.example", nil, netip.MustParseAddr("10.0.0.1"), time.Hour)
	if err := w.Replace(rules(t, "allow=host.example", "deny=10.0.0.0/8")); err != nil {
		t.Fatal(err)
	}
	w.check(t, "10.0.0.1:1", true)
	w.check(t, "10.0.0.2:1", false)
	if got := fmt.Sprint(w.Rules()); got != "[{allow=host.example 1 0} {deny=10.0.0.0/8 2 0}]" {
		t.Error(got)
	}
	if err := w.Replace(make([]Rule, MaxRules+1)); err == nil {
		t.Error("too many rules are accepted")
	}
	if err := w.Replace(make([]Rule, 1)); err == nil {
		t.Error("an empty rule is accepted")
	}
	w.check(t, "10.0.0.2:1", false)
}

func TestTableIsBounded(t *testing.T) {
	w := newWorld(t, "allow=*.example")
	w.guest.max = 100
	addr := func(i int) netip.Addr { return netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)}) }
	for i := range 1000 {
		w.guest.Answer("a.example", nil, addr(i), time.Hour)
		w.guest.Answer("a.example", nil, addr(0), time.Hour) // stays the newest
	}
	if n := len(w.guest.stations); n != 100 || w.guest.oldest.Len() != 100 {
		t.Errorf("%d addresses are known", n)
	}
	w.guest.Check(netip.AddrPortFrom(addr(0), 1))
	for i, want := range map[int]bool{0: true, 999: true, 901: true, 900: false, 1: false} {
		if d := w.guest.Check(netip.AddrPortFrom(addr(i), 1)); d.Allowed != want {
			t.Errorf("address %d: %v, want %v", i, d, want)
		}
	}
	for i := range 100 {
		w.guest.Answer(fmt.Sprintf("n%d.example", i), nil, addr(999), time.Duration(100+i)*time.Second)
	}
	if n := len(w.guest.stations[addr(999)].names); n != namesPerAddr {
		t.Errorf("one address has %d names", n)
	}
}

func TestRefusalsAreCountedAndLogged(t *testing.T) {
	w := newWorld(t, "deny=10.0.0.0/8", "allow=x.example")
	for range 5000 {
		w.check(t, "10.0.0.1:1", false)
	}
	w.check(t, "169.254.169.254:80", false)
	w.check(t, "192.0.2.1:80", false)
	w.guest.Query("y.example")
	got := map[string]uint64{}
	w.Refusals(func(reason string, n uint64) { got[reason] = n })
	want := map[string]uint64{"rule": 5000, "metadata": 1, "loopback": 0, "link_local": 0, "not_listed": 1, "lookup": 1}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("counted %v, want %v", got, want)
	}
	text := w.log.String()
	if n := strings.Count(text, "\n"); n > 30 {
		t.Errorf("%d lines for 5000 refusals", n)
	}
	for _, part := range []string{`guest=g1 destination=10.0.0.1:1 decision="refused by deny=10.0.0.0/8"`,
		`name=y.example decision="refused: there are allow rules`} {
		if !strings.Contains(text, part) {
			t.Errorf("the log lacks %s:\n%s", part, text)
		}
	}
}

func TestConcurrentUse(t *testing.T) {
	w := newWorld(t, "allow=*.example")
	sets := [][]Rule{rules(t, "allow=*.example"), rules(t, "deny=10.0.0.0/8"), nil}
	var wg sync.WaitGroup
	for k := range 4 {
		wg.Go(func() {
			for i := range 500 {
				addr := netip.AddrFrom4([4]byte{192, 0, byte(k), byte(i)})
				w.guest.Answer(fmt.Sprintf("n%d.example", i%20), []string{"alias.example"}, addr, time.Second)
				w.guest.Check(netip.AddrPortFrom(addr, 80))
				w.guest.Query("n.example")
				if i%100 == k {
					_ = w.Replace(sets[k%3])
					_, _ = w.Rules(), w.guest.Names()
				}
			}
		})
	}
	wg.Wait()
}
