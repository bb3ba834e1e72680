package virtqueue_test

import (
	"testing"

	"github.com/vhostd/vhostd/virtqueue"
)

// TestWorkOfABatch: chains of very many descriptors without bytes end a batch early, and their descriptors are counted, those
// that lie in two regions for more.
func TestWorkOfABatch(t *testing.T) {
	for name, at := range map[string]uint64{"in one piece": tableGPA, "across a seam": seam - 8} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, rigOptions{size: 64, features: ind, regions: chainRegions})
			defer r.mem.Close()
			loop := desc{bufGPA, 0, next, 0} // its own successor
			table := make([]desc, 64)
			table[0] = loop
			r.pokeTable(t, at, table)
			r.drv.PokeDesc(0, at, 16*2000, indirect, 0)
			for range 64 {
				r.drv.PokeHead(0)
			}
			r.drv.Publish()
			before := r.dev.Walked()
			n := r.fill(t, virtqueue.MaxBatch)
			walked := r.dev.Walked() - before
			if n == 0 || n == virtqueue.MaxBatch || walked > 4096+17*(virtqueue.MaxSegs+1) {
				t.Errorf("a batch of %d chains and %d descriptors", n, walked)
			}
			total := n
			for total < 64 {
				r.dev.CompleteBatch(r.b, 0, n)
				n = r.fill(t, virtqueue.MaxBatch)
				if n == 0 {
					t.Fatalf("%d of 64 chains delivered", total)
				}
				total += n
			}
		})
	}
}

// TestWorkOfABatchPacked: the same for tables of packed rings, whose entries all belong to the chain, and for chains of the ring.
func TestWorkOfABatchPacked(t *testing.T) {
	r := newPackedRig(t, rigOptions{size: 2000, features: ind})
	const entries = 2000 // all zero: descriptors without bytes
	for i := range 64 {
		if i%8 == 7 {
			for range virtqueue.MaxSegs / 8 {
				r.drv.PokeChain(bufGPA, 0, junk, next)
			}
			r.drv.PokeChain(bufGPA, 0, uint16(i), 0)
			continue
		}
		r.drv.PokeChain(tableGPA, 16*entries, uint16(i), indirect)
	}
	r.drv.Publish()
	for total := 0; total < 64; {
		before := r.dev.Walked()
		n := r.fill(t, virtqueue.MaxBatch)
		walked := r.dev.Walked() - before
		if n == 0 || n == virtqueue.MaxBatch || walked < uint64(n) || walked > 4096+virtqueue.MaxSegs+2 {
			t.Fatalf("a batch of %d chains and %d descriptors", n, walked)
		}
		for i := range n {
			long := (total+i)%8 == 7
			if c := r.b.Chains[i]; (c.Fault == virtqueue.FaultNone) != long || int(c.Head) != total+i {
				t.Fatalf("chain %d: %+v", total+i, c)
			}
			if long && walked < virtqueue.MaxSegs/8 {
				t.Errorf("a chain of %d descriptors counts %d", virtqueue.MaxSegs/8, walked)
			}
		}
		r.dev.CompleteBatch(r.b, 0, n)
		total += n
	}
}

// A chain of more descriptors than a batch has segments is a fault, even if they have no bytes; its end is found all the same.
func TestLongChainPacked(t *testing.T) {
	for _, n := range []int{virtqueue.MaxSegs, virtqueue.MaxSegs + 1, 1990} {
		r := newPackedRig(t, rigOptions{size: 2000, start: 1500})
		for range n - 1 {
			r.drv.PokeChain(bufGPA, 0, junk, next)
		}
		r.drv.PokeChain(bufGPA, 0, 5, 0)
		r.drv.PokeChain(bufGPA, 1, 6, 0)
		r.drv.Publish()
		if got := r.fill(t, 32); got != 2 || r.b.Chains[1].Head != 6 {
			t.Fatalf("%d descriptors: Fill = %d, %+v", n, got, r.b.Chains[:2])
		}
		c := r.b.Chains[0]
		if int(c.Descs) != n || c.Head != 5 || (c.Fault == virtqueue.FaultTooLong) != (n > virtqueue.MaxSegs) || r.dev.Walked() != uint64(n) {
			t.Errorf("%d descriptors: %+v, %d counted", n, c, r.dev.Walked())
		}
	}
}
