package network

import (
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
)

func mustParse(t *testing.T, text string) Network {
	t.Helper()
	n, err := Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestDifference: which keys of which networks a running one follows.
func TestDifference(t *testing.T) {
	for _, tc := range []struct{ from, to, live, fixed string }{
		{"user", "user", "", ""},
		{"user", "tap,name=a", "", "network"},
		{"user,publish=80:80", "user,publish=81:80,deny=10.0.0.0/8,rate-in=1Mbit,guard=10.0.2.15", "deny guard publish rate-in", ""},
		{"user,deny=10.0.0.0/8,allow=10.1.0.0/16", "user,allow=10.1.0.0/16,deny=10.0.0.0/8", "allow deny", ""},
		{"user", "user,mtu=1500,subnet=10.0.2.0/24,ipv6=on", "", ""}, // the defaults
		{"user", "user,mtu=1400,max-flows=9", "max-flows", "mtu"},
		{"user", "user,capture=/x", "", "capture"},
		{"user", "user,dns=192.0.2.1,host=a:192.0.2.2,lease=a=10.0.2.9", "dns host lease", ""},
		{"user", "user,dns=off", "", "dns"},
		{"user,dns=off,dhcp=off", "user,dns=off,dhcp=off,host=a:192.0.2.2,lease=a=10.0.2.9", "", ""},
		{"tap,name=a", "tap,name=a,rate-in=1Mbit", "", "rate-in"},
		{"tap,name=a,rate-in=1Mbit", "tap,name=b,rate-in=2Mbit,guard=10.0.0.1", "guard rate-in", "name"},
		{"sock,path=/x,guard=10.0.0.1", "sock,path=/x,guard=10.0.0.2", "guard", ""},
		{"switch,name=a,ageing=60s", "switch,name=a,ageing=61s,mac=02:00:00:00:00:01", "ageing", "mac"},
		{"switch,name=a,uplink=user", "switch,name=a,uplink=user,uplink-publish=80:80,uplink-mtu=1400", "uplink-publish", "uplink-mtu"},
		{"switch,name=a", "switch,name=a,uplink=user,uplink-publish=80:80", "", "uplink uplink-publish"},
		{"switch,name=a,uplink=tap,uplink-name=b", "switch,name=a,uplink=tap,uplink-name=c", "", "uplink-name"},
		{"echo", "echo,backlog=5", "", "backlog"},
	} {
		d := mustParse(t, tc.from).Difference(mustParse(t, tc.to))
		if strings.Join(d.Live, " ") != tc.live || strings.Join(d.Fixed, " ") != tc.fixed {
			t.Errorf("%s to %s: live %v, fixed %v, want %q and %q", tc.from, tc.to, d.Live, d.Fixed, tc.live, tc.fixed)
		}
	}
}

// TestFollow: a running user network publishes what a description says now, keeps what was published otherwise, and tells what it is.
func TestFollow(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return "publish=unix:" + filepath.Join(dir, name) + ":80" }
	n := mustParse(t, "user,dns=off,"+at("a"))
	p, err := n.Open(Options{Name: "guest", QueuePairs: 1, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	u, _ := UserPort(p)
	published := func(want ...string) {
		t.Helper()
		var got []string
		for _, what := range u.Published() {
			got = append(got, filepath.Base(what.Path))
		}
		if slices.Sort(got); !slices.Equal(got, want) {
			t.Errorf("published: %v, want %v", got, want)
		}
	}
	blocked, err := net.Listen("unix", filepath.Join(dir, "b"))
	if err != nil {
		t.Fatal(err)
	}
	to := mustParse(t, "user,dns=off,mtu=1400,"+at("b")+","+at("c")+",deny=10.0.0.0/8")
	c, err := n.Follow(p, to, nil)
	if err == nil || !strings.Contains(err.Error(), "is there already") || c.Network.text != n.text {
		t.Errorf("%+v, %v, want b to be taken", c, err)
	}
	published("c")
	if len(u.Policy().Rules) != 1 {
		t.Error("one failure keeps the rest from being done")
	}
	blocked.Close()
	c, err = n.Follow(p, to, nil)
	if err != nil || strings.Contains(c.Network.text, "mtu") || !strings.Contains(c.Network.text, "deny=10.0.0.0/8") {
		t.Errorf("%v, %v", c.Network, err)
	}
	published("b", "c")
	if err := u.Unpublish(u.Published()[0]); err != nil {
		t.Fatal(err)
	}
	if d := c.Network.Difference(to); len(d.Live) != 0 || !slices.Equal(d.Fixed, []string{"mtu"}) {
		t.Errorf("left: %+v", d)
	}
	if c, err = c.Network.Follow(p, mustParse(t, "user,dns=off,"+at("b")+","+at("c")), nil); err != nil {
		t.Fatal(err)
	}
	published("b") // what the API has taken back stays so
	if len(u.Policy().Rules) != 0 {
		t.Error("the rules stay")
	}
}

// TestFollowUplink: what one guest says of its switch's user network, and another one repeats.
func TestFollowUplink(t *testing.T) {
	s, _ := newSwitches(t)
	open := func(text string) (Network, port.Port) {
		n := mustParse(t, text)
		p, err := n.Open(Options{QueuePairs: 1, Switches: s})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { p.Close() })
		return n, p
	}
	n1, p1 := open("switch,name=lan,uplink=user,uplink-dns=off")
	n2, p2 := open("switch,name=lan,uplink=user,uplink-dns=off")
	to := mustParse(t, "switch,name=lan,ageing=60s,uplink=user,uplink-dns=off,uplink-deny=10.0.0.0/8")
	for i, f := range []func() (Changed, error){
		func() (Changed, error) { return n1.Follow(p1, to, s) }, func() (Changed, error) { return n2.Follow(p2, to, s) },
	} {
		if c, err := f(); err != nil || c.Network.text != to.text {
			t.Errorf("guest %d: %+v, %v", i, c, err)
		}
	}
	u := s.UserUplinks()
	if len(u) != 1 || u[0].Switch != "lan" || len(u[0].Port.Policy().Rules) != 1 || s.Status()[0].Uplink != "user,deny=10.0.0.0/8,dns=off" {
		t.Errorf("%+v, %+v", u, s.Status())
	}
	if err := mustParse(t, "switch,name=lan,uplink=user,uplink-dns=off").opener.(*switchSpec).agree(to.opener.(*switchSpec)); err == nil {
		t.Error("a guest with the old description agrees")
	}
}

// TestGuardedNetworks: each kind of network drops what a guest sends under another address, and can be told another one while it runs.
func TestGuardedNetworks(t *testing.T) {
	s, rig := newSwitches(t)
	for kind, text := range map[string]string{
		"user": "user,dns=off", "switch": "switch,name=lan", "sock": "sock,path=" + filepath.Join(t.TempDir(), "net"), "tap": "tap,name=vhdgrd%d",
	} {
		t.Run(kind, func(t *testing.T) {
			if kind == "tap" {
				testmain.NeedTun(t)
			}
			guarded(t, s, rig, text)
		})
	}
}

// guarded wants a guard in front of the network that text describes.
func guarded(t *testing.T, s *Switches, rig *porttest.Rig, text string) {
	n := mustParse(t, text+",guard=02:00:00:00:00:14,guard=10.0.2.20")
	p, err := n.Open(Options{QueuePairs: 1, Switches: s, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	q := rig.Open(t, p, 0)
	send := func(from byte, refused uint64) {
		t.Helper()
		q.Send([]packet.Packet{rig.Packet(t, arp(from), 0)})
		if n := porttest.DropCount(q, "spoofed_mac") + porttest.DropCount(q, "spoofed_arp"); n != refused {
			t.Errorf("after a frame of station %d: %d refused, want %d", from, n, refused)
		}
	}
	send(20, 0)
	send(21, 1)
	if err := p.(port.AddressKeeper).MaySend([6]byte{2, 0, 0, 0, 0, 21}); err == nil {
		t.Error("the guest may take another's address")
	}
	if _, err := n.Follow(p, mustParse(t, text+",guard=10.0.2.21"), s); err != nil {
		t.Fatal(err)
	}
	send(21, 1)
	send(20, 2)
}
