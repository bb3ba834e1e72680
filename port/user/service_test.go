package user

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv6"
	mdns "github.com/miekg/dns"

	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/port/user/dhcp"
	"github.com/vhostd/vhostd/port/user/dns"
	"github.com/vhostd/vhostd/port/user/policy"
	"github.com/vhostd/vhostd/virtio"
)

func newServed(t testing.TB, o Options, s Services) *Port {
	t.Helper()
	o.Logger = quiet
	p, err := NewWith(o, s)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// TestDHCP: a machine without an address gets the first one, and what it needs to know.
func TestDHCP(t *testing.T) {
	p := newServed(t, Options{MTU: 1400, Search: []string{"vm.example"}}, Services{})
	c := newCard(t, p, 0)
	replies := make(chan *dhcpv4.DHCPv4, 4)
	see := func(f []byte) {
		if len(f) > 42 && f[23] == protoUDP && port16(f[36:]) == dhcpClientPort {
			if m, err := dhcpv4.FromBytes(f[42:]); err == nil {
				replies <- m
			}
		}
	}
	c.tap.Store(&see)
	exchange := func(m *dhcpv4.DHCPv4) *dhcpv4.DHCPv4 {
		t.Helper()
		payload := m.ToBytes()
		v := newIP(netip.IPv4Unspecified(), broadcast4, protoUDP, udpLen+len(payload), false)
		defer v.Release()
		head := binary.BigEndian.AppendUint16(binary.BigEndian.AppendUint16(nil, dhcpClientPort), dhcpServerPort)
		head = append(binary.BigEndian.AppendUint16(head, uint16(udpLen+len(payload))), 0, 0)
		frame := append(append(append([]byte(nil), broadcast[:]...), c.mac[:]...), 8, 0)
		frame = append(append(append(frame, v.AsSlice()...), head...), payload...)
		c.send(frame, virtio.NetHdr{})
		select {
		case r := <-replies:
			return r
		case <-time.After(3 * time.Second):
			t.Fatal("no answer")
			return nil
		}
	}
	discover, err := dhcpv4.NewDiscovery(c.mac[:], dhcpv4.WithRequestedOptions(dhcpv4.OptionInterfaceMTU))
	if err != nil {
		t.Fatal(err)
	}
	offer := exchange(discover)
	request, err := dhcpv4.NewRequestFromOffer(offer, dhcpv4.WithRequestedOptions(dhcpv4.OptionInterfaceMTU))
	if err != nil {
		t.Fatal(err)
	}
	ack := exchange(request)
	if ack.MessageType() != dhcpv4.MessageTypeAck || ack.YourIPAddr.String() != p.opts.Guest.String() ||
		ack.Router()[0].String() != p.opts.Gateway.String() || ack.DNS()[0].String() != p.opts.Gateway.String() {
		t.Errorf("acknowledged: %v", ack.Summary())
	}
	if mtu := ack.Options.Get(dhcpv4.OptionInterfaceMTU); !bytes.Equal(mtu, []byte{1400 >> 8, 1400 & 255}) {
		t.Errorf("MTU option: %v", mtu)
	}
	if r := p.Leases(); len(r.Leases) != 1 || r.Leases[0].Addr != p.opts.Guest {
		t.Errorf("leases: %v", r.Leases)
	}
}

// TestAdvertisement: who asks for routers learns the prefix.
func TestAdvertisement(t *testing.T) {
	p := newServed(t, Options{}, Services{})
	g := newGuest(t, p)
	prefix := p.opts.Subnet6.Addr().As16()
	told := g.icmpOf(func(src netip.Addr, b []byte) bool {
		return src == p.link6 && b[0] == 134 && bytes.Contains(b, append([]byte{3, 4, 64, 0xc0}, b[0:0]...)) && bytes.Contains(b, prefix[:])
	})
	if !porttest.Eventually(func() bool { // the guest's stack solicits by itself when its interface comes up, maybe before we look
		p.advertise(netip.Addr{}, groupMAC6)
		return came(told, 100*time.Millisecond)
	}) {
		t.Error("no advertisement")
	}
}

// resolver is a DNS server of the host that knows one name.
func resolver(t *testing.T, at string) string {
	t.Helper()
	conn, err := net.ListenPacket("udp", at)
	if err != nil {
		t.Fatal(err)
	}
	s := &mdns.Server{PacketConn: conn, Handler: mdns.HandlerFunc(func(w mdns.ResponseWriter, q *mdns.Msg) {
		m := new(mdns.Msg).SetReply(q)
		if q.Question[0].Name == "web.example." && q.Question[0].Qtype == mdns.TypeA {
			m.Answer = []mdns.RR{&mdns.A{Hdr: mdns.RR_Header{Name: "web.example.", Rrtype: mdns.TypeA, Class: mdns.ClassINET, Ttl: 60}, A: net.ParseIP(live4)}}
		} else {
			m.Rcode = mdns.RcodeNameError
		}
		_ = w.WriteMsg(m)
	})}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = s.ActivateAndServe()
	}()
	t.Cleanup(func() {
		conn.Close()
		<-done
	})
	return conn.LocalAddr().String()
}

