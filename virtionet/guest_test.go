package virtionet

import (
	"bytes"
	"encoding/binary"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// poison fills guest buffers, so that stray writes show.
const poison = 0xa5

// pattern is a frame of n bytes of an experimental protocol, different for each seed.
func pattern(n, seed int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8 + seed*31 + 1)
	}
	if n >= 14 {
		copy(b[12:], []byte{0x88, 0xb5})
	}
	return b
}

func plain(n, seed int) frame { return frame{data: pattern(n, seed)} }

// raw is a frame as the driver lays it out.
func (r *rig) raw(h virtio.NetHdr, data []byte) []byte {
	b := make([]byte, r.o.features.NetHdrLen(), 12+len(data))
	h.Encode(b)
	return append(b, data...)
}

// place puts b into guest memory that no earlier call used lately.
func (r *rig) place(b []byte) (gpa uint64) {
	n := uint64(len(b)+63) &^ 63
	if r.next+n > rigSlots*rigBuf {
		r.next = 0
	}
	gpa = r.bufs + r.next
	r.next += n
	copy(r.mem.Bytes(gpa, uint64(len(b))), b)
	return gpa
}

// cut splits n bytes at gpa into buffers of the given lengths and one of the rest.
func cut(gpa uint64, n int, write bool, lengths ...int) (bufs []driver.Buf) {
	for _, l := range lengths {
		l = min(l, n)
		bufs = append(bufs, driver.Buf{Addr: gpa, Len: uint32(l), Write: write})
		gpa, n = gpa+uint64(l), n-l
	}
	if n > 0 {
		bufs = append(bufs, driver.Buf{Addr: gpa, Len: uint32(n), Write: write})
	}
	return bufs
}

// pieces splits n bytes at gpa into buffers of size bytes.
func pieces(gpa uint64, n, size int, write bool) []driver.Buf {
	return cut(gpa, n, write, repeat(size, n/size)...)
}

func repeat(v, n int) (s []int) {
	for range n {
		s = append(s, v)
	}
	return s
}

// post adds a chain to ring i and shows it to the device.
func (r *rig) post(i int, bufs []driver.Buf) (head uint16) {
	r.t.Helper()
	head, err := r.rings[i].AddChain(bufs)
	if err != nil {
		r.t.Fatal(err)
	}
	r.rings[i].Publish()
	return head
}

func (r *rig) postIndirect(i int, bufs []driver.Buf) (head uint16) {
	r.t.Helper()
	table := r.place(make([]byte, 16*len(bufs)))
	head, err := r.rings[i].AddIndirect(r.mem.Host(table), table, bufs)
	if err != nil {
		r.t.Fatal(err)
	}
	r.rings[i].Publish()
	return head
}

// send posts a frame without marks in one buffer.
func (r *rig) send(f frame) (head uint16) {
	r.t.Helper()
	b := r.raw(f.hdr, f.data)
	return r.post(1, cut(r.place(b), len(b), false))
}

// rxBuffer is a receive buffer as the test remembers it.
type rxBuffer struct {
	head uint16
	bufs []driver.Buf
}

// offer posts a poisoned receive chain of the given pieces, one after another in memory.
func (r *rig) offer(lengths ...int) rxBuffer {
	r.t.Helper()
	n := 0
	for _, l := range lengths {
		n += l
	}
	bufs := cut(r.place(bytes.Repeat([]byte{poison}, n)), n, true, lengths...)
	return rxBuffer{r.post(0, bufs), bufs}
}

// content is what the chain's buffers hold, in order.
func (r *rig) content(b rxBuffer) (all []byte) {
	for _, d := range b.bufs {
		all = append(all, r.mem.Bytes(d.Addr, uint64(d.Len))...)
	}
	return all
}

// untouched reports whether b is still as offer left it.
func untouched(b []byte) bool {
	for _, v := range b {
		if v != poison {
			return false
		}
	}
	return true
}

type usedEntry struct {
	head    uint16
	written uint32
}

func (r *rig) used(i int) (list []usedEntry) {
	r.t.Helper()
	for {
		head, written, ok := r.rings[i].GetUsed()
		if !ok {
			break
		}
		list = append(list, usedEntry{head, written})
	}
	if err := r.rings[i].Err(); err != nil {
		r.t.Fatal(err)
	}
	return list
}

// wantUsed checks that exactly these heads came back in order, each with length 0.
func (r *rig) wantUsed(i int, heads ...uint16) {
	r.t.Helper()
	got := r.used(i)
	if len(got) != len(heads) {
		r.t.Fatalf("ring %d: %d chains came back, want %d", i, len(got), len(heads))
	}
	for n, u := range got {
		if u.head != heads[n] || u.written != 0 {
			r.t.Fatalf("ring %d: used entry %d is head %d with length %d, want head %d with length 0", i, n, u.head, u.written, heads[n])
		}
	}
}

