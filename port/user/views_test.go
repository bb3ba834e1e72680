package user

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/port/user/dns"
	"github.com/vhostd/vhostd/port/user/policy"
)

// mustRule makes rules of allow=… and deny=….
func mustRules(t *testing.T, texts ...string) (rules []policy.Rule) {
	t.Helper()
	for _, text := range texts {
		action, what := policy.Allow, strings.TrimPrefix(text, "allow=")
		if rest, ok := strings.CutPrefix(text, "deny="); ok {
			action, what = policy.Deny, rest
		}
		r, err := policy.ParseRule(action, what)
		if err != nil {
			t.Fatal(err)
		}
		rules = append(rules, r)
	}
	return rules
}

// opened waits until there are n flows and none is on its way between two tables.
func opened(t *testing.T, p *Port, n int) {
	t.Helper()
	if !porttest.Eventually(func() bool {
		list := p.Flows(FlowQuery{})
		return list.Total == n && !slices.ContainsFunc(list.Flows, func(f Flow) bool { return f.State != "open" })
	}) {
		t.Fatalf("flows: %+v", p.Flows(FlowQuery{}))
	}
}

// ended says whether a connection was reset.
func ended(c net.Conn) bool {
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	_, err := c.Read(make([]byte, 1))
	return err != nil && !strings.Contains(err.Error(), "timeout") && !strings.Contains(err.Error(), "deadline")
}

// TestNewRulesEndFlows: a flow that a new rule denies ends, on both sides, and is counted for the rule; others go on.
func TestNewRulesEndFlows(t *testing.T) {
	p := newServed(t, Options{}, Services{NoDNS: true, Rules: mustRules(t, "deny=198.51.100.0/24")})
	g := newGuest(t, p)
	gone := make(chan struct{}, 2)
	at := listenTCP(t, live4+":0", func(c *net.TCPConn) {
		_, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c}) // not by splice(2), whose pipes the runtime keeps
		gone <- struct{}{}
	})
	other := listenTCP(t, "["+live6+"]:0", echoTCP)
	lost, kept := g.mustDial(at), g.mustDial(other)
	sink, err := net.ListenPacket("udp", live4+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer sink.Close()
	question := g.dialUDP(sink.LocalAddr().String())
	_, _ = question.Write([]byte("x"))
	opened(t, p, 3)

	if n, err := p.SetRules(mustRules(t, "deny=198.51.100.0/24", "deny=203.0.113.0/24")); n != 0 || err != nil {
		t.Errorf("rules that deny none of them: %d ended, %v", n, err)
	}
	n, err := p.SetRules(mustRules(t, "deny=203.0.113.0/24", "deny="+live4))
	if n != 2 || err != nil {
		t.Errorf("%d ended, %v, want the connection and the datagrams", n, err)
	}
	if !ended(lost) {
		t.Error("the guest's connection goes on")
	}
	select {
	case <-gone:
	case <-time.After(10 * time.Second):
		t.Error("the host's connection goes on")
	}
	if _, err := kept.Write([]byte("y")); err != nil {
		t.Errorf("a connection that is allowed: %v", err)
	}
	if _, err := io.ReadFull(kept, make([]byte, 1)); err != nil {
		t.Errorf("a connection that is allowed: %v", err)
	}
	v := p.Policy()
	if len(v.Rules) != 2 || v.Rules[1].Ended != 2 || v.Rules[0].Ended != 0 || v.Ended["rule"] != 2 || v.Rest != "allow" {
		t.Errorf("policy: %+v", v)
	}
	if _, err := g.dialWithin(at, 3*time.Second); err == nil {
		t.Error("the guest connects again")
	}
	if v := p.Policy(); v.Rules[1].Hits == 0 || v.Refusals["rule"] == 0 || p.Protocols()[kindTCP].Refused == 0 {
		t.Errorf("policy: %+v, %+v", v, p.Protocols())
	}
}

