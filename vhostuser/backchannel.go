package vhostuser

import (
	"fmt"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
)

// Back-end messages (vhost-user.rst, "Back-end message types"). Their ids are
// another series than the front-end's.
const (
	BackendIOTLBMsg     Request = 1
	BackendConfigChange Request = 2
)

// backChannel sends messages of the back-end over the socket of
// SET_BACKEND_REQ_FD, from a goroutine of its own: neither the session nor a
// worker waits for a front-end that does not read. What is to be sent is kept as
// state, not as a queue of messages, so that there is never much of it.
//
// No reply is asked for: to answer, QEMU may need the session to answer first.
// So nothing is read either, and what a front-end sends here stays in the socket.
// The descriptor's flags are left alone, for the front-end may share them.
type backChannel struct {
	logger *slog.Logger
	wake   chan struct{}
	quit   chan struct{}
	done   chan struct{}

	mu      sync.Mutex
	sock    fd
	rest    []byte          // of a message that was cut
	config  bool            // CONFIG_CHANGE_MSG is due
	tell    bool            // the front-end acknowledged CONFIG
	iotlb   *guestmem.IOTLB // whose questions are misses; nil without an IOMMU
	running bool
	logged  bool
}

const (
	minResend = 10 * time.Millisecond
	maxResend = time.Second
)

func newBackChannel(logger *slog.Logger) *backChannel {
	return &backChannel{logger: logger, wake: make(chan struct{}, 1), quit: make(chan struct{}), done: make(chan struct{})}
}

// poke has the goroutine look whether there is something to send. It never blocks.
func (c *backChannel) poke() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// replace takes over the socket, and closes the one before. All questions are put
// again: the one before may have been of no use.
func (c *backChannel) replace(sock fd) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.sock.close()
	c.sock, c.rest = sock, nil
	if c.iotlb != nil {
		c.iotlb.PutAgain()
	}
	if !c.running {
		c.running = true
		go c.run()
	}
	c.poke()
}

// serve names the IOTLB whose questions are put, nil for none.
func (c *backChannel) serve(t *guestmem.IOTLB) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.iotlb = t
}

// tellConfig says whether the front-end takes CONFIG_CHANGE_MSG.
func (c *backChannel) tellConfig(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.tell = on
}

// configChanged has CONFIG_CHANGE_MSG sent as soon as there is a channel. Changes that
// were not sent yet are one message.
func (c *backChannel) configChanged() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.config = true
	c.poke()
}

// close ends the channel; nothing is sent afterwards.
func (c *backChannel) close() {
	close(c.quit)
	c.mu.Lock()
	running := c.running
	c.mu.Unlock()
	if running {
		<-c.done
	}
	c.sock.close()
}

func (c *backChannel) run() {
	defer close(c.done)
	timer := time.NewTimer(0)
	defer timer.Stop()
	for delay := minResend; ; {
		select {
		case <-c.quit:
			return
		case <-c.wake:
		case <-timer.C:
		}
		if c.send() {
			delay = minResend
			continue
		}
		timer.Reset(delay)
		delay = min(2*delay, maxResend)
	}
}

// send writes what is due. It returns false if the front-end takes no more now.
func (c *backChannel) send() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.sock.ok() {
		if len(c.rest) == 0 {
			c.rest = c.next()
		}
		if len(c.rest) == 0 {
			return true
		}
		n, err := unix.SendmsgN(c.sock.num(), c.rest, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		switch err {
		case nil:
			c.rest = c.rest[n:]
		case unix.EINTR:
		case unix.EAGAIN:
			return false
		default:
			c.fail(err)
		}
	}
	return true
}

// next encodes the next message, nil if there is none.
func (c *backChannel) next() []byte {
	if c.config && c.tell {
		c.config = false
		return backendMessage(BackendConfigChange, nil)
	}
	if c.iotlb == nil {
		return nil
	}
	q, ok := c.iotlb.Next()
	if !ok {
		return nil
	}
	perm := uint8(guestmem.PermRead)
	if q.Write {
		perm = guestmem.PermWrite
	}
	return backendMessage(BackendIOTLBMsg, IOTLBMsg{IOVA: q.Addr, Perm: perm, Type: IOTLBMiss}.Append(nil))
}

func backendMessage(req Request, payload []byte) []byte {
	b := Header{Request: req, Flags: FlagVersion, Size: uint32(len(payload))}.Append(make([]byte, 0, HeaderLen+len(payload)))
	return append(b, payload...)
}

func (c *backChannel) fail(err error) {
	c.sock.close()
	c.rest = nil
	if !c.logged {
		c.logged = true
		c.logger.Warn("the front-end's channel for messages of the back-end ended: rings that need it wait for another one", "err", err)
	}
}

// setBackendReqFD takes the socket for messages of the back-end.
func (s *Session) setBackendReqFD(m *message) error {
	if err := m.fds[0].channels(); err != nil {
		return err
	}
	s.back.replace(m.fds[0].take())
	return nil
}

// channels refuses a descriptor that is no local socket of a connection.
func (f fd) channels() error {
	domain, err := unix.GetsockoptInt(f.num(), unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return fmt.Errorf("the descriptor is no socket: %w", err)
	}
	kind, err := unix.GetsockoptInt(f.num(), unix.SOL_SOCKET, unix.SO_TYPE)
	if err != nil {
		return fmt.Errorf("the socket's type cannot be told: %w", err)
	}
	if domain != unix.AF_UNIX || kind != unix.SOCK_STREAM && kind != unix.SOCK_SEQPACKET {
		return fmt.Errorf("a socket of domain %d and type %d, accepted are local ones (%d) of type stream (%d) or seqpacket (%d)",
			domain, kind, unix.AF_UNIX, unix.SOCK_STREAM, unix.SOCK_SEQPACKET)
	}
	return nil
}
