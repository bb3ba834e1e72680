package virtqueue_test

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

func TestNewSplitRefuses(t *testing.T) {
	r := newRig(t, rigOptions{size: 16})
	for _, c := range []struct {
		name   string
		change func(*virtqueue.Config)
		want   string
	}{
		{"size 0", func(c *virtqueue.Config) { c.Size = 0 }, "power of two"},
		{"size 3", func(c *virtqueue.Config) { c.Size = 3 }, "power of two"},
		{"size 32769", func(c *virtqueue.Config) { c.Size = 32769 }, "power of two"},
		{"descriptors + 8", func(c *virtqueue.Config) { c.Desc += 8 }, "multiple of 16"},
		{"available + 1", func(c *virtqueue.Config) { c.Avail++ }, "multiple of 2"},
		{"used + 2", func(c *virtqueue.Config) { c.Used += 2 }, "multiple of 4"},
		{"no used ring", func(c *virtqueue.Config) { c.Used = 0 }, "used ring"},
		{"packed", func(c *virtqueue.Config) { c.Features |= virtio.FRingPacked }, "packed"},
		{"no memory", func(c *virtqueue.Config) { c.Mem = nil }, "memory table"},
	} {
		cfg := r.cfg
		c.change(&cfg)
		if _, err := virtqueue.NewSplit(cfg); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", c.name, err, c.want)
		}
	}
}

// Every size and layout works over several laps and over the index wrap at
// 65536, with batches that do not divide the ring.
func TestSizesAndLayouts(t *testing.T) {
	layouts := map[string]func(int, uint64) driver.Layout{"packed": driver.Packed, "paged": driver.Paged, "odd": driver.Odd}
	for name, layout := range layouts {
		for size := 1; size <= virtqueue.MaxSize; size *= 2 {
			t.Run(fmt.Sprintf("layout=%s/size=%d", name, size), func(t *testing.T) {
				r := newRig(t, rigOptions{size: size, layout: layout, start: 65530})
				if r.dev.Size() != size {
					t.Fatalf("Size = %d", r.dev.Size())
				}
				for lap := range 7 {
					heads := r.add(t, min(size, 100))
					if got := r.serve(t); got != len(heads) {
						t.Fatalf("lap %d: %d chains served of %d", lap, got, len(heads))
					}
					r.takeUsed(t, heads)
				}
				if virtqueue.Position(r.drv.LastUsed()) != r.dev.Position() {
					t.Errorf("driver is at %d, device at %d", r.drv.LastUsed(), r.dev.Position())
				}
			})
		}
	}
}

func TestBroken(t *testing.T) {
	for _, c := range []struct {
		name   string
		damage func(r *rig)
		good   int // chains delivered first
		want   string
	}{
		{"index jumps by more than the size", func(r *rig) { r.drv.PokeAvailIdx(r.drv.AvailIdx() + 17) }, 0, "available index is 21 at position 4"},
		{"index goes back", func(r *rig) { r.drv.PokeAvailIdx(r.drv.AvailIdx() - 1) }, 0, "available index is 3 at position 4"},
		{"head is the size", func(r *rig) { r.drv.PokeHead(16); r.drv.Publish() }, 0, "names descriptor 16 of a ring of 16"},
		{"head is far out", func(r *rig) { r.drv.PokeHead(0xffff); r.drv.Publish() }, 0, "names descriptor 65535"},
		{"third head", func(r *rig) {
			r.drv.PokeDesc(0, bufGPA, 1, 0, 0)
			r.drv.PokeHead(0)
			r.drv.PokeHead(0)
			r.drv.PokeHead(99)
			r.drv.Publish()
		}, 2, "entry 6 names descriptor 99"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, rigOptions{size: 16})
			r.add(t, 4)
			r.serve(t)
			c.damage(r)
			if c.good > 0 {
				if n := r.fill(t, 32); n != c.good {
					t.Fatalf("Fill = %d, want %d", n, c.good)
				}
			}
			r.b.Reset()
			n, err := r.dev.Fill(r.b, 32)
			var broken *virtqueue.BrokenError
			if n != 0 || !errors.As(err, &broken) || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("Fill = %d, %v, want %q", n, err, c.want)
			}
			if r.b.N != 0 || r.b.NSegs != 0 {
				t.Errorf("batch has %d chains, %d segments", r.b.N, r.b.NSegs)
			}
			if !r.dev.EnableKicks() {
				t.Error("EnableKicks would let a broken ring sleep unnoticed")
			}
		})
	}
}

