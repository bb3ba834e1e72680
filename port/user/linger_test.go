package user

import (
	"io"
	"net"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"github.com/vhostd/vhostd/port/porttest"
)

// TestUnacknowledgedCounts: what waits for a guest that reads nothing stays a flow with its buffers, also when both sides have ended the
// connection, so that a guest cannot have more wait than there are buffers. When it reads, it gets everything, and the flow ends.
func TestUnacknowledgedCounts(t *testing.T) {
	const down, conns = 2 << 20, 4
	p := newPort(t, Options{})
	g := newGuest(t, p)
	window := tcpip.TCPReceiveBufferSizeRangeOption{Min: 4096, Default: 64 << 10, Max: 128 << 10}
	if err := g.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &window); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{}, conns)
	at := listenTCP(t, live4+":0", func(c *net.TCPConn) {
		_, _ = io.Copy(io.Discard, c) // to the guest's FIN
		if _, err := c.Write(make([]byte, down)); err != nil {
			t.Error(err)
		}
		_ = c.CloseWrite()
		ended <- struct{}{}
	})
	var all []interface {
		io.ReadCloser
		SetReadDeadline(time.Time) error
	}
	for range conns {
		c := g.mustDial(at)
		defer c.Close()
		if err := c.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	for range conns {
		<-ended
	}
	parted := func() bool { return p.flows.fds.held.Load() == 0 }
	if !porttest.Eventually(parted) {
		t.Fatalf("%d sockets are open whose both directions have ended", p.flows.fds.held.Load())
	}
	if n, held := p.FlowCount(), p.tcp.granted.Load(); n != conns || held < 2*conns*down {
		t.Errorf("%d flows, %d bytes granted, want %d flows with their buffers", n, held, conns)
	}
	for _, c := range all {
		_ = c.SetReadDeadline(time.Now().Add(stall))
		if n, err := io.Copy(io.Discard, c); n != down || err != nil {
			t.Errorf("received %d bytes, %v", n, err)
		}
	}
	noFlows(t, p)
}
