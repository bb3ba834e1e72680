package cases

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
)

// payloads are bodies of the right length for every message, so that its descriptors are what is wrong with it.
func payloads() map[vhostuser.Request][]byte {
	sizes := map[vhostuser.Request]int{
		vhostuser.ReqSetFeatures: 8, vhostuser.ReqSetMemTable: 8, vhostuser.ReqSetLogBase: 16, vhostuser.ReqSetVringNum: 8,
		vhostuser.ReqSetVringAddr: 40, vhostuser.ReqSetVringBase: 8, vhostuser.ReqGetVringBase: 8, vhostuser.ReqSetVringKick: 8,
		vhostuser.ReqSetVringCall: 8, vhostuser.ReqSetVringErr: 8, vhostuser.ReqSetProtocolFeatures: 8, vhostuser.ReqSetVringEnable: 8,
		vhostuser.ReqSendRARP: 8, vhostuser.ReqNetSetMTU: 8, vhostuser.ReqIOTLBMsg: 32, vhostuser.ReqSetVringEndian: 8,
		vhostuser.ReqGetConfig: 29, vhostuser.ReqSetConfig: 29, vhostuser.ReqCreateCryptoSession: 64, vhostuser.ReqCloseCryptoSession: 8,
		vhostuser.ReqGetInflightFD: 24, vhostuser.ReqSetInflightFD: 24, vhostuser.ReqVringKick: 8, vhostuser.ReqAddMemReg: 40,
		vhostuser.ReqRemMemReg: 40, vhostuser.ReqSetStatus: 8, vhostuser.ReqGetSharedObject: 16, vhostuser.ReqSetDeviceStateFD: 8,
		vhostuser.ReqGetVringBaseSkipDrain: 8,
	}
	all := map[vhostuser.Request][]byte{}
	for req := range vhostuser.ReqGetVringBaseSkipDrain + 3 { // two ids that nobody knows included
		all[req] = make([]byte, sizes[req])
	}
	return all
}

// TestFD01_SurplusDescriptors: descriptors on messages that take none are closed, whatever becomes of the message.
func TestFD01_SurplusDescriptors(t *testing.T) {
	d := serve(t, "echo")
	var pipe [2]int
	must(t, unix.Pipe2(pipe[:], unix.O_CLOEXEC))
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	surplus := []int{pipe[0], pipe[1], pipe[0], pipe[1], pipe[0], pipe[1], pipe[0], pipe[1]}
	d.serves()
	base := d.use()
	for req, payload := range payloads() {
		d.flood(t, req, payload, surplus)
	}
	d.disconnected()
	d.flat(base)
	if n := d.logged("refused"); n > 200 {
		t.Errorf("%d lines in the log about refused messages", n)
	}
	d.serves()
}

// flood sends one message with descriptors many times, on the header, on the second part and asking for an acknowledgement, and
// connects again when that ends the connection.
func (d *vhostd) flood(t *testing.T, req vhostuser.Request, payload []byte, fds []int) {
	t.Helper()
	header := message(req, payload)[:vhostuser.HeaderLen]
	c := d.dial()
	must(t, c.SetProtocolFeatures(vhostuser.ProtoReplyAck|vhostuser.ProtoStatus|vhostuser.ProtoMQ))
	var held use
	for i := range rounds(12, 1000) {
		err := c.Send(req, vhostuser.FlagVersion|vhostuser.FlagNeedReply, payload, fds...)
		if err == nil && len(payload) > 0 {
			if err = c.SendRaw(header, fds...); err == nil {
				err = c.SendRaw(payload, fds[:2]...)
			}
		}
		if err == nil {
			err = settle(c, req)
		}
		switch {
		case err != nil:
			must(t, c.Close())
			d.disconnected()
			if i > 3 {
				return // it always ends the connection
			}
			c = d.dial()
			must(t, c.SetProtocolFeatures(vhostuser.ProtoReplyAck))
		case i == 2:
			held = d.use()
		case i > 2 && held.files > 0 && d.use().files > held.files:
			t.Errorf("%v with surplus descriptors: %d open files, %d before", req, d.use().files, held.files)
			held.files = 0
		}
	}
	must(t, c.Close())
	d.disconnected()
}

