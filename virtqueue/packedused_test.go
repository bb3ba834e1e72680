package virtqueue_test

import (
	"bytes"
	"testing"

	"github.com/vhostd/vhostd/virtio"
)

func TestPackedUnfill(t *testing.T) {
	r := newPackedRig(t, rigOptions{size: 13, start: fresh | 9})
	var ids []uint16
	for _, n := range []int{1, 3, 2, 1, 4, 2} {
		id, err := r.drv.AddChain(bufs(n, uint32(10+n)))
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, id)
	}
	r.drv.Publish()
	for give := range 7 {
		if n := r.fill(t, 32); n != 6 {
			t.Fatalf("Fill = %d", n)
		}
		if r.dev.MoreAvailable() {
			t.Error("all chains were delivered")
		}
		r.dev.Unfill(give)
		if r.dev.Empty() != (give == 0) || r.dev.MoreAvailable() || r.dev.EnableKicksForMore() {
			t.Errorf("%d given back: empty %v, more %v", give, r.dev.Empty(), r.dev.MoreAvailable())
		}
		r.dev.Unfill(6 - give)
	}
	if n := r.fill(t, 2); n != 2 {
		t.Fatal(n)
	}
	r.dev.Unfill(1)
	r.dev.Complete(ids[0], 5)
	if p := r.dev.Position(); p != 0x80098009 {
		t.Errorf("Position = %#x although the driver was told of nothing", p)
	}
	if n := r.fill(t, 32); n != 5 || r.b.Chains[0].Head != ids[1] || r.b.Chains[4].Head != ids[5] {
		t.Errorf("%d chains: %+v", n, r.b.Chains[:n])
	}
	r.dev.CompleteBatch(r.b, 0, 5)
	r.dev.Publish(0)
	r.takeUsed(t, ids)
	if p := r.dev.Position(); p != 0x00090009 {
		t.Errorf("Position = %#x, want 0x90009", p)
	}
}

func TestPackedMisusePanics(t *testing.T) {
	r := newPackedRig(t, rigOptions{size: 16})
	r.add(t, 2)
	r.fill(t, 2)
	for name, f := range map[string]func(){
		"Unfill":        func() { r.dev.Unfill(3) },
		"Unfill < 0":    func() { r.dev.Unfill(-1) },
		"CompleteBatch": func() { r.dev.CompleteBatch(r.b, 0, 3) },
		"Complete": func() {
			r.dev.Unfill(2)
			r.dev.Complete(0, 0)
		},
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s did not panic", name)
				}
			}()
			f()
		}()
		r.dev.Unfill(r.fill(t, 2))
		r.fill(t, 2)
	}
}

// Nothing of a staged chain is in the ring, so that a new life finds it again.
func TestPackedPublishLag(t *testing.T) {
	for _, inOrder := range []virtio.Features{0, virtio.FInOrder} {
		for _, start := range []uint16{fresh, 12} {
			r := newPackedRig(t, rigOptions{size: 16, start: start, features: inOrder})
			ids := r.add(t, 16)
			r.fill(t, 16)
			before := bytes.Clone(ringBytes(t, r))
			r.dev.CompleteBatch(r.b, 0, 8)
			if !bytes.Equal(before, ringBytes(t, r)) {
				t.Error("CompleteBatch wrote to the ring")
			}
			total := 0
			for i, step := range []struct{ lag, want, staged int }{
				{100, 0, 8}, {8, 0, 8}, {5, 3, 5}, {7, 0, 5}, {5, 0, 5}, {3, 2, 3}, {-1, 3, 0}, {0, 0, 0}, {3, 0, 0},
			} {
				got := r.dev.Publish(step.lag)
				if got != step.want || r.dev.Staged() != step.staged {
					t.Errorf("start %#x, step %d: Publish(%d) = %d, %d staged, want %d, %d", start, i, step.lag, got, r.dev.Staged(), step.want, step.staged)
				}
				r.takeUsed(t, ids[total:total+got])
				total += got
			}
			at := r.dev.Position()
			r.restart(t, uint32(at))
			if n := r.fill(t, 32); n != 8 || r.b.Chains[0].Head != ids[8] {
				t.Errorf("a new life at %#x finds %d chains", at, n)
			}
		}
	}
}

func TestPackedSetMemory(t *testing.T) {
	r := newPackedRig(t, rigOptions{size: 16})
	ids := r.add(t, 4)
	r.fill(t, 2)
	r.dev.CompleteBatch(r.b, 0, 2)
	other := newTable(t, region{0, 0x1000}, region{bufGPA, bufSize})
	old, moved := host(t, r.mem, 0, 0x1000), host(t, other, 0, 0x1000)
	copy(bytesAt(moved, 0x1000), bytesAt(old, 0x1000))
	clear(bytesAt(old, 0x1000))
	shift := moved - old
	r.dev.SetMemory(other, r.cfg.Desc+shift, r.cfg.Avail+shift, r.cfg.Used+shift)
	if n := r.fill(t, 32); n != 2 || r.b.Chains[0].Head != ids[2] || r.b.Segs[0].Host != host(t, other, bufGPA+128, 1) {
		t.Fatalf("%d chains after the move: %+v %+v", n, r.b.Chains[0], r.b.Segs[0])
	}
	r.dev.CompleteBatch(r.b, 0, 2)
	r.dev.Publish(0)
	r.dev.EnableKicks()
	if !bytes.Equal(bytesAt(old, 0x1000), make([]byte, 0x1000)) {
		t.Error("the old memory was written")
	}
}
