package dhcp

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

var everything = dhcpv4.WithRequestedOptions(dhcpv4.OptionSubnetMask, dhcpv4.OptionRouter, dhcpv4.OptionDomainNameServer,
	dhcpv4.OptionDomainName, dhcpv4.OptionDNSDomainSearchList, dhcpv4.OptionInterfaceMTU, dhcpv4.OptionHostName,
	dhcpv4.OptionClasslessStaticRoute, dhcpv4.OptionTFTPServerName, dhcpv4.OptionBootfileName, dhcpv4.OptionBroadcastAddress)

func TestOptions(t *testing.T) {
	c := config4()
	c.HostName, c.TFTPServer, c.BootFile = "guest-1", "10.0.2.9", "pxe.0"
	c.Routes = []Route{{netip.MustParsePrefix("10.9.0.0/16"), ip("10.0.2.7")}}
	w := newWorld4(t, c)
	id := dhcpv4.WithOption(dhcpv4.OptClientIdentifier([]byte{255, 1, 2, 3}))
	ack := w.boot(station(1), everything, id, dhcpv4.WithOption(dhcpv4.OptMaxMessageSize(1500)))
	mtu, _ := dhcpv4.GetUint16(dhcpv4.OptionInterfaceMTU, ack.Options)
	ones, _ := ack.SubnetMask().Size()
	for _, c := range []struct {
		what      string
		got, want any
	}{
		{"address", addrOf(ack.YourIPAddr), ip("10.0.2.15")},
		{"mask", ones, 24},
		{"router", addrOf(ack.Router()[0]), ip("10.0.2.2")},
		{"DNS", addrOf(ack.DNS()[0]), ip("10.0.2.2")},
		{"search", ack.DomainSearch().Labels, []string{"corp.example", "example.net"}},
		{"domain", ack.DomainName(), "corp.example"},
		{"MTU", mtu, uint16(1500)},
		{"host name", ack.HostName(), "guest-1"},
		{"routes", dhcpv4.Routes(ack.ClasslessStaticRoute()).String(), "route to 0.0.0.0/0 via 10.0.2.2; route to 10.9.0.0/16 via 10.0.2.7"},
		{"TFTP server", ack.TFTPServerName(), "10.0.2.9"},
		{"next server", addrOf(ack.ServerIPAddr), ip("10.0.2.9")},
		{"boot file", ack.BootFileName, "pxe.0"},
		{"boot file option", ack.BootFileNameOption(), "pxe.0"},
		{"broadcast", addrOf(ack.BroadcastAddress()), ip("10.0.2.255")},
		{"lease", ack.IPAddressLeaseTime(0), DefaultLease},
		{"client identifier", ack.Options.Get(dhcpv4.OptionClientIdentifier), []byte{255, 1, 2, 3}},
	} {
		if !reflect.DeepEqual(c.got, c.want) {
			t.Errorf("%s: %v, want %v", c.what, c.got, c.want)
		}
	}
	few := w.boot(station(2), dhcpv4.WithRequestedOptions(dhcpv4.OptionRouter))
	if few.Options.Has(dhcpv4.OptionInterfaceMTU) || !few.Options.Has(dhcpv4.OptionRouter) || !few.Options.Has(dhcpv4.OptionSubnetMask) {
		t.Errorf("options that nobody asked for, or too few: %v", few.Summary())
	}
}

// TestMessageSize: the least important options are left out for a client that takes short messages.
func TestMessageSize(t *testing.T) {
	c := config4()
	c.Search = nil
	for range 8 {
		c.Search = append(c.Search, strings.Repeat("a", 60))
	}
	w := newWorld4(t, c)
	for _, size := range []uint16{0, 10, 576, 700, 1000, 65535} {
		m := discovery(t, station(1), everything)
		if size != 0 {
			m.UpdateOption(dhcpv4.OptMaxMessageSize(size))
		}
		offer, reply := w.send(m)
		limit := min(max(int(size), 576), 1500) - 28
		if len(reply.Payload) > limit || !offer.Options.Has(dhcpv4.OptionRouter) {
			t.Errorf("size %d: %d bytes, at most %d may be", size, len(reply.Payload), limit)
		}
		if has := offer.Options.Has(dhcpv4.OptionDNSDomainSearchList); has != (limit > 800) {
			t.Errorf("size %d: search list is there: %v", size, has)
		}
	}
}

