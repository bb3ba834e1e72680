package virtqueue_test

import (
	"encoding/binary"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// checkBatch verifies what must hold whatever the guest does: segments lie in guest memory, add up, and a fault has none.
func checkBatch(t *testing.T, b *virtqueue.Batch, mem *guestmem.Table, size int) {
	t.Helper()
	used := 0
	for i := range b.N {
		c := b.Chains[i]
		if int(c.First) != used || c.Fault != 0 && c.N != 0 || int(c.Descs) > size || c.Descs == 0 {
			t.Fatalf("chain %d = %+v after %d segments", i, c, used)
		}
		used += int(c.N)
		sum := uint64(0)
		for _, s := range b.ChainSegs(i) {
			if s.Len == 0 || !mem.Owns(s.Host) || !mem.Owns(s.Host+uintptr(s.Len)-1) {
				t.Fatalf("chain %d: segment %+v lies outside of guest memory", i, s)
			}
			sum += uint64(s.Len)
		}
		if min(sum, 1<<31) != uint64(c.Len) {
			t.Fatalf("chain %d: length %d, segments have %d", i, c.Len, sum)
		}
	}
	if used != b.NSegs {
		t.Fatalf("%d segments in chains, %d in the batch", used, b.NSegs)
	}
}

// FuzzPackedChains gives the guest's memory over to the input: first descriptors and tables, then pieces written over them
// between the device's calls.
func FuzzPackedChains(f *testing.F) {
	d := func(addr uint64, n uint32, id, flags uint16) []byte {
		b := binary.LittleEndian.AppendUint64(nil, addr)
		b = binary.LittleEndian.AppendUint32(b, n)
		b = binary.LittleEndian.AppendUint16(b, id)
		return binary.LittleEndian.AppendUint16(b, flags)
	}
	f.Add(append(d(bufGPA, 64, 0, 0x81), d(bufGPA, 1, 1, 0x80)...), []byte{0, 16, 8, 2}, false)
	f.Add(append(d(bufGPA, 32, 3, 0x84), d(0, 32, 0, 4)...), []byte{0, 2, 0, 1, 3, 4, 1, 9}, true)
	f.Add(append(d(seam-8, 48, 6, 0x84), d(seam-1, 0xffffffff, 0, 0x80)...), []byte{3, 64, 40, 1}, false)
	f.Add(d(^uint64(0), 2, 0xffff, 0x8080), []byte{1, 2, 3, 0x85, 0x80, 0x80}, true)
	f.Fuzz(func(t *testing.T, image, script []byte, rx bool) {
		r := newPackedRig(t, rigOptions{size: 7, features: ind | eventIdx | virtio.FInOrder, rx: rx, regions: chainRegions})
		defer r.mem.Close()
		ring := bytesAt(host(t, r.mem, ringGPA, 0x1000), 0x1000)[16:] // descriptors begin there
		tables := bytesAt(host(t, r.mem, bufGPA, 0x1000), 0x1000)
		copy(ring[:16*7+16], image)
		copy(tables, image)
		for ; len(script) >= 4; script = script[4:] {
			what, n, where, act := script[0], int(script[1]), int(script[2]), script[3]
			target := ring
			if what&1 != 0 {
				target = tables
			}
			copy(target[where:where+n], script[4:])
			r.turn(t, act)
		}
	})
}

// turn is what the device does, as act says, with whatever the ring holds.
func (r *packedRig) turn(t *testing.T, act byte) {
	t.Helper()
	r.b.Reset()
	got, err := r.dev.Fill(r.b, int(act))
	var broken *virtqueue.BrokenError
	if err != nil && (!errors.As(err, &broken) || got != 0) || got != r.b.N {
		t.Fatalf("Fill = %d, %v, batch has %d", got, err, r.b.N)
	}
	checkBatch(t, r.b, r.mem, int(r.cfg.Size))
	keep := got
	if act&0x80 != 0 {
		keep = got / 2
	}
	r.dev.Unfill(got - keep)
	staged := r.dev.Staged() + keep
	r.dev.CompleteBatch(r.b, 0, keep)
	if n := r.dev.Publish(int(act & 3)); n != max(staged-int(act&3), 0) || r.dev.Staged() != staged-n {
		t.Fatalf("%d of %d staged chains published, %d left", n, staged, r.dev.Staged())
	}
	at := r.dev.Position()
	if again, err := virtqueue.ParsePosition(uint32(at), r.cfg.Size, true); err != nil || again != at {
		t.Fatalf("position %#x: %v", at, err)
	}
	r.dev.NeedsCall()
	r.dev.EnableKicks()
	r.dev.EnableKicksForMore()
}

// RING-06: a guest that changes descriptors and indirect tables all the time gets valid segments or faults, or a broken ring,
// and the device never writes but where it owns the ring.
func TestFlippingGuestPacked(t *testing.T) {
	const size = 50
	r := newPackedRig(t, rigOptions{size: size, features: ind})
	tableHost := host(t, r.mem, tableGPA, 64)
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Add(1)
	go func() {
		defer wg.Done()
		for i := 0; !stop.Load(); i++ {
			for k := range 2 { // each lap leaves the ring available for another wrap counter
				state := uint16(driver.DescFAvail)
				if (i/size+k)%2 == 0 {
					state = driver.DescFUsed
				}
				r.drv.PokeDesc(i, bufGPA, 0xfffff000, 1, state)
				r.drv.PokeDesc(i, 0x99999999, 60, 2, state|next)
				r.drv.PokeDesc(i, tableGPA, 32, 3, state|indirect)
				driver.PokePackedTable(tableHost, 0, bufGPA, 10, 0, indirect)
				driver.PokePackedTable(tableHost, 0, bufGPA, 10, 0, 0)
				r.drv.PokeDesc(i, bufGPA, 60, 4, state)
			}
			r.drv.PokeDriverEvent(uint16(i*31), uint16(i))
		}
	}()
	chains, broken := 0, 0
	start := time.Now()
	for time.Since(start) < 100*time.Millisecond || chains < 1000 && time.Since(start) < 10*time.Second {
		r.b.Reset()
		n, err := r.dev.Fill(r.b, 32)
		if err != nil {
			broken++
			r.restart(t, uint32(r.dev.Position()))
			continue
		}
		checkBatch(t, r.b, r.mem, size)
		r.dev.CompleteBatch(r.b, 0, n)
		r.dev.Publish(0)
		r.dev.NeedsCall()
		chains += n
	}
	stop.Store(true)
	wg.Wait()
	if chains < 1000 {
		t.Errorf("%d chains were delivered, the ring broke %d times", chains, broken)
	}
}

// The driver fills the ring on one core while the device drains it on another, in many laps and with chains of every kind:
// every chain arrives once, in order, and with what was written before it.
func TestBothSidesAtOncePacked(t *testing.T) {
	for _, size := range []int{1, 2, 3, 100, 255, 256, 1000} {
		for _, features := range []virtio.Features{0, virtio.FInOrder} {
			t.Run(fmt.Sprintf("size=%d/%v", size, features), func(t *testing.T) {
				r := newPackedRig(t, rigOptions{size: size, features: ind | eventIdx | features, start: uint16(size - 1)})
				payload, tables := host(t, r.mem, bufGPA, 0x40000), host(t, r.mem, tableGPA, 0x10000)
				bothSides(t, r.drv, r.dev, payload, tables, features == 0, 20*size+5000)
			})
		}
	}
}

// slotOf is where a frame of the two-sided test lies: 2048 slots of 64 bytes.
func slotOf(frame uint32) uint64 { return uint64(frame%2048) * 64 }

// frameBufs cuts the 8 bytes of a frame into one to three pieces.
func frameBufs(frame uint32, free int) []driver.Buf {
	at := bufGPA + slotOf(frame)
	switch pieces := min(int(frame%3)+1, free); pieces {
	case 1:
		return []driver.Buf{{Addr: at, Len: 8}}
	case 2:
		return []driver.Buf{{Addr: at, Len: 3}, {Addr: at + 3, Len: 5}}
	default:
		return []driver.Buf{{Addr: at, Len: 1}, {Addr: at + 1, Len: 2}, {Addr: at + 3, Len: 5}}
	}
}

func bothSides(t *testing.T, drv driver.Queue, dev virtqueue.Ring, payload, tables uintptr, lengths bool, total int) {
	done := make(chan struct{})
	defer func() { <-done }()
	go func() {
		defer close(done)
		for sent, taken := uint32(0), uint32(0); int(taken) < total && !t.Failed(); runtime.Gosched() {
			for drv.Free() > 0 && int(sent) < total && sent-taken < 1024 {
				binary.LittleEndian.PutUint64(bytesAt(payload+uintptr(slotOf(sent)), 8), uint64(sent)|0xabcd<<32)
				at := uint64(sent%1024) * 48
				var err error
				if sent%5 == 0 {
					_, err = drv.AddIndirect(tables+uintptr(at), tableGPA+at, frameBufs(sent, 3))
				} else {
					_, err = drv.AddChain(frameBufs(sent, drv.Free()))
				}
				if err != nil {
					t.Error(err)
				}
				sent++
				if sent%4 != 0 {
					drv.Publish()
				}
			}
			drv.Publish()
			for {
				_, n, ok := drv.GetUsed()
				if !ok {
					break
				}
				if lengths && n != taken {
					t.Errorf("used chain %d came back with %d", taken, n)
				}
				taken++
			}
			if drv.Err() != nil {
				t.Error(drv.Err())
				return
			}
		}
	}()
	var b virtqueue.Batch
	for want := uint32(0); int(want) < total && !t.Failed(); runtime.Gosched() {
		b.Reset()
		if _, err := dev.Fill(&b, 1+int(want%32)); err != nil {
			t.Error(err)
			return
		}
		for i := range b.N {
			var frame []byte
			for _, s := range b.ChainSegs(i) {
				frame = append(frame, bytesAt(s.Host, int(s.Len))...)
			}
			if len(frame) != 8 || binary.LittleEndian.Uint64(frame) != uint64(want)|0xabcd<<32 {
				t.Errorf("chain %d carries %x", want, frame)
			}
			b.Chains[i].Written = want
			want++
		}
		dev.CompleteBatch(&b, 0, b.N)
		dev.Publish(0)
	}
}