// settle waits until everything sent so far was handled, and skips what was answered, by a request other than the one that was sent.
func settle(c *frontend.Conn, sent vhostuser.Request) error {
	barrier := vhostuser.ReqGetFeatures
	if sent == barrier {
		barrier = vhostuser.ReqGetProtocolFeatures
	}
	if err := c.Send(barrier, vhostuser.FlagVersion, nil); err != nil {
		return err
	}
	for {
		r, err := c.Recv(patience)
		for _, fd := range r.FDs {
			_ = unix.Close(fd)
		}
		if err != nil || r.Request == barrier {
			return err
		}
	}
}

// TestFD01_MoreDescriptorsThanOneMessageHolds: the kernel passes at most 253 with one send, and several sends belong to a message.
func TestFD01_MoreDescriptorsThanOneMessageHolds(t *testing.T) {
	d := serve(t, "echo")
	fds := make([]int, 253)
	devnull, err := os.Open(os.DevNull)
	must(t, err)
	defer devnull.Close()
	for i := range fds {
		fds[i] = int(devnull.Fd())
	}
	d.serves()
	base := d.use()
	for range rounds(3, 50) {
		c := d.dial()
		must(t, c.SetProtocolFeatures(vhostuser.ProtoReplyAck))
		mustRefuse(t, "253 descriptors", c.DoAck(vhostuser.ReqSetMemTable, make([]byte, 8), fds...))
		header := message(vhostuser.ReqSetOwner, nil)
		for i := range header { // descriptors on every byte of it
			if c.SendRaw(header[i:i+1], fds...) != nil {
				break
			}
		}
		_ = settle(c, vhostuser.ReqSetOwner) // the connection may be over
		must(t, c.Close())
		d.disconnected()
	}
	d.flat(base)
	d.serves()
}

// TestFD01_OutOfDescriptors: a program without a free descriptor loses the message or the connection, and recovers.
func TestFD01_OutOfDescriptors(t *testing.T) {
	d := serve(t, "echo")
	d.serves()
	base := d.use()
	var limit unix.Rlimit
	must(t, unix.Prlimit(d.PID(), unix.RLIMIT_NOFILE, nil, &limit))
	mem := memory(t)
	for spare := range 9 {
		time.Sleep(50 * time.Millisecond) // the control socket may just be closing a connection
		must(t, unix.Prlimit(d.PID(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: d.lowestFree() + uint64(spare), Max: limit.Max}, nil))
		c := d.dial()
		c.Timeout = 500 * time.Millisecond // without a descriptor the connection is not even accepted
		p := detached(t, mem, 0, plain)
		err := first(func() error { return negotiate(c, plain) }, func() error { return share(c, mem) }, rings(c, p), on(c, 0, 1))
		t.Logf("%d descriptors left: %v", spare, err)
		must(t, c.Close())
		must(t, unix.Prlimit(d.PID(), unix.RLIMIT_NOFILE, &limit, nil))
		d.disconnected()
		d.serves()
	}
	d.flat(base)
}

// lowestFree is the number that the program's next descriptor gets.
func (d *vhostd) lowestFree() (n uint64) {
	for ; ; n++ {
		if _, err := os.Lstat(fmt.Sprintf("/proc/%d/fd/%d", d.PID(), n)); err != nil {
			return n
		}
	}
}

