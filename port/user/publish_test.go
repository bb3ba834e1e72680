package user

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"

	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

func (g *guest) listenUDP(at tcpip.FullAddress) *gonet.UDPConn {
	g.t.Helper()
	c, err := gonet.DialUDP(g.stack, &at, nil, protocolOf(netipOf(at.Addr)))
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { c.Close() })
	return c
}

// hello makes the guest known to the network.
func (g *guest) hello(p *Port) {
	g.t.Helper()
	for _, to := range []netip.Addr{p.opts.Gateway, p.opts.Gateway6} {
		done := g.icmpOf(func(src netip.Addr, _ []byte) bool { return src == to })
		g.card.send(g.pingFrame(to, 1, 1, 8, 64), virtio.NetHdr{})
		if !came(done, 3*time.Second) {
			g.t.Fatal("the gateway does not answer")
		}
	}
}

// serveTCP is a server of the guest that says who called and returns what it is sent.
func (g *guest) serveTCP(at netip.AddrPort) {
	g.t.Helper()
	l, err := gonet.ListenTCP(g.stack, full(at), protocolOf(at.Addr()))
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
				_, _ = io.WriteString(c, host+"\n")
				_, _ = io.Copy(c, c)
			}()
		}
	}()
}

// TestPublishTCP over IPv4, IPv6 and a Unix socket, with the client's address where the guest can answer to it.
func TestPublishTCP(t *testing.T) {
	path := filepath.Join(t.TempDir(), "web.sock")
	p := newPort(t, Options{Publish: []Publication{
		{Proto: "tcp", Port: 8080, GuestPort: 80}, {Proto: "tcp", Path: path, GuestPort: 80},
		{Proto: "tcp", Addr: netip.MustParseAddr(live4), Port: 9000, Count: 3, GuestPort: 80},
	}})
	g := newGuest(t, p)
	g.serveTCP(netip.AddrPortFrom(g.v4, 80))
	g.serveTCP(netip.AddrPortFrom(g.v6, 80))
	g.serveTCP(netip.AddrPortFrom(g.v4, 82))
	for _, known := range []bool{false, true} { // at first the guest has to be looked for
		for _, tc := range []struct{ network, to, seen string }{
			{"tcp", live4 + ":8080", live4}, {"tcp", "127.0.0.1:8080", p.opts.Gateway.String()},
			{"unix", path, p.opts.Gateway.String()}, {"tcp", live4 + ":9002", live4},
			{"tcp", "[" + live6 + "]:8080", live6}, {"tcp", "[::1]:8080", p.opts.Gateway6.String()},
		} {
			if strings.HasPrefix(tc.to, "[") && !known {
				continue // the guest's IPv6 address is learnt from it
			}
			c, err := net.Dial(tc.network, tc.to)
			if err != nil {
				t.Fatal(err)
			}
			_ = c.SetDeadline(time.Now().Add(5 * time.Second))
			_, _ = io.WriteString(c, "ping")
			if conn, ok := c.(interface{ CloseWrite() error }); ok {
				_ = conn.CloseWrite()
			}
			b, err := io.ReadAll(c)
			if err != nil || string(b) != tc.seen+"\nping" {
				t.Errorf("%s: received %q, %v; want the guest to see %s", tc.to, b, err, tc.seen)
			}
			c.Close()
		}
		g.hello(p)
	}
	c, err := net.Dial("tcp", live4+":9001") // nobody listens in the guest, which may be told as early as here
	if err == nil {
		_, err = c.Read(make([]byte, 1))
		c.Close()
	}
	if err == nil || !strings.Contains(err.Error(), "reset") {
		t.Errorf("nobody listens in the guest: %v, want a reset", err)
	}
	noFlows(t, p)
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); err == nil {
		t.Error("the Unix socket is left behind")
	}
}

// TestPublishWhileRunning: ports come and go; whose a port is already is told.
func TestPublishWhileRunning(t *testing.T) {
	p := newPort(t, Options{})
	g := newGuest(t, p)
	g.serveTCP(netip.AddrPortFrom(g.v4, 80))
	taken := listenTCP(t, live4+":0", echoTCP)
	_, takenPort, _ := net.SplitHostPort(taken)
	for _, step := range []struct{ add, remove, wrong string }{
		{add: "7000:80"},
		{add: "7000:81", wrong: "published already (7000:80)"},
		{add: live4 + ":6990-7010:80", wrong: "published already (7000:80)"},
		{add: "7000:80/udp"},
		{add: live4 + ":" + takenPort + ":80", wrong: "belongs to another program"},
		{add: "203.0.113.77:7001:80", wrong: "no address of this host"},
		{add: "7001:192.0.2.7:80", wrong: "no address of a guest"},
		{add: "unix:/nowhere/at/all:80", wrong: "no such file"},
		{remove: "7000:81", wrong: "not published"},
		{remove: "7000:80"},
		{add: live4 + ":7000:81"},
		{add: live4 + ":7001-7003:[" + g.v6.String() + "]:80"},
	} {
		what, err := ParsePublication(step.add + step.remove)
		if err != nil {
			t.Fatal(err)
		}
		if step.add != "" {
			err = p.Publish(what)
		} else {
			err = p.Unpublish(what)
		}
		if step.wrong == "" && err != nil || step.wrong != "" && (err == nil || !strings.Contains(err.Error(), step.wrong)) {
			t.Errorf("%+v: %v", step, err)
		}
	}
	if list := p.Published(); len(list) != 3 || list[0].String() != "7000:80/udp" {
		t.Errorf("published: %v", list)
	}
}