// The driver counts from the used index that it can see: what is staged or
// peeked still counts as outstanding.
func TestIndexJumpCountsUnpublished(t *testing.T) {
	r := newRig(t, rigOptions{size: 16})
	r.add(t, 16)
	r.fill(t, 10)
	r.dev.CompleteBatch(r.b, 0, 10)
	r.fill(t, 10)
	r.drv.PokeAvailIdx(17)
	if _, err := r.dev.Fill(r.b, 1); err == nil {
		t.Error("17 outstanding chains on a ring of 16 were accepted")
	}
	r.drv.PokeAvailIdx(16)
	r.dev.Publish(0)
	r.drv.PokeAvailIdx(26)
	if _, err := r.dev.Fill(r.b, 1); err != nil {
		t.Errorf("10 chains were given back and added again: %v", err)
	}
}

func TestUnfillAndPosition(t *testing.T) {
	r := newRig(t, rigOptions{size: 16, start: 65533})
	heads := r.add(t, 10)
	if n := r.fill(t, 4); n != 4 {
		t.Fatal(n)
	}
	r.dev.Unfill(3)
	r.dev.Complete(heads[0], 5)
	if p := r.dev.Position(); p != 65534 {
		t.Errorf("Position = %d, want 65534", p)
	}
	r.b.Reset()
	for i, want := range []int{7, 2} {
		n, err := r.dev.Fill(r.b, want)
		if n != want || err != nil {
			t.Fatalf("Fill %d = %d, %v", i, n, err)
		}
	}
	for i := range 9 {
		if got := r.b.Chains[i]; got.Head != heads[i+1] || got.Len != uint32(i+2) {
			t.Errorf("chain %d = %+v", i, got)
		}
	}
	r.dev.Unfill(9)
	if p := r.dev.Position(); p != 65534 {
		t.Errorf("Position = %d, want 65534", p)
	}
	if r.dev.Empty() {
		t.Error("nothing available after Unfill")
	}
	r.dev.Publish(0)
	r.takeUsed(t, heads[:1])
	if got := r.serve(t); got != 9 {
		t.Errorf("%d served", got)
	}
	r.takeUsed(t, heads[1:])
	if p := r.dev.Position(); p != 7 {
		t.Errorf("Position = %d, want 7", p)
	}
}

func TestMisusePanics(t *testing.T) {
	r := newRig(t, rigOptions{size: 16})
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
		r.dev.Unfill(min(2, r.fill(t, 2)))
		r.fill(t, 2)
	}
}

func TestPublishLag(t *testing.T) {
	for _, start := range []uint16{0, 65533} {
		r := newRig(t, rigOptions{size: 16, start: start})
		r.add(t, 16)
		r.fill(t, 16)
		r.dev.CompleteBatch(r.b, 0, 8)
		for i, step := range []struct{ lag, want, staged int }{
			{100, 0, 8}, {8, 0, 8}, {5, 3, 5}, {7, 0, 5}, {5, 0, 5}, {-1, 5, 0}, {0, 0, 0}, {3, 0, 0},
		} {
			before := r.drv.PeekUsedIdx()
			got := r.dev.Publish(step.lag)
			if got != step.want || r.dev.Staged() != step.staged {
				t.Errorf("start %d, step %d: Publish(%d) = %d, %d staged, want %d, %d", start, i, step.lag, got, r.dev.Staged(), step.want, step.staged)
			}
			if moved := int(r.drv.PeekUsedIdx() - before); moved != step.want {
				t.Errorf("start %d, step %d: used index moved by %d, want %d", start, i, moved, step.want)
			}
		}
	}
}

