package user

import (
	"fmt"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/vhostd/vhostd/internal/testmain"
)

// TestNAT05_LateAnswer: an answer that comes after the flow has ended does not reach the guest, does no harm, and the next question from
// the same port is answered.
func TestNAT05_LateAnswer(t *testing.T) {
	p := newPort(t, Options{})
	g := newGuest(t, p)
	for _, host := range []string{live4, live6} {
		server, err := net.ListenPacket("udp", net.JoinHostPort(host, "0"))
		if err != nil {
			t.Fatal(err)
		}
		defer server.Close()
		c := g.dialUDP(server.LocalAddr().String())
		b := make([]byte, 20)
		question := func(text string) net.Addr {
			t.Helper()
			if _, err := fmt.Fprint(c, text); err != nil {
				t.Fatal(err)
			}
			_ = server.SetReadDeadline(time.Now().Add(10 * time.Second))
			n, from, err := server.ReadFrom(b)
			if err != nil || string(b[:n]) != text {
				t.Fatalf("%s: the server got %q, %v", host, b[:n], err)
			}
			return from
		}
		first := question("first")
		p.flows.ahead.Add(int64(longLife/time.Second) * 2)
		noFlows(t, p)
		if _, err := server.WriteTo([]byte("late"), first); err != nil {
			t.Fatal(err)
		}
		if _, err := server.WriteTo([]byte("in time"), question("second")); err != nil {
			t.Fatal(err)
		}
		_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
		if n, err := c.Read(b); err != nil || string(b[:n]) != "in time" {
			t.Errorf("%s: the guest got %q, %v", host, b[:n], err)
		}
	}
}

// TestLongNAT06_OneWay: flows in which only the guest sends, or only the host, live for a minute longer than any silence may last, with
// empty datagrams among the others.
func TestLongNAT06_OneWay(t *testing.T) {
	testmain.Long(t)
	t.Parallel()
	const pause = time.Second
	p := newPort(t, Options{})
	g := newGuest(t, p)
	var all sync.WaitGroup
	for _, host := range []string{live4, live6} {
		for _, up := range []bool{true, false} {
			server, err := net.ListenPacket("udp", net.JoinHostPort(host, "0"))
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			c := g.dialUDP(server.LocalAddr().String())
			all.Go(func() {
				if err := oneWay(c, server, up, int((longLife+time.Minute)/pause), pause); err != nil {
					t.Errorf("%s, from the guest %v: %v", host, up, err)
				}
			})
		}
	}
	all.Wait()
	t.Logf("counters: %+v", p.Flows(FlowQuery{Proto: "udp"}).Protocols)
	p.flows.ahead.Add(int64(longLife/time.Second) * 2)
	noFlows(t, p)
}

// oneWay makes a flow by one datagram of the guest and sends n more in one direction, each third of them empty. All must arrive, from
// the same address.
func oneWay(c net.Conn, server net.PacketConn, up bool, n int, pause time.Duration) error {
	b := make([]byte, 20)
	if _, err := c.Write([]byte("hello")); err != nil {
		return err
	}
	_ = server.SetReadDeadline(time.Now().Add(time.Minute))
	_, from, err := server.ReadFrom(b)
	if err != nil {
		return err
	}
	for i := range n {
		time.Sleep(pause)
		sent := "datagram"
		if i%3 == 0 {
			sent = ""
		}
		got := 0
		if up {
			if _, err := c.Write([]byte(sent)); err != nil {
				return err
			}
			_ = server.SetReadDeadline(time.Now().Add(time.Minute))
			var again net.Addr
			if got, again, err = server.ReadFrom(b); err == nil && again.String() != from.String() {
				return fmt.Errorf("datagram %d comes from %v, the first came from %v", i, again, from)
			}
		} else {
			if _, err := server.WriteTo([]byte(sent), from); err != nil {
				return err
			}
			_ = c.SetReadDeadline(time.Now().Add(time.Minute))
			got, err = c.Read(b)
		}
		if err != nil || string(b[:got]) != sent {
			return fmt.Errorf("datagram %d of %d: %q for %q, %w", i, n, b[:got], sent, err)
		}
	}
	return nil
}
