package vhostuser_test

import (
	"errors"
	"io"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/internal/uffd"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
)

// newPostcopyBench is a negotiated session that offers postcopy.
func newPostcopyBench(t *testing.T) *bench {
	t.Helper()
	if err := uffd.Probe(); err != nil {
		testmain.Skip(t, "postcopy does not work here: %v", err)
	}
	return newBench(t, newDevice(4), func(o *vhostuser.Options) { o.Postcopy = true }).negotiate()
}

// advise returns the userfaultfd, which the test's end closes.
func (b *bench) advise() int {
	b.t.Helper()
	fd, err := b.PostcopyAdvise()
	b.must(err)
	if fd < 0 {
		b.t.Fatalf("POSTCOPY_ADVISE brings no descriptor; %s", b.logs)
	}
	b.t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// arriving is a session that listens, with memory of which the origin brings pages.
func (b *bench) arriving(m *frontend.Memory, edit func(*frontend.Origin)) *frontend.Origin {
	b.t.Helper()
	origin, err := m.Leave()
	b.must(err)
	b.t.Cleanup(func() { origin.Close() })
	if edit != nil {
		edit(origin)
	}
	fd, err := b.PostcopyAdvise()
	b.must(err)
	b.must(b.PostcopyListen())
	specs, fds := m.Table()
	bases, err := b.SetMemTableListening(specs, fds)
	b.must(err)
	origin.Serve(fd, bases)
	b.must(b.PostcopyAck(vhostuser.ReqSetMemTable, 0))
	b.must(b.Sync())
	return origin
}

func TestPostcopyIsOfferedOnRequest(t *testing.T) {
	for _, want := range []bool{false, true} {
		if want && uffd.Probe() != nil {
			testmain.Skip(t, "postcopy does not work here: %v", uffd.Probe())
		}
		b := newBench(t, newDevice(2), func(o *vhostuser.Options) { o.Postcopy = want })
		p, err := b.GetProtocolFeatures()
		b.must(err)
		if got := p&vhostuser.ProtoPagefault != 0; got != want {
			t.Errorf("offered: %v, asked for: %v", got, want)
		}
	}
}

// children counts the processes that this one started.
func children(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range entries {
		status, err := os.ReadFile("/proc/" + e.Name() + "/status")
		if err == nil && strings.Contains(string(status), "PPid:\t"+strconv.Itoa(os.Getpid())+"\n") {
			n++
		}
	}
	return n
}

// TestPostcopyOrder is what QEMU does, with a second table and the end.
func TestPostcopyOrder(t *testing.T) {
	b := newPostcopyBench(t)
	m := newMemory(t, 1<<20, 4<<20)
	origin := b.arriving(m, func(o *frontend.Origin) { o.Delay = 5 * time.Millisecond })
	b.startRing(m, 0, 7)
	b.startRing(m, 1, 9)
	b.eventually("the rings' pages are there and both run", func() bool { return b.dev.isRunning(0) && b.dev.isRunning(1) })
	if origin.Faults.Load() == 0 {
		t.Error("no fault: the rings' pages were not fetched")
	}
	b.dev.peek(func(d *fakeDevice) {
		if d.running[0].Via == nil {
			t.Error("a ring runs that does not ask whether memory has arrived")
		}
		if d.running[0].Base != 7 || d.running[1].Base != 9 {
			t.Errorf("bases %v and %v", d.running[0].Base, d.running[1].Base)
		}
	})
	b.must(origin.Deliver())
	b.must(b.PostcopyEnd())
	b.eventually("the helper has ended", func() bool { return children(t) == 0 })
	b.shareMemory(m) // under rings that still ask whether memory has arrived
	b.rings(true, false, 0, 1)
	for i, want := range []uint32{7, 9} {
		if base, err := b.GetVringBase(i); err != nil || base != want {
			t.Errorf("ring %d: base %d, %v", i, base, err)
		}
	}
	b.startRing(m, 0, 7)
	b.must(b.Sync())
	b.dev.peek(func(d *fakeDevice) {
		if c, ok := d.running[0]; !ok || c.Via != nil {
			t.Errorf("after the end the ring runs %v, via %v", ok, c.Via)
		}
	})
	b.shareMemory(m) // in the usual form again
	b.regions(2)
	b.must(origin.Err())
}

func (b *bench) eventually(what string, ok func() bool) {
	b.t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			b.t.Fatalf("not in time: %s; log: %s", what, b.logs)
		}
	}
}