// wantSent checks that the network was sent exactly these frames in this order.
func wantSent(t testing.TB, f *fakePort, frames ...frame) {
	t.Helper()
	got := f.take()
	if len(got) != len(frames) {
		t.Fatalf("%d frames were sent, want %d", len(got), len(frames))
	}
	for i := range got {
		if !bytes.Equal(got[i].data, frames[i].data) {
			t.Fatalf("frame %d: %d bytes that differ from the %d wanted", i, len(got[i].data), len(frames[i].data))
		}
		if got[i].hdr != frames[i].hdr {
			t.Fatalf("frame %d has header %+v, want %+v", i, got[i].hdr, frames[i].hdr)
		}
	}
}

// drops are ring i's counters, after the worker's present turn.
func (r *rig) drops(i int) map[string]uint64 {
	r.loop.Do(func() {})
	for _, s := range r.dev.Snapshot().Rings {
		if s.Index == r.index(i) {
			return s.Drops
		}
	}
	return nil
}

func (r *rig) wantDrops(i int, want map[string]uint64) {
	r.t.Helper()
	got := r.drops(i)
	for reason, n := range got {
		if want[reason] != n {
			r.t.Errorf("ring %d: %d drops for %s, want %d", i, n, reason, want[reason])
		}
	}
	for reason, n := range want {
		if got[reason] != n {
			r.t.Errorf("ring %d: %d drops for %s, want %d", i, got[reason], reason, n)
		}
	}
}

// received takes one delivered frame out of the receiveq: chains lists what was
// offered, oldest first. It checks lengths and poison and returns what is left of chains.
func (r *rig) received(chains []rxBuffer) (f frame, buffers int, rest []rxBuffer) {
	r.t.Helper()
	hdrLen := r.o.features.NetHdrLen()
	var all []byte
	for n := 1; ; buffers++ {
		if buffers == n {
			break
		}
		if len(chains) == 0 {
			r.t.Fatal("more chains used than offered")
		}
		head, written, ok := r.rings[0].GetUsed()
		if !ok {
			r.t.Fatalf("only %d of %d buffers of a frame were published (%v)", buffers, n, r.rings[0].Err())
		}
		if head != chains[0].head {
			r.t.Fatalf("head %d came back, want %d", head, chains[0].head)
		}
		b := r.content(chains[0])
		if int(written) > len(b) {
			r.t.Fatalf("used length %d of a chain of %d bytes", written, len(b))
		}
		if !untouched(b[written:]) {
			r.t.Fatalf("bytes behind the used length %d were written", written)
		}
		chains = chains[1:]
		all = append(all, b[:written]...)
		if buffers == 0 {
			if len(all) < hdrLen {
				r.t.Fatalf("first buffer has %d bytes, less than a header", len(all))
			}
			f.hdr.Decode(all[:hdrLen])
			if r.o.features.Has(virtio.FNetMrgRxBuf) {
				n = int(binary.LittleEndian.Uint16(all[10:]))
			}
			if n == 0 {
				r.t.Fatal("num_buffers is 0")
			}
		}
	}
	f.data = all[hdrLen:]
	return f, buffers, chains
}

// wantReceived is received for a frame known in advance; it checks num_buffers too.
func (r *rig) wantReceived(chains []rxBuffer, want frame) (buffers int, rest []rxBuffer) {
	r.t.Helper()
	f, buffers, rest := r.received(chains)
	if !bytes.Equal(f.data, want.data) {
		r.t.Fatalf("frame of %d bytes came as %d bytes that differ", len(want.data), len(f.data))
	}
	want.hdr.NumBuffers = uint16(buffers)
	if r.o.features.NetHdrLen() == virtio.NetHdrLenLegacy {
		want.hdr.NumBuffers = 0
	}
	if f.hdr != want.hdr {
		r.t.Fatalf("frame came with header %+v, want %+v", f.hdr, want.hdr)
	}
	return buffers, rest
}

// kick notifies ring i if the device asked for it, and says whether it did.
func (r *rig) kick(i int) bool {
	if !r.rings[i].NeedsKick() {
		return false
	}
	r.forceKick(i)
	return true
}

func (r *rig) forceKick(i int) { _, _ = unix.Write(r.kicks[i], []byte{1, 0, 0, 0, 0, 0, 0, 0}) }

// signals reads how often an eventfd was written since the last look.
func signals(fd int) uint64 {
	var b [8]byte
	if n, _ := unix.Read(fd, b[:]); n != 8 {
		return 0
	}
	return binary.LittleEndian.Uint64(b[:])
}

// awaitCall sleeps until ring i is called.
func (r *rig) awaitCall(i int, limit time.Duration) bool {
	p := []unix.PollFd{{Fd: int32(r.calls[i]), Events: unix.POLLIN}}
	for end := time.Now().Add(limit); ; {
		n, err := unix.Poll(p, int(max(0, time.Until(end).Milliseconds())))
		if err == unix.EINTR {
			continue
		}
		return n == 1 && signals(r.calls[i]) > 0
	}
}

func waitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); !ok(); time.Sleep(200 * time.Microsecond) {
		if time.Now().After(end) {
			t.Fatalf("%s did not happen within 5 s", what)
		}
	}
}
