package dhcp

import (
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"pgregory.net/rapid"
)

// TestModel has stations do anything in any order. The model knows which address each was given and until when: no other station may
// be given it before, and a renewal in time is never refused.
func TestModel(t *testing.T) {
	type holding struct {
		addr  netip.Addr
		until time.Time
		ack   *dhcpv4.DHCPv4
	}
	rapid.Check(t, func(rt *rapid.T) {
		c := config4()
		c.Last, c.Lease = ip("10.0.2.19"), time.Hour
		c.Pins = []Pin{{MAC: station(0), Addr: ip("10.0.2.17")}}
		w := newWorld4(t, c)
		has := map[MAC]holding{}
		who := rapid.Custom(func(rt *rapid.T) MAC { return station(byte(rapid.IntRange(0, 6).Draw(rt, "station"))) })
		want := rapid.Custom(func(rt *rapid.T) dhcpv4.Modifier {
			return dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(net.IPv4(10, 0, 2, byte(rapid.IntRange(0, 25).Draw(rt, "want")))))
		})
		given := func(mac MAC, ack *dhcpv4.DHCPv4) {
			addr := addrOf(ack.YourIPAddr)
			for other, h := range has {
				if other != mac && h.addr == addr && w.clock.Before(h.until) {
					rt.Fatalf("%v was given to %v while %v has it until %v", addr, mac, other, h.until)
				}
			}
			if (addr == ip("10.0.2.17")) != (mac == station(0)) || addr.Less(c.First) || c.Last.Less(addr) {
				rt.Fatalf("%v was given to %v", addr, mac)
			}
			has[mac] = holding{addr, w.clock.Add(c.Lease), ack}
		}
		rt.Repeat(map[string]func(*rapid.T){
			"boot": func(rt *rapid.T) {
				mac := who.Draw(rt, "who")
				if ack := w.boot(mac, want.Draw(rt, "want")); ack != nil {
					given(mac, ack)
				}
			},
			"reboot": func(rt *rapid.T) {
				mac := who.Draw(rt, "who")
				m := discovery(t, mac, dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest), want.Draw(rt, "want"))
				answer, _ := w.send(m)
				if answer.MessageType() == dhcpv4.MessageTypeAck {
					given(mac, answer)
				}
			},
			"renew": func(rt *rapid.T) {
				mac := who.Draw(rt, "who")
				h, ok := has[mac]
				if !ok {
					return
				}
				m, _ := dhcpv4.NewRenewFromAck(h.ack)
				answer, _ := w.send(m)
				if answer.MessageType() == dhcpv4.MessageTypeAck {
					given(mac, answer)
				} else if w.clock.Before(h.until) {
					rt.Fatalf("%v may not renew %v, which it has until %v", mac, h.addr, h.until)
				}
			},
			"release": func(rt *rapid.T) {
				mac := who.Draw(rt, "who")
				if h, ok := has[mac]; ok {
					m, _ := dhcpv4.NewReleaseFromACK(h.ack)
					w.send(m)
					delete(has, mac)
				}
			},
			"decline": func(rt *rapid.T) {
				mac := who.Draw(rt, "who")
				if h, ok := has[mac]; ok {
					w.send(discovery(t, mac, dhcpv4.WithMessageType(dhcpv4.MessageTypeDecline),
						dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(h.addr.AsSlice())),
						dhcpv4.WithOption(dhcpv4.OptServerIdentifier(c.Gateway.AsSlice()))))
					delete(has, mac)
				}
			},
			"time": func(rt *rapid.T) {
				w.clock = w.clock.Add(time.Duration(rapid.IntRange(1, 4000).Draw(rt, "seconds")) * time.Second)
			},
			"": func(*rapid.T) { w.leases.verify(rt) },
		})
	})
}