// TestPostcopySlots shares memory region by region, some of it twice as QEMU before 8.1 does.
func TestPostcopySlots(t *testing.T) {
	b := newPostcopyBench(t)
	m := newMemory(t, 1<<20, 1<<20, 1<<20)
	origin, err := m.Leave()
	b.must(err)
	defer origin.Close()
	fd, err := b.PostcopyAdvise()
	b.must(err)
	b.must(b.PostcopyListen())
	specs, fds := m.Table()
	var bases []uint64
	for _, i := range []int{0, 1, 0} {
		base, err := b.AddMemRegListening(specs[i], fds[i])
		b.must(err)
		bases = append(bases, base)
	}
	if bases[0] != bases[2] || bases[0] == bases[1] {
		t.Errorf("addresses %#x, the first and the third are of one region", bases)
	}
	b.must(b.PostcopyAck(vhostuser.ReqAddMemReg, 0))
	b.regions(2)
	third, err := b.AddMemRegListening(specs[2], fds[2])
	b.must(err)
	origin.Serve(fd, []uint64{bases[0], bases[1], third})
	b.must(b.PostcopyAck(vhostuser.ReqAddMemReg, 0))
	b.regions(3)
	b.startRing(m, 0, 0)
	b.eventually("the ring runs", func() bool { return b.dev.isRunning(0) })
	b.must(b.DoAck(vhostuser.ReqRemMemReg, vhostuser.AppendMemReg(nil, specs[1])))
	b.must(b.PostcopyAck(vhostuser.ReqRemMemReg, 0))
	b.regions(2)
	b.rings(true, false, 0)
	b.must(origin.Deliver())
	b.must(b.PostcopyEnd())
	b.must(b.AddMemReg(specs[1], fds[1]))
	b.regions(3)
}

