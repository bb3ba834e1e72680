package virtqueue_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// leaveTaken writes into a split region what a back-end leaves that completed the first of
// the heads, took the others newest first and was killed.
func leaveTaken(r *rig, region []byte, heads []uint16) {
	for i, head := range heads[1:] {
		at := region[16+16*int(head):]
		at[0] = 1
		binary.LittleEndian.PutUint64(at[8:], uint64(len(heads)-i))
	}
	binary.LittleEndian.PutUint16(region[14:], 1)
	binary.LittleEndian.PutUint64(bytesAt(r.cfg.Used+4, 8), uint64(heads[0]))
	r.drv.PokeUsedIdx(1)
}

// Chains of an earlier life that are taken again wait for what their translator does not know, as others do.
func TestMissingWhenTakenAgain(t *testing.T) {
	r := newRig(t, rigOptions{size: 8})
	in, region := inflightRegion(t, 8, false)
	via := newPager(r.mem, 4096)
	r.cfg.Inflight, r.cfg.Via = in, via
	r.restart(t, 0)
	heads := r.add(t, 5)
	leaveTaken(r, region, heads)
	r.restart(t, 0)
	if in.Resubmitted != 4 {
		t.Fatalf("%+v", in)
	}
	if misses := via.fillMissing(t, r.dev, r.b, 4); misses == 0 {
		t.Error("nothing was missed")
	}
	for i, want := range []uint16{heads[4], heads[3], heads[2], heads[1]} {
		if got := r.b.Chains[i].Head; got != want {
			t.Errorf("chain %d is that of head %d, want %d", i, got, want)
		}
	}
}

// What an earlier life took is taken again once: not when the ring's index comes round.
func TestInflightTakenAgainOnce(t *testing.T) {
	r := newRig(t, rigOptions{size: 8})
	in, region := inflightRegion(t, 8, false)
	r.cfg.Inflight = in
	r.restart(t, 0)
	leaveTaken(r, region, r.add(t, 5))
	r.restart(t, 0)
	if n := r.serve(t); n != 4 || in.Resubmitted != 4 {
		t.Fatalf("%d chains were served, %+v", n, in)
	}
	for {
		if _, _, ok := r.drv.GetUsed(); !ok {
			break
		}
	}
	// One chain of two descriptors, so that heads come in another place in the next round of the index.
	if _, err := r.drv.AddChain([]driver.Buf{{Addr: bufGPA, Len: 1}, {Addr: bufGPA, Len: 1}}); err != nil {
		t.Fatal(err)
	}
	r.drv.Publish()
	r.serve(t)
	r.drv.GetUsed()
	for i := range 1<<16 + 16 {
		head := r.add(t, 1)
		r.serve(t)
		if got, _, ok := r.drv.GetUsed(); !ok || got != head[0] {
			t.Fatalf("chain %d: head %d came back as %d, %v (%v)", i, head[0], got, ok, r.drv.Err())
		}
	}
}

// Every page of a ring that the device changes is marked.
func TestLoggedRings(t *testing.T) {
	for _, features := range []virtio.Features{0, virtio.FInOrder, virtio.FRingEventIdx, packed, packed | virtio.FInOrder, packed | virtio.FRingEventIdx} {
		for _, rx := range []bool{false, true} {
			for _, tracked := range []bool{false, true} {
				t.Run(fmt.Sprintf("%v/rx=%v/inflight=%v", features, rx, tracked), func(t *testing.T) {
					const size = 1024
					s := newSides(t, rigOptions{size: size, features: features, rx: rx})
					if tracked {
						s.cfg.Inflight, _ = inflightRegion(t, size, features.Has(packed))
					}
					s.restart(t, s.dev.Position())
					s.logged(t)
				})
			}
		}
	}
}

func (s *sides) logged(t *testing.T) {
	log, marks := newLog(t)
	gpa := func(host uintptr) uint64 { a, _ := s.mem.GPA(host, 1); return a }
	s.dev = virtqueue.WithLog(s.dev, virtqueue.UsedLog{Log: log, Used: gpa(s.cfg.Used), Desc: gpa(s.cfg.Desc)})
	ring := bytesAt(host(t, s.mem, ringGPA, s.mem.Regions()[0].Size), int(s.mem.Regions()[0].Size))
	changes := func(what string, change func()) {
		t.Helper()
		before := bytes.Clone(ring)
		clear(marks())
		change()
		for page := range len(ring) / guestmem.LogPage {
			at := page * guestmem.LogPage
			if !bytes.Equal(before[at:at+guestmem.LogPage], ring[at:at+guestmem.LogPage]) && marks()[page/8]>>(page%8)&1 == 0 {
				t.Fatalf("%s: page %d was changed and is not marked", what, page)
			}
		}
	}
	for i := range 300 {
		for range virtqueue.MaxBatch {
			bufs := []driver.Buf{{Addr: bufGPA, Len: 8, Write: s.cfg.DeviceWrites}, {Addr: bufGPA + 64, Len: 8, Write: s.cfg.DeviceWrites}}
			if _, err := s.drv.AddChain(bufs[:1+i%2]); err != nil {
				t.Fatal(err)
			}
		}
		s.drv.Publish()
		n := s.fill(t, virtqueue.MaxBatch-i%5)
		changes("complete", func() {
			s.dev.CompleteBatch(s.b, 0, n-1)
			s.dev.Complete(s.b.Chains[n-1].Head, 1)
		})
		changes("publish with a lag", func() { s.dev.Publish(i % 7) })
		changes("publish", func() { s.dev.Publish(0) })
		changes("serve", func() { s.serve(t) })
		changes("enable kicks", func() { s.dev.EnableKicks() })
		changes("disable kicks", func() { s.dev.DisableKicks() })
		for {
			if _, _, ok := s.drv.GetUsed(); !ok {
				break
			}
		}
		if err := s.drv.Err(); err != nil {
			t.Fatal(err)
		}
	}
}

// newLog makes a log for the ring's memory. marks is its bitmap.
func newLog(t *testing.T) (log *guestmem.Log, marks func() []byte) {
	fd, err := unix.MemfdCreate("virtqueue-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	const size = 4096
	if err := unix.Ftruncate(fd, size); err != nil {
		t.Fatal(err)
	}
	if log, err = guestmem.NewLog(size, 0, fd); err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Munmap(b); err != nil {
			t.Error(err)
		}
		if err := log.Close(); err != nil {
			t.Error(err)
		}
	})
	return log, func() []byte { return b }
}
