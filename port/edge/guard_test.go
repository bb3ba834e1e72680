package edge

import (
	"net"
	"net/netip"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port/echo"
	"github.com/vhostd/vhostd/port/porttest"
)

var (
	own   = net.HardwareAddr{0x52, 0x54, 0, 0, 0, 1}
	other = net.HardwareAddr{0x52, 0x54, 0, 0, 0, 2}
)

func strict(t testing.TB) *Guard {
	return newGuard(t, Source{MAC: [6]byte(own), Addrs: []netip.Prefix{
		netip.MustParsePrefix("10.0.2.15/32"), netip.MustParsePrefix("fd00:1::/64"),
	}})
}

func build(t testing.TB, parts ...gopacket.SerializableLayer) []byte {
	t.Helper()
	b := gopacket.NewSerializeBuffer()
	if err := gopacket.SerializeLayers(b, gopacket.SerializeOptions{FixLengths: true}, parts...); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func ether(src net.HardwareAddr, kind layers.EthernetType) *layers.Ethernet {
	return &layers.Ethernet{SrcMAC: src, DstMAC: net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, EthernetType: kind}
}

func ip4(src string, proto layers.IPProtocol) *layers.IPv4 {
	return &layers.IPv4{Version: 4, IHL: 5, TTL: 64, SrcIP: net.ParseIP(src).To4(), DstIP: net.IPv4(192, 0, 2, 1).To4(), Protocol: proto}
}

func ip6(src string, proto layers.IPProtocol) *layers.IPv6 {
	return &layers.IPv6{Version: 6, HopLimit: 255, SrcIP: net.ParseIP(src), DstIP: net.ParseIP("ff02::1"), NextHeader: proto}
}

func udp(src, dst layers.UDPPort) *layers.UDP { return &layers.UDP{SrcPort: src, DstPort: dst} }

func arp(hw net.HardwareAddr, ip string) *layers.ARP { return arpTo(hw, ip, "10.0.2.2") }

func arpTo(hw net.HardwareAddr, ip, target string) *layers.ARP {
	return &layers.ARP{
		AddrType: layers.LinkTypeEthernet, Protocol: layers.EthernetTypeIPv4, HwAddressSize: 6, ProtAddressSize: 4, Operation: layers.ARPReply,
		SourceHwAddress: hw, SourceProtAddress: net.ParseIP(ip).To4(), DstHwAddress: other, DstProtAddress: net.ParseIP(target).To4(),
	}
}

func icmp6(kind uint8, body string) []gopacket.SerializableLayer {
	payload := gopacket.Payload(append(make([]byte, 4), net.ParseIP(body)...))
	return []gopacket.SerializableLayer{&layers.ICMPv6{TypeCode: layers.CreateICMPv6TypeCode(kind, 0)}, payload}
}

func TestGuard(t *testing.T) {
	e4, e6, ea := ether(own, layers.EthernetTypeIPv4), ether(own, layers.EthernetTypeIPv6), ether(own, layers.EthernetTypeARP)
	tag := &layers.Dot1Q{VLANIdentifier: 5, Type: layers.EthernetTypeIPv4}
	nd := func(src string, kind uint8, body string) []byte {
		return build(t, append([]gopacket.SerializableLayer{e6, ip6(src, layers.IPProtocolICMPv6)}, icmp6(kind, body)...)...)
	}
	// Extension headers in front: hop-by-hop and options of 8 bytes, a first and a later fragment.
	hidden := func(chain ...byte) []byte {
		return build(t, append([]gopacket.SerializableLayer{e6, ip6("fe80::1", layers.IPProtocolIPv6HopByHop), gopacket.Payload(chain)},
			icmp6(134, "::")...)...)
	}
	for _, c := range []struct {
		what  string
		frame []byte
		want  refusal
	}{
		{"own IPv4", build(t, e4, ip4("10.0.2.15", 17), udp(1, 2)), fine},
		{"another MAC", build(t, ether(other, layers.EthernetTypeIPv4), ip4("10.0.2.15", 17), udp(1, 2)), spoofedMAC},
		{"another IPv4", build(t, e4, ip4("10.0.2.16", 17), udp(1, 2)), spoofedIP},
		{"another IPv4 in a VLAN", build(t, ether(own, layers.EthernetTypeDot1Q), tag, ip4("10.0.2.16", 17), udp(1, 2)), spoofedIP},
		{"own IPv4 in a VLAN", build(t, ether(own, layers.EthernetTypeDot1Q), tag, ip4("10.0.2.15", 17), udp(1, 2)), fine},
		{"tags without end", append(build(t, ether(own, layers.EthernetTypeDot1Q))[:14:14],
			0, 1, 0x81, 0, 0, 1, 0x81, 0, 0, 1, 8, 0), unreadable},
		{"DHCP request", build(t, e4, ip4("0.0.0.0", 17), udp(68, 67)), fine},
		{"no address, not DHCP", build(t, e4, ip4("0.0.0.0", 17), udp(1, 67)), spoofedIP},
		{"no address, TCP", build(t, e4, ip4("0.0.0.0", 6)), spoofedIP},
		{"DHCP answer", build(t, e4, ip4("10.0.2.15", 17), udp(67, 68)), rogueDHCP},
		{"DHCP answer from another port", build(t, e4, ip4("10.0.2.15", 17), udp(1067, 68)), rogueDHCP},
		{"IPv4 cut", build(t, e4, ip4("10.0.2.15", 17))[:30], unreadable},
		{"own ARP", build(t, ea, arp(own, "10.0.2.15")), fine},
		{"ARP probe", build(t, ea, arpTo(own, "0.0.0.0", "10.0.2.15")), fine},
		{"ARP probe for another's address", build(t, ea, arp(own, "0.0.0.0")), spoofedARP},
		{"ARP for the gateway", build(t, ea, arp(own, "10.0.2.2")), spoofedARP},
		{"ARP of another", build(t, ea, arp(other, "10.0.2.15")), spoofedARP},
		{"ARP cut", build(t, ea, arp(own, "10.0.2.15"))[:41], unreadable},
		{"own IPv6", build(t, e6, ip6("fd00:1::9", 17), udp(1, 2)), fine},
		{"link-local", build(t, e6, ip6("fe80::9", 17), udp(546, 547)), fine},
		{"another IPv6", build(t, e6, ip6("fd00:2::9", 17), udp(1, 2)), spoofedIP},
		{"no IPv6 address", build(t, e6, ip6("::", 17), udp(1, 2)), spoofedIP},
		{"DHCPv6 answer", build(t, e6, ip6("fe80::9", 17), udp(547, 546)), rogueDHCP},
		{"DHCPv6 answer from another port", build(t, e6, ip6("fe80::9", 17), udp(1547, 546)), rogueDHCP},
		{"UDP header in a later fragment", build(t, e6, ip6("fe80::9", layers.IPProtocolIPv6Fragment), gopacket.Payload{60, 0, 0, 1, 0, 0, 0, 1,
			17, 0, 0, 0, 0, 0, 0, 0}), unreadable},
		{"DAD", nd("::", 135, "fd00:1::9"), fine},
		{"DAD, link-local", nd("::", 135, "fe80::9"), fine},
		{"DAD for another's address", nd("::", 135, "fd00:2::1"), spoofedND},
		{"solicitation of another's address", nd("fe80::9", 135, "fd00:2::1"), fine},
		{"router solicitation", nd("::", 133, "::"), fine},
		{"listener report", nd("::", 143, "::"), fine},
		{"echo from nowhere", nd("::", 128, "::"), spoofedIP},
		{"own advertisement", nd("fe80::9", 136, "fd00:1::9"), fine},
		{"another's advertisement", nd("fe80::9", 136, "fd00:2::1"), spoofedND},
		{"router advertisement", nd("fe80::9", 134, "::"), rogueRouter},
		{"redirect", nd("fe80::9", 137, "fd00:2::1"), rogueRouter},
		{"advertisement behind headers", hidden(60, 0, 0, 0, 0, 0, 0, 0, 58, 0, 0, 0, 0, 0, 0, 0), rogueRouter},
		{"advertisement in a first fragment", hidden(44, 0, 0, 0, 0, 0, 0, 0, 58, 0, 0, 1, 0, 0, 0, 1), rogueRouter},
		{"later fragment", hidden(44, 0, 0, 0, 0, 0, 0, 0, 58, 0, 0, 8, 0, 0, 0, 1), fine},
		{"headers beyond what is read", hidden(60, 255, 0, 0, 0, 0, 0, 0), unreadable},
		{"IPv6 cut", nd("fe80::9", 136, "fd00:1::9")[:50], unreadable},
		{"ICMPv6 cut", nd("fe80::9", 136, "fd00:1::9")[:70], unreadable},
		{"another protocol", build(t, ether(own, 0x88cc), gopacket.Payload("x")), protocol},
		{"short", []byte{1, 2, 3}, fine},
	} {
		r := strict(t).rules.Load()
		if got := r.judge(c.frame[:min(len(c.frame), peek)], len(c.frame)); got != c.want {
			t.Errorf("%s: %q, want %q", c.what, refusalNames[got], refusalNames[c.want])
		}
	}
	macOnly := newGuard(t, Source{MAC: [6]byte(own)}).rules.Load()
	for what, c := range map[string]struct {
		frame []byte
		want  refusal
	}{
		"any IP": {build(t, e4, ip4("10.9.9.9", 17), udp(67, 68)), fine}, "any protocol": {build(t, ether(own, 0x88cc),
			gopacket.Payload("x")), fine},
		"ARP of another": {build(t, ea, arp(other, "10.9.9.9")), spoofedARP}, "another MAC": {build(t, ether(other, 0x88cc),
			gopacket.Payload("x")), spoofedMAC},
	} {
		if got := macOnly.judge(c.frame, len(c.frame)); got != c.want {
			t.Errorf("MAC alone, %s: %q, want %q", what, refusalNames[got], refusalNames[c.want])
		}
	}
}

// TestRefusedFrames sends good and forged frames in turn.
func TestRefusedFrames(t *testing.T) {
	rig := porttest.NewRig(t)
	g := strict(t)
	p := Wrap(newEcho(t, echo.Options{Backlog: 5}), Options{Guard: g})
	t.Cleanup(func() { p.Close() })
	q := rig.Open(t, p, 0)
	good := build(t, ether(own, layers.EthernetTypeIPv4), ip4("10.0.2.15", 17), udp(1, 2))
	bad := build(t, ether(own, layers.EthernetTypeIPv4), ip4("10.0.2.16", 17), udp(1, 2))
	var pkts []packet.Packet
	for i := range 16 {
		pkts = append(pkts, rig.Packet(t, [][]byte{bad, good}[i%2], 5*(1+i%3)))
	}
	if n := q.Send(pkts); n != 11 { // five good ones fit, and six forged ones stand before the sixth
		t.Errorf("%d frames were taken", n)
	}
	rig.Release(pkts[11:])
	if n := porttest.DropCount(q, "spoofed_ip"); n != 6 {
		t.Errorf("%d forged frames are counted", n)
	}
	if got := rig.Recv(t, q, 5); len(got) != 5 {
		t.Errorf("%d frames came back", len(got))
	}
	if err := g.Set(Source{MAC: [6]byte(own), Addrs: []netip.Prefix{netip.MustParsePrefix("10.0.2.16/32")}}); err != nil {
		t.Fatal(err)
	}
	if n := q.Send([]packet.Packet{rig.Packet(t, bad, 0)}); n != 1 || porttest.DropCount(q, "") != 6 {
		t.Error("the guest's new address is refused")
	}
}

// FuzzGuard wants what passes to be the guest's own, as gopacket reads it.
func FuzzGuard(f *testing.F) {
	e4, e6 := ether(own, layers.EthernetTypeIPv4), ether(own, layers.EthernetTypeIPv6)
	f.Add(build(f, e4, ip4("10.0.2.15", 17), udp(68, 67)))
	f.Add(build(f, ether(own, layers.EthernetTypeARP), arp(own, "10.0.2.15")))
	f.Add(build(f, append([]gopacket.SerializableLayer{e6, ip6("fe80::9", layers.IPProtocolICMPv6)}, icmp6(136, "fd00:1::9")...)...))
	f.Add(build(f, e6, ip6("fd00:1::9", layers.IPProtocolIPv6HopByHop), gopacket.Payload{60, 0, 0, 0, 0, 0, 0, 0, 58, 0, 0, 0, 0, 0, 0,
		0, 134, 0, 0, 0}))
	r := strict(f).rules.Load()
	f.Fuzz(func(t *testing.T, frame []byte) {
		if r.judge(frame[:min(len(frame), peek)], len(frame)) != fine || len(frame) < 14 {
			return
		}
		p := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.DecodeOptions{NoCopy: true})
		outer := true
		for i, l := range p.Layers() {
			if l.LayerType() == layers.LayerTypeIPv4 || l.LayerType() == layers.LayerTypeIPv6 {
				if !outer {
					return // a tunnel; what is inside is the guest's
				}
				outer = false
			}
			switch l := l.(type) {
			case *layers.Ethernet:
				if i > 0 {
					return // a tunnel as well
				}
				if l.SrcMAC.String() != own.String() {
					t.Errorf("%x passed", frame)
				}
			case *layers.IPv4:
				if src := l.SrcIP.String(); l.SrcIP != nil && src != "10.0.2.15" && src != "0.0.0.0" {
					t.Errorf("%s passed in %x", src, frame)
				}
				return
			case *layers.IPv6:
				if src, _ := netip.AddrFromSlice(l.SrcIP); src.IsValid() && !r.own(src) && !src.IsLinkLocalUnicast() && !src.IsUnspecified() {
					t.Errorf("%v passed in %x", src, frame)
				}
			case *layers.ICMPv6RouterAdvertisement, *layers.ICMPv6Redirect:
				t.Errorf("a router speaks in %x", frame)
			case *layers.Dot1Q, *layers.ARP, *layers.ICMPv6, *layers.IPv6HopByHop, *layers.IPv6Destination, *layers.IPv6Routing,
				*layers.IPv6Fragment:
			default:
				return
			}
		}
	})
}

func BenchmarkJudge(b *testing.B) {
	r := strict(b).rules.Load()
	for name, frame := range map[string][]byte{
		"ipv4": build(b, ether(own, layers.EthernetTypeIPv4), ip4("10.0.2.15", 6), gopacket.Payload(make([]byte, 40))),
		"ipv6": build(b, ether(own, layers.EthernetTypeIPv6), ip6("fd00:1::9", 6), gopacket.Payload(make([]byte, 40))),
	} {
		b.Run("frame="+name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if r.judge(frame, len(frame)) != fine {
					b.Fatal("refused")
				}
			}
		})
	}
}
