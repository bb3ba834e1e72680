package attach

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/worker"
)

// TestHostileRings: whatever a back-end writes into the rings ends the connection with a reason that names it.
func TestHostileRings(t *testing.T) {
	for name, c := range map[string]struct {
		want string
		do   func(rx, tx *fakeRing)
	}{
		"id beyond the ring":           {"names head 65535", func(rx, _ *fakeRing) { rx.use(65535, 20); rx.publish() }},
		"id twice":                     {"not outstanding", func(rx, _ *fakeRing) { rx.answer(30, 30) }},
		"transmit id never given":      {"not outstanding", func(_, tx *fakeRing) { tx.use(3, 0); tx.publish() }},
		"used index jumps":             {"used index is", func(rx, _ *fakeRing) { rx.usedIdx = 40000; rx.publish() }},
		"length beyond the buffer":     {"came back with", func(rx, _ *fakeRing) { rx.answer(uint32(rxBuffer(allFeatures, 0) + 1)) }},
		"length of 4 GiB":              {"came back with 4294967295", func(rx, _ *fakeRing) { rx.answer(1<<32 - 1) }},
		"less than a header":           {"the header alone has 12", func(rx, _ *fakeRing) { rx.answer(11) }},
		"second buffer too long":       {"came back with", func(rx, _ *fakeRing) { tooLongSecond(rx) }},
		"err eventfd of the receiveq":  {"calls a ring broken", func(rx, _ *fakeRing) { ringBell(rx.fail) }},
		"err eventfd of the transmitq": {"calls a ring broken", func(_, tx *fakeRing) { ringBell(tx.fail) }},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			f.listen()
			a := f.attach(nil)
			if name == "transmit id never given" {
				sendFrame(t, a, 60)
				f.rings[1].take()
			}
			c.do(f.rings[0], f.rings[1])
			sendFrame(t, a, 60) // a transmitq is looked at when there is something to send
			select {
			case err := <-a.ended:
				if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), f.path) {
					t.Errorf("%v, want the socket and %q", err, c.want)
				}
			case <-time.After(patience):
				t.Error("the session goes on")
			}
		})
	}
}

// TestErrorsWherePolled: workers that poll look at no descriptors, so that somebody else has to look at the err eventfds.
func TestErrorsWherePolled(t *testing.T) {
	for i, which := range []string{"receiveq", "transmitq"} {
		t.Run(which, func(t *testing.T) {
			f := newFake(t)
			f.listen()
			a := f.attach(func(o *Options) { o.Wake = worker.Poll })
			ringBell(f.rings[i].fail)
			select {
			case err := <-a.ended:
				if err == nil || !strings.Contains(err.Error(), "queue pair 0: the back-end calls a ring broken") {
					t.Errorf("%v", err)
				}
			case <-time.After(patience):
				t.Error("the session goes on")
			}
		})
	}
}

// answer uses one chain as often as there are lengths.
func (r *fakeRing) answer(lengths ...uint32) {
	head, _ := r.take()
	for _, n := range lengths {
		r.use(uint32(head), n)
	}
	r.publish()
}

func tooLongSecond(rx *fakeRing) {
	h, data := rx.take()
	virtio.NetHdr{NumBuffers: 2}.Encode(data[:virtio.NetHdrLen])
	rx.use(uint32(h), 100)
	h, data = rx.take()
	rx.use(uint32(h), uint32(len(data)+1))
	rx.publish()
}

func sendFrame(t *testing.T, a *attached, n int) []byte {
	t.Helper()
	b := bytes.Repeat([]byte{0x42}, a.features.NetHdrLen()+n)
	clear(b[:a.features.NetHdrLen()])
	if _, err := unix.Write(a.namespace, b); err != nil {
		t.Fatal(err)
	}
	return b[a.features.NetHdrLen():]
}

// TestBadFrames: a frame that cannot be is counted under its reason, and those after it arrive.
func TestBadFrames(t *testing.T) {
	frame := bytes.Repeat([]byte{7}, 100)
	sum := func(start uint16) virtio.NetHdr {
		return virtio.NetHdr{NumBuffers: 1, Flags: virtio.HdrFNeedsCsum, CsumStart: start, CsumOffset: 16}
	}
	segments := sum(34)
	segments.GSOType = virtio.GSOTCPv4
	for name, c := range map[string]struct {
		header  virtio.NetHdr
		frame   []byte
		buffers []int
		without virtio.Features
		want    reason
	}{
		"runt":                       {virtio.NetHdr{NumBuffers: 1}, frame[:13], []int{25}, 0, tooShort},
		"no buffers":                 {virtio.NetHdr{}, frame, []int{112}, 0, badMerge},
		"more buffers than any":      {virtio.NetHdr{NumBuffers: 65535}, frame, []int{112}, 0, badMerge},
		"buffers that are not there": {virtio.NetHdr{NumBuffers: 3}, frame, []int{62, 50}, 0, badMerge},
		"checksum beyond the frame":  {sum(90), frame, []int{112}, 0, badHeader},
		"checksum not negotiated":    {sum(34), frame, []int{112}, virtio.FNetGuestCSum, badHeader},
		"segments of nothing":        {segments, frame, []int{112}, 0, badHeader},
		"unknown segmentation":       {virtio.NetHdr{NumBuffers: 1, GSOType: 77}, frame, []int{112}, 0, badHeader},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFake(t)
			f.listen()
			a := f.attach(func(o *Options) { o.Without = c.without })
			f.rings[0].deliver(c.header, c.frame, c.buffers...)
			eventually(t, "the frame is counted", func() bool { return a.counts.received.drops[c.want].Load() == 1 })
			f.rings[0].deliver(virtio.NetHdr{NumBuffers: 1}, frame, 112)
			if _, got := a.frame(t); !bytes.Equal(got, frame) {
				t.Errorf("got % x", got)
			}
			eventually(t, "the good frame is counted", func() bool { return a.counts.received.frames.Load() == 1 })
		})
	}
}