// TestNAT13_Renew goes through the life of a lease.
func TestNAT13_Renew(t *testing.T) {
	w := newWorld4(t, config4())
	ack := w.boot(station(1), dhcpv4.WithOption(dhcpv4.OptHostName("Web-1.corp")))
	if list := w.Leases(); len(list) != 1 || list[0].State != Bound || list[0].Name != "web-1" || list[0].MAC != station(1) {
		t.Errorf("leases %+v", list)
	}
	renew, _ := dhcpv4.NewRenewFromAck(ack)
	w.clock = w.clock.Add(DefaultLease / 2)
	for _, broadcast := range []bool{false, true} { // renew, rebind
		if broadcast {
			renew.SetBroadcast()
		}
		answer, reply := w.send(renew)
		if answer.MessageType() != dhcpv4.MessageTypeAck || addrOf(answer.YourIPAddr) != ip("10.0.2.15") ||
			reply.Addr != ip("10.0.2.15") || reply.MAC != station(1) || !answer.ClientIPAddr.Equal(renew.ClientIPAddr) {
			t.Errorf("renewal: %v to %v", answer, reply.Addr)
		}
	}
	if left := w.Leases()[0].Expires.Sub(w.clock); left != DefaultLease {
		t.Errorf("the lease lasts %v more", left)
	}
	w.clock = w.clock.Add(DefaultLease + time.Second)
	if list := w.Leases(); list[0].State != Released {
		t.Errorf("expired: %+v", list)
	}
	if got := w.addr(station(1)); got != ip("10.0.2.15") {
		t.Errorf("the station came back and got %v", got)
	}
}

func reboot(t testing.TB, mac MAC, want string) *dhcpv4.DHCPv4 {
	return discovery(t, mac, dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest),
		dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(net.ParseIP(want))))
}

func TestNAT13_RebootAndNAK(t *testing.T) {
	w := newWorld4(t, config4())
	w.addr(station(1))
	for _, c := range []struct {
		mac  MAC
		want string
		kind dhcpv4.MessageType
	}{
		{station(1), "10.0.2.15", dhcpv4.MessageTypeAck},
		{station(1), "10.0.2.16", dhcpv4.MessageTypeNak},   // it has another one
		{station(2), "10.0.2.15", dhcpv4.MessageTypeNak},   // somebody else's
		{station(2), "192.168.1.5", dhcpv4.MessageTypeNak}, // it has moved here
		{station(2), "10.0.2.2", dhcpv4.MessageTypeNak},    // ours
		{station(2), "10.0.2.255", dhcpv4.MessageTypeNak},
		{station(2), "10.0.2.0", dhcpv4.MessageTypeNak},
		{station(3), "10.0.2.77", dhcpv4.MessageTypeAck}, // known from before the daemon's restart
	} {
		answer, reply := w.send(reboot(t, c.mac, c.want))
		if answer.MessageType() != c.kind {
			t.Errorf("%v asks for %s: %v, want %v", c.mac, c.want, answer.MessageType(), c.kind)
		}
		if c.kind == dhcpv4.MessageTypeNak && (reply.Addr != broadcastAddr || reply.MAC != broadcastMAC ||
			answer.Options.Has(dhcpv4.OptionSubnetMask) ||
			!addrOf(answer.YourIPAddr).IsUnspecified()) {
			t.Errorf("refusal to %v: %v", reply.Addr, answer.Summary())
		}
	}
}

func TestDestinations(t *testing.T) {
	w := newWorld4(t, config4())
	m := discovery(t, station(1), dhcpv4.WithBroadcast(true))
	if _, reply := w.send(m); reply.Addr != broadcastAddr || reply.MAC != broadcastMAC {
		t.Errorf("broadcast flag: to %v %v", reply.Addr, reply.MAC)
	}
	m.SetUnicast()
	if _, reply := w.send(m); reply.Addr != ip("10.0.2.15") || reply.MAC != station(1) {
		t.Errorf("no flag: to %v %v", reply.Addr, reply.MAC)
	}
	inform, _ := dhcpv4.NewInform(net.HardwareAddr(m.ClientHWAddr), net.IPv4(10, 0, 2, 200))
	answer, reply := w.send(inform)
	if reply.Addr != ip("10.0.2.200") || !addrOf(answer.YourIPAddr).IsUnspecified() || answer.Options.Has(dhcpv4.OptionIPAddressLeaseTime) ||
		!answer.Options.Has(dhcpv4.OptionRouter) {
		t.Errorf("inform: to %v, %v", reply.Addr, answer.Summary())
	}
}

