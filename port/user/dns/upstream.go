package dns

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	// MaxSockets bounds the datagram sockets to resolvers, MaxStreams the connections to them.
	MaxSockets = 64
	MaxStreams = 32
	// perSocket is how many questions share a socket at one time, usesOfSocket and lifeOfSocket how long it gets new ones.
	perSocket    = 16
	usesOfSocket = 64
	lifeOfSocket = 10 * time.Second
	idleSocket   = 5 * time.Second
	maxAnswer    = 65535
)

var (
	errBusy    = errors.New("too many questions are under way")
	errTimeout = errors.New("no answer in time")
	errClosed  = errors.New("the forwarder is closed")
)

// sockets are the datagram sockets to all resolvers. It is safe for concurrent use.
type sockets struct {
	mu      sync.Mutex
	all     map[*socket]struct{}
	closed  bool
	ended   sync.WaitGroup
	buffer  sync.Pool
	stray   func() // counts datagrams that answer nothing
	contain func() // is deferred on goroutines
}

// socket is one port of ours at which a resolver's answers arrive. Its fields belong to sockets.mu.
type socket struct {
	conn    net.Conn
	addr    netip.AddrPort
	born    time.Time
	uses    int
	pending map[uint16]*exchange
	idle    *time.Timer
	retired bool // it gets no new questions, and is closed when none is pending
}

// exchange is one question under way.
type exchange struct {
	sent  []byte // header and question section
	exact bool
	done  chan result // of one
}

type result struct {
	answer []byte
	err    error
}

// ask sends a query, whose identifier it sets, and waits for the answer.
func (s *sockets) ask(ctx context.Context, addr netip.AddrPort, query []byte, end int, exact bool) ([]byte, error) {
	e := &exchange{sent: query[:end], exact: exact, done: make(chan result, 1)}
	k, id, err := s.register(addr, e)
	if err != nil {
		return nil, err
	}
	defer s.forget(k, id)
	binary.BigEndian.PutUint16(query, id)
	if _, err := k.conn.Write(query); err != nil {
		s.retire(k)
		return nil, fmt.Errorf("ask %v: %w", addr, err)
	}
	select {
	case r := <-e.done:
		return r.answer, r.err
	case <-ctx.Done():
		return nil, fmt.Errorf("ask %v: %w", addr, errTimeout)
	}
}

// register finds a socket for the question, and an identifier that is free there.
func (s *sockets) register(addr netip.AddrPort, e *exchange) (*socket, uint16, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k, err := s.choose(addr)
	if err != nil {
		return nil, 0, err
	}
	var random [2]byte
	for {
		rand.Read(random[:])
		id := binary.BigEndian.Uint16(random[:])
		if k.pending[id] == nil {
			k.pending[id] = e
			k.uses++
			k.idle.Stop()
			return k, id, nil
		}
	}
}

func (s *sockets) choose(addr netip.AddrPort) (*socket, error) {
	if s.closed {
		return nil, errClosed
	}
	now := time.Now()
	var spare *socket
	for k := range s.all {
		if !k.retired && (k.uses >= usesOfSocket || now.Sub(k.born) > lifeOfSocket) {
			k.retired = true
			s.settle(k)
			continue
		}
		if !k.retired && k.addr == addr && len(k.pending) < perSocket {
			return k, nil
		}
		if len(k.pending) == 0 {
			spare = k
		}
	}
	if len(s.all) >= MaxSockets {
		if spare == nil {
			return nil, errBusy
		}
		spare.retired = true
		s.settle(spare)
	}
	conn, err := net.Dial("udp", addr.String())
	if err != nil {
		return nil, err
	}
	k := &socket{conn: conn, addr: addr, born: now, pending: map[uint16]*exchange{}}
	k.idle = time.AfterFunc(idleSocket, func() { s.expire(k) })
	s.all[k] = struct{}{}
	s.ended.Add(1)
	go s.read(k)
	return k, nil
}

// settle closes a retired socket that nobody waits at.
func (s *sockets) settle(k *socket) {
	if _, open := s.all[k]; open && k.retired && len(k.pending) == 0 {
		delete(s.all, k)
		k.idle.Stop()
		k.conn.Close()
	}
}

func (s *sockets) forget(k *socket, id uint16) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(k.pending, id)
	if len(k.pending) == 0 {
		k.idle.Reset(idleSocket)
	}
	s.settle(k)
}

func (s *sockets) expire(k *socket) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(k.pending) == 0 {
		k.retired = true
		s.settle(k)
	}
}

func (s *sockets) retire(k *socket) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k.retired = true
}

// read hands answers over until the socket is closed. An error (the resolver's host refuses) is everybody's who waits here.
func (s *sockets) read(k *socket) {
	defer s.contain()
	defer s.ended.Done()
	buffer := s.buffer.Get().(*[maxAnswer]byte)
	defer s.buffer.Put(buffer)
	for {
		n, err := k.conn.Read(buffer[:])
		if err != nil {
			s.fail(k, err)
			return
		}
		if n < headerLen || !s.deliver(k, buffer[:n]) {
			s.stray()
		}
	}
}

func (s *sockets) fail(k *socket, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k.retired = true
	for id, e := range k.pending {
		delete(k.pending, id)
		e.done <- result{err: fmt.Errorf("ask %v: %w", k.addr, err)}
	}
	s.settle(k)
}

func (s *sockets) deliver(k *socket, answer []byte) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	id := binary.BigEndian.Uint16(answer)
	e := k.pending[id]
	if e == nil || !answers(answer, e.sent, e.exact) {
		return false
	}
	delete(k.pending, id)
	e.done <- result{answer: append([]byte(nil), answer...)}
	return true
}

func (s *sockets) close() {
	s.mu.Lock()
	s.closed = true
	for k := range s.all {
		k.idle.Stop()
		k.conn.Close()
	}
	s.mu.Unlock()
	s.ended.Wait()
}

// askStream asks over a connection of its own.
func askStream(ctx context.Context, addr netip.AddrPort, query []byte, end int, exact bool) ([]byte, error) {
	rand.Read(query[:2])
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "tcp", addr.String())
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := writeStream(conn, query); err != nil {
		return nil, fmt.Errorf("ask %v over TCP: %w", addr, err)
	}
	answer, err := readStream(conn)
	if err != nil {
		return nil, fmt.Errorf("ask %v over TCP: %w", addr, err)
	}
	if len(answer) < headerLen || answer[0] != query[0] || answer[1] != query[1] || !answers(answer, query[:end], exact) {
		return nil, fmt.Errorf("ask %v over TCP: the answer belongs to another question", addr)
	}
	return answer, nil
}

// writeStream writes a message with the length that stands in front of it on a stream (RFC 1035, 4.2.2), in one piece.
func writeStream(w io.Writer, message []byte) error {
	_, err := w.Write(append(binary.BigEndian.AppendUint16(make([]byte, 0, 2+len(message)), uint16(len(message))), message...))
	return err
}

func readStream(r io.Reader) ([]byte, error) {
	var size [2]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	message := make([]byte, binary.BigEndian.Uint16(size[:]))
	_, err := io.ReadFull(r, message)
	return message, err
}
