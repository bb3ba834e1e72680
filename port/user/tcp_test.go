package user

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/port/porttest"
)

// echoTCP hides the connection from io.Copy, which would keep pipes for splice(2).
func echoTCP(c *net.TCPConn) { _, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c}) }

func TestTCPEcho(t *testing.T) {
	g := newGuest(t, newPort(t, Options{}))
	for _, host := range []string{live4, live6} {
		at := listenTCP(t, net.JoinHostPort(host, "0"), echoTCP)
		c := g.mustDial(at)
		for _, size := range []int{1, 1000, 100_000, 5_000_000} {
			sent := make([]byte, size)
			for i := range sent {
				sent[i] = byte(rand.Uint32())
			}
			go c.Write(sent)
			got := make([]byte, size)
			if _, err := io.ReadFull(c, got); err != nil {
				t.Fatalf("%s, %d bytes: %v", host, size, err)
			}
			if sha256.Sum256(got) != sha256.Sum256(sent) {
				t.Fatalf("%s, %d bytes: came back changed", host, size)
			}
		}
		c.Close()
	}
}

// TestNAT15_ConnectErrors: the guest learns what became of its connect, and no handshake is finished before the host's.
func TestNAT15_ConnectErrors(t *testing.T) {
	g := newGuest(t, newPort(t, Options{}))
	for _, tc := range []struct{ to, want string }{
		{live4 + ":1", "refused"},
		{"[" + live6 + "]:1", "refused"},
		{unreached4 + ":80", "no route"},
		{"10.0.2.99:80", "no route"}, // nobody answers ARP
		{silent4 + ":80", "timeout"},
		{"[" + silent6 + "]:80", "timeout"},
	} {
		t.Run(tc.to, func(t *testing.T) {
			start := time.Now()
			c, err := g.dial(tc.to)
			if err == nil {
				c.Close()
				t.Fatal("connected")
			}
			if tc.want == "timeout" {
				if took := time.Since(start); took < 5*time.Second {
					t.Errorf("failed after %v with %v, want silence", took, err)
				}
				return
			}
			if !strings.Contains(err.Error(), tc.want) && !(tc.want == "no route" && strings.Contains(err.Error(), "unreachable")) {
				t.Errorf("error %v, want one with %q", err, tc.want)
			}
			if took := time.Since(start); took > 4*time.Second {
				t.Errorf("took %v", took)
			}
		})
	}
}

// TestUnreachableV6: address unreachable, which the guest's stack in these tests does not understand.
func TestUnreachableV6(t *testing.T) {
	g := newGuest(t, newPort(t, Options{}))
	told := make(chan struct{})
	var once sync.Once
	see := func(f []byte) {
		if len(f) > 54 && f[12] == 0x86 && f[20] == protoICMPv6 && f[54] == 1 && f[55] == 3 {
			once.Do(func() { close(told) })
		}
	}
	g.card.tap.Store(&see)
	go func() {
		if c, err := g.dial("[" + unreached6 + "]:80"); err == nil {
			c.Close()
		}
	}()
	select {
	case <-told:
	case <-time.After(5 * time.Second):
		t.Error("the guest was not told")
	}
}

// TestNAT03_HalfClose: each side may end its direction and still receive.
func TestNAT03_HalfClose(t *testing.T) {
	const up, down = 1 << 20, 10 << 20
	p := newPort(t, Options{})
	g := newGuest(t, p)
	at := listenTCP(t, live4+":0", func(c *net.TCPConn) {
		n, err := io.Copy(io.Discard, c) // to the guest's FIN
		if n != up || err != nil {
			t.Errorf("host received %d bytes, %v", n, err)
		}
		time.Sleep(sized(200*time.Millisecond, 2*time.Second))
		_, _ = c.Write(make([]byte, down))
	})
	c := g.mustDial(at)
	if _, err := c.Write(make([]byte, up)); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, c); n != down || err != nil {
		t.Errorf("guest received %d bytes, %v", n, err)
	}
	c.Close()

	at = listenTCP(t, live4+":0", func(c *net.TCPConn) {
		_, _ = c.Write(make([]byte, down))
		_ = c.CloseWrite()
		if n, err := io.Copy(io.Discard, c); n != up || err != nil {
			t.Errorf("host received %d bytes, %v", n, err)
		}
	})
	c = g.mustDial(at)
	if n, err := io.Copy(io.Discard, c); n != down || err != nil {
		t.Errorf("guest received %d bytes, %v", n, err)
	}
	if _, err := c.Write(make([]byte, up)); err != nil {
		t.Fatal(err)
	}
	c.Close()
	noFlows(t, p)
}