func TestParsePublication(t *testing.T) {
	for _, tc := range []struct{ text, want string }{
		{"8080:80", ""}, {"8080:80/tcp", "8080:80"}, {"53:53/udp", ""}, {"127.0.0.1:8080:80", ""}, {"[::1]:8080:80", ""}, {"8000-8009:9000", ""},
		{"8080:10.0.2.16:80", ""}, {"[::]:8080:[fd00::5]:80/udp", ""}, {"unix:/run/a b.sock:22", ""}, {"unix:rel/x:1", ""},
		{"", "missing"}, {"80", "missing"}, {"80:", "guest's port"}, {":80", "host's port"}, {"80:0", "guest's port"}, {"65536:80", "host's port"},
		{"8080:80/sctp", "protocol"}, {"9-8:1", "range"}, {"1-1025:1", "1024"}, {"65000-65535:65001", "65535"}, {"::1:80:80", "host's address"},
		{"[127.0.0.1]:80:80", "host's address"}, {"host:80:80", "host's address"}, {"unix::80", "path is empty"}, {"unix:@x:80", "abstract"}, {"+80:80", "host's port"},
		{"[fe80::1%lo]:1:1", "host's address"},
	} {
		p, err := ParsePublication(tc.text)
		switch {
		case err != nil && (tc.want == "" || !strings.Contains(err.Error(), tc.want)):
			t.Errorf("%q: %v, want %q", tc.text, err, tc.want)
		case err == nil && tc.want != "" && p.String() != tc.want:
			t.Errorf("%q: no error but %v", tc.text, p)
		case err == nil && tc.want == "" && p.String() != tc.text:
			t.Errorf("%q became %v", tc.text, p)
		}
	}
}

func FuzzParsePublication(f *testing.F) {
	for _, s := range []string{"8080:80", "[::1]:1-2:[fd00::1]:3/udp", "unix:/a:1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParsePublication(text)
		if err != nil {
			return
		}
		again, err := ParsePublication(p.String())
		if err != nil || again.String() != p.String() {
			t.Errorf("%q: %v, then %v, %v", text, p, again, err)
		}
	})
}

// TestListing shows flows to people.
func TestListing(t *testing.T) {
	p := newPort(t, Options{})
	g := newGuest(t, p)
	at := listenTCP(t, live4+":0", echoTCP)
	c := g.mustDial(at)
	_, _ = c.Write([]byte("12345"))
	_, _ = io.ReadFull(c, make([]byte, 5))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		silent := netip.MustParseAddrPort(silent4 + ":80")
		if c, err := gonet.DialContextTCP(ctx, g.stack, full(silent), protocolOf(silent.Addr())); err == nil {
			c.Close()
		}
	}()
	if !porttest.Eventually(func() bool { // counted when the guest has it
		list := p.Flows(FlowQuery{})
		return list.Total == 2 && list.Flows[0].ToGuest == 5
	}) {
		t.Fatalf("flows: %v", p.Flows(FlowQuery{}))
	}
	first, second := p.Flows(FlowQuery{}).Flows[0], p.Flows(FlowQuery{}).Flows[1]
	if first.Proto != "tcp" || first.State != "open" || first.FromGuest != 5 || first.ToGuest != 5 || first.Remote.String() != at || first.Guest.Addr() != g.v4 {
		t.Errorf("open flow: %+v", first)
	}
	if second.State != "connecting" || second.Remote.String() != silent4+":80" {
		t.Errorf("connecting flow: %+v", second)
	}
}

// TestPublishedFileIsOurs: a socket goes with its publication, but not one that somebody else has put in its place.
func TestPublishedFileIsOurs(t *testing.T) {
	p := newPort(t, Options{})
	path := filepath.Join(t.TempDir(), "s")
	what, err := ParsePublication("unix:" + path + ":80")
	if err != nil {
		t.Fatal(err)
	}
	publish := func() {
		t.Helper()
		if err := p.Publish(what); err != nil {
			t.Fatal(err)
		}
	}
	publish()
	if err := p.Unpublish(what); err != nil {
		t.Error(err)
	}
	publish() // the path is free again
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	other, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := p.Unpublish(what); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(path); err != nil {
		t.Errorf("another program's socket was removed: %v", err)
	}
}
