package vhostuser_test

import (
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
)

// C78: whatever becomes of the channel, the session goes on, and a new channel gets what was not answered.
func TestC78_Channel(t *testing.T) {
	b := newIOMMUBench(t)
	a := ringAddr(b.mem, 0)
	_, err := b.back.Write([]byte(strings.Repeat("garbage", 1000)))
	b.must(err)
	reply := vhostuser.Header{Request: vhostuser.BackendIOTLBMsg, Flags: 5, Size: 8}.Append(nil)
	_, err = b.back.Write(append(reply, payload64(0)...)) // nobody asked
	b.must(err)
	b.configure(0)
	b.miss()
	b.must(b.back.Close())
	b.tell(a.Desc + iovaOff) // the next miss finds the channel closed
	b.must(b.Sync())
	for range 3 { // C79: a channel replaces the one before
		b.back = b.channel()
		if m := b.miss(); m.IOVA != a.Avail+iovaOff {
			t.Fatalf("on a new channel: %+v", m)
		}
	}
	b.tell(a.Avail + iovaOff)
	b.tell(b.miss().IOVA)
	b.rings(true, false, 0)
}

// C78: a front-end that does not read its channel holds up nobody.
func TestC78_ChannelIsNotRead(t *testing.T) {
	b := newIOMMUBench(t)
	b.start(0)
	b.must(b.back.SetReadBuffer(1))
	for i := range uint64(5000) { // misses that nobody reads: of a ring that moves about
		a := ringAddr(b.mem, 1)
		a.Desc, a.Avail, a.Used = iovaOff+i<<16, iovaOff+i<<16+0x4000, iovaOff+i<<16+0x5000
		if i == 0 {
			b.must(b.SetVringNum(1, 256))
			b.must(b.SetVringKick(1, eventFD(t)))
		}
		b.must(b.SetVringAddr(a))
	}
	b.must(b.Sync())
	b.rings(true, false, 0)
	start := time.Now()
	b.must(b.Conn.Close())
	if err := b.wait(); err != nil {
		t.Error(err)
	}
	if d := time.Since(start); d > 5*time.Second {
		t.Errorf("the session took %v to end", d)
	}
}

// C79: only a local socket is a channel, every descriptor that is replaced is closed.
func TestC79_ChannelDescriptors(t *testing.T) {
	b := newIOMMUBench(t)
	b.channel()
	before := openFDs()
	for range 50 {
		b.channel().Close()
	}
	b.must(b.Sync())
	if now := openFDs(); now > before {
		t.Errorf("%d descriptors, %d before", now, before)
	}
	udp, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	b.must(err)
	defer unix.Close(udp)
	datagram, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	b.must(err)
	defer unix.Close(datagram)
	lonely, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	b.must(err)
	defer unix.Close(lonely)
	var refused *frontend.RefusedError
	for name, fd := range map[string]int{"eventfd": eventFD(t), "network socket": udp, "datagram socket": datagram} {
		if err := b.DoAck(vhostuser.ReqSetBackendReqFD, nil, fd); !errors.As(err, &refused) {
			t.Errorf("%s: %v", name, err)
		}
	}
	b.must(b.DoAck(vhostuser.ReqSetBackendReqFD, nil, lonely)) // is no channel when it is used
	b.configure(0)
	b.must(b.Sync())
	b.back = b.channel()
	b.miss()
}

// The channel's descriptor keeps its flags: the front-end may share them.
func TestNTF10_ChannelFlags(t *testing.T) {
	b := newIOMMUBench(t)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	b.must(err)
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	b.must(b.DoAck(vhostuser.ReqSetBackendReqFD, nil, pair[1]))
	b.configure(0)
	var raw [44]byte
	if n, err := unix.Read(pair[0], raw[:]); n != 44 || err != nil {
		t.Fatal(n, err)
	}
	flags, err := unix.FcntlInt(uintptr(pair[1]), unix.F_GETFL, 0)
	b.must(err)
	if flags&unix.O_NONBLOCK != 0 {
		t.Error("the descriptor does not block any more")
	}
}

// Config changes are told on the channel, if the front-end reads the configuration space.
func TestConfigChangeMessage(t *testing.T) {
	b := newIOMMUBench(t)
	b.start(0)
	change := func(v byte) {
		_, err := b.GetConfig(0, 24)
		b.must(err)
		b.dev.peek(func(d *fakeDevice) { d.config = append([]byte{v}, make([]byte, 23)...) })
		b.session.LookAtConfig()
	}
	change(1)
	b.must(b.back.SetReadDeadline(time.Now().Add(10 * time.Second)))
	var raw [vhostuser.HeaderLen]byte
	_, err := io.ReadFull(b.back, raw[:])
	b.must(err)
	if h := vhostuser.DecodeHeader(raw[:]); h != (vhostuser.Header{Request: vhostuser.BackendConfigChange, Flags: 1}) {
		t.Errorf("back-end message %+v", h)
	}
	b.session.LookAtConfig()
	b.silent()
}