// TestFD03_RepeatedDescriptors: each new descriptor replaces the one before, which is closed.
func TestFD03_RepeatedDescriptors(t *testing.T) {
	d := serve(t, "echo")
	d.serves()
	idle := d.use()
	mem := memory(t)
	c := d.session(mem, plain)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1), func() error { return c.SetVringErr(0, p.RX.ErrFD) }, func() error { return c.SetVringErr(1, p.TX.ErrFD) })
	flows(t, p)
	must(t, c.SetLogFD(p.TX.CallFD))
	base := d.use()
	log, err := unix.MemfdCreate("vhost-user-frontend", unix.MFD_CLOEXEC)
	must(t, err)
	defer unix.Close(log)
	for range rounds(200, 1000) {
		for _, q := range []*frontend.Queue{p.RX, p.TX} {
			must(t, c.SetVringKick(q.Index, q.KickFD))
			must(t, c.SetVringCall(q.Index, q.CallFD))
			must(t, c.SetVringErr(q.Index, q.ErrFD))
		}
		for _, i := range []uint64{34, 255} { // eight pairs and a control queue are 17 queues, of which QEMU takes each for a pair
			mustRefuse(t, "kick of a ring out of range", c.DoAck(vhostuser.ReqSetVringKick, word(i), p.TX.KickFD))
			mustRefuse(t, "call of a ring out of range", c.DoAck(vhostuser.ReqSetVringCall, word(i), p.TX.CallFD))
			mustRefuse(t, "err of a ring out of range", c.DoAck(vhostuser.ReqSetVringErr, word(i), p.TX.ErrFD))
		}
		must(t, c.SetLogFD(p.TX.CallFD))
		mustRefuse(t, "SET_LOG_BASE", c.DoAck(vhostuser.ReqSetLogBase, make([]byte, 16), log))
		mustRefuse(t, "SET_BACKEND_REQ_FD", c.DoAck(vhostuser.ReqSetBackendReqFD, nil, p.TX.CallFD))
		mustRefuse(t, "SET_INFLIGHT_FD", c.DoAck(vhostuser.ReqSetInflightFD, make([]byte, 24), log))
	}
	d.flat(base)
	flows(t, p)
	must(t, c.Close())
	d.disconnected()
	d.flat(idle)
	for range rounds(5, 1000) { // ends the connection each time: the reply it needs cannot be given
		c := d.dial()
		must(t, c.Send(vhostuser.ReqGetInflightFD, vhostuser.FlagVersion, make([]byte, 24), log))
		must(t, c.AwaitClose(patience))
		d.disconnected()
	}
	d.flat(idle)
	d.serves()
}

// TestFD05_DescriptorsCloseOnExec: the program starts no children; if it ever does, they inherit nothing but 0, 1 and 2.
func TestFD05_DescriptorsCloseOnExec(t *testing.T) {
	d := serve(t, "echo")
	c := d.connect(memory(t), frontend.Options{Features: plain})
	for i := range 4 {
		flows(t, pair(t, c, i))
	}
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	must(t, err)
	defer unix.Close(fd)
	must(t, c.SetVringCall(0, fd))
	must(t, c.Sync())
	d.inheritable()
	// A message that is not complete keeps its descriptors.
	must(t, c.SendRaw(message(vhostuser.ReqSetOwner, nil)[:1], fd, fd))
	time.Sleep(quiet)
	d.inheritable()
}

// inheritable reports descriptors without close-on-exec, except those that this process was started with and so passed on.
func (d *vhostd) inheritable() {
	d.t.Helper()
	dir := filepath.Join("/proc", fmt.Sprint(d.PID()))
	entries, err := os.ReadDir(filepath.Join(dir, "fdinfo"))
	must(d.t, err)
	for _, e := range entries {
		info, err := os.ReadFile(filepath.Join(dir, "fdinfo", e.Name()))
		if err != nil || len(e.Name()) == 1 && e.Name() <= "2" {
			continue
		}
		var flags int
		for line := range strings.Lines(string(info)) {
			_, _ = fmt.Sscanf(line, "flags: %o", &flags)
		}
		if flags&unix.O_CLOEXEC == 0 {
			target, _ := os.Readlink(filepath.Join(dir, "fd", e.Name()))
			if own, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil && own == target {
				continue
			}
			d.t.Errorf("descriptor %s (%s) would be inherited", e.Name(), target)
		}
	}
}

