package hostile

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// isZero demands n bytes of zeros in the file.
func (a *attack) isZero(fd int, n uint64) {
	a.t.Helper()
	b := make([]byte, n)
	got, err := unix.Pread(fd, b, 0)
	must(a.t, err)
	if uint64(got) != n {
		a.t.Fatalf("a file of %d bytes, want %d", got, n)
	}
	for i, v := range b {
		if v != 0 {
			a.t.Fatalf("byte %d is %#x", i, v)
		}
	}
}

var kickRows = []row{
	{"A21", "kick_before_anybody_looks", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			for range 6 {
				c, p := a.running(frontend.Options{Features: f})
				_, _, err := c.Stop(0)
				must(a.t, err)
				_, err = p.PostRx(1)
				must(a.t, err)
				must(a.t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct)) // kicked while stopped
				drain(p.TX.KickFD)
				drain(p.RX.KickFD)
				a.pair(c, 0)
				_, _, err = p.RecvFrame(patience)
				must(a.t, err)
				must(a.t, p.DrainTx(patience))
				must(a.t, c.Close())
			}
		})
	}},
	{"A22", "socket_closed_while_workers_sleep", func(a *attack) {
		for range 5 {
			c, p := a.running(frontend.Options{})
			a.flows(p)
			time.Sleep(5 * time.Millisecond)
			must(a.t, c.Close())
		}
		a.settled("evil")
		before, begin := a.cpu(), time.Now()
		time.Sleep(300 * time.Millisecond)
		if share := float64(a.cpu()-before) / float64(time.Since(begin)); share > 0.6 { // the good guest takes some
			a.t.Errorf("%.0f %% of a processor after the end of a connection", 100*share)
		}
	}},
	{"C42", "another_kick_descriptor", func(a *attack) {
		c, p := a.running(frontend.Options{})
		before := a.files()
		for range 50 {
			old := p.TX.KickFD
			fresh, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
			must(a.t, err)
			p.TX.KickFD = fresh
			must(a.t, c.SetVringKick(1, fresh))
			unix.Close(old)
			a.flows(p)
		}
		if n := a.files(); n > before {
			a.t.Errorf("%d descriptors are open, %d were", n, before)
		}
	}},
	{"C43", "kick_descriptors_of_any_kind", func(a *attack) {
		c, p := a.running(frontend.Options{})
		r, w := a.pipe()
		_ = w.Close()
		regular, err := os.CreateTemp(a.t.TempDir(), "")
		must(a.t, err)
		defer regular.Close()
		for what, fd := range map[string]int{
			"a pipe whose other end is closed": int(r.Fd()), "a regular file": int(regular.Fd()), "memory": c.Mem.Regions[0].FD,
		} {
			a.refused(what, c.SetVringKick(1, fd))
			a.refused(what, c.SetVringCall(1, fd))
			a.flows(p)
		}
		must(a.t, c.Close())
		for what, flags := range map[string]int{"blocking": 0, "semaphore": unix.EFD_SEMAPHORE, "semaphore, no waiting": unix.EFD_SEMAPHORE | unix.EFD_NONBLOCK, "full": unix.EFD_NONBLOCK} {
			c, p := a.running(frontend.Options{})
			fd := a.eventfd(flags)
			must(a.t, c.SetVringKick(1, fd))
			if what == "full" {
				_, err := unix.Write(fd, word(^uint64(1)))
				must(a.t, err)
			}
			status, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
			must(a.t, err)
			for range 5 {
				must(a.t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
				_, _ = unix.Write(fd, word(1))
				a.receives(p, frameOf(60, 1))
			}
			if now, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0); err != nil || now != status {
				a.t.Errorf("%s: flags %#o, were %#o, %v", what, now, status, err)
			}
			must(a.t, c.Close())
		}
	}},
	{"C44", "call_descriptors_that_are_full", func(a *attack) {
		for _, flags := range []int{unix.EFD_NONBLOCK, 0} {
			c, p := a.running(frontend.Options{})
			full := a.eventfd(flags)
			_, err := unix.Write(full, binary.NativeEndian.AppendUint64(nil, ^uint64(1)))
			must(a.t, err)
			for i := range 2 {
				must(a.t, c.SetVringCall(i, full))
			}
			for range 10 {
				_, err := p.PostRx(1)
				must(a.t, err)
				must(a.t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
				eventually(a.t, "the frame comes back without a call", func() bool {
					_, _, ok, err := p.TryRecv()
					must(a.t, err)
					return ok
				})
			}
			must(a.t, c.Close())
		}
	}},
	{"C45", "descriptor_announced_and_missing_or_the_reverse", func(a *attack) {
		c, p := a.running(frontend.Options{})
		before := a.files()
		for _, req := range []vhostuser.Request{vhostuser.ReqSetVringKick, vhostuser.ReqSetVringCall, vhostuser.ReqSetVringErr} {
			a.refused(fmt.Sprint(req, " without a descriptor"), c.DoAck(req, word(1)))
			a.refused(fmt.Sprint(req, " with one that is not announced"), c.DoAck(req, word(vhostuser.VringNoFD|1), p.TX.ErrFD))
			a.refused(fmt.Sprint(req, " with two"), c.DoAck(req, word(1), p.TX.ErrFD, p.TX.ErrFD))
		}
		if n := a.files(); n > before {
			a.t.Errorf("%d descriptors are open, %d were", n, before)
		}
		a.flows(p)
		must(a.t, c.SetVringCall(1, -1))
		must(a.t, c.SetVringCall(1, p.TX.CallFD))
		a.flows(p)
	}},
}

// drain takes the count of an eventfd.
func drain(fd int) {
	var b [8]byte
	_, _ = unix.Read(fd, b[:])
}

// cpu is the processor time that the program has used.
func (d *vhostd) cpu() (total time.Duration) {
	d.t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", d.PID()))
	must(d.t, err)
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			continue // the thread has ended
		}
		var ns int64
		if _, err := fmt.Sscan(string(text), &ns); err != nil {
			d.t.Fatalf("%s: %v", file, err)
		}
		total += time.Duration(ns)
	}
	return total
}
