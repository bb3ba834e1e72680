package virtqueue_test

import (
	"testing"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// A transmitq whose driver keeps order gets one used entry for all that is published together: in the place of the first, with
// the head of the last. A receiveq gets one for each chain.
func TestInOrderSplit(t *testing.T) {
	for _, rx := range []bool{false, true} {
		r := newRig(t, rigOptions{size: 16, features: virtio.FInOrder, rx: rx, start: 65530})
		for i := range uint16(16) {
			r.dev.Empty() // settles
			pokeUsed(t, r, i, 0x7777)
		}
		heads := r.add(t, 10)
		r.fill(t, 10)
		for i := range 10 {
			if rx {
				r.b.Chains[i].Written = uint32(i + 1)
			}
		}
		r.dev.CompleteBatch(r.b, 0, 9)
		r.dev.Complete(heads[9], r.b.Chains[9].Written)
		for _, step := range []struct{ lag, n, at int }{{7, 3, 0}, {6, 1, 3}, {0, 6, 4}} {
			if n := r.dev.Publish(step.lag); n != step.n {
				t.Fatalf("Publish(%d) = %d", step.lag, n)
			}
			if rx {
				continue
			}
			for i := step.at; i < step.at+step.n; i++ {
				want := uint32(0x7777)
				if i == step.at {
					want = uint32(heads[step.at+step.n-1])
				}
				if id, _ := r.drv.PeekUsed(uint16(65530 + i)); id != want {
					t.Errorf("used entry %d names %#x, want %#x", i, id, want)
				}
			}
		}
		for i, want := range heads {
			head, n, ok := r.drv.GetUsed()
			if !ok || head != want || rx && n != uint32(i+1) {
				t.Errorf("rx %v: used %d: head %d, %d bytes, %v, %v", rx, i, head, n, ok, r.drv.Err())
			}
		}
	}
}

func pokeUsed(t *testing.T, r *rig, slot, head uint16) {
	t.Helper()
	b := bytesAt(r.cfg.Used+4+8*uintptr(slot), 8)
	b[0], b[1] = byte(head), byte(head>>8)
}

// The same in a packed ring, over its end.
func TestInOrderPacked(t *testing.T) {
	for _, start := range []uint16{fresh, fresh | 10, 6} {
		r := newPackedRig(t, rigOptions{size: 13, features: virtio.FInOrder, start: start})
		var ids []uint16
		for _, n := range []int{1, 3, 2, 4, 1} {
			id, _ := r.drv.AddChain(bufs(n, 5))
			ids = append(ids, id)
		}
		r.drv.Publish()
		before := string(ringBytes(t, r))
		r.fill(t, 32)
		r.dev.CompleteBatch(r.b, 0, 5)
		r.dev.Publish(2) // 1, 3 and 2 descriptors
		changed := 0
		for i := range 13 {
			if before[16*i:16*i+16] != string(ringBytes(t, r)[16*i:16*i+16]) {
				changed++
			}
		}
		_, n, id, _ := r.drv.PeekDesc(int(start & 0x7fff))
		if changed != 1 || id != ids[2] || n != 0 {
			t.Errorf("start %#x: %d descriptors written, id %d of %v, length %d", start, changed, id, ids, n)
		}
		r.takeUsed(t, ids[:3])
		r.dev.Publish(0)
		r.takeUsed(t, ids[3:])
		for range 20 {
			ids := r.add(t, 7)
			r.serve(t)
			r.takeUsed(t, ids)
		}
		if at := r.drv.LastUsed(); r.dev.Position() != virtqueue.Position(at)|virtqueue.Position(at)<<16 {
			t.Errorf("driver at %#x, device at %#x", at, r.dev.Position())
		}
	}
}

// A receiveq has to tell each length.
func TestInOrderPackedReceive(t *testing.T) {
	r := newPackedRig(t, rigOptions{size: 6, features: virtio.FInOrder, rx: true})
	for range 7 {
		ids := r.add(t, 4)
		r.serve(t)
		for i, want := range ids {
			if id, n, ok := r.drv.GetUsed(); !ok || id != want || n != uint32(i+1) {
				t.Fatalf("used %d: id %d, %d bytes, %v, %v", i, id, n, ok, r.drv.Err())
			}
		}
	}
}

// The event index of a driver counts chains that no used entry names.
func TestInOrderCalls(t *testing.T) {
	r := newPackedRig(t, rigOptions{size: 8, features: virtio.FInOrder | eventIdx})
	ids := r.add(t, 1)
	r.serve(t)
	r.takeUsed(t, ids)
	r.dev.NeedsCall()
	ids = r.add(t, 5)
	r.drv.PokeDriverEvent(fresh|3, driver.EventDesc)
	r.serve(t)
	if !r.dev.NeedsCall() {
		t.Error("no call for a skipped descriptor")
	}
	r.takeUsed(t, ids)
}
