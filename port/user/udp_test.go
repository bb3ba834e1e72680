package user

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"

	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

// listenUDP is a server on the host that returns each datagram.
func listenUDP(t testing.TB, at string) (string, net.PacketConn) {
	t.Helper()
	c, err := net.ListenPacket("udp", at)
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 1<<16)
		for {
			n, from, err := c.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = c.WriteTo(b[:n], from)
		}
	}()
	t.Cleanup(func() {
		c.Close()
		<-done
	})
	return c.LocalAddr().String(), c
}

// TestNAT05_PortUnreachable: the guest learns that nobody listens, and the flow works again as soon as somebody does.
func TestNAT05_PortUnreachable(t *testing.T) {
	p := newPort(t, Options{})
	g := newGuest(t, p)
	for _, host := range []string{live4, live6} {
		at, server := listenUDP(t, net.JoinHostPort(host, "0"))
		c := g.dialUDP(at)
		exchange := func() error {
			if _, err := c.Write([]byte("x")); err != nil {
				return err
			}
			_ = c.SetReadDeadline(time.Now().Add(2 * time.Second))
			_, err := c.Read(make([]byte, 10))
			return err
		}
		if err := exchange(); err != nil {
			t.Fatalf("%s: %v", host, err)
		}
		server.Close()
		told := g.icmpOf(func(src netip.Addr, b []byte) bool {
			return src.String() == host && (b[0] == 3 && b[1] == 3 || b[0] == 1 && b[1] == 4)
		})
		for range 2 { // the guest's stack may refuse to send because of the one before
			if _, err := c.Write([]byte("x")); err != nil {
				_, _ = c.Write([]byte("x"))
			}
			if !came(told, 3*time.Second) {
				t.Errorf("%s: nobody listens, and nothing was told", host)
			}
		}
		listenUDP(t, at)
		if !porttest.Eventually(func() bool { return exchange() == nil }) { // the guest's stack may still hold refusals
			t.Errorf("%s: somebody listens again, and does not answer", host)
		}
	}
}

// TestNAT05_IdleFlow: a flow that has ended for want of traffic begins anew with the next datagram from the same port.
func TestNAT05_IdleFlow(t *testing.T) {
	p := newPort(t, Options{})
	g := newGuest(t, p)
	at, _ := listenUDP(t, live4+":0")
	c := g.dialUDP(at)
	for i := range 3 {
		_, _ = fmt.Fprint(c, "question", i)
		b := make([]byte, 20)
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
		if n, err := c.Read(b); err != nil || string(b[:n]) != fmt.Sprint("question", i) {
			t.Fatalf("after %d times of silence: %q, %v", i, b[:n], err)
		}
		p.flows.ahead.Add(int64(longLife/time.Second) * 3 / 2)
		noFlows(t, p)
	}
}

// TestNAT06_OneWay: a flow lives on while only one side sends, for longer than any silence may last.
func TestNAT06_OneWay(t *testing.T) {
	p := newPort(t, Options{})
	g := newGuest(t, p)
	server, err := net.ListenPacket("udp", live4+":0")
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	c := g.dialUDP(server.LocalAddr().String())
	b := make([]byte, 20)
	step := func(send func() error, receive net.Conn, from net.PacketConn) {
		t.Helper()
		for range 40 {
			if err := send(); err != nil {
				t.Fatal(err)
			}
			var err error
			if receive != nil {
				_ = receive.SetReadDeadline(time.Now().Add(10 * time.Second))
				_, err = receive.Read(b)
			} else {
				_ = from.SetReadDeadline(time.Now().Add(10 * time.Second))
				_, _, err = from.ReadFrom(b)
			}
			if err != nil {
				t.Fatal(err)
			}
			p.flows.ahead.Add(int64(shortLife/time.Second) - 2)
			p.flows.sweep()
		}
	}
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	_ = server.SetReadDeadline(time.Now().Add(10 * time.Second))
	_, seen, err := server.ReadFrom(b)
	if err != nil {
		t.Fatal(err)
	}
	step(func() error { _, err := server.WriteTo([]byte("down"), seen); return err }, c, nil)
	step(func() error { _, err := c.Write([]byte("up")); return err }, nil, server)
	if _, again, _ := lastFrom(c, server, b); again != nil && again.String() != seen.String() {
		t.Errorf("the flow comes from %v now, and came from %v", again, seen)
	}
}

// lastFrom sends one more datagram and says whom it seems to come from.
func lastFrom(c net.Conn, server net.PacketConn, b []byte) (n int, from net.Addr, err error) {
	if _, err = c.Write([]byte("x")); err != nil {
		return 0, nil, err
	}
	return server.ReadFrom(b)
}