// TestNamesLastAsLongAsFlows: a connection to an address that was looked up stays allowed, and stays deniable, by its name.
func TestNamesLastAsLongAsFlows(t *testing.T) {
	server := resolver(t, "127.0.0.1:0")
	upstream, err := dns.ParseUpstream(server)
	if err != nil {
		t.Fatal(err)
	}
	p := newServed(t, Options{}, Services{Upstreams: []dns.Upstream{upstream}, Rules: mustRules(t, "allow=web.example")})
	g := newGuest(t, p)
	at := listenTCP(t, live4+":0", echoTCP)
	g.ask(p.opts.Gateway, false, "web.example.")
	c := g.mustDial(at)
	opened(t, p, 1)
	p.opts.services.mu.Lock()
	clear(p.opts.services.guests) // what was looked up has run out
	p.opts.services.mu.Unlock()
	if n, err := p.SetRules(mustRules(t, "deny=203.0.113.0/24", "allow=web.example")); n != 0 || err != nil {
		t.Errorf("%d ended, %v: the name's life is over, the connection's is not", n, err)
	}
	if n, err := p.SetRules(mustRules(t, "deny=web.example")); n != 1 || err != nil {
		t.Errorf("%d ended, %v, want the connection to the name", n, err)
	}
	if !ended(c) {
		t.Error("the connection goes on")
	}
}

// TestFlowList: what is listed, in which order, and how much at most.
func TestFlowList(t *testing.T) {
	p := newServed(t, Options{}, Services{})
	g := newGuest(t, p)
	at := listenTCP(t, live4+":0", echoTCP)
	quietOne, busy := g.mustDial(at), g.mustDial(at)
	if _, err := busy.Write(make([]byte, 5000)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(busy, make([]byte, 5000)); err != nil {
		t.Fatal(err)
	}
	if !porttest.Eventually(func() bool { return p.Protocols()[kindTCP].ToGuest == 5000 }) { // counted when the guest may have them already
		t.Errorf("counters: %+v", p.Protocols())
	}
	list := p.Flows(FlowQuery{Sort: "bytes", Limit: 1, Proto: "tcp"})
	if list.Total != 2 || list.Limit != 1 || len(list.Flows) != 1 {
		t.Fatalf("list: %+v", list)
	}
	f := list.Flows[0]
	if f.Guest.Port() != netip.MustParseAddrPort(busy.LocalAddr().String()).Port() || f.FromGuest != 5000 || f.ToGuest != 5000 ||
		f.PacketsFrom == 0 || f.PacketsTo == 0 || f.State != "open" || f.Remote.String() != at || f.Idle > f.Age {
		t.Errorf("the busy flow: %+v", f)
	}
	quietest := netip.MustParseAddrPort(quietOne.LocalAddr().String()).Port()
	if f := p.Flows(FlowQuery{Sort: "idle", Limit: 1}).Flows[0]; f.Guest.Port() != quietest {
		t.Errorf("the quietest flow: %+v", f)
	}
	if n := p.Flows(FlowQuery{Guest: netip.MustParseAddr("10.0.2.99")}).Total; n != 0 {
		t.Errorf("%d flows of a guest that is not there", n)
	}
	if c := p.Protocols()[kindTCP]; c.Flows != 2 || c.Opened != 2 || c.FromGuest != 5000 || c.ToGuest != 5000 || c.PacketsFrom == 0 {
		t.Errorf("counters: %+v", c)
	}
	for _, q := range []FlowQuery{{Proto: "sctp"}, {Sort: "name"}, {Limit: -1}, {Limit: MaxListed + 1}} {
		if q.Validate() == nil {
			t.Errorf("%+v is accepted", q)
		}
	}
}

// TestInboundFlowBeforeItsAnswer: a connection to a published port is listed while the guest is looked for, and gone when it is not there.
func TestInboundFlowBeforeItsAnswer(t *testing.T) {
	p := newServed(t, Options{}, Services{})
	newGuest(t, p)
	what, err := ParsePublication("127.0.0.1:7099:10.0.2.77:80")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Publish(what); err != nil {
		t.Fatal(err)
	}
	call := func() {
		c, err := net.Dial("tcp", "127.0.0.1:7099")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
	}
	call()
	if !porttest.Eventually(func() bool {
		list := p.Flows(FlowQuery{}).Flows
		if len(list) == 0 {
			call() // the test was slower than the search for the guest
			return false
		}
		f := list[0]
		return f.Inbound && f.State == "connecting" && f.Guest.String() == "10.0.2.77:80" && p.Protocols()[kindTCP].Flows > 0
	}) {
		t.Errorf("flows: %+v", p.Flows(FlowQuery{}))
	}
	if !porttest.Eventually(func() bool { return p.Flows(FlowQuery{}).Total == 0 && p.FlowCount() == 0 }) {
		t.Errorf("left: %+v", p.Flows(FlowQuery{}))
	}
}

// TestVeryManyFlows: a guest with the most flows that it may have; the list is short, the total is right, and datagrams pass meanwhile.
func TestVeryManyFlows(t *testing.T) {
	p := newServed(t, Options{}, Services{})
	const n = DefaultMaxFlows
	for i := range n { // without sockets, of which the tests have fewer
		p.flows.ahead.Store(-int64(time.Since(p.flows.start) / time.Second)) // the clock stands still, however slow the machine is
		d := &dgram{port: p, started: time.Now(), fd: -1, via: &udpListener{port: p}}
		remote := netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, byte(i >> 16), 1}), 53)
		d.key = flowKey{protoUDP, netip.AddrPortFrom(p.opts.Guest, uint16(i)), remote}
		d.up.Store(uint64(i))
		if !p.flows.admit() || !p.flows.add(d) {
			t.Fatalf("flow %d is refused", i)
		}
	}
	p.flows.ahead.Store(-3600) // none of them becomes too old for the rest of the test
	var stop atomic.Bool
	var looks atomic.Int64
	var looking sync.WaitGroup
	looking.Go(func() {
		for !stop.Load() {
			p.flows.find(flowKey{})
			looks.Add(1)
		}
	})
	var list FlowList
	if !porttest.Eventually(func() bool {
		before := looks.Load()
		list = p.Flows(FlowQuery{Sort: "bytes", Limit: 3})
		return looks.Load() > before+10
	}) {
		t.Error("nobody gets at the table while it is listed")
	}
	stop.Store(true)
	looking.Wait()
	if list.Total != n || len(list.Flows) != 3 || list.Flows[0].FromGuest != n-1 || list.Flows[2].FromGuest != n-3 {
		t.Errorf("list: %+v", list)
	}
	if list.Protocols[kindUDP].Flows != n {
		t.Errorf("counters: %+v", list.Protocols)
	}
	body, err := json.Marshal(p.Flows(FlowQuery{Limit: MaxListed}))
	if err != nil || len(body) > MaxListed*400 {
		t.Errorf("%d bytes of JSON, %v", len(body), err)
	}
	for p.flows.evict() { // within the time that Close has, a busy machine may not get through so many
	}
}

