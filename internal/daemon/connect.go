package daemon

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/unixsock"
)

// Bounds of the pause between two attempts to dial. A front-end that appears is connected within
// the longest pause.
const (
	minPause = 20 * time.Millisecond
	maxPause = time.Second
	// settled is the length of a session after which the next dial starts from minPause again: a
	// peer that accepts and closes at once must not be dialed in a busy loop.
	settled = time.Second
	// acceptPause follows an accept that failed, such as for lack of file descriptors.
	acceptPause = 100 * time.Millisecond
)

// acceptLoop serves front-ends one after the other until the listener is closed.
func (g *guest) acceptLoop(l *unixsock.Listener) {
	for {
		conn, err := l.AcceptUnix()
		if err != nil {
			if g.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			g.log.Error("accepting a front-end failed", "err", err)
			g.sleep(acceptPause)
			continue
		}
		c, ctx, err := g.admit(conn)
		if err != nil {
			g.log.Warn("front-end refused", "reason", err)
			conn.Close()
			continue
		}
		g.log.Info("front-end connected", "peer", c.session.State().Peer)
		g.loops.Go(func() { _ = g.serve(ctx, c) })
	}
}

// dialLoop keeps a client connected until the guest is removed.
func (g *guest) dialLoop() {
	pause := minPause
	waiting := false
	for g.ctx.Err() == nil {
		conn, err := dial(g.ctx, g.spec.Socket)
		if err != nil {
			if !waiting && g.ctx.Err() == nil {
				waiting = true
				g.log.Info("waiting for the front-end's socket", "socket", g.spec.Socket, "reason", g.daemon.explainDial(err))
			}
			g.sleep(pause)
			pause = min(2*pause, maxPause)
			continue
		}
		waiting = false
		c, ctx, err := g.admit(conn)
		if err != nil {
			conn.Close()
			continue
		}
		g.log.Info("connected to the front-end", "socket", g.spec.Socket)
		since := time.Now()
		_ = g.serve(ctx, c)
		if time.Since(since) >= settled {
			pause = minPause
		} else {
			g.sleep(pause)
			pause = min(2*pause, maxPause)
		}
	}
}

// explainDial adds what the sandbox has to do with an error that root does not expect.
func (d *Daemon) explainDial(err error) error {
	s := d.confined.Load()
	if s == nil || !errors.Is(err, unix.EACCES) || os.Geteuid() != 0 || slices.Contains(s.State().Capabilities, "cap_dac_override") {
		return err
	}
	return fmt.Errorf("%w (the sandbox keeps CAP_DAC_OVERRIDE, for sockets of other users, if a guest of the start is a client)", err)
}

func dial(ctx context.Context, path string) (*net.UnixConn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	return conn.(*net.UnixConn), nil
}

// sleep waits for about d, spread so that many guests do not dial in step, or until the guest is
// removed.
func (g *guest) sleep(d time.Duration) {
	timer := time.NewTimer(d - rand.N(d/4))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-g.ctx.Done():
	}
}
