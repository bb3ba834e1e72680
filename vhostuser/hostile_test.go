package vhostuser_test

import (
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
)

// answer is what the protocol asks for when a message cannot be served.
type answer uint8

const (
	ackIfAsked answer = iota // non-zero u64 with need_reply, else silence
	always                   // non-zero u64
	contents                 // a reply, or the end of the connection
)

var answers = map[vhostuser.Request]answer{
	vhostuser.ReqGetFeatures: contents, vhostuser.ReqGetVringBase: contents, vhostuser.ReqGetProtocolFeatures: contents,
	vhostuser.ReqGetQueueNum: contents, vhostuser.ReqGetConfig: contents, vhostuser.ReqCreateCryptoSession: contents,
	vhostuser.ReqPostcopyAdvise: contents, vhostuser.ReqGetInflightFD: contents, vhostuser.ReqGetMaxMemSlots: contents,
	vhostuser.ReqGetStatus: contents, vhostuser.ReqGetSharedObject: contents, vhostuser.ReqGetShmemConfig: contents,
	vhostuser.ReqGetVringBaseSkipDrain: contents,
	vhostuser.ReqIOTLBMsg:              always, vhostuser.ReqPostcopyEnd: always,
	vhostuser.ReqSetDeviceStateFD: always, vhostuser.ReqCheckDeviceState: always,
	vhostuser.ReqSetLogBase: always,
}

// TestMessageMatrix_C7_C8_C11_FD01 sends every id, known or not, with every
// payload size up to 41, with and without descriptors, with and without
// need_reply. Each gets exactly the answers the protocol asks for, or ends the
// connection where an answer is impossible.
func TestMessageMatrix_C7_C8_C11_A15_FD01(t *testing.T) {
	fd := eventFD(t)
	ids := []vhostuser.Request{0, 46, 47, 0x7fffffff, 0xffffffff}
	for id := vhostuser.Request(1); id <= 45; id++ {
		ids = append(ids, id)
	}
	fds := openFDs()
	for _, id := range ids {
		b := newBench(t, newDevice(2)).negotiate()
		for size := range 42 {
			for _, nfds := range []int{0, 1, 2, 32} {
				for _, need := range []bool{false, true} {
					if !b.try(id, make([]byte, size), nfds, fd, need) {
						b.Conn.Close()
						if err := b.wait(); err == nil {
							t.Errorf("%v, %d bytes: the connection ended without a reason", id, size)
						}
						b = newBench(t, b.dev).negotiate()
					}
				}
			}
		}
		b.checkDevice()
		if n := b.logs.lines(); n > 3 {
			t.Errorf("%v: %d log lines", id, n)
		}
		b.Conn.Close()
		b.must(b.wait())
	}
	if n := openFDs(); n > fds+1 {
		t.Errorf("%d descriptors open, %d before", n, fds)
	}
}

// try sends one message and a GET_STATUS behind it and checks the replies. It
// reports whether the connection lives.
func (b *bench) try(id vhostuser.Request, payload []byte, nfds, fd int, need bool) bool {
	b.t.Helper()
	flags := uint32(vhostuser.FlagVersion)
	if need {
		flags |= vhostuser.FlagNeedReply
	}
	fds := make([]int, nfds)
	for i := range fds {
		fds[i] = fd
	}
	b.must(b.Send(id, flags, payload, fds...))
	if err := b.Send(vhostuser.ReqGetStatus, vhostuser.FlagVersion, nil); !closed(err) {
		b.must(err)
	}
	kind := answers[id]
	if kind != ackIfAsked || need && id != vhostuser.ReqSetProtocolFeatures {
		r, err := b.Recv(0)
		if closed(err) && kind == contents {
			return false
		}
		b.must(err)
		if r.Request != id || r.Flags != 5 {
			b.t.Fatalf("%v, %d bytes, %d descriptors: reply %+v", id, len(payload), nfds, r)
		}
	}
	r, err := b.Recv(0)
	if id == vhostuser.ReqSetProtocolFeatures && err == nil && r.Request == id {
		r, err = b.Recv(0)
	}
	if id == vhostuser.ReqSetProtocolFeatures && closed(err) {
		return false // it acknowledged nothing, so GET_STATUS has no answer
	}
	b.must(err)
	if r.Request != vhostuser.ReqGetStatus {
		b.t.Fatalf("%v, %d bytes, %d descriptors: unasked reply %+v", id, len(payload), nfds, r)
	}
	return true
}

