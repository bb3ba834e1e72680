package dhcp

import (
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv6"

	"github.com/vhostd/vhostd/internal/testmain"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Goroutines()))
}

func ip(text string) netip.Addr { return netip.MustParseAddr(text) }

func station(n byte) MAC { return MAC{0x52, 0x54, 0, 0, 0, n} }

func config4() Config {
	return Config{
		Subnet: netip.MustParsePrefix("10.0.2.0/24"), Gateway: ip("10.0.2.2"), First: ip("10.0.2.15"),
		DNS: []netip.Addr{ip("10.0.2.2")}, Search: []string{"corp.example", "example.net."}, MTU: 1500,
	}
}

func config6() Config6 {
	return Config6{
		Prefix: netip.MustParsePrefix("fd00:1::/64"), Gateway: ip("fd00:1::2"), MAC: MAC{2, 0, 0, 0, 0, 1},
		First: ip("fd00:1::15"), Last: ip("fd00:1::ff"), DNS: []netip.Addr{ip("fd00:1::2")}, Search: []string{"corp.example"},
	}
}

// world4 is a server with a clock that the test moves.
type world4 struct {
	*Server
	t     testing.TB
	clock time.Time
}

func newWorld4(t testing.TB, c Config, leases ...Lease) *world4 {
	t.Helper()
	s, err := New(c, leases, nil)
	if err != nil {
		t.Fatal(err)
	}
	w := &world4{Server: s, t: t, clock: time.Unix(1e9, 0)}
	s.now = func() time.Time { return w.clock }
	return w
}

// send returns the answer, nil if there is none.
func (w *world4) send(m *dhcpv4.DHCPv4) (*dhcpv4.DHCPv4, Reply) {
	w.t.Helper()
	reply, ok := w.Handle(m.ToBytes(), MAC(m.ClientHWAddr))
	if !ok {
		return nil, reply
	}
	answer, err := dhcpv4.FromBytes(reply.Payload)
	if err != nil {
		w.t.Fatalf("the answer is malformed: %v", err)
	}
	if answer.TransactionID != m.TransactionID || answer.Flags != m.Flags || MAC(answer.ClientHWAddr) != MAC(m.ClientHWAddr) ||
		answer.OpCode != dhcpv4.OpcodeBootReply || addrOf(answer.ServerIdentifier()) != w.config.Gateway {
		w.t.Errorf("the answer does not fit the question: %v", answer.Summary())
	}
	return answer, reply
}

func discovery(t testing.TB, mac MAC, mods ...dhcpv4.Modifier) *dhcpv4.DHCPv4 {
	t.Helper()
	m, err := dhcpv4.NewDiscovery(mac[:], mods...)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// boot goes through discovery and request, and returns the acknowledgement, nil if there is none.
func (w *world4) boot(mac MAC, mods ...dhcpv4.Modifier) *dhcpv4.DHCPv4 {
	w.t.Helper()
	offer, _ := w.send(discovery(w.t, mac, mods...))
	if offer == nil {
		return nil
	}
	request, err := dhcpv4.NewRequestFromOffer(offer, mods...)
	if err != nil {
		w.t.Fatal(err)
	}
	request.UpdateOption(dhcpv4.OptRequestedIPAddress(offer.YourIPAddr)) // mods may hold what the discovery asked for
	ack, _ := w.send(request)
	if ack == nil || ack.MessageType() != dhcpv4.MessageTypeAck || !ack.YourIPAddr.Equal(offer.YourIPAddr) {
		w.t.Fatalf("offer %v, then %v", offer, ack)
	}
	return ack
}

func (w *world4) addr(mac MAC, mods ...dhcpv4.Modifier) netip.Addr {
	w.t.Helper()
	if ack := w.boot(mac, mods...); ack != nil {
		return addrOf(ack.YourIPAddr)
	}
	return netip.Addr{}
}

// world6 is its counterpart.
type world6 struct {
	*Server6
	t     testing.TB
	clock time.Time
}

func newWorld6(t testing.TB, c Config6, leases ...Lease) *world6 {
	t.Helper()
	s, err := New6(c, leases, nil)
	if err != nil {
		t.Fatal(err)
	}
	w := &world6{Server6: s, t: t, clock: time.Unix(1e9, 0)}
	s.now = func() time.Time { return w.clock }
	return w
}

func (w *world6) send(m *dhcpv6.Message, mac MAC) *dhcpv6.Message {
	w.t.Helper()
	payload, ok := w.Handle(m.ToBytes(), mac)
	if !ok {
		return nil
	}
	answer, err := dhcpv6.MessageFromBytes(payload)
	if err != nil {
		w.t.Fatalf("the answer is malformed: %v", err)
	}
	if answer.TransactionID != m.TransactionID || answer.Options.ServerID() == nil || !answer.Options.ServerID().Equal(w.duid()) {
		w.t.Errorf("the answer does not fit the question: %v", answer.Summary())
	}
	return answer
}