// TestUDPUnreachable: other errors are told as well.
func TestUDPUnreachable(t *testing.T) {
	p := newPort(t, Options{})
	g := newGuest(t, p)
	for _, tc := range []struct {
		to         string
		kind, code byte
	}{{unreached4, 3, 1}, {unreached6, 1, 3}} {
		told := g.icmpOf(func(_ netip.Addr, b []byte) bool { return b[0] == tc.kind && b[1] == tc.code })
		_, _ = g.dialUDP(net.JoinHostPort(tc.to, "53")).Write([]byte("x"))
		if !came(told, 3*time.Second) {
			t.Errorf("%s: nothing was told", tc.to)
		}
	}
	noFlows(t, p)
}

// TestNAT06_FlowsEnd: flows of one question end soon, others later; a full table ends the oldest.
func TestNAT06_FlowsEnd(t *testing.T) {
	p := newPort(t, Options{MaxFlows: 50})
	g := newGuest(t, p)
	at, _ := listenUDP(t, live4+":0")
	for range 120 {
		c := g.dialUDP(at)
		_, _ = c.Write([]byte("question"))
		_ = c.SetReadDeadline(time.Now().Add(2 * time.Second))
		if _, err := c.Read(make([]byte, 10)); err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	if n := p.FlowCount(); n != 50 {
		t.Errorf("%d flows, want as many as are allowed", n)
	}
	stream := g.dialUDP(at)
	for range 5 {
		_, _ = stream.Write([]byte("stream"))
		_, _ = stream.Read(make([]byte, 10))
	}
	p.flows.ahead.Add(int64(shortLife/time.Second) + 3) // time flies
	if !porttest.Eventually(func() bool { return p.FlowCount() == 1 }) {
		t.Errorf("%d flows after the time of short ones, want the stream", p.FlowCount())
	}
	p.flows.ahead.Add(int64(longLife / time.Second))
	noFlows(t, p)
}

// pingFrame is an echo request of the guest.
func (g *guest) pingFrame(dst netip.Addr, ident, seq uint16, size int, ttl uint8) []byte {
	src, proto, kind := g.v4, uint8(protoICMP), byte(echoRequest4)
	if dst.Is6() {
		src, proto, kind = g.v6, protoICMPv6, echoRequest6
	}
	b := make([]byte, icmpLen+size)
	b[0] = kind
	binary.BigEndian.PutUint16(b[4:], ident)
	binary.BigEndian.PutUint16(b[6:], seq)
	for i := range size {
		b[icmpLen+i] = byte(i)
	}
	sum := uint16(0)
	if dst.Is6() {
		sum = pseudoSum(proto, src, dst, len(b))
	}
	binary.BigEndian.PutUint16(b[2:], ^checksum.Checksum(b, sum))
	v := newIP(src, dst, proto, len(b), false)
	defer v.Release()
	head := v.AsSlice()
	if dst.Is4() {
		head[8] = ttl
		putSum4(head)
	} else {
		head[7] = ttl
	}
	_, _ = v.Write(b)
	frame := append(append(append([]byte(nil), g.card.port.mac[:]...), g.card.mac[:]...), 0x08, 0x00)
	if dst.Is6() {
		frame[12], frame[13] = 0x86, 0xdd
	}
	return append(frame, v.AsSlice()...)
}

// icmpOf waits for an ICMP message to the guest and returns it with its source.
func (g *guest) icmpOf(want func(src netip.Addr, b []byte) bool) chan struct{} {
	done := make(chan struct{}, 16)
	see := func(f []byte) {
		switch {
		case len(f) > 34 && f[12] == 8 && f[23] == protoICMP && want(netip.AddrFrom4([4]byte(f[26:30])), f[34:]),
			len(f) > 54 && f[12] == 0x86 && f[20] == protoICMPv6 && want(netip.AddrFrom16([16]byte(f[22:38])), f[54:]):
			select {
			case done <- struct{}{}:
			default:
			}
		}
	}
	g.card.tap.Store(&see)
	return done
}

func came(c chan struct{}, within time.Duration) bool {
	select {
	case <-c:
		return true
	case <-time.After(within):
		return false
	}
}

// TestNAT11_Ping: the gateway answers by itself, others are asked, and who is not there does not answer.
func TestNAT11_Ping(t *testing.T) {
	p := newPort(t, Options{})
	g := newGuest(t, p)
	for i, tc := range []struct {
		dst   string
		there bool
	}{
		{p.opts.Gateway.String(), true}, {p.opts.Gateway6.String(), true}, {live4, true}, {live6, true},
		{silent4, false}, {silent6, false}, {"10.0.2.77", false},
	} {
		dst, ident := netip.MustParseAddr(tc.dst), uint16(100+i)
		for seq, size := range []int{56, 0, 1400} {
			reply := g.icmpOf(func(src netip.Addr, b []byte) bool {
				return src == dst && (b[0] == echoReply4 && dst.Is4() || b[0] == echoReply6) && port16(b[4:]) == ident &&
					port16(b[6:]) == uint16(seq) && len(b) == icmpLen+size
			})
			g.card.send(g.pingFrame(dst, ident, uint16(seq), size, 64), virtio.NetHdr{})
			wait := 3 * time.Second
			if !tc.there {
				wait = 200 * time.Millisecond
			}
			if got := came(reply, wait); got != tc.there {
				t.Errorf("ping %s with %d bytes: answered %v", tc.dst, size, got)
			}
		}
	}
	if n := p.Flows(FlowQuery{}).Total; n != 4 {
		t.Errorf("%d flows, want 4: %v", n, p.Flows(FlowQuery{}))
	}
	for _, dst := range []netip.Addr{p.opts.Gateway, p.opts.Gateway6, netip.MustParseAddr(live4), netip.MustParseAddr(live6)} {
		g.pingInPieces(t, dst)
	}
}

// pingInPieces has ten requests of 8000 bytes under way, and wants the answers by their last pieces.
func (g *guest) pingInPieces(t *testing.T, dst netip.Addr) {
	t.Helper()
	const size, last = 8000, (icmpLen + 8000) / 1480 * 1480
	answers := make(chan struct{}, 100)
	see := func(f []byte) {
		var from netip.Addr
		switch {
		case len(f) > 34 && f[12] == 8 && f[23] == protoICMP && port16(f[20:]) == last/8:
			from = netip.AddrFrom4([4]byte(f[26:30]))
		case len(f) > 62 && f[12] == 0x86 && f[20] == protoFragment && port16(f[56:])&1 == 0:
			from = netip.AddrFrom16([16]byte(f[22:38]))
		}
		if from == dst {
			answers <- struct{}{}
		}
	}
	g.card.tap.Store(&see)
	for i := range uint16(10) {
		frame := g.pingFrame(dst, 500+i, 1, size, 64)
		l4, proto := virtio.EthernetHdrLen+ipLen(dst), uint8(protoICMP)
		if dst.Is6() {
			proto = protoICMPv6
		}
		for _, f := range g.piecesOf(500+i, dst, proto, frame[l4:]) {
			g.card.send(f, virtio.NetHdr{})
		}
	}
	for i := range 10 {
		if !came(answers, 20*time.Second) {
			t.Errorf("ping %s with %d bytes: %d answers of 10", dst, size, i)
			return
		}
	}
}

// TestPingErrors: the way is told, as far as the host knows it.
func TestPingErrors(t *testing.T) {
	p := newPort(t, Options{})
	g := newGuest(t, p)
	for i, tc := range []struct {
		dst  string
		ttl  uint8
		from netip.Addr
		kind uint8
	}{
		{live4, 1, p.opts.Gateway, 11}, {live6, 1, p.opts.Gateway6, 3},
		{unreached4, 64, p.opts.Gateway, 3}, {unreached6, 64, p.opts.Gateway6, 1},
	} {
		dst := netip.MustParseAddr(tc.dst)
		told := g.icmpOf(func(src netip.Addr, b []byte) bool { return src == tc.from && b[0] == tc.kind })
		g.card.send(g.pingFrame(dst, uint16(i), 1, 56, tc.ttl), virtio.NetHdr{})
		if !came(told, 3*time.Second) {
			t.Errorf("ping %s with ttl %d: nothing was told", tc.dst, tc.ttl)
		}
	}
}

// TestPublishUDP: clients of the host reach the guest, from their own address where that can be, and get its answers.
func TestPublishUDP(t *testing.T) {
	p := newPort(t, Options{Publish: []Publication{{Proto: "udp", Port: 5300, GuestPort: 53}}})
	g := newGuest(t, p)
	server4, server6 := g.listenUDP(full(netip.AddrPortFrom(g.v4, 53))), g.listenUDP(full(netip.AddrPortFrom(g.v6, 53)))
	g.hello(p)
	for _, tc := range []struct{ local, remote, seen string }{
		{live4, live4, live4}, {"127.0.0.1", "127.0.0.1", p.opts.Gateway.String()}, {live6, live6, "[" + live6 + "]"},
		{"::1", "::1", "[" + p.opts.Gateway6.String() + "]"},
	} {
		c, err := net.Dial("udp", net.JoinHostPort(tc.remote, "5300"))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		server := server4
		if strings.Contains(tc.remote, ":") {
			server = server6
		}
		for i := range 3 {
			if _, err := fmt.Fprint(c, "hello", i); err != nil {
				t.Fatal(err)
			}
			b := make([]byte, 100)
			_ = server.SetReadDeadline(time.Now().Add(3 * time.Second))
			n, from, err := server.ReadFrom(b)
			if err != nil || string(b[:n]) != fmt.Sprint("hello", i) || !strings.HasPrefix(from.String(), tc.seen+":") {
				t.Fatalf("%s: guest received %q from %v, %v", tc.remote, b[:n], from, err)
			}
			_, _ = server.WriteTo(b[:n], from)
			_ = c.SetReadDeadline(time.Now().Add(3 * time.Second))
			if n, err = c.Read(b); err != nil || n != 6 {
				t.Errorf("%s: client received %d bytes, %v", tc.remote, n, err)
			}
		}
	}
}
