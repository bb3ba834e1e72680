package user

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// stall is how long a transfer may stand still: a lost window update or probe stops it for ever.
const stall = time.Minute

// longestStall is how long any transfer of TestNAT19_LossAndPauses stood still.
var longestStall peak

type peak struct{ atomic.Int64 }

func (p *peak) raise(d time.Duration) {
	for old := p.Load(); int64(d) > old && !p.CompareAndSwap(old, int64(d)); old = p.Load() {
	}
}

// drain reads n bytes, resting each time that so many have come as fill every buffer on the way, and returns their digest.
func drain(r interface {
	io.Reader
	SetReadDeadline(time.Time) error
}, n int) (hash.Hash, error) {
	rest, every := sized(500*time.Millisecond, 10*time.Second), sized(6<<20, 20<<20)
	h, buf := sha256.New(), make([]byte, 64<<10)
	next := every
	for got := 0; got < n; {
		began := time.Now()
		_ = r.SetReadDeadline(began.Add(stall))
		k, err := r.Read(buf)
		longestStall.raise(time.Since(began))
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
	long, short, flows := sized(14<<20, 125<<20), sized(1<<20, 125<<20), sized(3, 4)
	p := newPort(t, Options{})
	g := newGuest(t, p)
	g.card.gso = false // more and smaller frames to lose
	data := pattern(long, 3)
	down := listenTCP(t, live4+":0", func(c *net.TCPConn) {
		var size [1]byte // in MiB
		if _, err := io.ReadFull(c, size[:]); err == nil {
			_, _ = c.Write(data[:int(size[0])<<20])
		}
	})
	digests := map[int][]byte{}
	for _, n := range []int{long, short} {
		digest := sha256.Sum256(data[:n])
		digests[n] = digest[:]
	}
	up := listenTCP(t, net.JoinHostPort(live6, "0"), func(c *net.TCPConn) {
		var size [1]byte
		_, err := io.ReadFull(c, size[:])
		n := int(size[0]) << 20
		if h, failed := drain(c, n); err != nil || failed != nil {
			t.Errorf("up: %v %v", err, failed)
		} else if !bytes.Equal(h.Sum(nil), digests[n]) {
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
				g.receive(down, n, digests[n])
			} else {
				g.send(up, data[:n])
			}
		})
	}
	all.Wait()
	g.card.lose.Store(0)
	t.Logf("no stream stood still for more than %v, pauses apart", time.Duration(longestStall.Load()))
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
	for _, b := range [][]byte{{byte(len(data) >> 20)}, data} {
		if _, err := c.Write(b); err != nil {
			g.t.Errorf("up: %v", err)
		}
	}
	_ = c.SetReadDeadline(time.Now().Add(5 * stall))
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		g.t.Errorf("up: the end was not acknowledged: %v", err)
	}
}
