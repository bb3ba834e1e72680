// Package sock is the network behind a Unix socket of the type SEQPACKET: a message is an Ethernet frame of 14 to
// virtio.MaxFrame bytes, without a header of any kind and complete (no offloads), in both directions. One peer at a time is
// connected: a test program, a user-mode network stack, another vhostd.
//
// The socket is reliable, and so is the network while a peer is there: a peer that does not read is back-pressure, and what it
// sent before the guest was ready waits in the socket. Without a peer the guest's frames are dropped and counted. File
// descriptors that a peer attaches are never received.
//
// Frames for the guest arrive at queue pair 0; the other pairs send alone.
package sock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/unixsock"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
)

const (
	// dialEvery is how often a peer that is not there is looked for, and one that is there for its end.
	dialEvery = 200 * time.Millisecond
	// sendBuffer asks for room in the socket; the kernel gives up to net.core.wmem_max, twice that with its own share.
	sendBuffer = 1 << 20
	// acceptPause keeps a loop of failing accepts (no descriptors left) from spinning.
	acceptPause = 100 * time.Millisecond
)

// Port is a network behind a socket. It implements [port.Port].
type Port struct {
	opts     Options
	log      *slog.Logger
	listener *unixsock.Listener // nil: dials
	queues   port.QueueSet

	ctx  context.Context
	end  context.CancelFunc
	loop sync.WaitGroup

	mu   sync.Mutex // guards what follows
	peer *net.UnixConn
	open map[*queue]struct{}
}

// New makes the socket, or starts to dial. The caller closes the port.
func New(o Options) (*Port, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if o.Mode == 0 {
		o.Mode = 0o600
	}
	p := &Port{opts: o, log: o.Logger, open: map[*queue]struct{}{}}
	if p.log == nil {
		p.log = slog.Default()
	}
	if !o.Connect {
		var err error
		p.listener, err = unixsock.Listen(o.Path, unixsock.Options{Mode: o.Mode, UID: -1, GID: -1, Packet: true})
		if err != nil {
			return nil, fmt.Errorf("network %s: %w", kind, err)
		}
	}
	p.ctx, p.end = context.WithCancel(context.Background())
	if o.Connect {
		p.loop.Go(p.dial)
	} else {
		p.loop.Go(p.accept)
	}
	return p, nil
}

// accept takes peers, one at a time: whoever comes while another is connected is sent away.
func (p *Port) accept() {
	for {
		conn, err := p.listener.AcceptUnix()
		switch {
		case p.ctx.Err() != nil:
			if err == nil {
				conn.Close()
			}
			return
		case err != nil:
			p.pause(acceptPause)
		case p.connected():
			p.log.Warn("another peer is connected, one at a time is served", "socket", p.opts.Path)
			conn.Close()
		default:
			p.welcome(conn)
		}
	}
}

func (p *Port) dial() {
	dialer := net.Dialer{Timeout: time.Second}
	for told := false; p.ctx.Err() == nil; p.pause(dialEvery) {
		if p.connected() {
			told = false
			continue
		}
		conn, err := dialer.DialContext(p.ctx, "unixpacket", p.opts.Path)
		if err != nil {
			if !told && p.ctx.Err() == nil {
				p.log.Info("waiting for the peer's socket", "socket", p.opts.Path, "reason", err)
				told = true
			}
			continue
		}
		p.welcome(conn.(*net.UnixConn))
	}
}

func (p *Port) pause(d time.Duration) {
	select {
	case <-p.ctx.Done():
	case <-time.After(d):
	}
}

// connected says whether the peer is there, and forgets one that has gone.
func (p *Port) connected() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.peer == nil {
		return false
	}
	if !hungUp(p.peer) {
		return true
	}
	p.peer.Close()
	p.peer = nil
	p.log.Info("peer disconnected", "socket", p.opts.Path)
	return false
}

// welcome makes conn the peer. Every queue gets a descriptor of its own, so that no worker uses a number that another closes.
func (p *Port) welcome(conn *net.UnixConn) {
	_ = conn.SetWriteBuffer(sendBuffer)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.peer = conn
	for q := range p.open {
		q.offer(duplicate(conn))
	}
	p.log.Info("peer connected", "socket", p.opts.Path)
}

// duplicate returns another descriptor of the connection, -1 if there is none left.
func duplicate(conn *net.UnixConn) (fd int) {
	fd = -1
	control(conn, func(own int) {
		if n, err := unix.FcntlInt(uintptr(own), unix.F_DUPFD_CLOEXEC, 3); err == nil {
			fd = n
		}
	})
	return fd
}

// hungUp says whether the peer has closed its side, also while frames of it are still unread.
func hungUp(conn *net.UnixConn) bool {
	gone := true
	control(conn, func(fd int) { gone = ended(fd) })
	return gone
}

func ended(fd int) bool {
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0 && fds[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
}

func control(conn *net.UnixConn, f func(fd int)) {
	if raw, err := conn.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { f(int(fd)) })
	}
}

// Kind is "sock".
func (*Port) Kind() string { return kind }

// Features are none: frames on the socket are complete.
func (*Port) Features() virtio.Features { return 0 }

// MTU is 0: a message can be as long as the longest frame.
func (*Port) MTU() int { return 0 }

// SetMTU accepts anything.
func (*Port) SetMTU(int) error { return nil }

// Configure refuses features that were not offered.
func (*Port) Configure(acked virtio.Features) error { return port.CheckOffloads(kind, 0, acked) }

// OpenQueue implements [port.Port].
func (p *Port) OpenQueue(i int, r port.Resources) (port.Queue, error) {
	q, err := p.queues.Open(i, func() (port.Queue, error) {
		q, err := newQueue(p, i, r)
		if err != nil {
			return nil, err
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		p.open[q] = struct{}{}
		if p.peer != nil {
			q.offer(duplicate(p.peer))
		}
		return q, nil
	})
	if err != nil {
		return nil, fmt.Errorf("network %s: %w", kind, err)
	}
	return q, nil
}

// Announce sends the RARP request to the peer, if there is one that takes it.
func (p *Port) Announce(mac [6]byte) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.peer == nil {
		return nil
	}
	frame := port.RARP(mac)
	control(p.peer, func(fd int) { _ = unix.Send(fd, frame[:], unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL) })
	return nil
}

// Status is up while a peer is connected.
func (p *Port) Status() port.Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.peer != nil && !hungUp(p.peer) {
		return port.Status{Up: true, Detail: p.opts.Path}
	}
	return port.Status{Detail: "no peer is connected to " + p.opts.Path}
}

// Close implements [port.Port]. It removes the socket that New made.
func (p *Port) Close() error {
	p.end()
	var errs []error
	if p.listener != nil {
		errs = append(errs, p.listener.Close())
	}
	p.loop.Wait()
	errs = append(errs, p.queues.Close())
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.peer != nil {
		errs = append(errs, p.peer.Close())
		p.peer = nil
	}
	return errors.Join(errs...)
}

// left forgets a queue that was closed.
func (p *Port) left(q *queue) {
	p.mu.Lock()
	delete(p.open, q)
	p.mu.Unlock()
	p.queues.Remove(q.index)
}