func TestReleaseAndDecline(t *testing.T) {
	w := newWorld4(t, config4())
	ack := w.boot(station(1))
	decline := discovery(t, station(1), dhcpv4.WithMessageType(dhcpv4.MessageTypeDecline),
		dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(ack.YourIPAddr)), dhcpv4.WithOption(dhcpv4.OptServerIdentifier(ack.ServerIdentifier())))
	foreign := discovery(t, station(2), dhcpv4.WithMessageType(dhcpv4.MessageTypeDecline),
		dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(ack.YourIPAddr)), dhcpv4.WithOption(dhcpv4.OptServerIdentifier(ack.ServerIdentifier())))
	w.send(foreign)
	if list := w.Leases(); list[0].State != Bound {
		t.Errorf("a station declined another's address: %+v", list)
	}
	w.send(decline)
	if list := w.Leases(); list[0].State != Declined || list[0].MAC != (MAC{}) {
		t.Errorf("declined: %+v", list)
	}
	if got := w.addr(station(1), dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(ack.YourIPAddr))); got != ip("10.0.2.16") {
		t.Errorf("after its decline the station got %v", got)
	}
	release, _ := dhcpv4.NewReleaseFromACK(w.boot(station(1)))
	w.send(release)
	if list := w.Leases(); list[1].State != Released {
		t.Errorf("released: %+v", list)
	}
	w.clock = w.clock.Add(declineTime)
	if got := w.addr(station(3), dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(ack.YourIPAddr))); got != ip("10.0.2.15") {
		t.Errorf("a declined address whose time has ended is not given: %v", got)
	}
	for range 2 * maxDeclined {
		d := discovery(t, station(4), dhcpv4.WithMessageType(dhcpv4.MessageTypeDecline),
			dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(w.boot(station(4)).YourIPAddr)),
			dhcpv4.WithOption(dhcpv4.OptServerIdentifier(ack.ServerIdentifier())))
		w.send(d)
	}
	declined := 0
	for _, l := range w.Leases() {
		if l.State == Declined {
			declined++
		}
	}
	if declined != maxDeclined {
		t.Errorf("%d addresses are set aside", declined)
	}
}

// TestHostileNames: what a station calls itself is shown if it is a host name, and otherwise not.
func TestHostileNames(t *testing.T) {
	w := newWorld4(t, config4())
	for i, name := range []string{"\x1b[2J\x07", "a\nb", "\u009b31m", `a"b`, "<script>", "\xff\xfe", strings.Repeat("x", 64), "web-1"} {
		mac := station(byte(20 + i))
		w.boot(mac, dhcpv4.WithOption(dhcpv4.OptHostName(name)))
		got := ""
		for _, l := range w.Leases() {
			if l.MAC == mac {
				got = l.Name
			}
		}
		if want := map[string]string{"web-1": "web-1"}[name]; got != want {
			t.Errorf("%q is shown as %q", name, got)
		}
	}
}

