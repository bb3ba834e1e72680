package frontend_test

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
)

// scripted is a connection whose other end the test plays by hand.
func scripted(t *testing.T) (*frontend.Conn, *net.UnixConn) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: t.TempDir() + "/s", Net: "unix"})
	must(t, err)
	defer l.Close()
	c, err := frontend.Dial(l.Addr().String())
	must(t, err)
	back, err := l.AcceptUnix()
	must(t, err)
	t.Cleanup(func() { c.Close(); back.Close() })
	return c, back
}

func reply(req vhostuser.Request, flags uint32, payload ...byte) []byte {
	return append(vhostuser.Header{Request: req, Flags: flags, Size: uint32(len(payload))}.Append(nil), payload...)
}

// TestRepliesAreJudged: the client is as strict as QEMU, or tests would miss what
// QEMU does not forgive.
func TestRepliesAreJudged(t *testing.T) {
	const get, set = vhostuser.ReqGetFeatures, vhostuser.ReqSetOwner
	u64 := []byte{1, 0, 0, 0, 0, 0, 0, 0}
	for name, tt := range map[string]struct {
		reply []byte
		want  string // "": accepted
	}{
		"good":              {reply(get, 5, u64...), ""},
		"need_reply echoed": {reply(get, 0xd, u64...), "flags 0xd"},
		"reply bit missing": {reply(get, 1, u64...), "flags 0x1"},
		"another request":   {reply(set, 5, u64...), "got SET_OWNER"},
		"four bytes":        {reply(get, 5, u64[:4]...), "4 bytes"},
		"cut":               {reply(get, 5, u64...)[:15], "EOF"},
		"absurd size":       {vhostuser.Header{Request: get, Flags: 5, Size: 1 << 20}.Append(nil), "announces"},
		"connection closed": {nil, "EOF"},
	} {
		t.Run(name, func(t *testing.T) {
			c, back := scripted(t)
			_, err := back.Write(tt.reply)
			must(t, err)
			must(t, back.CloseWrite())
			_, err = c.GetFeatures()
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

func TestAcknowledgement(t *testing.T) {
	c, back := scripted(t)
	_, err := back.Write(reply(vhostuser.ReqSetOwner, 5, 7, 0, 0, 0, 0, 0, 0, 0))
	must(t, err)
	err = c.DoAck(vhostuser.ReqSetOwner, nil)
	var refused *frontend.RefusedError
	if !errors.As(err, &refused) || refused.Value != 7 || !strings.Contains(err.Error(), "SET_OWNER") {
		t.Errorf("got %v", err)
	}
	if err := c.AwaitClose(10 * time.Millisecond); err == nil {
		t.Error("AwaitClose on an open connection")
	}
	must(t, back.Close())
	must(t, c.AwaitClose(time.Second))
}

func TestDescriptorsInReply(t *testing.T) {
	c, back := scripted(t)
	null, err := os.Open(os.DevNull)
	must(t, err)
	defer null.Close()
	_, _, err = back.WriteMsgUnix(reply(vhostuser.ReqGetInflightFD, 5, 1), unix.UnixRights(int(null.Fd())), nil)
	must(t, err)
	r, err := c.Recv(time.Second)
	must(t, err)
	if len(r.FDs) != 1 || len(r.Payload) != 1 {
		t.Fatalf("reply %+v", r)
	}
	must(t, unix.Close(r.FDs[0]))
	if _, ok := r.U64(); ok {
		t.Error("one byte taken for a number")
	}
	if _, err := c.Recv(10 * time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("silence: %v", err)
	}
}

// TestAwaitEnd: the wait ends with the context and leaves the connection usable, with the peer's end, and with unasked bytes.
func TestAwaitEnd(t *testing.T) {
	c, back := scripted(t)
	for range 3 {
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		must(t, c.AwaitEnd(ctx))
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	must(t, c.AwaitEnd(ctx))
	_, err := back.Write(reply(vhostuser.ReqGetFeatures, 5, 1, 0, 0, 0, 0, 0, 0, 0))
	must(t, err)
	if f, err := c.GetFeatures(); err != nil || f != 1 {
		t.Errorf("the connection is not usable: %v, %v", f, err)
	}
	_, err = back.Write([]byte{1})
	must(t, err)
	if err := c.AwaitEnd(t.Context()); err == nil || !strings.Contains(err.Error(), "nobody asked for") {
		t.Error(err)
	}
	must(t, back.Close())
	if err := c.AwaitEnd(t.Context()); !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
		t.Error(err)
	}
}
