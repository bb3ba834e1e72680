package user

import (
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

const (
	// serviceBuffer is what a guest's connection to a service of the gateway may keep in the stack in each direction: one message of DNS.
	serviceBuffer = 64 << 10
	// serviceBacklog is how many of them wait to be accepted.
	serviceBacklog = 256
	// lingerTime is how long the guest may take to acknowledge what was written before the service closed a connection, and maxLingering
	// how many connections wait for that; others are reset.
	lingerTime   = 10 * time.Second
	maxLingering = 256
)

// serviceListener accepts guests' connections to a service. Unlike those of gonet they have small buffers, and closing one ends it in
// bounded time: the stack itself would keep what a guest does not acknowledge as long as the guest likes, for any number of connections.
type serviceListener struct {
	port  *Port
	ep    tcpip.Endpoint
	waits *waiter.Queue
	quit  chan struct{}
	once  sync.Once
}

func (p *Port) listenService(at tcpip.FullAddress, protocol tcpip.NetworkProtocolNumber) (*serviceListener, error) {
	l := &serviceListener{port: p, waits: &waiter.Queue{}, quit: make(chan struct{})}
	ep, err := p.stack.NewEndpoint(tcp.ProtocolNumber, protocol, l.waits)
	if err != nil {
		return nil, fmt.Errorf("make an endpoint: %v", err)
	}
	l.ep = ep
	ep.SocketOptions().SetReceiveBufferSize(serviceBuffer, true) // connections have the listener's
	if err = ep.Bind(at); err == nil {
		err = ep.Listen(serviceBacklog)
	}
	if err != nil {
		ep.Close()
		return nil, fmt.Errorf("listen on port %d of %v: %v", at.Port, at.Addr, err)
	}
	return l, nil
}

// Accept implements [net.Listener].
func (l *serviceListener) Accept() (net.Conn, error) {
	entry, told := waiter.NewChannelEntry(waiter.ReadableEvents)
	l.waits.EventRegister(&entry)
	defer l.waits.EventUnregister(&entry)
	for {
		ep, waits, err := l.ep.Accept(nil)
		switch err.(type) {
		case nil:
			ep.SocketOptions().SetSendBufferSize(serviceBuffer, true)
			return &serviceConn{TCPConn: gonet.NewTCPConn(waits, ep), port: l.port, ep: ep, waits: waits}, nil
		case *tcpip.ErrWouldBlock:
		default:
			return nil, net.ErrClosed // a listening endpoint has no other trouble
		}
		select {
		case <-told:
		case <-l.quit:
			return nil, net.ErrClosed
		}
	}
}

// Addr implements [net.Listener].
func (l *serviceListener) Addr() net.Addr {
	a, _ := l.ep.GetLocalAddress() // is bound
	return &net.TCPAddr{IP: net.IP(a.Addr.AsSlice()), Port: int(a.Port)}
}

// Close implements [net.Listener]. Connections stay.
func (l *serviceListener) Close() error {
	l.once.Do(func() {
		close(l.quit)
		l.ep.Close()
	})
	return nil
}

// serviceConn is a connection of a guest to a service.
type serviceConn struct {
	*gonet.TCPConn
	port  *Port
	ep    tcpip.Endpoint
	waits *waiter.Queue
	once  sync.Once
}

// Close implements [net.Conn] and does not wait.
func (c *serviceConn) Close() error {
	c.once.Do(c.end)
	return nil
}

func (c *serviceConn) end() {
	entry, told := waiter.NewChannelEntry(waiter.EventHUp)
	c.waits.EventRegister(&entry)
	_ = c.TCPConn.Close() // fails never
	count := &c.port.lingering
	if n := count.Add(1); n > maxLingering || settled(c.ep) {
		c.waits.EventUnregister(&entry)
		c.reset(count)
		return
	}
	c.port.serves.Go(func() {
		defer c.port.contain()
		defer c.reset(count)
		defer c.waits.EventUnregister(&entry)
		late := time.NewTimer(c.port.lingerTime)
		defer late.Stop()
		select {
		case <-told:
		case <-late.C:
		case <-c.port.tcp.quit:
		}
	})
}

// reset ends what is left of the connection.
func (c *serviceConn) reset(count *atomic.Int64) {
	if !settled(c.ep) {
		c.ep.Abort()
	}
	count.Add(-1)
}

// settled says whether an endpoint has nothing to send any more and the guest knows that.
func settled(ep tcpip.Endpoint) bool {
	switch tcp.EndpointState(ep.State()) {
	case tcp.StateTimeWait, tcp.StateClose, tcp.StateError:
		return true
	}
	return false
}
