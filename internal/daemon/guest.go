package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/internal/network"
	"github.com/vhostd/vhostd/internal/ringstate"
	"github.com/vhostd/vhostd/internal/unixsock"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtionet"
)

// teardownWait is how long a new front-end waits for the end of the session of one that is gone.
const teardownWait = time.Second

// errStopped is the cause with which sessions end when the guest is removed.
var errStopped = errors.New("the guest is being removed")

// guest is one guest's life: start once, stop once, in between sessions one after the other.
type guest struct {
	daemon *Daemon
	spec   config.GuestSpec // as it was added; what changes since is below
	from   Source
	log    *slog.Logger

	ready chan struct{} // closed when start has returned
	ctx   context.Context
	end   context.CancelCauseFunc
	loops sync.WaitGroup // accept or dial loop, sessions
	halt  func() error

	rings   *ringstate.Store // nil if there is none
	removed atomic.Bool      // the guest, not the daemon, is what ends

	changing sync.Mutex      // held while the guest follows another description
	tried    network.Network // guarded by changing: an attempt to follow that failed half-way; empty for none

	mu       sync.Mutex // guards what follows
	network  network.Network
	copy     virtionet.CopyPolicy // that the description asks for; the device's may have been changed since
	txAlloc  virtionet.TxAlloc
	port     port.Port
	device   *virtionet.Device
	listener *unixsock.Listener
	current  *connection
}

// connection is a session and what the guest needs to judge and end it.
type connection struct {
	conn    *net.UnixConn
	session *vhostuser.Session
	end     context.CancelCauseFunc
	done    chan struct{}
}

func newGuest(d *Daemon, spec config.GuestSpec, from Source) *guest {
	g := &guest{
		daemon: d, spec: spec, from: from, log: d.log.With("guest", spec.Name), ready: make(chan struct{}), network: spec.Network,
		copy: spec.Copy, txAlloc: spec.TxAlloc,
	}
	g.ctx, g.end = context.WithCancelCause(context.Background())
	g.halt = sync.OnceValue(g.teardown)
	return g
}

// start makes port, device and socket, in this order: the socket last, so that a front-end never
// meets a guest that is not complete.
func (g *guest) start() error {
	batch := fairBatch(g.daemon.opts.Arena.Bytes(), g.spec.QueuePairs)
	if batch > 0 {
		g.log.Warn("the guest receives fewer frames at a time: its queue pairs could keep more than a third of the arena from others",
			"frames", batch, "queue-pairs", g.spec.QueuePairs, "arena", g.daemon.opts.Arena.Bytes())
	}
	p, err := g.spec.Network.Open(network.Options{Name: g.spec.Name, QueuePairs: g.spec.QueuePairs, Switches: g.daemon.switches,
		Echoes: &g.daemon.echoes, LeaseFile: g.leaseFile(), Batch: batch, Logger: g.log})
	if err != nil {
		return err
	}
	g.mu.Lock()
	g.port = p
	g.mu.Unlock()
	g.rings = g.openRings()
	device, err := virtionet.New(virtionet.Options{
		Name: g.spec.Name, Port: p, Arena: g.daemon.opts.Arena, Workers: g.daemon.opts.Workers,
		QueuePairs: g.spec.QueuePairs, TxLag: g.spec.TxLag, TxAlloc: g.spec.TxAlloc, Copy: g.spec.Copy, Budget: g.daemon.budget,
		MAC: g.spec.MAC, MTU: g.spec.MTU, OnFatal: g.fatal,
		Logger: g.daemon.log, // the device adds its name to it
	})
	if err != nil {
		return err
	}
	g.mu.Lock()
	g.device = device
	g.mu.Unlock()
	return g.connectivity()
}

func (g *guest) connectivity() error {
	switch {
	case g.from.Conn != nil:
		g.loops.Go(func() { g.inherited() })
		return nil
	case g.spec.Client:
		g.loops.Go(g.dialLoop)
		return nil
	}
	l := g.from.Listener
	if l == nil {
		var err error
		if l, err = unixsock.Listen(g.spec.Socket, g.spec.Listen); err != nil {
			return err
		}
	}
	g.mu.Lock()
	g.listener = l
	g.mu.Unlock()
	g.loops.Go(func() { g.acceptLoop(l) })
	return nil
}

