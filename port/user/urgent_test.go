package user

import (
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestUrgentBytes: what a peer sends as urgent (RFC 6093) is a byte like any other, at its place, and does not hold up what follows. Asked
// how much it holds, a socket counts to the urgent byte only, and says 0 there.
func TestUrgentBytes(t *testing.T) {
	p := newPort(t, Options{})
	g := newGuest(t, p)
	said := make(chan struct{}, 6)
	at := listenTCP(t, live4+":0", func(c *net.TCPConn) {
		raw, err := c.SyscallConn()
		if err != nil {
			t.Error(err)
			return
		}
		send := func(text string, flags int) {
			var failed error
			if err := raw.Write(func(fd uintptr) bool {
				_, failed = unix.SendmsgN(int(fd), []byte(text), nil, nil, flags)
				return failed != unix.EAGAIN
			}); err != nil || failed != nil {
				t.Errorf("send %q: %v, %v", text, err, failed)
			}
		}
		for range 3 {
			send("abc", unix.MSG_OOB)
			<-said // the guest has all that came before the last byte, and maybe that too
			send("defg", 0)
			<-said
		}
		_, _ = io.Copy(io.Discard, c)
	})
	c := g.mustDial(at)
	defer c.Close()
	defer close(said)
	_ = c.SetReadDeadline(time.Now().Add(stall))
	for range 3 {
		for _, want := range []string{"ab", "cdefg"} {
			got := make([]byte, len(want))
			if n, err := io.ReadFull(c, got); err != nil || string(got) != want {
				t.Fatalf("received %q, %v, want %q", got[:n], err, want)
			}
			said <- struct{}{}
		}
	}
}
