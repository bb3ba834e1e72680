package pool

import (
	"runtime"
	"slices"
	"sync"
	"testing"

	"github.com/vhostd/vhostd/pagemem"
	"pgregory.net/rapid"
)

// TestRingModel compares the ring with a slice, also round the wrap of the
// 32-bit lap numbers.
func TestRingModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := 1 << rapid.IntRange(0, 5).Draw(t, "log size")
		r := newRing(size)
		start := rapid.SampledFrom([]uint64{0, 1<<32 - 64, 1<<33 - 64}).Draw(t, "start")
		r.head.Store(start)
		r.tail.Store(start)
		var model []pagemem.PageID
		next := pagemem.PageID(0)
		t.Repeat(map[string]func(*rapid.T){
			"push": func(t *rapid.T) {
				ids := make([]pagemem.PageID, rapid.IntRange(0, 20).Draw(t, "n"))
				for i := range ids {
					ids[i] = next
					next++
				}
				n := r.push(ids)
				if want := min(len(ids), size-len(model)); n != want {
					t.Fatalf("pushed %d of %d, want %d", n, len(ids), want)
				}
				model = append(model, ids[:n]...)
			},
			"pop": func(t *rapid.T) {
				dst := make([]pagemem.PageID, rapid.IntRange(0, 20).Draw(t, "n"))
				n := r.pop(dst)
				if want := min(len(dst), len(model)); n != want || !slices.Equal(dst[:n], model[:n]) {
					t.Fatalf("popped %v, want %d of %v", dst[:n], want, model)
				}
				model = model[n:]
			},
		})
	})
}

// TestRingProducers pushes from several goroutines: nothing is lost or doubled,
// and each producer's pages arrive in its order.
func TestRingProducers(t *testing.T) {
	const producers, each = 4, 20000
	r := newRing(64)
	var wg sync.WaitGroup
	for p := range producers {
		wg.Go(func() { produce(r, pagemem.PageID(p*each), each) })
	}
	var next [producers]pagemem.PageID
	var ids [24]pagemem.PageID
	for got := 0; got < producers*each; {
		n := r.pop(ids[:])
		for _, id := range ids[:n] {
			if p := id / each; id%each != next[p] {
				t.Fatalf("producer %d: got %d, want %d", p, id%each, next[p])
			} else {
				next[p]++
			}
		}
		if got += n; n == 0 {
			runtime.Gosched()
		}
	}
	wg.Wait()
	if n := r.pop(ids[:]); n != 0 || r.pushed() != producers*each {
		t.Errorf("%d left over, %d pushed", n, r.pushed())
	}
}

func produce(r *ring, first pagemem.PageID, count int) {
	var ids [7]pagemem.PageID
	for sent := 0; sent < count; {
		want := min(1+sent%len(ids), count-sent)
		for i := range want {
			ids[i] = first + pagemem.PageID(sent+i)
		}
		n := r.push(ids[:want])
		if sent += n; n == 0 {
			runtime.Gosched()
		}
	}
}

// TestRingPreemptedProducer: claimed slots that are not filled yet hold back
// what is behind them, and nobody else.
func TestRingPreemptedProducer(t *testing.T) {
	r := newRing(8)
	r.push([]pagemem.PageID{1})
	r.tail.Add(1) // another producer, preempted after its claim
	if n := r.push([]pagemem.PageID{3, 4}); n != 2 {
		t.Fatalf("pushed %d behind the claim", n)
	}
	var ids [8]pagemem.PageID
	if n := r.pop(ids[:]); n != 1 || ids[0] != 1 {
		t.Fatalf("popped %v", ids[:n])
	}
	r.slots[1].Store(2<<32 | 2) // it goes on
	if n := r.pop(ids[:]); n != 3 || !slices.Equal(ids[:3], []pagemem.PageID{2, 3, 4}) {
		t.Fatalf("popped %v", ids[:n])
	}
}
