package user

import (
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

const (
	// guestLife is how long a guest may take to answer a connection for a published port.
	guestLife = 30 * time.Second
	// findEvery and findTries are how a guest is looked for that nobody has heard of.
	findEvery = 10 * time.Millisecond
	findTries = 100
)

// inbound takes a connection of the host to a guest.
func (s *tcpSide) inbound(what Publication, fd int, client netip.AddrPort) {
	if !s.port.flows.fds.take() {
		s.refuse(fd)
		return
	}
	if !s.makeRoom() {
		s.port.flows.fds.give()
		s.refuse(fd)
		return
	}
	class := s.grant()
	c := &conn{
		side: s, waits: &waiter.Queue{}, fd: fd, other: client, inbound: true, started: time.Now(), buffer: bufferClasses[class],
	}
	s.mu.Lock()
	closed := s.closed
	if !closed {
		s.busy.Add(1)
	}
	s.mu.Unlock()
	if closed {
		s.giveUp(c)
		return
	}
	s.port.spawn(func() {
		defer s.busy.Done()
		s.serve(what, c)
	})
}

// refuse resets a connection that nothing has counted yet.
func (s *tcpSide) refuse(fd int) {
	s.port.traffic[kindTCP].limited.Add(1)
	s.port.lost.add(flowLimit)
	resetOnClose(fd)
	_ = unix.Close(fd)
}

// giveUp resets a connection whose guest could not be reached.
func (s *tcpSide) giveUp(c *conn) {
	if c.ep != nil {
		c.ep.Abort()
		c.ep.Close()
	}
	resetOnClose(c.fd)
	s.port.closeSocket(c.fd)
	s.giveBack(c.buffer)
	s.port.flows.count.Add(-1)
}

// serve connects to the guest and begins to copy.
func (s *tcpSide) serve(what Publication, c *conn) {
	guest, ok := s.port.target(what, c.other.Addr())
	c.guest = netip.AddrPortFrom(guest, what.GuestPort)
	s.call(c, c.guest)
	defer s.called(c)
	if !ok || !s.findGuest(guest) {
		s.giveUp(c)
		return
	}
	entry, told := waiter.NewChannelEntry(waiter.WritableEvents | waiter.EventErr | waiter.EventHUp)
	c.waits.EventRegister(&entry)
	defer c.waits.EventUnregister(&entry)
	if !s.connectGuest(c) {
		s.giveUp(c)
		return
	}
	late := time.NewTimer(guestLife)
	defer late.Stop()
	for tcp.EndpointState(c.ep.State()) == tcp.StateSynSent || tcp.EndpointState(c.ep.State()) == tcp.StateSynRecv ||
		tcp.EndpointState(c.ep.State()) == tcp.StateConnecting {
		select {
		case <-told:
		case <-s.quit:
			s.giveUp(c)
			return
		case <-late.C:
			s.giveUp(c)
			return
		}
	}
	if tcp.EndpointState(c.ep.State()) == tcp.StateError || tcp.EndpointState(c.ep.State()) == tcp.StateClose {
		s.giveUp(c)
		return
	}
	tuneSocket(c.fd)
	s.called(c)
	s.start(c)
}

// call lists a connection that the guest has to answer, until called.
func (s *tcpSide) call(c *conn, guest netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calling[c] = guest
}

func (s *tcpSide) called(c *conn) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.calling, c)
}

// findGuest says whether the station of an address is known, and asks for it if not.
func (s *tcpSide) findGuest(a netip.Addr) bool {
	for i := range findTries {
		if _, ok := s.port.neighbors.lookup(a); ok {
			return true
		}
		if i%(findTries/4) == 0 {
			s.port.ask(a)
		}
		select {
		case <-s.quit:
			return false
		case <-time.After(findEvery):
		}
	}
	return false
}

// connectGuest sends the SYN, in the client's name if that is possible, else in the gateway's.
func (s *tcpSide) connectGuest(c *conn) bool {
	p := s.port
	to := tcpip.FullAddress{NIC: nicID, Addr: addressOf(c.guest.Addr()), Port: c.guest.Port()}
	names := []netip.AddrPort{netip.AddrPortFrom(p.gatewayOf(c.guest.Addr()), 0)}
	if p.keeps(c.other.Addr(), c.guest.Addr()) {
		names = append([]netip.AddrPort{c.other}, names...)
	}
	for _, name := range names {
		ep, err := p.stack.NewEndpoint(tcp.ProtocolNumber, protocolOf(c.guest.Addr()), c.waits)
		if err != nil {
			return false
		}
		err = ep.Bind(tcpip.FullAddress{NIC: nicID, Addr: addressOf(name.Addr()), Port: name.Port()})
		if err == nil {
			ep.SocketOptions().SetReceiveBufferSize(int64(c.buffer), true)
			err = ep.Connect(to)
		}
		if _, started := err.(*tcpip.ErrConnectStarted); started || err == nil {
			c.ep = ep
			return true
		}
		ep.Abort()
		ep.Close()
	}
	return false
}
