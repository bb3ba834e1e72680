package vhostuser_test

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
)

func header(req vhostuser.Request, flags, size uint32) []byte {
	return vhostuser.Header{Request: req, Flags: flags, Size: size}.Append(nil)
}

func payload64(v uint64) []byte { return binary.LittleEndian.AppendUint64(nil, v) }

// checkDevice fails the test if the device saw its contract broken.
func (b *bench) checkDevice() {
	b.t.Helper()
	if f := b.dev.faults.Load(); f != nil {
		b.t.Fatalf("device contract: %s", *f)
	}
}

func TestHostileC3toC6_BrokenHeaderCloses(t *testing.T) {
	for _, tt := range []struct {
		name   string
		header []byte
	}{
		{"version 0", header(vhostuser.ReqGetFeatures, 0, 0)},
		{"version 2", header(vhostuser.ReqGetFeatures, 2, 0)},
		{"version 3", header(vhostuser.ReqGetFeatures, 3, 0)},
		{"reply bit", header(vhostuser.ReqGetFeatures, 5, 0)},
		{"unknown flag", header(vhostuser.ReqGetFeatures, 0x11, 0)},
		{"size 0xffffffff", header(vhostuser.ReqSetFeatures, 1, 0xffffffff)},
		{"size one too large", header(vhostuser.ReqSetFeatures, 1, vhostuser.MaxPayload+1)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := newBench(t, newDevice(2))
			b.must(b.SendRaw(tt.header, eventFD(t)))
			b.must(b.AwaitClose(time.Second))
			if err := b.wait(); err == nil || !strings.Contains(err.Error(), "header of") {
				t.Errorf("Serve returned %v", err)
			}
			b.checkDevice()
		})
	}
}

func TestHostileC1C2_RCN09_CutMessageTimesOut(t *testing.T) {
	whole := append(header(vhostuser.ReqSetVringNum, 1, 8), make([]byte, 8)...)
	for _, n := range []int{1, 11, 12, 19} {
		b := newBench(t, newDevice(2), func(o *vhostuser.Options) { o.MessageTimeout = 50 * time.Millisecond })
		b.must(b.SendRaw(whole[:n], eventFD(t)))
		b.must(b.AwaitClose(time.Second))
		if err := b.wait(); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%d bytes, then silence: Serve returned %v", n, err)
		}
	}
}

func TestRCN09_CloseInsideMessageIsClean(t *testing.T) {
	whole := append(header(vhostuser.ReqSetVringAddr, 1, 40), make([]byte, 40)...)
	before := openFDs()
	for n := range len(whole) {
		b := newBench(t, newDevice(2))
		if n > 0 {
			b.must(b.SendRaw(whole[:n]))
		}
		b.Conn.Close()
		if err := b.wait(); err != nil {
			t.Errorf("closed after %d bytes: Serve returned %v", n, err)
		}
		if strings.Contains(b.logs.String(), "level=WARN") || strings.Contains(b.logs.String(), "level=ERROR") {
			t.Errorf("closed after %d bytes: logged %s", n, b.logs)
		}
	}
	if now := openFDs(); now > before {
		t.Errorf("%d descriptors open, %d before", now, before)
	}
}

func TestRCN09_FD07_ByteByByte(t *testing.T) {
	b := newBench(t, newDevice(2))
	kick := eventFD(t)
	msg := append(header(vhostuser.ReqSetVringKick, 1, 8), payload64(0)...)
	for i := range msg {
		if i == 0 {
			b.must(b.SendRaw(msg[:1], kick))
		} else {
			b.must(b.SendRaw(msg[i : i+1]))
		}
	}
	b.must(b.Sync())
	if rings := b.session.State().Rings; len(rings) != 1 || !rings[0].HasKick {
		t.Errorf("rings %+v, want ring 0 with a kick descriptor", rings)
	}
}