func TestPins(t *testing.T) {
	c := config4()
	c.Pins = []Pin{{MAC: station(1), Addr: ip("10.0.2.16")}, {Name: "db", Addr: ip("10.0.2.5")}}
	w := newWorld4(t, c)
	db := dhcpv4.WithOption(dhcpv4.OptHostName("DB"))
	for _, tc := range []struct {
		mac  MAC
		mods []dhcpv4.Modifier
		want string
	}{
		{station(2), nil, "10.0.2.15"},
		{station(3), []dhcpv4.Modifier{dhcpv4.WithOption(dhcpv4.OptRequestedIPAddress(net.IPv4(10, 0, 2, 16)))}, "10.0.2.17"},
		{station(1), nil, "10.0.2.16"},
		{station(4), []dhcpv4.Modifier{db}, "10.0.2.5"},
		{station(5), []dhcpv4.Modifier{db}, "10.0.2.18"}, // the name is taken
		{station(4), []dhcpv4.Modifier{db}, "10.0.2.5"},
	} {
		if got := w.addr(tc.mac, tc.mods...); got != ip(tc.want) {
			t.Errorf("%v: %v, want %v", tc.mac, got, tc.want)
		}
	}
	// A pin that comes later moves the station when it renews, and takes the address from who has it.
	ack := w.boot(station(2))
	c.Pins = []Pin{{MAC: station(2), Addr: ip("10.0.2.17")}}
	if err := w.Configure(c); err != nil {
		t.Fatal(err)
	}
	renew, _ := dhcpv4.NewRenewFromAck(ack)
	if answer, _ := w.send(renew); answer.MessageType() != dhcpv4.MessageTypeNak {
		t.Errorf("renewal beside the pin: %v", answer.MessageType())
	}
	if got := w.addr(station(2)); got != ip("10.0.2.17") {
		t.Errorf("pinned later: %v", got)
	}
	if got := w.addr(station(3)); got == ip("10.0.2.17") {
		t.Error("two stations have one address")
	}
}

// TestNAT13_Restart: a server that has forgotten everything renews what stations have. Pins are its configuration, and hold all the same: a
// newcomer gets no pinned address, whoever comes first.
func TestNAT13_Restart(t *testing.T) {
	c := config4()
	c.Pins = []Pin{{MAC: station(1), Addr: ip("10.0.2.15")}, {Name: "db", Addr: ip("10.0.2.16")}}
	w := newWorld4(t, c)
	db := dhcpv4.WithOption(dhcpv4.OptHostName("db"))
	stations := []struct {
		mac  MAC
		mods []dhcpv4.Modifier
		want string
	}{{station(1), nil, "10.0.2.15"}, {station(2), []dhcpv4.Modifier{db}, "10.0.2.16"}, {station(3), nil, "10.0.2.17"}}
	var acks []*dhcpv4.DHCPv4
	for _, s := range stations {
		acks = append(acks, w.boot(s.mac, s.mods...))
	}
	again := newWorld4(t, c)
	for i, s := range stations {
		renew, err := dhcpv4.NewRenewFromAck(acks[i], s.mods...)
		if err != nil {
			t.Fatal(err)
		}
		answer, _ := again.send(renew)
		if answer.MessageType() != dhcpv4.MessageTypeAck || addrOf(answer.YourIPAddr) != ip(s.want) {
			t.Errorf("%v renews %s: %v", s.mac, s.want, answer.Summary())
		}
	}
	newcomer := newWorld4(t, c)
	if got := newcomer.addr(station(9)); got != ip("10.0.2.17") {
		t.Errorf("a newcomer got %v", got)
	}
	for _, s := range stations[:2] {
		if got := newcomer.addr(s.mac, s.mods...); got != ip(s.want) {
			t.Errorf("%v got %v, its pin is %s", s.mac, got, s.want)
		}
	}
}

func TestPoolIsUsedUp(t *testing.T) {
	c := config4()
	c.Last = ip("10.0.2.17")
	w := newWorld4(t, c)
	for i := range byte(3) {
		w.clock = w.clock.Add(time.Minute)
		w.addr(station(i))
	}
	if got := w.addr(station(9)); got.IsValid() {
		t.Errorf("a fourth station got %v of three addresses", got)
	}
	w.clock = w.clock.Add(DefaultLease - time.Minute) // those of 0 and 1 have ended
	if got := w.addr(station(9)); got != ip("10.0.2.15") {
		t.Errorf("got %v, want the address that is unused for longest", got)
	}
	if got := w.addr(station(1)); got != ip("10.0.2.16") {
		t.Errorf("the other station's address is gone: %v", got)
	}
}

