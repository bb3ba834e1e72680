package user

import (
	"errors"
	"io"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/waiter"
)

// conn is an established connection: an endpoint of the stack, which the guest talks to, and a socket of the host. Its two directions
// are copied by goroutines that exist only while there is something to copy. It implements [source].
type conn struct {
	side         *tcpSide
	ep           tcpip.Endpoint
	waits        *waiter.Queue
	entry        waiter.Entry
	fd           int
	token        token
	guest, other netip.AddrPort
	inbound      bool // the host side has asked for it
	started      time.Time
	buffer       int // granted, each way
	license      license

	up, down           pump         // guest to host, host to guest
	ending             atomic.Bool  // the host may have sent an end that nobody has looked for
	upBytes, downBytes atomic.Int64 // copied
	last               atomic.Int64 // when bytes were copied, in nanoseconds after started

	mu       sync.Mutex
	users    int  // goroutines that use ep and fd
	upDone   bool // the guest's FIN was passed on
	downDone bool // the host's FIN was passed on
	over     bool
	linger   bool // the host is told by a reset
}

// pump is the state of one direction.
type pump struct{ state atomic.Uint32 }

const (
	idle uint32 = iota
	running
	again // something came while it was running
)

// kick has step called until it returns false with nothing new since.
func (p *pump) kick(c *conn, step func(*conn) bool) {
	if p.claim(c) {
		go p.run(c, step)
	}
}

// claim says that the caller is the one to run the direction, and has entered c.
func (p *pump) claim(c *conn) bool {
	for {
		switch s := p.state.Load(); {
		case s == again:
			return false
		case s == running:
			if p.state.CompareAndSwap(running, again) {
				return false
			}
		case p.state.CompareAndSwap(idle, running):
			return c.enter()
		}
	}
}

func (p *pump) run(c *conn, step func(*conn) bool) {
	defer c.side.port.contain()
	defer c.leave()
	for {
		if step(c) {
			continue
		}
		if p.state.CompareAndSwap(running, idle) {
			return
		}
		p.state.Store(running)
	}
}

// enter keeps ep and fd open until leave; false says that they are not any more.
func (c *conn) enter() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return false
	}
	c.users++
	return true
}

func (c *conn) leave() {
	c.mu.Lock()
	c.users--
	last := c.over && c.users == 0
	c.mu.Unlock()
	if last {
		c.release()
	}
}

// connEvents are what a connection's socket is watched for, from its connect on.
const connEvents = unix.EPOLLIN | unix.EPOLLOUT | unix.EPOLLRDHUP | unix.EPOLLET

// begin watches both sides. It is false if that cannot be done. The caller's goroutine copies the first that the host has sent, if it has,
// and so saves most connections the start of another one.
func (c *conn) begin() bool {
	o := c.ep.SocketOptions()
	o.SetKeepAlive(true)
	o.SetDelayOption(false)
	idle := tcpip.KeepaliveIdleOption(keepIdle)
	_ = c.ep.SetSockOpt(&idle) // accepts any time
	o.SetSendBufferSize(int64(c.buffer), true)
	c.entry = waiter.NewFunctionEntry(waiter.ReadableEvents|waiter.WritableEvents|waiter.EventErr|waiter.EventHUp, c.notify)
	if !c.enter() {
		return false
	}
	defer c.leave()
	if !c.watch() {
		return false
	}
	c.ending.Store(true) // the connect's events were not looked at
	c.waits.EventRegister(&c.entry)
	if c.ep.Readiness(waiter.ReadableEvents|waiter.EventErr|waiter.EventHUp) != 0 {
		c.kickUp()
	}
	if c.down.claim(c) {
		c.down.run(c, (*conn).copyDown)
	}
	return true
}

// watch has the poller tell c of its socket, which it may be watching already.
func (c *conn) watch() bool {
	p := c.side.port.poller
	if c.token.valid {
		p.replace(c.token, c)
		return true
	}
	t, err := p.add(c.fd, connEvents, c)
	if err != nil {
		return false
	}
	c.mu.Lock()
	c.token = t
	c.mu.Unlock()
	return true
}

func (c *conn) kickUp()   { c.up.kick(c, (*conn).copyUp) }
func (c *conn) kickDown() { c.down.kick(c, (*conn).copyDown) }

// notify is called by the stack, under its locks.
func (c *conn) notify(events waiter.EventMask) {
	defer c.side.port.contain()
	if events&(waiter.ReadableEvents|waiter.EventErr|waiter.EventHUp) != 0 {
		c.kickUp()
	}
	if events&(waiter.WritableEvents|waiter.EventErr|waiter.EventHUp) != 0 {
		c.kickDown()
	}
}

// ready implements [source].
func (c *conn) ready(events uint32) {
	if events&(unix.EPOLLRDHUP|unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		c.ending.Store(true)
	}
	if events&(unix.EPOLLIN|unix.EPOLLRDHUP|unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		c.kickDown()
	}
	if events&(unix.EPOLLOUT|unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		c.kickUp()
	}
}

