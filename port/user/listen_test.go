package user

import (
	"io"
	"net"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/vhostd/vhostd/port/porttest"
)

// answerAll serves port 53 with more than the guests of these tests have room for, and closes at once.
type answerAll struct{ answer []byte }

func (s answerAll) ServeDNS(conn net.PacketConn, l net.Listener) {
	if l == nil {
		return
	}
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_, _ = c.Write(s.answer)
		_ = c.Close()
	}
}

// TestServiceConnectionsLinger: what a service has written reaches the guest after the connection was closed, but the number of connections
// that wait for that is bounded, and nothing of them is left.
func TestServiceConnectionsLinger(t *testing.T) {
	answer := make([]byte, 48<<10)
	p := newPort(t, Options{Hooks: Hooks{DNS: answerAll{answer}}})
	p.lingerTime = time.Hour // on a busy machine the test takes longer than a guest may
	g := newGuest(t, p)
	window := tcpip.TCPReceiveBufferSizeRangeOption{Min: 4096, Default: 16 << 10, Max: 16 << 10}
	if err := g.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &window); err != nil {
		t.Fatal(err)
	}
	at := net.JoinHostPort(p.opts.Gateway.String(), "53")
	var conns []*gonet.TCPConn
	for range maxLingering + 40 {
		c := g.mustDial(at)
		defer c.Close()
		conns = append(conns, c)
	}
	if !porttest.Eventually(func() bool { return p.lingering.Load() == maxLingering }) {
		t.Errorf("%d connections wait for the guest, want %d", p.lingering.Load(), maxLingering)
	}
	whole := 0
	for _, c := range conns {
		_ = c.SetReadDeadline(time.Now().Add(stall))
		if n, err := io.Copy(io.Discard, c); err == nil && n == int64(len(answer)) {
			whole++
		}
		_ = c.Close()
	}
	if whole == 0 || whole > maxLingering {
		t.Errorf("%d of %d connections brought all, want 1 to %d", whole, len(conns), maxLingering)
	}
	if !porttest.Eventually(func() bool { return p.lingering.Load() == 0 }) {
		t.Errorf("%d connections are left", p.lingering.Load())
	}
}