// TestC84_PostcopyOrders sends the messages in wrong orders. The connection survives unless the front-end would wait for an answer
// that cannot be given.
func TestC84_PostcopyOrders(t *testing.T) {
	t.Run("LISTEN and END before ADVISE", func(t *testing.T) {
		b := newPostcopyBench(t)
		if err := b.PostcopyListen(); !isRefused(err) {
			t.Errorf("LISTEN: %v", err)
		}
		if err := b.PostcopyEnd(); !isRefused(err) {
			t.Errorf("END: %v", err)
		}
	})
	t.Run("ADVISE and LISTEN twice, END twice", func(t *testing.T) {
		b := newPostcopyBench(t)
		b.advise()
		if fd, err := b.PostcopyAdvise(); err != nil || fd >= 0 {
			t.Errorf("second ADVISE: descriptor %d, %v", fd, err)
		}
		if err := b.PostcopyEnd(); !isRefused(err) {
			t.Errorf("END before LISTEN: %v", err)
		}
		b.must(b.PostcopyListen())
		if err := b.PostcopyListen(); !isRefused(err) {
			t.Errorf("second LISTEN: %v", err)
		}
		b.must(b.PostcopyEnd())
		if err := b.PostcopyEnd(); !isRefused(err) {
			t.Errorf("second END: %v", err)
		}
		for range 3 {
			b.advise() // another migration
			b.must(b.PostcopyListen())
			b.must(b.PostcopyEnd())
		}
		if fd, err := b.PostcopyAdvise(); err != nil || fd >= 0 {
			t.Errorf("fifth ADVISE: descriptor %d, %v", fd, err)
		}
	})
	t.Run("LISTEN with memory", func(t *testing.T) {
		b := newPostcopyBench(t)
		m := newMemory(t, 1<<20)
		b.advise()
		b.shareMemory(m)
		if err := b.PostcopyListen(); !isRefused(err) {
			t.Errorf("LISTEN: %v", err)
		}
		b.startRing(m, 0, 0)
		b.must(b.Sync())
		if !b.dev.isRunning(0) {
			t.Error("the ring does not run")
		}
		for _, spec := range m.Regions {
			b.must(b.RemMemReg(spec.RegionSpec))
		}
		if err := b.PostcopyListen(); !isRefused(err) {
			t.Errorf("LISTEN with a started ring: %v", err)
		}
	})
	m := newMemory(t, 1<<20, 1<<20)
	specs, fds := m.Table()
	for name, violate := range map[string]func(*bench) error{
		"another message before the confirmation": func(b *bench) error { return b.SetVringNum(0, 256) },
		"END before the confirmation":             func(b *bench) error { return b.PostcopyEnd() },
		"a second table before the confirmation": func(b *bench) error {
			_, err := b.SetMemTableListening(specs, fds)
			return err
		},
		"a confirmation of another kind": func(b *bench) error { return b.PostcopyAck(vhostuser.ReqAddMemReg, 0) },
		"a confirmation that says no":    func(b *bench) error { return b.PostcopyAck(vhostuser.ReqSetMemTable, 1) },
		"the end of the connection":      func(b *bench) error { return b.Conn.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			b := newPostcopyBench(t)
			maps := mappings(t)
			b.advise()
			b.must(b.PostcopyListen())
			_, err := b.SetMemTableListening(specs, fds)
			b.must(err)
			_ = violate(b)
			if err := b.wait(); (err == nil) != (name == "the end of the connection") {
				t.Errorf("Serve returns %v", err)
			}
			if n := children(t); n != 0 {
				t.Errorf("%d helpers are left", n)
			}
			if now := mappings(t); now != maps {
				t.Errorf("%d mappings, %d before", now, maps)
			}
		})
	}
	t.Run("bad tables", func(t *testing.T) {
		overlap := specs[1]
		overlap.GPA = specs[0].GPA
		for name, table := range map[string][]guestmem.RegionSpec{"overlap": {specs[0], overlap}, "none": {}, "beyond the file": {{Size: 2 << 20}}} {
			b := newPostcopyBench(t)
			b.advise()
			b.must(b.PostcopyListen())
			_, err := b.SetMemTableListening(table, fds[:len(table)])
			if err == nil || b.wait() == nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

// TestPostcopyUnansweredFault: a page that never comes keeps its ring from starting and nothing else.
func TestPostcopyUnansweredFault(t *testing.T) {
	b := newPostcopyBench(t)
	m := newMemory(t, 1<<20)
	used := ringAddr(m, 0).Used - m.Regions[0].UVA
	b.arriving(m, func(o *frontend.Origin) { o.Stalled = func(gpa uint64) bool { return gpa == used&^4095 } })
	b.startRing(m, 0, 5)
	b.startRing(m, 1, 0)
	b.eventually("the other ring runs", func() bool { return b.dev.isRunning(1) })
	b.rings(false, false, 0)
	runtime.GC() // would not return if a thread of this process waited for the page
	if base, err := b.GetVringBase(0); err != nil || base != 5 {
		t.Errorf("base %d, %v", base, err)
	}
	begin := time.Now()
	b.Conn.Close()
	if err := b.wait(); err != nil {
		t.Errorf("Serve returns %v", err)
	}
	if took := time.Since(begin); took > 3*time.Second {
		t.Errorf("the end took %v", took)
	}
	if n := children(t); n != 0 {
		t.Errorf("%d helpers are left", n)
	}
	if data, err := unix.Seek(m.Regions[0].FD, int64(used&^4095), unix.SEEK_DATA); err == nil && data == int64(used&^4095) {
		t.Error("the page exists: somebody touched it")
	}
}

// TestPostcopyEndBringsWaitingRings: the front-end knows that all is there.
func TestPostcopyEndBringsWaitingRings(t *testing.T) {
	b := newPostcopyBench(t)
	m := newMemory(t, 1<<20)
	b.arriving(m, func(o *frontend.Origin) { o.Stalled = func(uint64) bool { return true } })
	b.startRing(m, 0, 0)
	b.must(b.Sync())
	b.rings(false, false, 0)
	b.must(b.PostcopyEnd())
	b.rings(true, false, 0)
}

// TestPostcopyTableUnderRings replaces the table while memory arrives: running rings wait until their pages are there again.
func TestPostcopyTableUnderRings(t *testing.T) {
	b := newPostcopyBench(t)
	m := newMemory(t, 1<<20)
	origin := b.arriving(m, nil)
	b.startRing(m, 0, 0)
	b.startRing(m, 1, 0)
	b.eventually("both run", func() bool { return b.dev.isRunning(0) && b.dev.isRunning(1) })
	specs, fds := m.Table()
	_, err := b.SetMemTableListening(specs, fds)
	b.must(err)
	b.must(b.PostcopyAck(vhostuser.ReqSetMemTable, 0)) // all pages of the rings are in the file: no fault at the new address
	b.eventually("neither waits", func() (ok bool) {
		b.dev.peek(func(d *fakeDevice) { ok = d.swaps > 2 && !d.parked[0] && !d.parked[1] })
		return ok
	})
	b.must(origin.Err())
}

// TestPostcopyHelperEnds ends the connection when the helper dies.
func TestPostcopyHelperEnds(t *testing.T) {
	b := newPostcopyBench(t)
	b.advise()
	entries, _ := os.ReadDir("/proc")
	for _, e := range entries {
		cmd, err := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		status, _ := os.ReadFile("/proc/" + e.Name() + "/status")
		if err == nil && strings.HasPrefix(string(cmd), "vhostd-postcopy") && strings.Contains(string(status), "PPid:\t"+strconv.Itoa(os.Getpid())+"\n") {
			pid, _ := strconv.Atoi(e.Name())
			b.must(unix.Kill(pid, unix.SIGKILL))
		}
	}
	if err := b.wait(); err == nil || !strings.Contains(err.Error(), "has ended") {
		t.Errorf("Serve returns %v", err)
	}
	if _, err := b.Recv(time.Second); !errors.Is(err, io.EOF) {
		t.Errorf("front-end reads %v", err)
	}
}
