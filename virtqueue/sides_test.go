package virtqueue_test

import (
	"testing"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// sides is both sides of a ring of either format over the same memory.
type sides struct {
	mem *guestmem.Table
	drv driver.Queue
	dev virtqueue.Ring
	b   *virtqueue.Batch
	cfg virtqueue.Config
}

// newSides makes a packed ring if the options' features say so.
func newSides(t testing.TB, o rigOptions) *sides {
	t.Helper()
	if o.features.Has(packed) {
		return newPackedRig(t, o).sides
	}
	return newRig(t, o).sides
}

// bothFormats runs f on a split ring, and on a packed one whose size is one descriptor less.
func bothFormats(t *testing.T, o rigOptions, f func(t *testing.T, s *sides)) {
	t.Run("split", func(t *testing.T) { f(t, newSides(t, o)) })
	o.features, o.size = o.features|packed, o.size-1
	t.Run("packed", func(t *testing.T) { f(t, newSides(t, o)) })
}

// restart is a new life of the device side over the same memory.
func (s *sides) restart(t testing.TB, base virtqueue.Position) {
	t.Helper()
	s.cfg.Base = base
	dev, err := virtqueue.New(s.cfg)
	if err != nil {
		t.Fatal(err)
	}
	s.dev = dev
}

// fill empties the batch and fills it.
func (s *sides) fill(t testing.TB, max int) int {
	t.Helper()
	s.b.Reset()
	n, err := s.dev.Fill(s.b, max)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// serve completes everything available, each chain with its own length as the
// written bytes, and publishes it.
func (s *sides) serve(t testing.TB) (n int) {
	t.Helper()
	for {
		got := s.fill(t, virtqueue.MaxBatch)
		if got == 0 {
			return n
		}
		for i := range got {
			s.b.Chains[i].Written = s.b.Chains[i].Len
		}
		s.dev.CompleteBatch(s.b, 0, got)
		s.dev.Publish(0)
		n += got
	}
}

// add makes n one-buffer chains available; chain i has i+1 bytes.
func (s *sides) add(t testing.TB, n int) (heads []uint16) {
	t.Helper()
	for i := range n {
		head, err := s.drv.AddDirect(driver.Buf{Addr: bufGPA + uint64(i)*64, Len: uint32(i + 1), Write: s.cfg.DeviceWrites})
		if err != nil {
			t.Fatal(err)
		}
		heads = append(heads, head)
	}
	s.drv.Publish()
	return heads
}

// takeUsed takes used chains back and expects them in the order of heads, and no more.
func (s *sides) takeUsed(t testing.TB, heads []uint16) {
	t.Helper()
	for i, want := range heads {
		head, _, ok := s.drv.GetUsed()
		if !ok || head != want {
			t.Fatalf("used chain %d of %d: head %d, %v, want %d; %v", i, len(heads), head, ok, want, s.drv.Err())
		}
	}
	if head, _, ok := s.drv.GetUsed(); ok {
		t.Fatalf("head %d is used too many", head)
	}
}

// A full ring is served and the device touches nothing outside of it.
func TestStaysInside(t *testing.T) {
	bothFormats(t, rigOptions{size: 64, layout: driver.Odd, features: virtio.FRingEventIdx}, func(t *testing.T, s *sides) {
		size := s.dev.Size()
		ring := bytesAt(host(t, s.mem, ringGPA, 0x1000), 0x1000)
		inside := make([]bool, len(ring))
		desc, avail, used := virtqueue.RingBytes(size, s.cfg.Features.Has(packed))
		base := host(t, s.mem, ringGPA, 1)
		for area, n := range map[uintptr]uint64{s.cfg.Desc: desc, s.cfg.Avail: avail, s.cfg.Used: used} {
			for i := range n {
				inside[uint64(area-base)+i] = true
			}
		}
		for i := range ring {
			if !inside[i] {
				ring[i] = 0xa5
			}
		}
		for range 3 {
			heads := s.add(t, size)
			if got := s.serve(t); got != size {
				t.Fatalf("%d chains served", got)
			}
			s.dev.EnableKicks()
			s.takeUsed(t, heads)
		}
		for i, v := range ring {
			if !inside[i] && v != 0xa5 {
				t.Fatalf("byte %#x outside of the ring was written", i)
			}
		}
	})
}

func TestNoAllocations(t *testing.T) {
	for _, rx := range []bool{false, true} {
		bothFormats(t, rigOptions{size: 256, features: ind | virtio.FRingEventIdx | virtio.FInOrder, rx: rx}, func(t *testing.T, s *sides) {
			two := []driver.Buf{{Addr: bufGPA, Len: 12, Write: rx}, {Addr: bufGPA + 100, Len: 64, Write: rx}}
			table := host(t, s.mem, tableGPA, 32)
			allocs := testing.AllocsPerRun(200, func() {
				for range 8 {
					s.drv.AddDirect(two[1])
					s.drv.AddChain(two)
					s.drv.AddIndirect(table, tableGPA, two)
					s.drv.AddDirect(driver.Buf{Addr: 0, Len: 0xffffffff})
				}
				s.drv.Publish()
				s.drv.NeedsKick()
				s.b.Reset()
				n, err := s.dev.Fill(s.b, virtqueue.MaxBatch)
				if n != 32 || err != nil {
					t.Fatal(n, err)
				}
				s.dev.Complete(s.b.Chains[0].Head, 0)
				s.dev.CompleteBatch(s.b, 1, n-1)
				s.dev.Publish(0)
				s.dev.NeedsCall()
				s.dev.EnableKicks()
				s.dev.DisableKicks()
				for range n {
					s.drv.GetUsed()
				}
				s.drv.EnableCalls()
			})
			if allocs != 0 || s.drv.Err() != nil {
				t.Errorf("%v allocations a batch, %v", allocs, s.drv.Err())
			}
		})
	}
}

// A receiver that lacks buffers for its packet waits for more of them.
func TestEnableKicksForMore(t *testing.T) {
	for _, o := range []rigOptions{{}, {features: eventIdx}, {features: eventIdx, start: 13}} {
		o.size, o.rx = 16, true
		bothFormats(t, o, func(t *testing.T, s *sides) {
			s.add(t, 4)
			if !s.dev.EnableKicksForMore() {
				t.Error("four new chains overlooked")
			}
			s.dev.Unfill(s.fill(t, 4))
			s.dev.Unfill(s.fill(t, 1))
			if s.dev.EnableKicksForMore() {
				t.Error("chains that were given back are not news")
			}
			if !s.dev.EnableKicks() {
				t.Error("EnableKicks overlooks what was given back")
			}
			s.drv.NeedsKick()
			s.dev.EnableKicksForMore()
			s.add(t, 1)
			if !s.drv.NeedsKick() {
				t.Error("no kick for the fifth chain")
			}
			if !s.dev.EnableKicksForMore() {
				t.Error("the fifth chain overlooked")
			}
			s.dev.Unfill(s.fill(t, 2))
			if !s.dev.EnableKicksForMore() {
				t.Error("the fifth chain was never delivered")
			}
		})
	}
}

// B3, RING-10: bad chains among good ones come back in order, the ring goes on.
func TestBadAmongGood(t *testing.T) {
	bothFormats(t, rigOptions{size: 64}, func(t *testing.T, s *sides) {
		bad := []driver.Buf{
			{Addr: 0x77777777, Len: 64}, {Addr: 0, Len: 1 << 30}, {Addr: ^uint64(0), Len: 60}, {Addr: bufGPA, Len: 1, Write: true},
			{Addr: 0x77777777}, // without bytes it is good
		}
		faults, good := 0, 0
		for i := range 1000 {
			b := driver.Buf{Addr: bufGPA, Len: 60}
			if i%2 == 1 {
				b = bad[i/2%len(bad)]
			}
			if _, err := s.drv.AddDirect(b); err != nil {
				t.Fatal(err)
			}
			s.drv.Publish()
			if i%10 != 9 {
				continue
			}
			for j := range s.fill(t, 32) {
				if s.b.Chains[j].Fault != 0 {
					faults++
				} else {
					good++
				}
			}
			s.dev.CompleteBatch(s.b, 0, s.b.N)
			s.dev.Publish(0)
			for range 10 {
				if _, n, ok := s.drv.GetUsed(); !ok || n != 0 {
					t.Fatal(n, ok, s.drv.Err())
				}
			}
		}
		if faults != 400 || good != 600 {
			t.Errorf("%d faults, %d good", faults, good)
		}
	})
}