// TestLiveSettings: names, pins and the bound of flows change under a running network, or not at all.
func TestLiveSettings(t *testing.T) {
	p := newServed(t, Options{}, Services{})
	g := newGuest(t, p)
	host, err := dns.ParseHost("db.example:192.0.2.55")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.SetNames(nil, []dns.Host{host}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"db.example.", "host.vhostd.internal."} {
		if m := g.ask(p.opts.Gateway, false, name); len(m.Answer) != 1 {
			t.Errorf("%s: %v", name, m)
		}
	}
	if err := p.SetNames(nil, []dns.Host{{Name: "a b"}}); err == nil {
		t.Error("a bad name is accepted")
	}
	names := []string{}
	for _, h := range p.DNS().Hosts {
		names = append(names, fmt.Sprint(h.Name, h.Addrs))
	}
	if len(names) != 2 || names[0] != "db.example[192.0.2.55]" {
		t.Errorf("names: %v", names)
	}
	p.SetMaxFlows(1)
	at := listenTCP(t, live4+":0", echoTCP)
	g.mustDial(at)
	if _, err := g.dialWithin(at, time.Second); err == nil {
		t.Error("a second flow where one is allowed")
	}
	if c := p.Protocols()[kindTCP]; c.Limited == 0 {
		t.Errorf("counters: %+v", c)
	}
	p.SetMaxFlows(10)
	g.mustDial(at)
}
