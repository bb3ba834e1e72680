package vhostuser_test

import (
	"bytes"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
)

const logged = testFeatures | bit30 | virtio.FVhostLogAll

// logFile is a file for a dirty log.
func logFile(t testing.TB, size int64) int {
	t.Helper()
	fd, err := unix.MemfdCreate("vhost-log-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	return fd
}

func contentOf(t testing.TB, fd, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	if _, err := unix.Pread(fd, b, 0); err != nil {
		t.Fatal(err)
	}
	return b
}

// mark is what a worker does, seen by the race detector.
func (d *fakeDevice) mark(gpa, n uint64) {
	d.peek(func(d *fakeDevice) { d.log.Mark(gpa, n) })
}

// deviceLog is the log that the device has.
func (d *fakeDevice) deviceLog() (l *guestmem.Log) {
	d.peek(func(d *fakeDevice) { l = d.log })
	return l
}

func (d *fakeDevice) ringLog(i int) (l vhostuser.RingLog) {
	d.peek(func(d *fakeDevice) { l = d.running[i].Log })
	return l
}

// TestMigration is the order of QEMU (migout.txt) on running rings, and MIG-05: rings and
// positions stay, marks begin and end.
func TestMigration(t *testing.T) {
	dev := newDevice(2)
	b := newBench(t, dev).negotiate()
	b.NeedReply = true
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	b.startRing(mem, 0, 0)
	b.startRing(mem, 1, 0)
	b.must(b.SetVringEnable(0, true))
	for range 20 {
		b.must(b.SetLogBase(4096, 0, logFile(t, 4096)))
		if dev.deviceLog() != nil {
			t.Fatal("marks are made before LOG_ALL")
		}
		b.must(b.SetFeatures(logged))
		if dev.deviceLog() == nil {
			t.Fatal("no marks with LOG_ALL")
		}
		for i := range 2 {
			a := ringAddr(mem, i)
			a.Flags, a.Log = 1, 0x1000*uint64(i)+0x240
			b.must(b.SetVringAddr(a))
			if got, want := dev.ringLog(i), (vhostuser.RingLog{On: true, Used: a.Log}); got != want {
				t.Fatalf("ring %d: %+v, want %+v", i, got, want)
			}
		}
		for i := range 2 {
			b.must(b.SetVringAddr(ringAddr(mem, i)))
			if dev.ringLog(i).On {
				t.Fatal("the ring is marked without the flag")
			}
		}
		b.must(b.SetFeatures(logged &^ virtio.FVhostLogAll))
		if dev.deviceLog() != nil {
			t.Fatal("marks are made without LOG_ALL")
		}
	}
	dev.peek(func(d *fakeDevice) {
		if len(d.starts) != 2 || len(d.running) != 2 || len(d.acked) != 1 {
			t.Errorf("starts %v, features %v", d.starts, d.acked)
		}
	})
	// LOG_ALL stays while rings stop and start again.
	b.must(b.SetFeatures(logged))
	_, err := b.GetVringBase(1)
	b.must(err)
	b.startRing(mem, 1, 7)
	if dev.deviceLog() == nil {
		t.Error("the log was lost with a ring")
	}
	b.checkDevice()
}

// TestPackedRingLog: descriptors are marked where they are, the event structure where the
// front-end says.
func TestPackedRingLog(t *testing.T) {
	dev := newDevice(2)
	dev.features |= virtio.FRingPacked
	b := newBench(t, dev).negotiate()
	mem := newMemory(t, 1<<20, 1<<20)
	b.shareMemory(mem)
	b.must(b.SetVringNum(0, 256))
	a := ringAddr(mem, 0)
	r := mem.Regions[1]
	a.Desc, a.Flags, a.Log = r.UVA+0x2000, 1, 0x5040
	b.must(b.SetVringAddr(a))
	b.must(b.SetVringKick(0, eventFD(t)))
	b.must(b.Sync())
	if got, want := dev.ringLog(0), (vhostuser.RingLog{On: true, Used: 0x5040, Desc: r.GPA + 0x2000}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	b.checkDevice()
}

// TestLogPerPass_C74: a fresh log while rings run, as cloud-hypervisor does for each pass; the old one
// is unmapped by the reply, and one reply of 16 bytes comes (A17), with and without need_reply.
func TestLogPerPass_C74(t *testing.T) {
	dev := newDevice(2)
	b := newBench(t, dev).negotiate()
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	b.startRing(mem, 0, 0)
	b.must(b.SetLogBase(64, 8, logFile(t, 4096)))
	b.must(b.SetFeatures(logged))
	b.must(b.Sync())
	fds, maps := openFDs(), logMappings(t)
	for i := range 200 {
		b.NeedReply = i%2 == 0
		fd := logFile(t, 4096)
		b.must(b.SetLogBase(64, 8, fd))
		dev.mark(0, 1)
		if got := contentOf(t, fd, 4096); got[8] != 1 {
			t.Fatalf("pass %d: the mark is not in the new log", i)
		}
		b.must(b.Sync()) // a reply too many comes before this one's
		unix.Close(fd)
	}
	if n, m := openFDs(), logMappings(t); n != fds || m != maps {
		t.Errorf("%d descriptors and %d mappings of logs, %d and %d before", n, m, fds, maps)
	}
	b.checkDevice()
}

func logMappings(t *testing.T) int {
	t.Helper()
	return countMaps(t, "memfd:vhost-log-test")
}

// TestRefusedLog_A1_A12: the answer is a non-zero u64, the log in use stays, and without one
// logging does not begin.
func TestRefusedLog_A1_A12(t *testing.T) {
	dev := newDevice(2)
	b := newBench(t, dev).negotiate()
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	b.startRing(mem, 0, 0)
	fd := logFile(t, 0x10000)
	refusals := func() {
		t.Helper()
		for _, tt := range []struct{ size, offset uint64 }{{0, 0}, {^uint64(0), 1}, {^uint64(0) - 0xfff, 0x2000}, {0x10000, 1}, {0x10001, 0}, {1 << 40, 0}} {
			for _, b.NeedReply = range []bool{false, true} {
				if err := b.SetLogBase(tt.size, tt.offset, fd); !isRefused(err) {
					t.Errorf("size %#x, offset %#x: %v", tt.size, tt.offset, err)
				}
				b.must(b.Sync())
			}
		}
		for _, f := range []int{eventFD(t)} {
			if err := b.SetLogBase(64, 0, f); !isRefused(err) {
				t.Errorf("an eventfd: %v", err)
			}
		}
		if err := b.DoAck(vhostuser.ReqSetLogBase, make([]byte, 16)); !isRefused(err) {
			t.Errorf("no descriptor: %v", err)
		}
	}
	refusals()
	if err := b.SetFeatures(logged); !isRefused(err) {
		t.Errorf("LOG_ALL after a refused log: %v", err)
	}
	b.must(b.SetLogBase(0x10000, 0, fd))
	b.must(b.SetFeatures(logged))
	kept := dev.deviceLog()
	refusals()
	if dev.deviceLog() != kept {
		t.Error("a refused log changed the one in use")
	}
	b.must(b.SetFeatures(logged)) // again, as for another pair
	b.checkDevice()
}

// TestLateLog: QEMU starts the rings of a guest that reboots during a migration before it
// brings the log. Nobody knows what was written in between, so all pages are marked.
func TestLateLog(t *testing.T) {
	for _, early := range []bool{false, true} { // is a log there that the front-end does not read any more?
		dev := newDevice(2)
		b := newBench(t, dev).negotiate()
		b.NeedReply = true
		mem := newMemory(t, 1<<20)
		b.shareMemory(mem)
		if early {
			b.must(b.SetLogBase(64, 0, logFile(t, 64)))
		}
		b.must(b.SetFeatures(logged))
		b.startRing(mem, 0, 0)
		fd := logFile(t, 64)
		b.must(b.SetLogBase(64, 0, fd))
		if got := contentOf(t, fd, 64); !bytes.Equal(got[:32], bytes.Repeat([]byte{0xff}, 32)) || got[32] != 0 {
			t.Errorf("log %x", got)
		}
		fd = logFile(t, 64)
		b.must(b.SetLogBase(64, 0, fd))
		if got := contentOf(t, fd, 64); !bytes.Equal(got, make([]byte, 64)) {
			t.Errorf("the next log: %x", got)
		}
		b.checkDevice()
	}
}

// TestSmallLog_C72: one line tells of pages beyond the log.
func TestSmallLog_C72(t *testing.T) {
	dev := newDevice(2)
	b := newBench(t, dev).negotiate()
	b.must(b.SetLogBase(1, 0, logFile(t, 64)))
	b.must(b.SetFeatures(logged))
	b.must(b.Sync())
	dev.mark(7*4096, 2*4096)
	b.must(b.SetLogBase(1, 0, logFile(t, 64)))
	if b.logs.lines() != 1 || !strings.Contains(b.logs.String(), "pages=1") {
		t.Errorf("log lines: %s", b.logs)
	}
	b.checkDevice()
}

func TestSetLogFD(t *testing.T) {
	dev := newDevice(2)
	b := newBench(t, dev).negotiate()
	b.NeedReply = true
	b.must(b.SetLogFD(eventFD(t)))
	fds := openFDs()
	for range 100 {
		b.must(b.SetLogFD(eventFD(t)))
	}
	if n := openFDs(); n != fds+100 { // the test's own
		t.Errorf("%d descriptors, %d before", n, fds)
	}
	var pipe [2]int
	b.must(unix.Pipe2(pipe[:], unix.O_CLOEXEC))
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	if err := b.SetLogFD(pipe[1]); !isRefused(err) {
		t.Errorf("a pipe: %v", err)
	}
	b.checkDevice()
}

func TestLogAddress(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	b.NeedReply = true
	mem := newMemory(t, 1<<20)
	b.shareMemory(mem)
	a := ringAddr(mem, 0)
	a.Log = ^uint64(0)
	b.must(b.SetVringAddr(a)) // without the flag it means nothing
	a.Flags = 1
	if err := b.SetVringAddr(a); !isRefused(err) {
		t.Errorf("a used ring beyond 64 bits: %v", err)
	}
}
