package vhostuser_test

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
)

// acked is a negotiated session that acknowledges every message, with memory.
func acked(t *testing.T, rings int) (*bench, func(i int) vhostuser.VringAddr) {
	t.Helper()
	b := newBench(t, newDevice(rings)).negotiate()
	b.NeedReply = true
	mem := newMemory(t, 8<<20)
	b.shareMemory(mem)
	t.Cleanup(b.checkDevice)
	return b, func(i int) vhostuser.VringAddr { return ringAddr(mem, i) }
}

// TestStartInAnyOrder shuffles all messages that a start needs. The base has a
// default, so it must come before the last of them.
func TestStartInAnyOrder(t *testing.T) {
	for seed := range uint64(200) {
		b := newBench(t, newDevice(2))
		mem := newMemory(t, 1<<20)
		kick := eventFD(t)
		steps := []func() error{
			func() error { return b.SetFeatures(testFeatures | bit30) },
			func() error { specs, fds := mem.Table(); return b.SetMemTable(specs, fds) },
			func() error { return b.SetVringNum(1, 128) },
			func() error { return b.SetVringAddr(ringAddr(mem, 1)) },
			func() error { return b.SetVringKick(1, kick) },
			func() error { return b.SetVringCall(1, -1) },
			func() error { return b.SetVringEnable(1, true) },
		}
		rng := rand.New(rand.NewPCG(seed, 0))
		rng.Shuffle(len(steps), func(i, j int) { steps[i], steps[j] = steps[j], steps[i] })
		b.must(b.SetVringBase(1, 77))
		for _, step := range steps {
			b.must(step())
		}
		b.must(b.Sync())
		b.dev.peek(func(d *fakeDevice) {
			if !slices.Equal(d.starts, []int{1}) || d.running[1].Base != 77 || d.running[1].Size != 128 || !d.enabled[1] {
				t.Fatalf("seed %d: starts %v, running %+v, enabled %v", seed, d.starts, d.running, d.enabled)
			}
		})
		b.checkDevice()
		if b.logs.lines() != 0 {
			t.Fatalf("seed %d: logged %s", seed, b.logs)
		}
	}
}

func TestHostileC33_RingSizes(t *testing.T) {
	b, _ := acked(t, 2)
	for _, n := range []uint32{0, 3, 65535, 65536, 1 << 31, 0xffffffff, 1<<16 + 256} {
		if err := b.SetVringNum(0, n); !isRefused(err) {
			t.Errorf("size %d: %v", n, err)
		}
	}
	for _, n := range []uint32{1, 2, 32768} {
		b.must(b.SetVringNum(0, n))
	}
}

func TestHostileA2_A10_C38_RingIndex(t *testing.T) {
	b, addr := acked(t, 2)
	fd := eventFD(t)
	for _, i := range []uint32{6, 255, 256, 0x100_0000, 0xffffffff} {
		state := vhostuser.VringState{Index: i, Num: 1}.Append(nil)
		for _, req := range []vhostuser.Request{vhostuser.ReqSetVringNum, vhostuser.ReqSetVringBase, vhostuser.ReqSetVringEnable} {
			if err := b.DoAck(req, state); !isRefused(err) {
				t.Errorf("%v of ring %d: %v", req, i, err)
			}
		}
		a := addr(0)
		a.Index = i
		if err := b.SetVringAddr(a); !isRefused(err) {
			t.Errorf("SET_VRING_ADDR of ring %d: %v", i, err)
		}
	}
	before := openFDs()
	for _, payload := range []uint64{6, 0xff, 1 << 9, 1 << 32, 1 << 63, 0xffffffffffffffff} {
		for _, req := range []vhostuser.Request{vhostuser.ReqSetVringKick, vhostuser.ReqSetVringCall, vhostuser.ReqSetVringErr} {
			if err := b.DoAck(req, payload64(payload), fd); !isRefused(err) {
				t.Errorf("%v with payload %#x: %v", req, payload, err)
			}
		}
	}
	if now := openFDs(); now > before {
		t.Errorf("%d descriptors open, %d before", now, before)
	}
	b.must(b.Send(vhostuser.ReqGetVringBase, 1, vhostuser.VringState{Index: 6}.Append(nil)))
	b.must(b.AwaitClose(time.Second))
}

