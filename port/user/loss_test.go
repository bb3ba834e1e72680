package user

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// stall is how long a transfer may stand still: a lost window update or probe stops it for ever.
const stall = time.Minute

// drain reads n bytes, resting each time that so many have come as fill every buffer on the way, and returns their digest.
func drain(r interface {
	io.Reader
	SetReadDeadline(time.Time) error
}, n int) (hash.Hash, error) {
	const rest, every = 500 * time.Millisecond, 6 << 20
	h, buf := sha256.New(), make([]byte, 64<<10)
	next := every
	for got := 0; got < n; {
		_ = r.SetReadDeadline(time.Now().Add(stall))
		k, err := r.Read(buf)
		h.Write(buf[:k])
		if got += k; err != nil && got < n {
			return nil, fmt.Errorf("after %d of %d bytes: %w", got, n, err)
		}
		if got >= next {
			time.Sleep(rest)
			next += every
		}
	}
	return h, nil
}

// TestNAT19_LossAndPauses: transfers in both directions at once go on when frames are lost on either way and the receiver stops reading
// until the window is closed.
func TestNAT19_LossAndPauses(t *testing.T) {
	const long, short, flows = 14 << 20, 1 << 20, 3
	p := newPort(t, Options{})
	g := newGuest(t, p)
	g.card.gso = false // more and smaller frames to lose
	data := pattern(long, 3)
	down := listenTCP(t, live4+":0", func(c *net.TCPConn) {
		var size [1]byte
		if _, err := io.ReadFull(c, size[:]); err == nil {
			_, _ = c.Write(data[:int(size[0])<<20])
		}
	})
	want := func(n int) []byte { s := sha256.Sum256(data[:n]); return s[:] }
	up := listenTCP(t, net.JoinHostPort(live6, "0"), func(c *net.TCPConn) {
		var size [1]byte
		_, err := io.ReadFull(c, size[:])
		n := int(size[0]) << 20
		if h, failed := drain(c, n); err != nil || failed != nil {
			t.Errorf("up: %v %v", err, failed)
		} else if !bytes.Equal(h.Sum(nil), want(n)) {
			t.Errorf("up: other bytes arrived")
		}
		_, _ = c.Write(size[:])
	})
	g.mustDial(down).Close()
	g.card.lose.Store(100)
	var all sync.WaitGroup
	for i := range 2 * flows {
		n := short
		if i < 2 {
			n = long
		}
		all.Go(func() {
			if i%2 == 0 {
				g.receive(down, n, want(n))
			} else {
				g.send(up, data[:n])
			}
		})
	}
	all.Wait()
	g.card.lose.Store(0)
	noFlows(t, p)
}

func (g *guest) receive(at string, n int, want []byte) {
	c, err := g.dialWithin(at, stall)
	if err != nil {
		g.t.Error(err)
		return
	}
	defer c.Close()
	_, _ = c.Write([]byte{byte(n >> 20)})
	if h, err := drain(c, n); err != nil {
		g.t.Errorf("down: %v", err)
	} else if !bytes.Equal(h.Sum(nil), want) {
		g.t.Errorf("down: other bytes arrived")
	}
}

func (g *guest) send(at string, data []byte) {
	c, err := g.dialWithin(at, stall)
	if err != nil {
		g.t.Error(err)
		return
	}
	defer c.Close()
	if _, err := c.Write(append([]byte{byte(len(data) >> 20)}, data...)); err != nil {
		g.t.Errorf("up: %v", err)
	}
	_ = c.SetReadDeadline(time.Now().Add(5 * stall))
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		g.t.Errorf("up: the end was not acknowledged: %v", err)
	}
}