// TestNAT03_ManyHalfClosed: connections that only the guest ends, and a reset in the half-closed state, which passes as one.
func TestNAT03_ManyHalfClosed(t *testing.T) {
	p := newPort(t, Options{})
	g := newGuest(t, p)
	at := listenTCP(t, live4+":0", echoTCP)
	for range 300 {
		c := g.mustDial(at)
		if _, err := c.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		_ = c.CloseWrite()
		_ = c.SetReadDeadline(time.Now().Add(stall))
		if b, err := io.ReadAll(c); err != nil || string(b) != "hello" {
			t.Fatalf("%q, %v", b, err)
		}
	}
	noFlows(t, p)
	at = listenTCP(t, live4+":0", func(c *net.TCPConn) {
		_, _ = io.Copy(io.Discard, c)
		_ = c.SetLinger(0)
	})
	c := g.mustDial(at)
	_ = c.CloseWrite()
	_ = c.SetReadDeadline(time.Now().Add(stall))
	if _, err := c.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "reset") {
		t.Errorf("guest read: %v, want a reset", err)
	}
	noFlows(t, p)
}

// noFlows waits until nothing is left of the flows.
func noFlows(t *testing.T, p *Port) {
	t.Helper()
	if !porttest.Eventually(func() bool { return resting(p) }) {
		t.Errorf("left: %d flows, %d bytes of buffers, %d descriptors; %v", p.FlowCount(), p.tcp.granted.Load(), p.flows.fds.held.Load(),
			p.Flows(FlowQuery{}))
	}
}

// resting says whether nothing of any flow is left.
func resting(p *Port) bool {
	return p.FlowCount() == 0 && p.tcp.granted.Load() == 0 && p.flows.fds.held.Load() == 0
}

// TestResets pass in both directions.
func TestResets(t *testing.T) {
	p := newPort(t, Options{})
	g := newGuest(t, p)
	hostSaw := make(chan error, 1)
	at := listenTCP(t, live4+":0", func(c *net.TCPConn) {
		_, err := io.ReadFull(c, make([]byte, 100))
		hostSaw <- err
	})
	g.mustDial(at)
	g.stack.Close() // aborts all of the guest's connections
	if err := <-hostSaw; !errors.Is(err, unix.ECONNRESET) {
		t.Errorf("host read: %v, want a reset", err)
	}
	noFlows(t, p)

	p = newPort(t, Options{})
	g = newGuest(t, p)
	at = listenTCP(t, live4+":0", func(c *net.TCPConn) {
		_, _ = io.ReadFull(c, make([]byte, 1)) // a reset before the guest's handshake is over refuses the connection
		_ = c.SetLinger(0)
	})
	c := g.mustDial(at)
	if _, err := c.Write(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); err == nil || !strings.Contains(err.Error(), "reset") {
		t.Errorf("guest read: %v, want a reset", err)
	}
	noFlows(t, p)
}

// TestConnectsAtOnce: a thousand connections are up within a second or so.
func TestConnectsAtOnce(t *testing.T) {
	p := newPort(t, Options{})
	g := newGuest(t, p)
	at := listenTCP(t, live4+":0", echoTCP)
	g.mustDial(at).Close() // a stack keeps few packets for a router that it still looks for
	var all sync.WaitGroup
	var failed sync.Map
	start := time.Now()
	for i := range 1000 {
		all.Go(func() {
			c, err := g.dialWithin(at, time.Minute) // with the race detector on a busy machine
			if err == nil {
				defer c.Close()
				b := []byte(fmt.Sprint(i, " "))
				_, _ = c.Write(b)
				got := make([]byte, len(b))
				if _, err = io.ReadFull(c, got); err == nil && !bytes.Equal(got, b) {
					err = fmt.Errorf("received %q", got)
				}
			}
			if err != nil {
				failed.Store(i, err)
			}
		})
	}
	all.Wait()
	t.Logf("1000 connections and exchanges in %v", time.Since(start))
	failed.Range(func(i, err any) bool {
		t.Errorf("connection %v: %v", i, err)
		return false
	})
	// Ends that a guest without time has lost are sent again after seconds, which double.
	for end := time.Now().Add(2 * time.Minute); !resting(p) && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	noFlows(t, p)
}

// TestNAT17_Loopback: the host's loopback is closed, and with the option only the gateway's name opens it.
func TestNAT17_Loopback(t *testing.T) {
	at4 := listenTCP(t, "127.0.0.1:0", echoTCP)
	_, port4, _ := net.SplitHostPort(at4)
	at6 := listenTCP(t, "[::1]:0", echoTCP)
	_, port6, _ := net.SplitHostPort(at6)
	p := newPort(t, Options{})
	g := newGuest(t, p)
	for _, to := range []string{p.opts.Gateway.String() + ":" + port4, "[" + p.opts.Gateway6.String() + "]:" + port6} {
		if c, err := g.dial(to); err == nil || !strings.Contains(err.Error(), "refused") {
			t.Errorf("%s: %v %v, want a refusal", to, c, err)
		}
	}
	p = newPort(t, Options{HostLoopback: true})
	g = newGuest(t, p)
	for _, to := range []string{p.opts.Gateway.String() + ":" + port4, "[" + p.opts.Gateway6.String() + "]:" + port6} {
		c := g.mustDial(to)
		if _, err := c.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 5)
		if _, err := io.ReadFull(c, b); err != nil || string(b) != "hello" {
			t.Errorf("%s: %q, %v", to, b, err)
		}
	}
}