// copyUp moves what the guest has sent to the host. It returns false when it has to wait.
func (c *conn) copyUp() bool {
	if c.done(true) {
		return false
	}
	w := hostWriter{fd: c.fd}
	result, err := c.ep.Read(&w, tcpip.ReadOptions{})
	if result.Count > 0 {
		c.moved(&c.upBytes, &c.side.port.traffic[kindTCP].up, int64(result.Count))
	}
	switch {
	case w.err != nil && !errors.Is(w.err, unix.EAGAIN):
		c.abort(true, false) // the host's side is gone
		return false
	case w.err != nil:
		return false
	case err == nil:
		return true
	}
	switch err.(type) {
	case *tcpip.ErrWouldBlock:
	case *tcpip.ErrClosedForReceive:
		_ = unix.Shutdown(c.fd, unix.SHUT_WR) // fails if the host is gone, which the other direction sees
		c.finished(true)
	default:
		c.abort(false, true) // the guest's side is gone
	}
	return false
}

// moved counts bytes that were copied in one direction.
func (c *conn) moved(mine *atomic.Int64, all *way, n int64) {
	mine.Add(n)
	all.bytes.Add(uint64(n))
	c.last.Store(int64(time.Since(c.started)))
}

// hostWriter writes to a socket as much as it takes, without waiting: the stack calls it under the endpoint's lock.
type hostWriter struct {
	fd  int
	err error
}

func (w *hostWriter) Write(b []byte) (n int, err error) {
	for n < len(b) {
		k, err := unix.SendmsgN(w.fd, b[n:], nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			w.err = err
			return n, io.ErrShortWrite
		}
		n += k
	}
	return n, nil
}

const (
	// chunk is how much is read from the host at a time: the knee of the curve, see docs/performance.md.
	chunk = 256 << 10
	// short is what the host sends in answer to a request rather than in a stream, whose next bytes are there already as a rule.
	short = 16 << 10
)

// copyDown moves what the host has sent to the guest. It returns false when it has to wait.
func (c *conn) copyDown() bool {
	if c.done(false) {
		return false
	}
	n, err := unix.IoctlGetInt(c.fd, unix.TIOCINQ)
	if err != nil {
		c.abort(true, false)
		return false
	}
	if n == 0 {
		return c.hostQuiet()
	}
	r := hostReader{fd: c.fd, left: min(n, chunk)}
	k, failure := c.ep.Write(&r, tcpip.WriteOptions{})
	if k > 0 {
		c.moved(&c.downBytes, &c.side.port.traffic[kindTCP].down, k)
	}
	if failure == nil {
		// Bytes that came meanwhile are told by an event of their own; an end may have been told together with these.
		return k < int64(n) || n >= short || c.ending.Load()
	}
	switch failure.(type) {
	case *tcpip.ErrWouldBlock:
	case *tcpip.ErrBadBuffer:
		c.abort(true, false)
	default:
		c.abort(false, true)
	}
	return false
}

// hostQuiet tells the end of the host's bytes from a pause.
func (c *conn) hostQuiet() bool {
	var one [1]byte
	c.ending.Store(false) // before the look, so that an end that is told after it is not forgotten
	n, _, err := unix.Recvfrom(c.fd, one[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	switch {
	case errors.Is(err, unix.EAGAIN):
		return false
	case errors.Is(err, unix.EINTR), err == nil && n > 0:
		return true
	case err != nil:
		c.abort(true, false)
		return false
	}
	if failure := c.ep.Shutdown(tcpip.ShutdownWrite); failure != nil {
		if _, gone := failure.(*tcpip.ErrNotConnected); !gone {
			c.abort(true, true)
			return false
		}
	}
	c.finished(false)
	return false
}

// hostReader reads what a socket is known to hold. It implements [tcpip.Payloader]: an end before that would make the stack spin.
type hostReader struct{ fd, left int }

var errShort = errors.New("the socket holds less than it said")

func (r *hostReader) Len() int { return r.left }

func (r *hostReader) Read(b []byte) (int, error) {
	b = b[:min(len(b), r.left)]
	if len(b) == 0 {
		return 0, nil
	}
	for {
		n, err := unix.Read(r.fd, b)
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return 0, err
		case n == 0:
			return 0, errShort
		}
		r.left -= n
		return n, nil
	}
}

// done says whether a direction has ended.
func (c *conn) done(up bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.over || up && c.upDone || !up && c.downDone
}

// finished ends one direction, and with the second one the connection.
func (c *conn) finished(up bool) {
	c.mu.Lock()
	if up {
		c.upDone = true
	} else {
		c.downDone = true
	}
	both := c.upDone && c.downDone
	c.mu.Unlock()
	if both {
		c.abort(false, false)
	}
}

// abort ends the connection: the sides that resetGuest and resetHost name are told by a reset, the others by nothing more.
// It says whether it was not ended before.
func (c *conn) abort(resetGuest, resetHost bool) bool {
	c.mu.Lock()
	if c.over {
		c.mu.Unlock()
		return false
	}
	c.over, c.linger = true, resetHost
	last := c.users == 0
	c.mu.Unlock()
	s := c.side
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
	if resetGuest {
		c.ep.Abort()
	}
	if last {
		c.release()
	}
	return true
}

// release closes both sides when nobody uses them any more.
func (c *conn) release() {
	c.waits.EventUnregister(&c.entry)
	c.ep.Close()
	p := c.side.port
	if c.linger {
		resetOnClose(c.fd)
	}
	p.poller.forget(c.token)
	p.closeSocket(c.fd)
	c.side.giveBack(c.buffer)
	p.flows.count.Add(-1)
}
