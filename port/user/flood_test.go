package user

import (
	"encoding/binary"
	"net/netip"
	"runtime"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

// segment is a TCP segment without payload from the guest.
func (g *guest) segment(from uint16, to netip.AddrPort, seq uint32, flags byte) []byte {
	b := make([]byte, tcpMin)
	binary.BigEndian.PutUint16(b, from)
	binary.BigEndian.PutUint16(b[2:], to.Port())
	binary.BigEndian.PutUint32(b[4:], seq)
	b[12], b[13], b[14] = tcpMin/4<<4, flags, 0x10
	src := g.v4
	if to.Addr().Is6() {
		src = g.v6
	}
	binary.BigEndian.PutUint16(b[16:], ^checksum.Checksum(b, pseudoSum(protoTCP, src, to.Addr(), len(b))))
	v := newIP(src, to.Addr(), protoTCP, len(b), false)
	defer v.Release()
	_, _ = v.Write(b)
	frame := append(append(append([]byte(nil), g.card.port.mac[:]...), g.card.mac[:]...), 0x08, 0x00)
	if to.Addr().Is6() {
		frame[12], frame[13] = 0x86, 0xdd
	}
	return append(frame, v.AsSlice()...)
}

const (
	flagSYN = 2
	flagRST = 4
	flagACK = 16
)

// TestNAT01_GuestGivesUp: connects that the guest resets, or never finishes, leave nothing behind, and others are answered meanwhile.
func TestNAT01_GuestGivesUp(t *testing.T) {
	p := newPort(t, Options{})
	g := newGuest(t, p)
	at := listenTCP(t, live4+":0", echoTCP)
	silent := netip.MustParseAddrPort(silent4 + ":80")
	for i := range uint16(200) {
		g.card.send(g.segment(20000+i, silent, 1000, flagSYN), virtio.NetHdr{})
	}
	if !porttest.Eventually(func() bool { return p.FlowCount() == 200 }) {
		t.Fatalf("%d flows", p.FlowCount())
	}
	g.mustDial(at).Close()
	for i := range uint16(200) {
		g.card.send(g.segment(20000+i, silent, 1000, flagSYN), virtio.NetHdr{}) // the same again opens nothing
		g.card.send(g.segment(20000+i, silent, 1001, flagRST), virtio.NetHdr{})
	}
	noFlows(t, p)
	for i := range uint16(200) { // left as they are when guest and network go
		g.card.send(g.segment(20000+i, silent, 1000, flagSYN), virtio.NetHdr{})
	}
	if !porttest.Eventually(func() bool { return p.FlowCount() == 200 }) {
		t.Fatalf("%d flows", p.FlowCount())
	}
}

// TestNAT02_ConnectsEnd: a connect that the host does not answer ends after connectLife, in silence.
func TestNAT02_ConnectsEnd(t *testing.T) {
	p := newPort(t, Options{})
	g := newGuest(t, p)
	silent := netip.MustParseAddrPort(silent4 + ":80")
	for i := range uint16(20) {
		g.card.send(g.segment(20000+i, silent, 1000, flagSYN), virtio.NetHdr{})
	}
	if !porttest.Eventually(func() bool { return p.flows.fds.held.Load() == 20 }) {
		t.Fatalf("%d connects", p.FlowCount())
	}
	p.tcp.mu.Lock()
	for _, c := range p.tcp.pending {
		c.began = c.began.Add(-connectLife)
	}
	p.tcp.mu.Unlock()
	noFlows(t, p)
}

// TestNAT02_DeadDestination: a flood of connects to nowhere does not keep others out, and is bounded.
func TestNAT02_DeadDestination(t *testing.T) {
	p := newPort(t, Options{MaxFlows: 300})
	g := newGuest(t, p)
	at := listenTCP(t, live4+":0", echoTCP)
	silent := netip.MustParseAddrPort(silent4 + ":80")
	g.mustDial(at).Close()
	for i := range uint16(3000) {
		g.card.send(g.segment(20000+i, silent, 1000, flagSYN), virtio.NetHdr{})
		if i%500 == 0 {
			start := time.Now()
			g.mustDial(at).Close()
			t.Logf("connected in %v", time.Since(start))
		}
	}
	if n := p.FlowCount(); n > 300 {
		t.Errorf("%d flows, 300 are allowed", n)
	}
	g.mustDial(at).Close()
}

// TestLongNAT02_DeadDestination: 2000 connects to nowhere, whose SYNs come again as a guest repeats them, and a connection to a host that
// answers every 100 ms, until all of the former have ended for want of an answer.
func TestLongNAT02_DeadDestination(t *testing.T) {
	testmain.Long(t)
	t.Parallel()
	const dead = 2000
	p := newPort(t, Options{})
	g := newGuest(t, p)
	at := listenTCP(t, live4+":0", echoTCP)
	silent := netip.MustParseAddrPort(silent4 + ":80")
	g.mustDial(at).Close()
	pending := func() int {
		p.tcp.mu.Lock()
		defer p.tcp.mu.Unlock()
		return len(p.tcp.pending)
	}
	syns := func() {
		for i := range uint16(dead) {
			g.card.send(g.segment(20000+i, silent, 1000, flagSYN), virtio.NetHdr{})
		}
	}
	syns()
	if !porttest.Eventually(func() bool { return pending() == dead }) {
		t.Fatalf("%d connects, want %d", pending(), dead)
	}
	start, again := time.Now(), time.Second
	tries, longest := 0, time.Duration(0)
	for ; pending() > 0; time.Sleep(100 * time.Millisecond) {
		switch since := time.Since(start); {
		case since > connectLife+time.Minute:
			t.Fatalf("%d connects are still under way after %v", pending(), since)
		case since > again && again < 40*time.Second: // a SYN after that would be a new connect
			again *= 2
			syns()
		}
		if n := p.flows.fds.held.Load(); n > dead+100 {
			t.Fatalf("%d descriptors for %d connects", n, dead)
		}
		began := time.Now()
		c, err := g.dial(at)
		if err != nil {
			t.Fatalf("try %d: %v", tries, err)
		}
		c.Close()
		tries++
		longest = max(longest, time.Since(began))
	}
	t.Logf("%d connections to a host that answers, the slowest up after %v; the dead ones ended after %v", tries, longest, time.Since(start))
	noFlows(t, p)
}

// TestNAT21_Flood: SYNs and datagrams to a host that answers, without an end of any handshake. Goroutines and memory stay bounded, and
// afterwards everything is as before.
func TestNAT21_Flood(t *testing.T) {
	p := newPort(t, Options{MaxFlows: 500})
	g := newGuest(t, p)
	at := netip.MustParseAddrPort(listenTCP(t, live4+":0", echoTCP))
	udpAt, _ := listenUDP(t, live4+":0")
	to := netip.MustParseAddrPort(udpAt)
	before := runtime.NumGoroutine()
	for i := range uint16(5000) {
		g.card.send(g.segment(1024+i, at, uint32(i), flagSYN), virtio.NetHdr{})
		if i%2 == 0 {
			key := flowKey{protoUDP, netip.AddrPortFrom(g.v4, 30000+i), to}
			if r := p.datagram(key, []byte("x"), 63); r != accepted && r != flowLimit {
				t.Fatalf("datagram: %s", reasonNames[r])
			}
		}
		if n := p.FlowCount(); n > 501 {
			t.Fatalf("%d flows", n)
		}
	}
	if n := runtime.NumGoroutine() - before; n > 2500 {
		t.Errorf("%d more goroutines", n)
	}
	p.flows.ahead.Add(int64((longLife + shortLife) / time.Second))
	if !porttest.Eventually(func() bool { return p.Flows(FlowQuery{Proto: "udp"}).Total == 0 }) {
		t.Errorf("%d datagram flows stay", p.Flows(FlowQuery{Proto: "udp"}).Total)
	}
}