func TestHostileC35_C36_C39_RingAddresses(t *testing.T) {
	b, addr := acked(t, 2)
	b.must(b.SetVringNum(0, 256))
	good := addr(0)
	end := good.Desc + 8<<20
	for name, edit := range map[string]func(*vhostuser.VringAddr){
		"descriptor table at 8":            func(a *vhostuser.VringAddr) { a.Desc += 8 },
		"available ring at 1":              func(a *vhostuser.VringAddr) { a.Avail++ },
		"used ring at 2":                   func(a *vhostuser.VringAddr) { a.Used += 2 },
		"descriptor table crosses the end": func(a *vhostuser.VringAddr) { a.Desc = end - 256*16 + 16 },
		"available ring crosses the end":   func(a *vhostuser.VringAddr) { a.Avail = end - 256*2 },
		"used ring crosses the end":        func(a *vhostuser.VringAddr) { a.Used = end - 256*8 },
		"address 0":                        func(a *vhostuser.VringAddr) { a.Desc = 0 },
		"address at the top":               func(a *vhostuser.VringAddr) { a.Used = ^uint64(15) },
		"unknown flag":                     func(a *vhostuser.VringAddr) { a.Flags = 2 },
	} {
		a := good
		edit(&a)
		if err := b.SetVringAddr(a); !isRefused(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	atEnd := good
	atEnd.Desc = end - 256*16
	b.must(b.SetVringAddr(atEnd))
	// A size that makes good addresses bad is refused where the start would be.
	b.must(b.SetVringKick(0, eventFD(t)))
	if !b.dev.isRunning(0) {
		t.Error("ring 0 does not run")
	}
}

// TestKickWithUnusableRing: the message that would start the ring is refused and
// its descriptor closed.
func TestKickWithUnusableRing(t *testing.T) {
	b, addr := acked(t, 2)
	bad := addr(0)
	bad.Desc += 8<<20 - 256*16 // fits 256 descriptors, not 512
	b.must(b.SetVringAddr(bad))
	b.must(b.SetVringNum(0, 512))
	before := openFDs()
	if err := b.SetVringKick(0, eventFD(t)); !isRefused(err) {
		t.Errorf("kick: %v", err)
	}
	if now := openFDs(); now != before+1 { // the test's own eventfd
		t.Errorf("%d descriptors open, %d before", now, before)
	}
	b.must(b.SetVringNum(0, 256))
	b.dev.peek(func(d *fakeDevice) { d.refuseStart = errors.New("epoll: operation not permitted") })
	if err := b.SetVringKick(0, eventFD(t)); !isRefused(err) {
		t.Errorf("kick that the device refuses: %v", err)
	}
	b.dev.peek(func(d *fakeDevice) { d.refuseStart = nil })
	b.must(b.SetVringKick(0, eventFD(t)))
	if !b.dev.isRunning(0) {
		t.Error("ring 0 does not run")
	}
}

func TestHostileC40_Base(t *testing.T) {
	b, _ := acked(t, 2)
	for _, base := range []uint32{0x10000, 0x80008000, 0xffffffff} {
		if err := b.SetVringBase(0, base); !isRefused(err) {
			t.Errorf("base %#x: %v", base, err)
		}
	}
	b.must(b.SetVringBase(0, 0xffff))
}

func TestMIG01_C41_GetVringBase(t *testing.T) {
	b, addr := acked(t, 2)
	if v, err := b.GetVringBase(3); err != nil || v != 0 {
		t.Errorf("position of a ring never named: %d, %v", v, err)
	}
	b.must(b.SetVringBase(0, 9))
	if v, err := b.GetVringBase(0); err != nil || v != 9 {
		t.Errorf("position of a ring never started: %d, %v", v, err)
	}
	b.must(b.SetVringNum(0, 256))
	b.must(b.SetVringAddr(addr(0)))
	b.must(b.SetVringKick(0, eventFD(t)))
	b.dev.peek(func(d *fakeDevice) { d.positions[0] = 0x2bc })
	for range 2 {
		if v, err := b.GetVringBase(0); err != nil || v != 0x2bc {
			t.Errorf("position %#x, %v", v, err)
		}
	}
	if b.dev.isRunning(0) {
		t.Error("ring 0 runs after GET_VRING_BASE")
	}
	// It stays down whatever else comes, until the next kick descriptor.
	b.must(b.SetVringBase(0, 0x2bc))
	b.must(b.SetVringAddr(addr(0)))
	b.must(b.SetVringEnable(0, true))
	if b.dev.isRunning(0) {
		t.Error("ring 0 runs without a new kick descriptor")
	}
	b.must(b.SetVringKick(0, eventFD(t)))
	b.dev.peek(func(d *fakeDevice) {
		if d.running[0].Base != 0x2bc {
			t.Errorf("restarted at %#x", d.running[0].Base)
		}
	})
}

// TestGetVringBaseCancelsStart: a ring that waits for something is stopped too.
func TestGetVringBaseCancelsStart(t *testing.T) {
	b, addr := acked(t, 2)
	b.must(b.SetVringKick(0, eventFD(t)))
	_, err := b.GetVringBase(0)
	b.must(err)
	b.must(b.SetVringNum(0, 256))
	b.must(b.SetVringAddr(addr(0)))
	if b.dev.isRunning(0) {
		t.Error("ring 0 runs after GET_VRING_BASE")
	}
}

func TestRunningRingRefusesChanges(t *testing.T) {
	b, addr := acked(t, 2)
	b.must(b.SetVringEnable(0, true))
	b.must(b.SetVringNum(0, 256))
	b.must(b.SetVringAddr(addr(0)))
	b.must(b.SetVringKick(0, eventFD(t)))
	if err := b.SetVringNum(0, 128); !isRefused(err) {
		t.Errorf("size: %v", err)
	}
	b.must(b.SetVringNum(0, 256))
	if err := b.SetVringBase(0, 1); !isRefused(err) {
		t.Errorf("base: %v", err)
	}
	moved := addr(0)
	moved.Used += 64
	if err := b.SetVringAddr(moved); !isRefused(err) {
		t.Errorf("address: %v", err)
	}
	// QEMU switches the logging of a running ring with the same addresses.
	same := addr(0)
	same.Flags, same.Log = 1, 0x5000
	b.must(b.SetVringAddr(same))
	b.dev.peek(func(d *fakeDevice) {
		if len(d.starts) != 1 || len(d.running) != 1 {
			t.Errorf("starts %v, running %v", d.starts, d.running)
		}
	})
}

func TestHostileA19_C42_KickAgain(t *testing.T) {
	b, addr := acked(t, 2)
	b.must(b.SetVringEnable(0, true))
	b.must(b.SetVringNum(0, 256))
	b.must(b.SetVringAddr(addr(0)))
	b.must(b.SetVringKick(0, eventFD(t)))
	before := openFDs()
	kick := eventFD(t)
	for range 100 {
		b.must(b.SetVringKick(0, kick))
		b.must(b.SetVringCall(0, kick))
		b.must(b.SetVringErr(0, kick))
	}
	if now := openFDs(); now != before+3 { // kick itself, call, err
		t.Errorf("%d descriptors open, %d before", now, before)
	}
	b.dev.peek(func(d *fakeDevice) {
		if len(d.starts) != 1 || !d.enabled[0] {
			t.Errorf("starts %v, enabled %v", d.starts, d.enabled)
		}
	})
	b.must(b.SetVringCall(0, -1))
	b.must(b.SetVringErr(0, -1))
	b.dev.peek(func(d *fakeDevice) {
		if c := d.running[0]; c.CallFD != -1 || c.ErrFD != -1 {
			t.Errorf("descriptors %+v", c)
		}
	})
}

func TestNEG09_C45_NoDescriptorForm(t *testing.T) {
	b, addr := acked(t, 2)
	b.must(b.SetVringCall(0, -1))
	b.must(b.SetVringCall(1, -1))
	b.must(b.SetVringErr(0, -1))
	fd := eventFD(t)
	before := openFDs()
	for range 3 {
		if err := b.SetVringKick(0, -1); !isRefused(err) {
			t.Errorf("kick without a descriptor: %v", err)
		}
		for _, req := range []vhostuser.Request{vhostuser.ReqSetVringKick, vhostuser.ReqSetVringCall, vhostuser.ReqSetVringErr} {
			if err := b.DoAck(req, payload64(0)); !isRefused(err) {
				t.Errorf("%v without the announced descriptor: %v", req, err)
			}
			if err := b.DoAck(req, payload64(0x100), fd); !isRefused(err) {
				t.Errorf("%v with a descriptor that bit 8 denies: %v", req, err)
			}
		}
	}
	if now := openFDs(); now > before {
		t.Errorf("%d descriptors open, %d before", now, before)
	}
	if n := b.logs.lines(); n > 3 {
		t.Errorf("%d log lines for three kinds of event:\n%s", n, b.logs)
	}
	b.must(b.SetVringNum(0, 256))
	b.must(b.SetVringAddr(addr(0)))
	b.must(b.SetVringKick(0, fd))
	b.dev.peek(func(d *fakeDevice) {
		if c, ok := d.running[0]; !ok || c.CallFD != -1 {
			t.Errorf("ring 0: %+v", c)
		}
	})
}

func TestHostileC46_EnableValue(t *testing.T) {
	b, _ := acked(t, 2)
	for _, n := range []uint32{2, 0xffffffff} {
		if err := b.DoAck(vhostuser.ReqSetVringEnable, vhostuser.VringState{Num: n}.Append(nil)); !isRefused(err) {
			t.Errorf("enable %d: %v", n, err)
		}
	}
}

// TestNTF10_FlagsOfReceivedDescriptors: the flags live in the open file
// description that the front-end shares.
func TestNTF10_FlagsOfReceivedDescriptors(t *testing.T) {
	b, addr := acked(t, 2)
	for _, flags := range []int{0, unix.EFD_NONBLOCK, unix.EFD_SEMAPHORE} {
		fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|flags)
		b.must(err)
		want, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
		b.must(err)
		b.must(b.SetVringNum(0, 256))
		b.must(b.SetVringAddr(addr(0)))
		b.must(b.SetVringKick(0, fd))
		b.must(b.SetVringCall(0, fd))
		b.must(b.SetVringErr(0, fd))
		_, err = b.GetVringBase(0)
		b.must(err)
		if got, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0); err != nil || got != want {
			t.Errorf("flags %#x became %#x, %v", want, got, err)
		}
		unix.Close(fd)
	}
}
