package cases

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// guest is a front-end with a running queue pair and the program that serves it.
type guest struct {
	*frontend.Pair
	t   testing.TB
	d   *vhostd
	c   *frontend.Client
	mem *frontend.Memory

	pages []uint64 // of scratch
}

// ordinary are the options of most cases: rings of 256, no offloads.
func ordinary() frontend.Options { return frontend.Options{Features: plain} }

// newGuest serves the network and runs pair 0 on it.
func newGuest(t testing.TB, network string, opts frontend.Options, flags ...string) *guest {
	t.Helper()
	return serve(t, network, flags...).guest(memory(t), opts)
}

func (d *vhostd) guest(mem *frontend.Memory, opts frontend.Options) *guest {
	d.t.Helper()
	c := d.connect(mem, opts)
	g := &guest{t: d.t, d: d, c: c, mem: mem, Pair: pair(d.t, c, 0)}
	must(d.t, c.Sync())
	return g
}

// alloc is n bytes of guest memory.
func (g *guest) alloc(n uint64) (gpa uint64) {
	g.t.Helper()
	at, err := g.mem.Alloc(0, n, 64)
	must(g.t, err)
	return at
}

// put stores a frame to send, behind an empty virtio header, in guest memory of its own.
func (g *guest) put(frame []byte) driver.Buf {
	g.t.Helper()
	at := g.alloc(uint64(virtio.NetHdrLen + len(frame)))
	copy(g.mem.Bytes(at+virtio.NetHdrLen, uint64(len(frame))), frame)
	return driver.Buf{Addr: at, Len: uint32(virtio.NetHdrLen + len(frame))}
}

// room is a receive buffer of n bytes.
func (g *guest) room(n int) driver.Buf {
	g.t.Helper()
	return driver.Buf{Addr: g.alloc(uint64(n)), Len: uint32(n), Write: true}
}

// add stages a chain of the buffers.
func (g *guest) add(q *frontend.Queue, bufs ...driver.Buf) (head uint16) {
	g.t.Helper()
	head, err := q.Ring.AddChain(bufs)
	must(g.t, err)
	return head
}

// usedEntry is an entry of the used ring.
type usedEntry struct {
	head    uint16
	written uint32
}

// take waits for n chains that add staged, and publishes them first.
func (g *guest) take(q *frontend.Queue, n int) (entries []usedEntry) {
	g.t.Helper()
	must(g.t, q.Flush())
	for len(entries) < n {
		head, written, ok := q.Ring.GetUsed()
		if !ok {
			must(g.t, q.Ring.Err())
			if err := q.WaitUsed(patience); err != nil {
				g.t.Fatalf("%d of %d chains used: %v", len(entries), n, err)
			}
			continue
		}
		entries = append(entries, usedEntry{head, written})
	}
	return entries
}

// returned is take for chains that must come back in order and with nothing written.
func (g *guest) returned(q *frontend.Queue, heads ...uint16) {
	g.t.Helper()
	for i, e := range g.take(q, len(heads)) {
		if e != (usedEntry{heads[i], 0}) {
			g.t.Fatalf("used entry %d is %+v, want head %d with nothing written", i, e, heads[i])
		}
	}
}

// dropped demands that ring i has counted exactly n packets under the reason.
func (g *guest) dropped(i int, reason string, n int) {
	g.t.Helper()
	var got uint64
	end := time.Now().Add(patience)
	for got = g.d.ring(i).Drops[reason]; got != uint64(n) && time.Now().Before(end); got = g.d.ring(i).Drops[reason] {
		time.Sleep(5 * time.Millisecond)
	}
	if got != uint64(n) {
		g.t.Fatalf("ring %d: %d packets dropped as %s, want %d; all drops: %v", i, got, reason, n, g.d.ring(i).Drops)
	}
}

// broken demands that the program reports the ring as broken, by the err descriptor and in the status.
func (g *guest) broken(q *frontend.Queue) {
	g.t.Helper()
	if err := q.WaitErr(patience); err != nil {
		g.t.Fatalf("ring %d: no err signal: %v", q.Index, err)
	}
	for _, r := range g.d.status().Rings {
		if r.Index == q.Index && r.Broken == "" {
			g.t.Fatalf("ring %d is not broken in the status: %+v", q.Index, r)
		}
	}
}

// restart stops the pair and starts it with zeroed rings, as a driver does that was reset.
func (g *guest) restart() {
	g.t.Helper()
	_, _, err := g.c.Stop(0)
	must(g.t, err)
	g.RX.Ring.Reset(0)
	g.TX.Ring.Reset(0)
	_, err = g.c.StartPair(0)
	must(g.t, err)
	must(g.t, g.c.Sync())
}

// raw is a queue on which nothing is kept in order: descriptors and heads are what the test writes. Nothing may be outstanding.
type raw struct {
	g    *guest
	q    *frontend.Queue
	from uint16 // position of the next used entry
}

func (g *guest) raw(q *frontend.Queue) *raw {
	g.t.Helper()
	if n := q.Ring.Outstanding(); n != 0 {
		g.t.Fatalf("ring %d: %d chains are outstanding", q.Index, n)
	}
	return &raw{g: g, q: q, from: q.Ring.PeekUsedIdx()}
}