// TestHangUps: a back-end that closes the connection at any message, or refuses one, gives an error and leaves nothing behind.
func TestHangUps(t *testing.T) {
	complete := newFake(t)
	complete.listen()
	complete.attach(nil)
	messages := len(complete.messages)
	for _, refuse := range []bool{false, true} {
		for n := range messages {
			f, seen := newFake(t), 0
			f.script = func(c *frontend.Conn, m frontend.Reply) (bool, bool) {
				seen++
				if seen <= n {
					return false, false
				}
				answered := m.Request == vhostuser.ReqGetFeatures // its reply cannot refuse
				if refuse && !answered && m.Flags&vhostuser.FlagNeedReply != 0 {
					replyU64(c, m, 1)
					return true, false
				}
				return false, true
			}
			f.listen()
			opts, err := Options{Socket: f.path, Netns: "none"}.withDefaults()
			if err != nil {
				t.Fatal(err)
			}
			s, err := dial(t.Context(), &opts)
			if err == nil {
				fds, _ := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
				err = s.start(fds[:1], 1500, []*traffic{{}})
				if closed := s.close(); closed != nil {
					t.Error(closed)
				}
				closeAll(fds[:])
			}
			if err == nil || !strings.Contains(err.Error(), f.path) {
				t.Errorf("message %d, refused %v: %v", n, refuse, err)
			}
		}
	}
}

// TestSilence: a back-end that answers nothing keeps nobody longer than the end of the context.
func TestSilence(t *testing.T) {
	f := newFake(t)
	ctx, cancel := context.WithCancel(t.Context())
	f.script = func(*frontend.Conn, frontend.Reply) (bool, bool) {
		cancel()
		return true, false
	}
	f.listen()
	opts, err := Options{Socket: f.path, Netns: "none"}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	if _, err := dial(ctx, &opts); err == nil {
		t.Error("no error")
	}
	if time.Since(begin) > answerWithin-time.Second {
		t.Error("the wait was not cut short")
	}
}

func TestLateAnswer(t *testing.T) {
	if err := explainPeer(&net.OpError{Op: "read", Err: timeout{}}); !strings.Contains(err.Error(), "does not answer") {
		t.Error(err)
	}
}

type timeout struct{}

func (timeout) Timeout() bool   { return true }
func (timeout) Temporary() bool { return true }
func (timeout) Error() string   { return "too late" }

// TestConnectionEnds: the end of the connection, and a message that nobody asked for, end the session.
func TestConnectionEnds(t *testing.T) {
	for name, say := range map[string]bool{"closed": false, "unasked": true} {
		t.Run(name, func(t *testing.T) {
			var conn *frontend.Conn
			f := newFake(t)
			f.script = func(c *frontend.Conn, _ frontend.Reply) (bool, bool) {
				conn = c
				return false, false
			}
			f.listen()
			a := f.attach(nil)
			if say {
				replyU64(conn, frontend.Reply{Header: vhostuser.Header{Request: vhostuser.ReqGetFeatures}}, 0)
			} else {
				conn.CloseWrite()
			}
			select {
			case err := <-a.ended:
				if say && !strings.Contains(err.Error(), "nobody asked for") || !say && !errors.Is(err, io.EOF) {
					t.Error(err)
				}
			case <-time.After(patience):
				t.Error("the session goes on")
			}
		})
	}
}

// TestMemoryIsSealed: the back-end can neither cut the memory nor seal it for us.
func TestMemoryIsSealed(t *testing.T) {
	f := newFake(t)
	f.listen()
	f.attach(nil)
	if err := unix.Ftruncate(f.memFD, 0); !errors.Is(err, unix.EPERM) {
		t.Errorf("truncate: %v", err)
	}
	if _, err := unix.FcntlInt(uintptr(f.memFD), unix.F_ADD_SEALS, unix.F_SEAL_FUTURE_WRITE); !errors.Is(err, unix.EPERM) {
		t.Errorf("seal: %v", err)
	}
}

// TestBlockedKick: a back-end that makes the kick's eventfd block and fills it does not hold the worker.
func TestBlockedKick(t *testing.T) {
	f := newFake(t)
	f.listen()
	a := f.attach(nil)
	kick := f.rings[1].kick
	for range 3 {
		fillEvent(t, kick)
		sendFrame(t, a, 60)
		h, _ := f.rings[1].take()
		f.rings[1].use(uint32(h), 0)
		f.rings[1].publish()
	}
	f.rings[0].deliver(virtio.NetHdr{NumBuffers: 1}, make([]byte, 64), 76)
	a.frame(t)
}

// fillEvent fills an eventfd, which others write to meanwhile, and has the next write to it block.
func fillEvent(t *testing.T, fd int) {
	t.Helper()
	if err := unix.SetNonblock(fd, true); err != nil {
		t.Fatal(err)
	}
	full, err := [8]byte{0xfe, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff}, error(unix.EAGAIN)
	for errors.Is(err, unix.EAGAIN) {
		var count [8]byte
		_, _ = unix.Read(fd, count[:]) // nothing is in it, or was
		_, err = unix.Write(fd, full[:])
	}
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.SetNonblock(fd, false); err != nil {
		t.Fatal(err)
	}
}
