package user

import (
	"errors"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

// dial is the forwarder's handler, on a goroutine of its own: it starts the host's connect and leaves the rest to the poller.
func (s *tcpSide) dial(r *tcp.ForwarderRequest) {
	defer s.port.contain()
	id := r.ID()
	key := connKey{addrPort(id.RemoteAddress, id.RemotePort), addrPort(id.LocalAddress, id.LocalPort)}
	s.mu.Lock()
	c := s.pending[key]
	_, ghost := s.ghosts[key]
	delete(s.ghosts, key)
	mine := c != nil && !ghost && c.request == nil
	if mine {
		c.request = r
	}
	s.mu.Unlock()
	if !mine {
		r.Complete(false)
		return
	}
	err := s.connect(c)
	var none fdError
	if errors.As(err, &none) && (s.port.flows.evict() || s.evictOther(c)) {
		err = s.connect(c)
	}
	if err != nil {
		s.connected(c, err)
	}
}

// evictOther ends the oldest connect but c.
func (s *tcpSide) evictOther(c *pending) bool {
	s.mu.Lock()
	front := s.dialing.Front()
	s.mu.Unlock()
	return front != nil && front.Value != c && s.drop(front.Value.(*pending))
}

func (s *tcpSide) connect(c *pending) error {
	to, _ := s.port.hostAddress(c.key.other)
	fd, err := s.port.newSocket(familyOf(to.Addr()), unix.SOCK_STREAM, 0)
	if err != nil {
		return err
	}
	tuneSocket(fd)
	err = unix.Connect(fd, sockaddrOf(to))
	if err != nil && !errors.Is(err, unix.EINPROGRESS) {
		s.port.closeSocket(fd)
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.over {
		s.port.closeSocket(fd)
		return nil
	}
	if c.token, err = s.port.poller.add(fd, connEvents, c); err != nil {
		s.port.closeSocket(fd)
		return err
	}
	c.fd = fd
	return nil
}

// keepIdle is how long a connection is quiet before either side is asked whether it is still there.
const keepIdle = 10 * time.Minute

// tuneSocket sets what every connection of the host wants: bytes go at once, as the guest sent them, and a peer that vanished is found out.
func tuneSocket(fd int) {
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1) // each is for the better only
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1)
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(keepIdle/time.Second))
}

// ready implements [source]: the host's connect has an end.
func (c *pending) ready(uint32) {
	s := c.side
	s.mu.Lock()
	fd := c.fd
	if fd < 0 || c.over || c.answered {
		s.mu.Unlock()
		return
	}
	n, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err == nil && n != 0 {
		err = unix.Errno(n)
	}
	if err == nil {
		if _, peer := unix.Getpeername(fd); peer != nil {
			s.mu.Unlock()
			return // not yet: a new socket tells of a hang-up at first
		}
	}
	c.answered = true
	s.busy.Add(1)
	s.mu.Unlock()
	s.port.spawn(func() {
		defer s.busy.Done()
		s.connected(c, err)
	})
}

// connected answers the guest's SYN.
func (s *tcpSide) connected(c *pending, err error) {
	if err == nil {
		s.shake(c)
		return
	}
	if !s.take(c) {
		return
	}
	var none fdError
	counts := &s.port.traffic[kindTCP]
	if errors.As(err, &none) {
		counts.limited.Add(1)
	} else {
		counts.failure.Add(1)
	}
	kind, tell := errorFor(err)
	switch {
	case errors.As(err, &none):
		s.port.lost.add(flowLimit)
		s.port.log.Warn("user network: no descriptors for more flows", "error", err)
		s.finish(c, false)
	case errors.Is(err, unix.ECONNREFUSED), errors.Is(err, unix.ECONNRESET):
		s.finish(c, true)
	case tell:
		guest := c.key.guest.Addr()
		s.port.explain(kind, guest, packetStart(guest, c.key.other.Addr(), protoTCP, c.start, tcpMin))
		s.finish(c, false)
	default:
		s.finish(c, false) // timed out, which the guest notices by itself
	}
}

// shake does the handshake with the guest and begins to copy.
func (s *tcpSide) shake(c *pending) {
	waits := &waiter.Queue{}
	s.mu.Lock()
	if c.over || c.waits != nil || s.closed {
		s.mu.Unlock()
		return
	}
	if c.place != nil {
		s.dialing.Remove(c.place)
		c.place = nil
	}
	c.waits = waits
	s.mu.Unlock()
	timer := s.port.after(handshakeLife, func() { waits.Notify(waiter.WritableEvents) })
	ep, err := c.request.CreateEndpoint(waits)
	timer.Stop()
	if !s.take(c) {
		return // nobody else ends one that shakes hands
	}
	if err != nil {
		s.finish(c, false)
		return
	}
	s.mu.Lock()
	fd := c.fd
	c.fd = -1
	s.mu.Unlock()
	c.request.Complete(false)
	s.start(&conn{
		side: s, ep: ep, waits: waits, fd: fd, token: c.token, guest: c.key.guest, other: c.key.other, started: c.began, buffer: c.buffer,
		license: c.license,
	})
}