func closed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)
}

func TestFD03_RepeatedDescriptors(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	b.startRing(mem, 0, 0)
	b.must(b.Sync())
	fd := eventFD(t)
	fds, maps := openFDs(), mappings(t)
	for _, i := range []int{0, 1, 200} {
		for range 1000 {
			b.must(b.SetVringKick(i, fd))
			b.must(b.SetVringCall(i, fd))
			b.must(b.SetVringErr(i, fd))
			b.must(b.Send(vhostuser.ReqSetLogFD, 1, nil, fd))
			b.must(b.Send(vhostuser.ReqSetBackendReqFD, 1, nil, fd))
			b.must(b.Send(vhostuser.ReqSetInflightFD, 1, make([]byte, 24), fd))
			b.must(b.Send(vhostuser.ReqRemMemReg, 1, make([]byte, 40), fd))
		}
	}
	b.must(b.Sync())
	// Ring 0 gained an err descriptor, ring 1 all three, the log one.
	if n, m := openFDs(), mappings(t); n > fds+5 || m > maps {
		t.Errorf("%d descriptors and %d mappings, %d and %d before", n, m, fds, maps)
	}
	b.checkDevice()
}

// TestFD05_CloseOnExec looks at the flag of everything that a session received.
func TestFD05_CloseOnExec(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	b.startRing(mem, 0, 0)
	b.must(b.SetVringErr(0, eventFD(t)))
	b.must(b.Sync())
	b.dev.peek(func(d *fakeDevice) {
		c := d.running[0]
		for _, fd := range []int{c.KickFD, c.CallFD, c.ErrFD} {
			if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
				t.Errorf("descriptor %d: flags %#x, %v", fd, flags, err)
			}
		}
	})
}

// TestConnectDisconnect ends sessions at every stage of their life; everything
// must be back each time.
func TestConnectDisconnect_C85(t *testing.T) {
	dev := newDevice(2)
	mem := newMemory(t, 1<<20)
	round := func(stage int) {
		b := newBench(t, dev)
		if stage > 0 {
			b.negotiate()
		}
		if stage > 1 {
			b.shareMemory(mem)
		}
		if stage > 2 {
			kick, call := b.startRing(mem, 0, 0)
			b.must(b.SetVringErr(0, call))
			b.must(b.SetVringEnable(0, true))
			unix.Close(kick)
			unix.Close(call)
		}
		b.Conn.Close()
		b.must(b.wait())
		b.checkDevice()
	}
	for stage := range 4 {
		round(stage)
	}
	fds, maps := openFDs(), mappings(t)
	for i := range 1000 {
		round(i & 3)
	}
	if n, m := openFDs(), mappings(t); n > fds || m > maps {
		t.Errorf("%d descriptors and %d mappings, %d and %d before", n, m, fds, maps)
	}
}

// TestOneSilentPeerBlocksNobody_C1: each connection has its own goroutine.
func TestOneSilentPeerBlocksNobody_C1(t *testing.T) {
	silent := newBench(t, newDevice(2))
	silent.must(silent.SendRaw(header(vhostuser.ReqSetFeatures, 1, 8)[:7]))
	b := newBench(t, newDevice(2))
	start := time.Now()
	b.must(b.Sync())
	if d := time.Since(start); d > time.Second {
		t.Errorf("answer after %v", d)
	}
	if _, err := silent.Recv(10 * time.Millisecond); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the silent one: %v", err)
	}
}