// unlisten closes the listening socket and removes its file, if it is ours.
func (g *guest) unlisten() {
	g.mu.Lock()
	l := g.listener
	g.mu.Unlock()
	if l != nil {
		if err := l.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			g.log.Warn("closing the socket", "err", err)
		}
	}
}

// stop ends everything and returns when it is gone. It may be called by several goroutines; all
// of them wait.
func (g *guest) stop() error { return g.halt() }

func (g *guest) teardown() error {
	g.unlisten()
	g.end(errStopped)
	g.loops.Wait()
	g.from.discard()
	g.mu.Lock()
	device, p := g.device, g.port
	g.device, g.port = nil, nil
	g.mu.Unlock()
	var errs []error
	if device != nil {
		errs = append(errs, device.Close())
	}
	if p != nil {
		errs = append(errs, p.Close())
	}
	if g.removed.Load() {
		g.forgetLeases()
	}
	errs = append(errs, g.closeRings(g.rings, g.removed.Load()))
	return errors.Join(errs...)
}

// fatal ends the present session because the device cannot go on, such as when the guest's memory
// vanished. The guest itself stays and serves the next front-end.
func (g *guest) fatal(err error) {
	g.mu.Lock()
	c := g.current
	g.mu.Unlock()
	if c != nil {
		c.end(err)
	}
}

// admit makes conn the present connection unless another front-end is alive. A front-end that has
// closed its side is waited for: a restarted one may be faster than the teardown.
func (g *guest) admit(conn *net.UnixConn) (*connection, context.Context, error) {
	g.mu.Lock()
	old := g.current
	g.mu.Unlock()
	if old != nil {
		if !hungUp(old.conn) {
			return nil, nil, errors.New("another front-end is connected, one at a time is served")
		}
		select {
		case <-old.done:
		case <-g.ctx.Done():
			return nil, nil, errStopped
		case <-time.After(teardownWait):
			return nil, nil, fmt.Errorf("the session of the front-end before is not torn down after %v", teardownWait)
		}
	}
	ctx, end := context.WithCancelCause(g.ctx)
	c := &connection{conn: conn, end: end, done: make(chan struct{})}
	opts := vhostuser.Options{Logger: g.log, Protocol: g.spec.Protocol, Postcopy: g.daemon.opts.Postcopy}
	if g.rings != nil {
		opts.Rings = g.rings
	}
	c.session = vhostuser.NewSession(conn, g.device, opts)
	g.mu.Lock()
	g.current = c
	g.mu.Unlock()
	return c, ctx, nil
}

// serve runs an admitted session from start to end.
func (g *guest) serve(ctx context.Context, c *connection) error {
	err := c.session.Serve(ctx)
	if cause := context.Cause(ctx); cause != nil {
		err = cause
	}
	g.mu.Lock()
	g.current = nil
	g.mu.Unlock()
	c.end(nil)
	close(c.done)
	switch {
	case err == nil || errors.Is(err, errStopped):
		g.log.Info("front-end disconnected", "peer", c.session.State().Peer)
	default:
		g.log.Warn("front-end disconnected", "reason", err)
	}
	return err
}

// inherited serves the one connection that was handed to the process.
func (g *guest) inherited() {
	c, ctx, err := g.admit(g.from.Conn)
	if err == nil {
		err = g.serve(ctx, c)
	}
	if g.from.Ended != nil && !errors.Is(err, errStopped) {
		g.from.Ended(err)
	}
}

// portStatus returns the condition of the network, ok=false while there is none.
func (g *guest) portStatus() (s port.Status, ok bool) {
	g.mu.Lock()
	p := g.port
	g.mu.Unlock()
	if p == nil {
		return port.Status{}, false
	}
	return p.Status(), true
}

// hungUp says whether the peer has closed its side, also while bytes of it are still unread.
func hungUp(conn *net.UnixConn) bool {
	raw, err := conn.SyscallConn()
	if err != nil {
		return true
	}
	gone := false
	if err := raw.Control(func(fd uintptr) {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(fds, 0)
		gone = err == nil && n > 0 && fds[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
	}); err != nil {
		return true
	}
	return gone
}