func TestTableIsBounded(t *testing.T) {
	c := config4()
	c.Subnet, c.Gateway, c.First = netip.MustParsePrefix("10.0.0.0/8"), ip("10.0.0.2"), ip("10.0.0.15")
	w := newWorld4(t, c)
	w.leases.max = 50
	mac := func(i int) (m MAC) {
		binary.BigEndian.PutUint32(m[2:], uint32(i))
		return m
	}
	for i := range 200 {
		w.send(discovery(t, mac(i)))
	}
	if n := len(w.leases.byAddr); n != 50 || len(w.leases.byMAC) != 50 {
		t.Errorf("%d leases", n)
	}
	w.clock = w.clock.Add(2 * offerTime)
	if !w.addr(mac(500)).IsValid() || len(w.leases.byAddr) != 50 {
		t.Error("offers that nobody took block the table")
	}
}

func TestRestore(t *testing.T) {
	end := time.Unix(1e9, 0).Add(time.Hour)
	w := newWorld4(t, config4(),
		Lease{Addr: ip("10.0.2.99"), MAC: station(1), State: Bound, Expires: end, Name: "bad\nname"},
		Lease{Addr: ip("10.0.2.99"), MAC: station(2), State: Bound, Expires: end}, // twice
		Lease{Addr: ip("10.0.3.1"), MAC: station(3), State: Bound, Expires: end},  // elsewhere
		Lease{Addr: ip("10.0.2.2"), MAC: station(4), State: Bound, Expires: end},  // ours
		Lease{Addr: ip("10.0.2.98"), MAC: station(5), State: "strange", Expires: end})
	if list := w.Leases(); len(list) != 1 || list[0].Name != "" {
		t.Errorf("restored %+v", list)
	}
	if got := w.addr(station(1)); got != ip("10.0.2.99") {
		t.Errorf("the station got %v", got)
	}
}

// TestNAT23_NoAnswer: malformed and foreign messages are counted.
func TestNAT23_NoAnswer(t *testing.T) {
	w := newWorld4(t, config4())
	good := discovery(t, station(1)).ToBytes()
	change := func(at int, b byte) []byte {
		c := bytes.Clone(good)
		c[at] = b
		return c
	}
	otherServer := reboot(t, station(1), "10.0.2.15")
	otherServer.UpdateOption(dhcpv4.OptServerIdentifier(net.IPv4(10, 0, 2, 3)))
	untyped := discovery(t, station(1))
	untyped.DeleteOption(dhcpv4.OptionDHCPMessageType)
	for _, c := range []struct {
		message []byte
		reason  string
	}{
		{nil, "malformed"},
		{good[:239], "malformed"},
		{good[:240], "not_client"},        // exactly 240 bytes: no options
		{untyped.ToBytes(), "not_client"}, // BOOTP
		{append(bytes.Clone(good[:240]), 53, 1, 1), "malformed"},
		{append(bytes.Clone(good[:240]), 53, 255), "malformed"},
		{append(bytes.Clone(good[:240]), 82, 6, 1, 4, 82, 255, 1, 1, 255), "not_client"},
		{make([]byte, MaxMessage+1), "too_long"},
		{change(0, 2), "not_client"},
		{change(1, 6), "not_client"},
		{change(2, 16), "not_client"},
		{change(24, 10), "relayed"},
		{change(33, 9), "spoofed"},
		{otherServer.ToBytes(), "other_server"},
		{discovery(t, station(1), dhcpv4.WithMessageType(dhcpv4.MessageTypeOffer)).ToBytes(), "not_client"},
		{discovery(t, station(1), dhcpv4.WithMessageType(dhcpv4.MessageTypeRequest)).ToBytes(), "malformed"},
		{discovery(t, station(1), dhcpv4.WithMessageType(dhcpv4.MessageTypeInform)).ToBytes(), "malformed"},
	} {
		before := map[string]uint64{}
		w.Drops(func(reason string, n uint64) { before[reason] = n })
		if _, ok := w.Handle(c.message, station(1)); ok {
			t.Errorf("%s: answered", c.reason)
		}
		w.Drops(func(reason string, n uint64) {
			if (n - before[reason]) != map[bool]uint64{true: 1}[reason == c.reason] {
				t.Errorf("message of %d bytes: %s counts %d, want one more %s", len(c.message), reason, n-before[reason], c.reason)
			}
		})
	}
	if len(w.Leases()) != 0 {
		t.Errorf("leases %+v", w.Leases())
	}
}