func TestCompleteBatchWritesLengths(t *testing.T) {
	r := newRig(t, rigOptions{size: 16, rx: true})
	heads := r.add(t, 8)
	r.fill(t, 8)
	for i := range 8 {
		r.b.Chains[i].Written = uint32(100 + i)
	}
	r.dev.CompleteBatch(r.b, 0, 3)
	r.dev.CompleteBatch(r.b, 3, 0)
	r.dev.CompleteBatch(r.b, 3, 5)
	if idx := r.drv.PeekUsedIdx(); idx != 0 {
		t.Fatalf("used index is %d before Publish", idx)
	}
	r.dev.Publish(0)
	for i, want := range heads {
		if head, n, ok := r.drv.GetUsed(); !ok || head != want || n != uint32(100+i) {
			t.Errorf("used %d: head %d, %d bytes, %v", i, head, n, ok)
		}
	}
}

// A batch without room for the next chain's segments ends before it.
func TestBatchRoom(t *testing.T) {
	r := newRig(t, rigOptions{size: 32, features: ind})
	for i, n := range []int{1000, 80, 8, 1, 1088} {
		bufs := make([]driver.Buf, n)
		for j := range bufs {
			bufs[j] = driver.Buf{Addr: bufGPA, Len: 1}
		}
		gpa := tableGPA + uint64(i)*0x8000
		if _, err := r.drv.AddIndirect(host(t, r.mem, gpa, uint64(16*n)), gpa, bufs); err != nil {
			t.Fatal(err)
		}
	}
	r.drv.Publish()
	if n := r.fill(t, 32); n != 3 || r.b.NSegs != virtqueue.MaxSegs {
		t.Fatalf("first batch: %d chains, %d segments", n, r.b.NSegs)
	}
	if n, err := r.dev.Fill(r.b, 32); n != 0 || err != nil {
		t.Fatalf("full batch: %d, %v", n, err)
	}
	if n := r.fill(t, 32); n != 1 || r.b.NSegs != 1 {
		t.Fatalf("second batch: %d chains, %d segments", n, r.b.NSegs)
	}
	if n := r.fill(t, 32); n != 1 || r.b.Chains[0].Fault != virtqueue.FaultNone || r.b.NSegs != virtqueue.MaxSegs {
		t.Fatalf("third batch: %d chains, %+v", n, r.b.Chains[0])
	}
	if n, err := r.dev.Fill(r.b, 0); n != 0 || err != nil {
		t.Errorf("Fill of 0 = %d, %v", n, err)
	}
}

func TestSetMemory(t *testing.T) {
	r := newRig(t, rigOptions{size: 16})
	heads := r.add(t, 4)
	r.fill(t, 2)
	r.dev.CompleteBatch(r.b, 0, 2)
	// The other table has a copy of the memory, as if the front-end had moved it.
	other := newTable(t, region{0, 0x1000}, region{bufGPA, bufSize})
	old, moved := host(t, r.mem, 0, 0x1000), host(t, other, 0, 0x1000)
	copy(bytesAt(moved, 0x1000), bytesAt(old, 0x1000))
	clear(bytesAt(old, 0x1000))
	shift := moved - old
	r.dev.SetMemory(other, r.cfg.Desc+shift, r.cfg.Avail+shift, r.cfg.Used+shift)
	if n := r.fill(t, 32); n != 2 || r.b.Chains[0].Head != heads[2] || r.b.Segs[0].Host != host(t, other, bufGPA+128, 1) {
		t.Fatalf("%d chains after the move: %+v %+v", n, r.b.Chains[0], r.b.Segs[0])
	}
	r.dev.CompleteBatch(r.b, 0, 2)
	r.dev.Publish(0)
	if !bytes.Equal(bytesAt(old, 0x1000), make([]byte, 0x1000)) {
		t.Error("the old memory was written")
	}
}
