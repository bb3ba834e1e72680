package dns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	mdns "github.com/miekg/dns"
)

// Bounds of what is under way.
const (
	// MaxQueries bounds the questions of all guests of a forwarder, MaxPerClient those of one guest and its connections.
	MaxQueries   = 512
	MaxPerClient = 128
	// MaxConns bounds the guests' connections.
	MaxConns = 256
	// connIdle is how long a guest's connection may stay without a question (RFC 7766, 6.2.3, asks for some seconds).
	connIdle = 10 * time.Second
	// answerTime bounds the time for one answer, with all resolvers that are asked. A libc waits for 5 s.
	answerTime = 10 * time.Second
	writeTime  = 10 * time.Second
)

// load is what is under way, by guest.
type load struct {
	mu    sync.Mutex
	total int
	by    map[netip.Addr]int
}

func (l *load) begin(guest netip.Addr, limit int) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.total >= limit || l.by[guest] >= MaxPerClient {
		return false
	}
	if l.by == nil {
		l.by = map[netip.Addr]int{}
	}
	l.total++
	l.by[guest]++
	return true
}

func (l *load) end(guest netip.Addr) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.total--
	if l.by[guest]--; l.by[guest] == 0 {
		delete(l.by, guest)
	}
}

// serving is what a forwarder serves on, and the goroutines that do.
type serving struct {
	mu     sync.Mutex
	closed bool
	open   map[io.Closer]struct{}
	ended  sync.WaitGroup
	conns  load
}

// add registers c and one goroutine. False says that it was closed at once, because the forwarder is.
func (s *serving) add(c io.Closer) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		c.Close()
		return false
	}
	if s.open == nil {
		s.open = map[io.Closer]struct{}{}
	}
	s.open[c] = struct{}{}
	s.ended.Add(1)
	return true
}

func (s *serving) done(c io.Closer) {
	c.Close()
	s.mu.Lock()
	delete(s.open, c)
	s.mu.Unlock()
	s.ended.Done()
}

func (s *serving) close() {
	s.mu.Lock()
	s.closed = true
	for c := range s.open {
		c.Close()
	}
	s.mu.Unlock()
	s.ended.Wait()
}

// ServePacket answers questions that arrive on conn until conn or the forwarder is closed, which closes conn. It returns nil then.
func (f *Forwarder) ServePacket(conn net.PacketConn) error {
	if !f.serving.add(conn) {
		return nil
	}
	defer f.serving.done(conn)
	buffer := make([]byte, maxAnswer)
	for {
		n, from, err := conn.ReadFrom(buffer)
		switch {
		case err == nil:
			f.datagram(conn, from, buffer[:n])
		case f.ctx.Err() != nil || errors.Is(err, net.ErrClosed) || errors.Is(err, io.EOF):
			return nil
		default:
			var temporary net.Error
			if errors.As(err, &temporary) && temporary.Timeout() {
				continue
			}
			return fmt.Errorf("dns: read: %w", err)
		}
	}
}

// datagram starts to answer one question. Beyond the bounds the answer is SERVFAIL at once.
func (f *Forwarder) datagram(conn net.PacketConn, from net.Addr, message []byte) {
	guest := addrOf(from)
	if !f.load.begin(guest, MaxQueries) {
		if f.count.busy.Add(1); len(message) >= headerLen && message[2]&flagQR == 0 {
			_, _ = conn.WriteTo(failure(message, mdns.RcodeServerFailure), from)
		}
		return
	}
	query := append([]byte(nil), message...)
	f.serving.ended.Add(1)
	go func() {
		defer f.contain()
		defer f.serving.ended.Done()
		defer f.load.end(guest)
		ctx, cancel := context.WithTimeout(f.ctx, answerTime)
		defer cancel()
		if answer := f.handle(ctx, guest, query, false); answer != nil {
			_, _ = conn.WriteTo(answer, from) // a guest that is gone misses nothing
		}
	}()
}

// ServeStream answers questions on connections that l accepts until l or the forwarder is closed, which closes l and the connections. It
// returns nil then.
func (f *Forwarder) ServeStream(l net.Listener) error {
	if !f.serving.add(l) {
		return nil
	}
	defer f.serving.done(l)
	for {
		conn, err := l.Accept()
		if err != nil {
			if f.ctx.Err() != nil || errors.Is(err, net.ErrClosed) || errors.Is(err, io.EOF) {
				return nil
			}
			return fmt.Errorf("dns: accept: %w", err)
		}
		guest := addrOf(conn.RemoteAddr())
		if !f.serving.conns.begin(guest, MaxConns) {
			f.count.busy.Add(1)
			conn.Close()
			continue
		}
		if !f.serving.add(conn) {
			f.serving.conns.end(guest)
			continue
		}
		go func() {
			defer f.contain()
			defer f.serving.done(conn)
			defer f.serving.conns.end(guest)
			f.stream(conn, guest)
		}()
	}
}

// stream answers the questions of one connection, one after another.
func (f *Forwarder) stream(conn net.Conn, guest netip.Addr) {
	for {
		_ = conn.SetReadDeadline(time.Now().Add(connIdle))
		query, err := readStream(conn)
		if err != nil {
			return
		}
		ctx, cancel := context.WithTimeout(f.ctx, answerTime)
		answer := f.handle(ctx, guest, query, true)
		cancel()
		if answer == nil {
			return // no question; RFC 7766 has nothing to say on a stream that carries something else
		}
		_ = conn.SetWriteDeadline(time.Now().Add(writeTime))
		if writeStream(conn, answer) != nil {
			return
		}
	}
}

// addrOf is a guest's address, the zero one for connections without.
func addrOf(a net.Addr) netip.Addr {
	switch a := a.(type) {
	case *net.UDPAddr:
		return a.AddrPort().Addr().Unmap()
	case *net.TCPAddr:
		return a.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}
