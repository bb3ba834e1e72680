package dhcp

import (
	"bytes"
	"encoding/hex"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/insomniacslk/dhcp/iana"
)

func solicit(t testing.TB, mac MAC, mods ...dhcpv6.Modifier) *dhcpv6.Message {
	t.Helper()
	m, err := dhcpv6.NewSolicit(net.HardwareAddr(mac[:]), mods...)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// boot6 goes through the four messages and returns the last.
func (w *world6) boot6(mac MAC, mods ...dhcpv6.Modifier) *dhcpv6.Message {
	w.t.Helper()
	advertise := w.send(solicit(w.t, mac, mods...), mac)
	if advertise == nil || advertise.Type() != dhcpv6.MessageTypeAdvertise || advertise.Options.Preference() != 255 {
		w.t.Fatalf("advertise: %v", advertise)
	}
	request, err := dhcpv6.NewRequestFromAdvertise(advertise, mods...)
	if err != nil {
		w.t.Fatal(err)
	}
	reply := w.send(request, mac)
	if reply == nil || reply.Type() != dhcpv6.MessageTypeReply {
		w.t.Fatalf("reply: %v", reply)
	}
	return reply
}

func first(m *dhcpv6.Message) netip.Addr {
	if ia := m.Options.OneIANA(); ia != nil && ia.Options.OneAddress() != nil {
		return addrOf(ia.Options.OneAddress().IPv6Addr)
	}
	return netip.Addr{}
}

// later makes a message of another type with what a reply has given.
func later(kind dhcpv6.MessageType, reply *dhcpv6.Message, server bool) *dhcpv6.Message {
	m := &dhcpv6.Message{MessageType: kind, TransactionID: dhcpv6.TransactionID{1, 2, 3}}
	m.AddOption(dhcpv6.OptClientID(reply.Options.ClientID()))
	if server {
		m.AddOption(dhcpv6.OptServerID(reply.Options.ServerID()))
	}
	for _, ia := range reply.Options.IANA() {
		m.AddOption(ia)
	}
	return m
}

func TestLifeOfAnIPv6Lease(t *testing.T) {
	w := newWorld6(t, config6())
	reply := w.boot6(station(1))
	ia := reply.Options.OneIANA()
	if first(reply) != ip("fd00:1::15") || ia.T1 != DefaultLease/2 || ia.Options.OneAddress().ValidLifetime != DefaultLease {
		t.Errorf("reply %v", reply.Summary())
	}
	if addrOf(reply.Options.DNS()[0]) != ip("fd00:1::2") || reply.Options.DomainSearchList().Labels[0] != "corp.example" {
		t.Errorf("resolvers %v, search %v", reply.Options.DNS(), reply.Options.DomainSearchList())
	}
	if second := w.boot6(station(2)); first(second) != ip("fd00:1::16") {
		t.Errorf("second station: %v", second)
	}
	w.clock = w.clock.Add(DefaultLease / 2)
	for _, m := range []*dhcpv6.Message{later(dhcpv6.MessageTypeRenew, reply, true), later(dhcpv6.MessageTypeRebind, reply, false)} {
		if answer := w.send(m, station(1)); answer == nil || first(answer) != ip("fd00:1::15") {
			t.Errorf("%v: %v", m.Type(), answer)
		}
	}
	duid := hex.EncodeToString(reply.Options.ClientID().ToBytes())
	if l := w.Leases()[0]; l.State != Bound || l.Expires.Sub(w.clock) != DefaultLease || duid == "" || l.DUID != duid {
		t.Errorf("lease %+v of %s", l, duid)
	}
	if answer := w.send(later(dhcpv6.MessageTypeRelease, reply, true),
		station(2)); answer.Options.OneIANA().Options.Status().StatusCode != iana.StatusNoBinding {
		t.Errorf("another's release: %v", answer)
	}
	if answer := w.send(later(dhcpv6.MessageTypeRelease, reply, true),
		station(1)); answer.Options.Status().StatusCode != iana.StatusSuccess {
		t.Errorf("release: %v", answer)
	}
	if l := w.Leases()[0]; l.State != Released {
		t.Errorf("lease %+v", l)
	}
	// The daemon has lost its memory: what the client has is taken over.
	w = newWorld6(t, config6())
	reply.Options.OneIANA().Options.OneAddress().IPv6Addr = net.ParseIP("fd00:1::77")
	if answer := w.send(later(dhcpv6.MessageTypeRenew, reply, true), station(1)); first(answer) != ip("fd00:1::77") {
		t.Errorf("renewal after a restart: %v", answer)
	}
	// What lies elsewhere ends, and there is a new one.
	reply.Options.OneIANA().Options.OneAddress().IPv6Addr = net.ParseIP("fd00:9::77")
	answer := w.send(later(dhcpv6.MessageTypeRebind, reply, false), station(3))
	addrs := answer.Options.OneIANA().Options.Addresses()
	if len(addrs) != 2 || first(answer) != ip("fd00:1::15") || addrs[1].ValidLifetime != 0 {
		t.Errorf("rebind from elsewhere: %v", answer.Summary())
	}
	if answer := w.send(later(dhcpv6.MessageTypeDecline, w.boot6(station(4)), true),
		station(4)); answer.Options.Status().StatusCode != iana.StatusSuccess {
		t.Errorf("decline: %v", answer)
	}
	if got := first(w.boot6(station(4))); got != ip("fd00:1::17") {
		t.Errorf("after the decline: %v", got)
	}
}

func TestOneAddressForEachStation(t *testing.T) {
	w := newWorld6(t, config6())
	m := solicit(t, station(1), dhcpv6.WithIAID([4]byte{1}), dhcpv6.WithIAPD([4]byte{9}))
	for i := range byte(20) {
		m.AddOption(&dhcpv6.OptIANA{IaId: [4]byte{0, i}})
	}
	answer := w.send(m, station(1))
	ias := answer.Options.IANA()
	if len(ias) != maxIAs || first(answer) != ip("fd00:1::15") || ias[1].Options.Status().StatusCode != iana.StatusNoAddrsAvail ||
		answer.Options.OneIAPD().Options.Status().StatusCode != iana.StatusNoPrefixAvail {
		t.Errorf("many associations: %v", answer.Summary())
	}
	rapid := w.send(solicit(t, station(2), dhcpv6.WithRapidCommit), station(2))
	if rapid.Type() != dhcpv6.MessageTypeReply || rapid.GetOneOption(dhcpv6.OptionRapidCommit) == nil || w.Leases()[1].State != Bound {
		t.Errorf("rapid commit: %v", rapid)
	}
}

func TestStateless(t *testing.T) {
	c := config6()
	c.First, c.Last = netip.Addr{}, netip.Addr{}
	w := newWorld6(t, c)
	m := &dhcpv6.Message{MessageType: dhcpv6.MessageTypeInformationRequest}
	m.AddOption(dhcpv6.OptRequestedOption(dhcpv6.OptionDNSRecursiveNameServer, dhcpv6.OptionInformationRefreshTime))
	answer := w.send(m, station(1))
	if answer == nil || len(answer.Options.DNS()) != 1 || answer.Options.DomainSearchList() != nil ||
		answer.Options.InformationRefreshTime(0) != DefaultLease {
		t.Errorf("information: %v", answer)
	}
	answer = w.send(solicit(t, station(1)), station(1))
	if answer.Options.OneIANA().Options.Status().StatusCode != iana.StatusNoAddrsAvail {
		t.Errorf("a stateless server's advertisement: %v", answer)
	}
}

func TestConfirm(t *testing.T) {
	w := newWorld6(t, config6())
	reply := w.boot6(station(1))
	m := later(dhcpv6.MessageTypeConfirm, reply, false)
	if answer := w.send(m, station(1)); answer.Options.Status().StatusCode != iana.StatusSuccess {
		t.Errorf("confirm: %v", answer)
	}
	reply.Options.OneIANA().Options.OneAddress().IPv6Addr = net.ParseIP("fd00:2::1")
	if answer := w.send(m, station(1)); answer.Options.Status().StatusCode != iana.StatusNotOnLink {
		t.Errorf("confirm of an address from elsewhere: %v", answer)
	}
}

func TestPins6(t *testing.T) {
	c := config6()
	c.Pins = []Pin{{MAC: station(1), Addr: ip("fd00:1::abcd")}, {Name: "db", Addr: ip("fd00:1::db")}}
	w := newWorld6(t, c)
	if got := first(w.boot6(station(1))); got != ip("fd00:1::abcd") {
		t.Errorf("pinned by MAC: %v", got)
	}
	if got := first(w.boot6(station(2), dhcpv6.WithFQDN(0, "DB.corp.example"))); got != ip("fd00:1::db") {
		t.Errorf("pinned by name: %v", got)
	}
}

func TestNAT23_NoAnswer6(t *testing.T) {
	w := newWorld6(t, config6())
	reply := w.boot6(station(1))
	good := solicit(t, station(1)).ToBytes()
	other := later(dhcpv6.MessageTypeRequest, reply, false)
	other.AddOption(dhcpv6.OptServerID(&dhcpv6.DUIDLL{HWType: 1, LinkLayerAddr: net.HardwareAddr{1, 2, 3, 4, 5, 6}}))
	info := later(dhcpv6.MessageTypeInformationRequest, reply, false)
	for _, c := range []struct {
		message []byte
		reason  string
	}{
		{nil, "malformed"},
		{good[:3], "malformed"},
		{append(bytes.Clone(good), 0, 1, 0xff, 0xff), "malformed"},
		{append(bytes.Clone(good), 0, 39, 0, 3, 0, 0xc0, 0), "malformed"}, // FQDN: a name that points nowhere
		{make([]byte, MaxMessage+1), "too_long"},
		{append([]byte{12}, make([]byte, 40)...), "relayed"},
		{[]byte{1, 1, 2, 3}, "malformed"}, // no client identifier
		{later(dhcpv6.MessageTypeSolicit, reply, true).ToBytes(), "malformed"},
		{later(dhcpv6.MessageTypeRequest, reply, false).ToBytes(), "malformed"},
		{other.ToBytes(), "other_server"},
		{info.ToBytes(), "malformed"},
		{later(dhcpv6.MessageTypeReply, reply, false).ToBytes(), "not_client"},
	} {
		before := map[string]uint64{}
		w.Drops(func(reason string, n uint64) { before[reason] = n })
		if _, ok := w.Handle(c.message, station(1)); ok {
			t.Errorf("%x is answered", c.message)
		}
		w.Drops(func(reason string, n uint64) {
			if (n - before[reason]) != map[bool]uint64{true: 1}[reason == c.reason] {
				t.Errorf("%x: %s counts %d, want one more %s", c.message, reason, n-before[reason], c.reason)
			}
		})
	}
}

// TestNamesDoNotExplode: a message of the largest size whose name list is all pointers to its longest name costs little.
func TestNamesDoNotExplode(t *testing.T) {
	w := newWorld6(t, config6())
	m := solicit(t, station(1)).ToBytes()
	room := MaxMessage - len(m) - 4
	names := []byte{}
	for len(names) < room/2-70 {
		names = append(append(names, 63), bytes.Repeat([]byte{'a'}, 63)...)
	}
	names = append(names, 0)
	for len(names)+2 <= room {
		names = append(names, 0xc0, 0)
	}
	m = append(append(m, 0, byte(dhcpv6.OptionDomainSearchList), byte(len(names)>>8), byte(len(names))), names...)
	result := testing.Benchmark(func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			w.Handle(m, station(1))
		}
	})
	if bytes := result.AllocedBytesPerOp(); bytes > 4<<20 {
		t.Errorf("a message of %d bytes costs %d bytes", len(m), bytes)
	}
}

func TestConfig6(t *testing.T) {
	for _, change := range []func(*Config6){
		func(c *Config6) { c.Prefix = netip.MustParsePrefix("10.0.0.0/8") },
		func(c *Config6) { c.Prefix = netip.MustParsePrefix("fd00:1::1/64") },
		func(c *Config6) { c.Gateway = ip("fd00:1::") },
		func(c *Config6) { c.Gateway = ip("fd00:2::1") },
		func(c *Config6) { c.Last = ip("fd00:1::1") },
		func(c *Config6) { c.First = ip("fd00:2::1") },
		func(c *Config6) { c.DNS = []netip.Addr{ip("10.0.0.1")} },
		func(c *Config6) { c.Lease = time.Second },
		func(c *Config6) { c.Pins = []Pin{{MAC: station(1), Addr: c.Gateway}} },
		func(c *Config6) { c.BootURL = string(make([]byte, 256)) },
	} {
		c := config6()
		change(&c)
		if _, err := New6(c, nil, nil); err == nil {
			t.Errorf("%+v is accepted", c)
		}
	}
}