// Each descriptor belongs to the message whose bytes carried it, however the bytes
// were cut or joined.
func TestFD07_C10_Pipelined(t *testing.T) {
	b := newBench(t, newDevice(2))
	b.must(b.SendRaw(append(header(vhostuser.ReqSetVringNum, 1, 8), vhostuser.VringState{Index: 0, Num: 64}.Append(nil)...)))
	kick := append(header(vhostuser.ReqSetVringKick, 1, 8), payload64(0)...)
	b.must(b.SendRaw(kick, eventFD(t)))
	call := append(header(vhostuser.ReqSetVringCall, 1, 8), payload64(1)...)
	b.must(b.SendRaw(call[:12]))
	b.must(b.SendRaw(call[12:], eventFD(t))) // on the body
	var many []byte
	for i := range 50 {
		many = append(many, header(vhostuser.ReqSetVringEnable, 1, 8)...)
		many = append(many, vhostuser.VringState{Index: 1, Num: uint32(i & 1)}.Append(nil)...)
	}
	b.must(b.SendRaw(many))
	b.must(b.Sync())
	rings := b.session.State().Rings
	if len(rings) != 2 {
		t.Fatalf("rings %+v", rings)
	}
	if r := rings[0]; r.Size != 64 || !r.HasKick || r.HasCall {
		t.Errorf("ring 0 is %+v", r)
	}
	if r := rings[1]; r.HasKick || !r.HasCall || !r.Enabled {
		t.Errorf("ring 1 is %+v", r)
	}
	if b.logs.lines() != 0 {
		t.Errorf("logged: %s", b.logs)
	}
}

func TestHostileC9_ManyDescriptors(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	fd := eventFD(t)
	before := openFDs()
	fds := make([]int, 253)
	for i := range fds {
		fds[i] = fd
	}
	for range 20 {
		b.must(b.Send(vhostuser.ReqSetOwner, 1, nil, fds...))
	}
	b.must(b.Sync())
	if now := openFDs(); now > before {
		t.Errorf("%d descriptors open, %d before", now, before)
	}
}

// TestHostileC86_NoDescriptorLeft: what the kernel could not install is lost, so
// the connection must end with a text that names the remedy.
func TestHostileC86_NoDescriptorLeft(t *testing.T) {
	b := newBench(t, newDevice(2))
	b.must(b.Sync())
	kick := eventFD(t)
	var old unix.Rlimit
	b.must(unix.Getrlimit(unix.RLIMIT_NOFILE, &old))
	limited := old
	limited.Cur = 3
	b.must(unix.Setrlimit(unix.RLIMIT_NOFILE, &limited))
	err := b.SetVringKick(0, kick)
	got := b.AwaitClose(2 * time.Second)
	b.must(unix.Setrlimit(unix.RLIMIT_NOFILE, &old))
	b.must(err)
	b.must(got)
	if err := b.wait(); err == nil || !strings.Contains(err.Error(), "LimitNOFILE") {
		t.Errorf("Serve returned %v", err)
	}
}

func TestHostileC13_PeerClosesDuringReply(t *testing.T) {
	for range 50 {
		b := newBench(t, newDevice(2))
		for range 8 {
			b.must(b.Send(vhostuser.ReqGetFeatures, 1, nil))
		}
		b.Conn.Close()
		if err := b.wait(); err != nil {
			t.Fatalf("Serve returned %v", err)
		}
	}
}

func TestHostileC14_PeerNeverReads(t *testing.T) {
	b := newBench(t, newDevice(2), func(o *vhostuser.Options) { o.WriteTimeout = 50 * time.Millisecond })
	b.Timeout = 2 * time.Second
	for range 100_000 {
		if b.Send(vhostuser.ReqGetFeatures, 1, nil) != nil {
			break
		}
	}
	if err := b.wait(); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Serve returned %v", err)
	}
}

func TestContextEndsSession(t *testing.T) {
	b := newBench(t, newDevice(2))
	b.must(b.Sync())
	b.cancel()
	if err := b.wait(); !errors.Is(err, context.Canceled) {
		t.Errorf("Serve returned %v", err)
	}
	if p := b.session.State().Phase; p != "closed" {
		t.Errorf("phase %q", p)
	}
}

// TestRingsStopBeforeTheConnectionEnds: QEMU completes the guest's chains itself as soon as it sees the connection closed, so that a ring
// that still ran would send what the guest has written anew (SHUT-01).
func TestRingsStopBeforeTheConnectionEnds(t *testing.T) {
	dev := newDevice(2)
	b := newBench(t, dev).negotiate()
	m := newMemory(t, 1<<20)
	b.shareMemory(m)
	b.startRing(m, 1, 0)
	b.must(b.SetVringEnable(1, true))
	b.must(b.Sync())
	var seen error
	dev.peek(func(d *fakeDevice) {
		d.stopping = func() { _, seen = b.Recv(200 * time.Millisecond) }
	})
	b.cancel()
	if err := b.wait(); !errors.Is(err, context.Canceled) {
		t.Errorf("Serve returned %v", err)
	}
	if !errors.Is(seen, os.ErrDeadlineExceeded) {
		t.Errorf("while a ring ran the front-end saw: %v", seen)
	}
	b.must(b.AwaitClose(time.Second))
}