// desc writes descriptor i.
func (r *raw) desc(i uint16, b driver.Buf, flags, next uint16) {
	if b.Write {
		flags |= driver.DescFWrite
	}
	r.q.Ring.PokeDesc(i, b.Addr, b.Len, flags, next)
}

// offer publishes heads and kicks.
func (r *raw) offer(heads ...uint16) {
	r.g.t.Helper()
	for _, h := range heads {
		r.q.Ring.PokeHead(h)
	}
	r.q.Ring.Publish()
	must(r.g.t, r.q.Kick())
}

// take waits for n used entries.
func (r *raw) take(n int) (entries []usedEntry) {
	r.g.t.Helper()
	for end := time.Now().Add(patience); int(r.q.Ring.PeekUsedIdx()-r.from) < n; time.Sleep(20 * time.Microsecond) {
		if time.Now().After(end) {
			r.g.t.Fatalf("ring %d: used index %d, want %d more than %d", r.q.Index, r.q.Ring.PeekUsedIdx(), n, r.from)
		}
	}
	for ; n > 0; n-- {
		id, written := r.q.Ring.PeekUsed(r.from)
		entries = append(entries, usedEntry{uint16(id), written})
		r.from++
	}
	return entries
}

// returned is take for chains that must come back in order and with nothing written.
func (r *raw) returned(heads ...uint16) {
	r.g.t.Helper()
	for i, e := range r.take(len(heads)) {
		if e != (usedEntry{heads[i], 0}) {
			r.g.t.Fatalf("used entry %d is %+v, want head %d with nothing written", i, e, heads[i])
		}
	}
}

// done gives the queue back to the driver's bookkeeping. Every chain came back.
func (r *raw) done() {
	r.g.t.Helper()
	if idx := r.q.Ring.PeekUsedIdx(); idx != r.q.Ring.AvailIdx() {
		r.g.t.Fatalf("ring %d: used index %d, available index %d: chains were lost", r.q.Index, idx, r.q.Ring.AvailIdx())
	}
	r.q.Ring.Attach(r.from)
}

// sent demands that the frame comes back from the echo network with these marks, num_buffers aside.
func (g *guest) sent(hdr virtio.NetHdr, frame []byte, layout frontend.Layout, want virtio.NetHdr) {
	g.t.Helper()
	must(g.t, g.SendTx(hdr, frame, layout))
	got, back := g.recv()
	if got.NumBuffers = 0; got != want {
		g.t.Fatalf("frame of %d bytes came back with header %+v, want %+v", len(frame), got, want)
	}
	if !bytes.Equal(back, swapped(frame)) {
		g.t.Fatalf("frame of %d bytes came back as %d bytes:\n% x\nwant\n% x", len(frame), len(back), head(back), head(swapped(frame)))
	}
}

// recv waits for the next frame and gives its buffers back to the device.
func (g *guest) recv() (virtio.NetHdr, []byte) {
	g.t.Helper()
	hdr, frame, err := g.RecvFrame(patience)
	must(g.t, err)
	_, err = g.PostRx(g.RX.Ring.Size())
	must(g.t, err)
	return hdr, frame
}

// none demands that no frame comes for a while.
func (g *guest) none() {
	g.t.Helper()
	time.Sleep(quiet)
	if hdr, frame, ok, err := g.TryRecv(); ok || err != nil {
		g.t.Fatalf("unexpected frame of %d bytes, header %+v, error %v", len(frame), hdr, err)
	}
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

// idle demands that the program uses less than the given share of a processor for a while. It may take some time to settle.
func (d *vhostd) idle(share float64, while time.Duration) {
	d.t.Helper()
	var got float64
	for range 5 {
		before, begin := d.cpu(), time.Now()
		time.Sleep(while)
		got = float64(d.cpu()-before) / float64(time.Since(begin))
		if got < share {
			return
		}
	}
	d.t.Errorf("the program uses %.0f %% of a processor, want less than %.0f %%", 100*got, 100*share)
}

// signals takes the count of an eventfd.
func signals(t testing.TB, fd int) uint64 {
	t.Helper()
	var b [8]byte
	_, err := unix.Read(fd, b[:])
	if err == unix.EAGAIN {
		return 0
	}
	must(t, err)
	return binary.NativeEndian.Uint64(b[:])
}

// scratch is a piece of at most a page of guest memory, the same for the same number.
func (g *guest) scratch(i int, n uint64) (gpa uint64) {
	g.t.Helper()
	for len(g.pages) <= i {
		g.pages = append(g.pages, g.alloc(4096))
	}
	if n > 4096 {
		g.t.Fatalf("scratch memory has pages of 4096 bytes, not %d", n)
	}
	return g.pages[i]
}

// regionAt describes the i-th memory region, at a guest address.
func regionAt(gpa, size uint64, i int) guestmem.RegionSpec {
	return guestmem.RegionSpec{GPA: gpa, Size: size, UVA: 0x7d00_0000_0000 + uint64(i)<<36}
}
