package dhcp

import (
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/mdlayher/ndp"
)

func advert() Advert {
	return Advert{
		MAC: MAC{2, 0, 0, 0, 0, 1}, Prefix: netip.MustParsePrefix("fd00:1::/64"), Lifetime: 30 * time.Minute, Autonomous: true, Other: true,
		MTU: 1500, DNS: []netip.Addr{ip("fd00:1::2")}, Search: []string{"corp.example."},
	}
}

// TestAdvert has gopacket read what is sent, and verifies the checksum by hand.
func TestAdvert(t *testing.T) {
	a := advert()
	src, dst := ip("fe80::1"), ip("ff02::1")
	b, err := a.Marshal(src, dst)
	if err != nil {
		t.Fatal(err)
	}
	s16, d16 := src.As16(), dst.As16()
	pseudo := append(append(append(s16[:], d16[:]...), 0, 0, byte(len(b)>>8), byte(len(b)), 0, 0, 0, 58), b...)
	if gopacket.FoldChecksum(gopacket.ComputeChecksum(pseudo, 0)) != 0 {
		t.Error("the checksum is wrong")
	}
	p := gopacket.NewPacket(b, layers.LayerTypeICMPv6, gopacket.Default)
	ra, ok := p.Layer(layers.LayerTypeICMPv6RouterAdvertisement).(*layers.ICMPv6RouterAdvertisement)
	if !ok {
		t.Fatal(p)
	}
	if ra.HopLimit != 64 || ra.RouterLifetime != 1800 || ra.ManagedAddressConfig() || !ra.OtherConfig() {
		t.Errorf("%+v", ra)
	}
	m, err := ndp.ParseMessage(b)
	if err != nil {
		t.Fatal(err)
	}
	options := map[byte]ndp.Option{}
	for _, o := range m.(*ndp.RouterAdvertisement).Options {
		options[o.Code()] = o
	}
	prefix, _ := options[3].(*ndp.PrefixInformation)
	mtu, _ := options[5].(*ndp.MTU)
	dns, _ := options[25].(*ndp.RecursiveDNSServer)
	search, _ := options[31].(*ndp.DNSSearchList)
	if prefix.Prefix != ip("fd00:1::") || !prefix.AutonomousAddressConfiguration || !prefix.OnLink || prefix.ValidLifetime != 24*time.Hour ||
		mtu.MTU != 1500 || dns.Servers[0] != ip("fd00:1::2") || search.DomainNames[0] != "corp.example" || len(options) != 5 {
		t.Errorf("options %v", options)
	}
}

func TestAdvertRefused(t *testing.T) {
	for _, tc := range []struct {
		change func(*Advert)
		wrong  string
	}{
		{func(a *Advert) { a.Lifetime = MaxRouterLifetime + 1 }, "lifetime"},
		{func(a *Advert) { a.Prefix = netip.MustParsePrefix("fd00:1::/80") }, "64 bits"},
		{func(a *Advert) { a.DNS = []netip.Addr{ip("10.0.0.1")} }, "family"},
		{func(a *Advert) { a.Search = []string{strings.Repeat("x", 64)} }, "search domain"},
	} {
		a := advert()
		tc.change(&a)
		if _, err := a.Marshal(ip("fe80::1"), ip("ff02::1")); err == nil || !strings.Contains(err.Error(), tc.wrong) {
			t.Errorf("error %v, want one about %s", err, tc.wrong)
		}
	}
}

func TestIsSolicitation(t *testing.T) {
	marshal := func(m ndp.Message) []byte {
		b, err := ndp.MarshalMessage(m)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	mac := station(1)
	bare := marshal(&ndp.RouterSolicitation{})
	full := marshal(&ndp.RouterSolicitation{Options: []ndp.Option{&ndp.LinkLayerAddress{Direction: ndp.Source, Addr: mac[:]}}})
	other := marshal(&ndp.NeighborSolicitation{TargetAddress: ip("fe80::1")})
	code := append([]byte(nil), bare...)
	code[1] = 1
	for _, c := range []struct {
		message []byte
		src     string
		want    bool
	}{
		{bare, "fe80::9", true}, {bare, "::", true}, {full, "fe80::9", true}, {full, "::", false}, {other, "fe80::9", false}, {code,
			"fe80::9", false},
		{bare[:7], "fe80::9", false}, {nil, "fe80::9", false}, {append(append([]byte(nil), bare...), 1, 0), "fe80::9", false},
	} {
		if got := IsSolicitation(c.message, ip(c.src)); got != c.want {
			t.Errorf("%x from %s: %v, want %v", c.message, c.src, got, c.want)
		}
	}
}
