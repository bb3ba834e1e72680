package cases

import (
	"bytes"
	"io"
	"os"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

const logAll = plain | virtio.FVhostUserProtocolFeatures | virtio.FVhostLogAll

// logged negotiates the protocol features of a migration, too.
func logged(t testing.TB, d *vhostd, mem *frontend.Memory, features virtio.Features) *frontend.Conn {
	t.Helper()
	c := d.dial()
	must(t, c.SetOwner())
	must(t, c.SetProtocolFeatures(vhostuser.ProtoMQ|vhostuser.ProtoReplyAck|vhostuser.ProtoStatus|vhostuser.ProtoLogShmfd|
		vhostuser.ProtoDeviceState|vhostuser.ProtoRARP|vhostuser.ProtoNetMTU))
	c.NeedReply = true
	must(t, c.SetFeatures(features|virtio.FVhostUserProtocolFeatures))
	must(t, share(c, mem))
	return c
}

// dirtyLog is a log in a file of its own.
type dirtyLog struct {
	fd           int
	size, offset uint64
}

// logOf makes a log for memory up to the guest address.
func logOf(t testing.TB, end, offset uint64) *dirtyLog {
	t.Helper()
	l := &dirtyLog{size: (end/guestmem.LogPage + 7) / 8, offset: offset}
	var err error
	l.fd, err = unix.MemfdCreate("vhost-user-frontend", unix.MFD_CLOEXEC)
	must(t, err)
	must(t, unix.Ftruncate(l.fd, int64(l.size+offset)))
	t.Cleanup(func() { l.close() })
	return l
}

func (l *dirtyLog) close() {
	if l.fd >= 0 {
		unix.Close(l.fd)
		l.fd = -1
	}
}

func (l *dirtyLog) set(c *frontend.Conn) error { return c.SetLogBase(l.size, l.offset, l.fd) }

// file is all of the log's file.
func (l *dirtyLog) file(t testing.TB) []byte {
	t.Helper()
	b := make([]byte, l.offset+l.size)
	_, err := unix.Pread(l.fd, b, 0)
	must(t, err)
	return b
}

func (l *dirtyLog) bits(t testing.TB) []byte { return l.file(t)[l.offset:] }

// logRings sends both addresses again, with or without the flag.
func logRings(t testing.TB, c *frontend.Conn, p *frontend.Pair, on uint32) {
	t.Helper()
	for _, q := range []*frontend.Queue{p.RX, p.TX} {
		a := q.Addr()
		a.Flags = on
		must(t, c.SetVringAddr(a))
	}
}

// TestMIG05_LogSwitch: under traffic logging begins and ends again and again, as QEMU and cloud-hypervisor do it, with the addresses
// of both rings sent again; nothing is lost and no index jumps.
func TestMIG05_LogSwitch(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	c := logged(t, d, mem, plain)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	traffic := startLoad(t, p)
	for range rounds(20, 100) {
		l := logOf(t, 64<<20, 0)
		must(t, l.set(c))
		must(t, c.SetFeatures(logAll))
		logRings(t, c, p, 1)
		time.Sleep(5 * time.Millisecond)
		mustRefuse(t, "another feature changed with LOG_ALL", c.SetFeatures(logAll^virtio.FNetMrgRxBuf^virtio.FVhostLogAll))
		logRings(t, c, p, 0)
		must(t, c.SetFeatures(logAll&^virtio.FVhostLogAll))
		l.close()
	}
	t.Logf("%d frames", traffic.end(t))
	if p.RX.Ring.PeekUsedIdx() != p.RX.Ring.LastUsed() || p.TX.Ring.PeekUsedIdx() != p.TX.Ring.AvailIdx() {
		t.Error("an index jumped")
	}
	stoppedAt := p.TX.Ring.PeekUsedIdx()
	base, err := c.GetVringBase(1)
	must(t, err)
	if uint16(base) != stoppedAt {
		t.Errorf("position %d, used index %d", base, stoppedAt)
	}
}

// TestMIG03_LogPerPass is also C74: every pass over the memory brings a new log while the rings run. What only the device writes, receive
// buffers and used rings, is at the destination what it was at the source when the rings have stopped.
func TestMIG03_LogPerPass(t *testing.T) {
	d := serve(t, "echo")
	const size = 64 << 20
	mem := memory(t, size)
	c := logged(t, d, mem, plain)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	traffic := startLoad(t, p)
	l := logOf(t, size, 3)
	must(t, l.set(c))
	must(t, c.SetFeatures(logAll))
	logRings(t, c, p, 1)
	source, image := mem.Bytes(0, size), make([]byte, size)
	copy(image, source)
	copied := 0
	pass := func(l *dirtyLog) {
		for i, b := range l.bits(t) {
			for k := range 8 {
				if b>>k&1 != 0 {
					at := (8*i + k) * guestmem.LogPage
					copy(image[at:at+guestmem.LogPage], source[at:])
					copied++
				}
			}
		}
		l.close()
	}
	passes := rounds(100, 2000)
	for i := range passes {
		next := logOf(t, size, uint64(i%9)*0x333)
		must(t, next.set(c))
		pass(l)
		l = next
	}
	t.Logf("%d frames, %d passes, %d pages", traffic.end(t), passes, copied)
	for i := range 2 {
		_, err := c.GetVringBase(i)
		must(t, err)
	}
	pass(l)
	buffers, n := p.RX.Buffers()
	parts := map[string][2]uint64{"receive buffers": {buffers, n}}
	for _, q := range []*frontend.Queue{p.RX, p.TX} {
		at, n := q.UsedRing()
		parts[map[int]string{0: "receiveq's used ring", 1: "transmitq's used ring"}[q.Index]] = [2]uint64{at, n}
	}
	for name, part := range parts {
		at, end := part[0], part[0]+part[1]
		if !bytes.Equal(source[at:end], image[at:end]) {
			t.Errorf("%s: source and destination differ", name)
		}
	}
	if copied == 0 {
		t.Error("nothing was marked")
	}
}

// TestMIG02_LogsOfAnyShape is also A1, A12, A25 and C72: bits are where the offset says, bad logs are refused and change nothing, bits beyond
// a log that is too small are not written, and the device goes on.
func TestMIG02_LogsOfAnyShape(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	c := logged(t, d, mem, plain)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	flows(t, p)
	bad := func() {
		t.Helper()
		l := logOf(t, 1<<20, 0xfe0)
		for _, s := range [][2]uint64{{^uint64(0), 1}, {0, 0}, {0x1000, 1}, {0x1001, 0}, {1 << 63, 1 << 63}, {1, ^uint64(0)}} {
			mustRefuse(t, "a bad log", c.SetLogBase(s[0], s[1], l.fd))
		}
		mustRefuse(t, "an eventfd", c.SetLogBase(64, 0, p.RX.KickFD))
		mustRefuse(t, "no descriptor", c.DoAck(vhostuser.ReqSetLogBase, make([]byte, 16)))
		l.close()
	}
	bad()
	mustRefuse(t, "LOG_ALL without a log", c.SetFeatures(logAll))
	for _, offset := range []uint64{0, 0x1000, 0x800, 1, 0x1003} {
		l := logOf(t, 64<<20, offset)
		must(t, l.set(c))
		must(t, c.SetFeatures(logAll))
		logRings(t, c, p, 1)
		bad()
		flows(t, p)
		used, _ := p.TX.UsedRing()
		if page := used / guestmem.LogPage; l.bits(t)[page/8]>>(page%8)&1 == 0 {
			t.Errorf("offset %#x: the used ring is not marked", offset)
		}
		if !bytes.Equal(l.file(t)[:offset], make([]byte, offset)) {
			t.Errorf("offset %#x: bytes in front of the log were written", offset)
		}
	}
	short := logOf(t, 8*guestmem.LogPage, 0) // one byte, in a file of one more
	must(t, unix.Ftruncate(short.fd, 2))
	must(t, short.set(c))
	flows(t, p)
	b := make([]byte, 2)
	_, err := unix.Pread(short.fd, b, 0)
	must(t, err)
	if b[1] != 0 {
		t.Error("a byte behind the log was written")
	}
	flows(t, p)
}

// TestMIG02_TruncatedLog is C73: the guest whose log file shrinks loses its connection, the program serves the next one.
func TestMIG02_TruncatedLog(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	c := logged(t, d, mem, plain)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	l := logOf(t, 64<<20, 0)
	must(t, l.set(c))
	must(t, c.SetFeatures(logAll))
	logRings(t, c, p, 1)
	must(t, unix.Ftruncate(l.fd, 0))
	_, err := p.PostRx(4)
	must(t, err)
	must(t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
	must(t, c.AwaitClose(patience))
	d.disconnected()
	flows(t, d.guest(memory(t), ordinary()).Pair)
}

// TestC80_DeviceState moves the state of one program's device to another's, and offers it hostile ones.
func TestC80_DeviceState(t *testing.T) {
	a, b := serve(t, "echo"), serve(t, "echo")
	mem := memory(t)
	c := logged(t, a, mem, plain)
	must(t, c.NetSetMTU(1400))
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	r, w, err := os.Pipe()
	must(t, err)
	defer r.Close()
	mustRefuse(t, "the state of running rings", c.SetDeviceStateFD(vhostuser.StateSave, int(w.Fd())))
	echoed(t, p, 300)
	stopped(t, c, p, 300)
	must(t, c.SetDeviceStateFD(vhostuser.StateSave, int(w.Fd())))
	w.Close()
	state, err := io.ReadAll(r)
	must(t, err)
	must(t, c.CheckDeviceState())
	dest := logged(t, b, mem, plain)
	idle := b.use()
	for _, bad := range [][]byte{bytes.Repeat([]byte{7}, 1<<20), state[:len(state)-1], append([]byte("vhostd\x00n\x02"), state[9:]...)} {
		if err := loadState(t, dest, bad); err == nil {
			t.Error("a bad state is accepted")
		}
	}
	must(t, loadState(t, dest, nil))
	must(t, loadState(t, dest, state))
	b.flat(idle)
	steps(t, func() error { return setRing(dest, p.RX, 300) }, func() error { return setRing(dest, p.TX, 300) }, on(dest, 0, 1))
	echoed(t, p, 10)
}

// loadState offers a state and returns what the program says to it.
func loadState(t testing.TB, c *frontend.Conn, state []byte) error {
	t.Helper()
	r, w, err := os.Pipe()
	must(t, err)
	defer w.Close()
	must(t, c.SetDeviceStateFD(vhostuser.StateLoad, int(r.Fd())))
	r.Close()
	_, _ = w.Write(state) // who reads may have seen enough
	w.Close()
	return c.CheckDeviceState()
}

// TestAnnouncementOnASwitch: SEND_RARP reaches the other guests of a segment, also from a guest none of whose rings runs yet, and they find
// it behind its new port.
func TestAnnouncementOnASwitch(t *testing.T) {
	d, a := segmentOf(t, "", ordinary(), 1)
	b := d.join(2, "", ordinary(), 1)
	moved := d.join(3, "", ordinary(), 0)
	mac := [6]byte{2, 0, 0, 0, 0, 1}
	b.gets(a.to(everybody, 60, 1)) // the segment knows where this address is
	must(t, moved.c.SendRARP(mac))
	want := port.RARP(mac)
	b.gets(want[:])
	a.gets(want[:])
}