// TestFD07_PipelinedMessages: descriptors stay with the message whose bytes carried them, however the bytes arrive.
func TestFD07_PipelinedMessages(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	for name, send := range map[string]func(c *frontend.Conn, m []byte, fds []int) error{
		"one send each": func(c *frontend.Conn, m []byte, fds []int) error { return c.SendRaw(m, fds...) },
		"header and body apart, descriptor with the first byte": func(c *frontend.Conn, m []byte, fds []int) error {
			return first(func() error { return c.SendRaw(m[:1], fds...) }, func() error { return c.SendRaw(m[1:vhostuser.HeaderLen]) },
				pause, func() error { return c.SendRaw(m[vhostuser.HeaderLen:]) })
		},
		"descriptor with the body": func(c *frontend.Conn, m []byte, fds []int) error {
			return first(func() error { return c.SendRaw(m[:vhostuser.HeaderLen]) }, pause, func() error { return c.SendRaw(m[vhostuser.HeaderLen:], fds...) })
		},
		"byte by byte, descriptor with the last": func(c *frontend.Conn, m []byte, fds []int) error {
			for i := range m[1:] {
				if err := c.SendRaw(m[i : i+1]); err != nil {
					return err
				}
			}
			return c.SendRaw(m[len(m)-1:], fds...)
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := d.session(mem, plain)
			c.NeedReply = false
			p := detached(t, mem, 0, plain)
			for _, q := range []*frontend.Queue{p.RX, p.TX} {
				for _, m := range ringMessages(q) {
					must(t, send(c, m.bytes, m.fds))
				}
			}
			must(t, enable(c, true, 0, 1))
			must(t, c.Sync())
			flows(t, p)
			must(t, c.Close())
			d.disconnected()
		})
	}
	t.Run("fifty in one send", func(t *testing.T) {
		c := d.session(mem, plain)
		c.NeedReply = false
		p := detached(t, mem, 0, plain)
		var batch []byte
		for range 50 {
			batch = append(batch, message(vhostuser.ReqSetVringNum, vhostuser.VringState{Num: 256}.Append(nil))...)
		}
		must(t, c.SendRaw(batch))
		for _, q := range []*frontend.Queue{p.RX, p.TX} {
			for _, m := range ringMessages(q) {
				must(t, c.SendRaw(m.bytes, m.fds...))
			}
		}
		must(t, enable(c, true, 0, 1))
		must(t, c.Sync())
		flows(t, p)
		if r := d.ring(0); r.Kicks == 0 {
			t.Errorf("ring 0 was never kicked: %+v", r)
		}
		must(t, c.Close())
		d.disconnected()
	})
	d.serves()
}

func pause() error {
	time.Sleep(2 * time.Millisecond)
	return nil
}

// wire is a message as it travels.
type wire struct {
	bytes []byte
	fds   []int
}

func message(req vhostuser.Request, payload []byte) []byte {
	return append(vhostuser.Header{Request: req, Flags: vhostuser.FlagVersion, Size: uint32(len(payload))}.Append(nil), payload...)
}

func ringMessages(q *frontend.Queue) []wire {
	i := uint32(q.Index)
	return []wire{
		{message(vhostuser.ReqSetVringNum, vhostuser.VringState{Index: i, Num: uint32(q.Ring.Size())}.Append(nil)), nil},
		{message(vhostuser.ReqSetVringBase, vhostuser.VringState{Index: i}.Append(nil)), nil},
		{message(vhostuser.ReqSetVringAddr, q.Addr().Append(nil)), nil},
		{message(vhostuser.ReqSetVringKick, word(uint64(i))), []int{q.KickFD}},
		{message(vhostuser.ReqSetVringCall, word(uint64(i))), []int{q.CallFD}},
		{message(vhostuser.ReqSetVringErr, word(uint64(i))), []int{q.ErrFD}},
	}
}