// ask sends a question to the gateway.
func (g *guest) ask(gateway netip.Addr, overTCP bool, name string) *mdns.Msg {
	g.t.Helper()
	at := netip.AddrPortFrom(gateway, dnsPort).String()
	var c net.Conn
	if overTCP {
		c = g.mustDial(at)
	} else {
		c = g.dialUDP(at)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(4 * time.Second))
	q := new(mdns.Msg).SetQuestion(name, mdns.TypeA)
	b, err := q.Pack()
	if err != nil {
		g.t.Fatal(err)
	}
	if overTCP {
		b = append(binary.BigEndian.AppendUint16(nil, uint16(len(b))), b...)
	}
	if _, err := c.Write(b); err != nil {
		g.t.Fatal(err)
	}
	answer := make([]byte, 4096)
	n := 0
	if overTCP {
		if _, err = io.ReadFull(c, answer[:2]); err == nil {
			n, err = io.ReadFull(c, answer[:port16(answer)])
		}
	} else {
		n, err = c.Read(answer)
	}
	m := new(mdns.Msg)
	if err == nil {
		err = m.Unpack(answer[:n])
	}
	if err != nil {
		g.t.Fatalf("%s over TCP %v: %v", name, overTCP, err)
	}
	return m
}

// TestNamesAndPolicy: the gateway answers names over both protocols, and a rule about a name opens what was answered for it.
func TestNamesAndPolicy(t *testing.T) {
	upstream, err := dns.ParseUpstream(resolver(t, "127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	host, err := dns.ParseHost("db.example:10.0.2.99")
	if err != nil {
		t.Fatal(err)
	}
	rule, err := policy.ParseRule(policy.Allow, "web.example")
	if err != nil {
		t.Fatal(err)
	}
	p := newServed(t, Options{}, Services{Upstreams: []dns.Upstream{upstream}, Hosts: []dns.Host{host}, Rules: []policy.Rule{rule}})
	g := newGuest(t, p)
	at := listenTCP(t, live4+":0", echoTCP)
	if _, err := g.dial(at); err == nil || !strings.Contains(err.Error(), "no route") && !strings.Contains(err.Error(), "unreachable") {
		t.Errorf("before the name was looked up: %v", err)
	}
	for _, gateway := range []netip.Addr{p.opts.Gateway, p.opts.Gateway6} {
		for _, overTCP := range []bool{false, true} {
			if m := g.ask(gateway, overTCP, "web.example."); len(m.Answer) != 1 || !strings.Contains(m.Answer[0].String(), live4) {
				t.Errorf("answer: %v", m)
			}
		}
	}
	if m := g.ask(p.opts.Gateway, false, "other.example."); m.Rcode == mdns.RcodeSuccess {
		t.Errorf("a name that is not allowed: %v", m)
	}
	g.mustDial(at).Close()
	names, rules := p.DNS(), p.Policy()
	if s := names.Stats; !names.Serving || s.Queries != 5 || s.Forwarded != 4 || s.Refused != 1 || len(names.Upstreams) != 1 {
		t.Errorf("DNS: %+v", names)
	}
	if len(rules.Rules) != 1 || rules.Rest != "deny" || rules.Refusals["not_listed"] == 0 {
		t.Errorf("policy: %+v", rules)
	}
}

// TestNAT13_LeasesOutliveTheNetwork: with a file for them, leases of both protocols are those of the network before.
func TestNAT13_LeasesOutliveTheNetwork(t *testing.T) {
	file := filepath.Join(t.TempDir(), "leases")
	mac := [6]byte{2, 0, 0, 0, 0, 7}
	begin := func() *Port {
		p, err := NewWith(Options{Logger: quiet}, Services{LeaseFile: file, NoDNS: true})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	p := begin()
	discover, err := dhcpv4.NewDiscovery(mac[:])
	if err != nil {
		t.Fatal(err)
	}
	reply, _, _ := p.opts.services.Answer4(discover.ToBytes(), mac, netip.IPv4Unspecified())
	offer, err := dhcpv4.FromBytes(reply)
	if err != nil {
		t.Fatal(err)
	}
	request, err := dhcpv4.NewRequestFromOffer(offer)
	if err != nil {
		t.Fatal(err)
	}
	p.opts.services.Answer4(request.ToBytes(), mac, netip.IPv4Unspecified())
	solicit, err := dhcpv6.NewSolicit(mac[:], dhcpv6.WithRapidCommit)
	if err != nil {
		t.Fatal(err)
	}
	p.opts.services.Answer6(solicit.ToBytes(), linkLocal(mac), mac)
	want := p.Leases().Leases
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	p = begin()
	defer p.Close()
	got := p.Leases().Leases
	if len(got) != 2 || len(want) != 2 || got[0].Addr != want[0].Addr || got[1].Addr != want[1].Addr || got[0].MAC != mac ||
		got[0].State != dhcp.Bound {
		t.Errorf("leases %+v, were %+v", got, want)
	}
}
