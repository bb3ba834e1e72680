package dhcp

import (
	"net"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv6"
	"github.com/mdlayher/ndp"
)

// verify wants that no address is leased twice, nor to two stations, and that the table stays small.
func (t *table) verify(tb interface {
	Helper()
	Errorf(string, ...any)
}) {
	tb.Helper()
	for mac, l := range t.byMAC {
		if l.MAC != mac || t.byAddr[l.Addr] != l || l.State == Declined {
			tb.Errorf("%v has %+v, the address is that of %+v", mac, l, t.byAddr[l.Addr])
		}
	}
	declined := 0
	for addr, l := range t.byAddr {
		if l.State == Declined {
			declined++
		} else if t.byMAC[l.MAC] != l {
			tb.Errorf("%v is leased to %v, who has %+v", addr, l.MAC, t.byMAC[l.MAC])
		}
		if l.Addr != addr || addr.Compare(t.first) < 0 || addr.Compare(t.last) > 0 && !l.Pinned {
			tb.Errorf("%v has the lease %+v", addr, l)
		}
	}
	if declined > maxDeclined || len(t.byAddr) > t.max {
		tb.Errorf("%d leases, %d declined", len(t.byAddr), declined)
	}
}

func FuzzHandle(f *testing.F) {
	w := newWorld4(f, config4())
	offer, _ := w.send(discovery(f, station(1), everything))
	request, _ := dhcpv4.NewRequestFromOffer(offer)
	ack, _ := w.send(request)
	renew, _ := dhcpv4.NewRenewFromAck(ack)
	release, _ := dhcpv4.NewReleaseFromACK(ack)
	inform, _ := dhcpv4.NewInform(net.HardwareAddr{0x52, 0x54, 0, 0, 0, 1}, net.IPv4(10, 0, 2, 9))
	for _, m := range []*dhcpv4.DHCPv4{discovery(f, station(1), everything), request, renew, release, inform} {
		f.Add(m.ToBytes())
	}
	f.Fuzz(func(t *testing.T, message []byte) {
		mac := station(1)
		if len(message) > 34 && message[28]&1 == 0 {
			mac = MAC(message[28:34])
		}
		reply, ok := w.Handle(message, mac)
		w.leases.verify(t)
		if !ok {
			return
		}
		if m, err := dhcpv4.FromBytes(reply.Payload); err != nil || len(reply.Payload) > MaxMessage || m.OpCode != dhcpv4.OpcodeBootReply {
			t.Errorf("answer of %d bytes: %v", len(reply.Payload), err)
		}
	})
}

func FuzzHandle6(f *testing.F) {
	w := newWorld6(f, config6())
	reply := w.boot6(station(1))
	f.Add(solicit(f, station(1), dhcpv6.WithRapidCommit, dhcpv6.WithFQDN(0, "a.b"), dhcpv6.WithIAPD([4]byte{1})).ToBytes(), byte(1))
	for _, kind := range []dhcpv6.MessageType{dhcpv6.MessageTypeRequest, dhcpv6.MessageTypeRenew, dhcpv6.MessageTypeRelease,
		dhcpv6.MessageTypeDecline} {
		f.Add(later(kind, reply, true).ToBytes(), byte(1))
	}
	for _, kind := range []dhcpv6.MessageType{dhcpv6.MessageTypeRebind, dhcpv6.MessageTypeConfirm, dhcpv6.MessageTypeInformationRequest} {
		f.Add(later(kind, reply, false).ToBytes(), byte(2))
	}
	f.Fuzz(func(t *testing.T, message []byte, who byte) {
		answer, ok := w.Handle(message, station(who))
		w.leases.verify(t)
		if !ok {
			return
		}
		if _, err := dhcpv6.MessageFromBytes(answer); err != nil {
			t.Errorf("answer %x: %v", answer, err)
		}
	})
}

func FuzzIsSolicitation(f *testing.F) {
	a := advert()
	b, err := a.Marshal(ip("fe80::1"), ip("ff02::1"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	b[0] = 133
	f.Add(b)
	f.Add([]byte{133, 0, 0, 0, 0, 0, 0, 0, 1, 0})
	f.Fuzz(func(t *testing.T, message []byte) {
		m, err := ndp.ParseMessage(message)
		if IsSolicitation(message, ip("::")) && (err != nil || m.Type() != 133) {
			t.Errorf("%x: %v %v", message, m, err)
		}
	})
}
