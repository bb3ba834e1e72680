package virtionet

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/fragalloc"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/echo"
	"github.com/vhostd/vhostd/port/null"
	"github.com/vhostd/vhostd/virtio"
)

var allTxAllocs = []TxAlloc{TxFrag, TxFragPool, TxRefPage}

func TestParseTxAlloc(t *testing.T) {
	for _, a := range allTxAllocs {
		if got, err := ParseTxAlloc(a.String()); got != a || err != nil {
			t.Errorf("%v is parsed as %v: %v", a, got, err)
		}
	}
	if _, err := ParseTxAlloc("slab"); err == nil || err.Error() != `"slab": accepted are frag, fragpool, refpage` {
		t.Errorf("slab: %v", err)
	}
}

// keepPort is a network that keeps the frames it is sent until they are asked for, and says that they wait for another
// processor.
type keepPort struct {
	*null.Port
	keepQueue
}

type keepQueue struct {
	port.Queue
	mu   sync.Mutex
	res  port.Resources
	kept []packet.Packet
	held int
}

func newKeepPort() *keepPort { return &keepPort{Port: null.New()} }

func (k *keepPort) Close() error { return k.Port.Close() }

func (k *keepPort) OpenQueue(i int, r port.Resources) (port.Queue, error) {
	q, err := k.Port.OpenQueue(i, r)
	k.keepQueue.Queue, k.res = q, r
	return &k.keepQueue, err
}

func (q *keepQueue) Send(pkts []packet.Packet) int {
	q.mu.Lock()
	defer q.mu.Unlock()
	for i := range pkts {
		q.kept = append(q.kept, packet.Packet{})
		pkts[i].MoveTo(&q.kept[len(q.kept)-1])
	}
	return len(pkts)
}

func (q *keepQueue) Held() int { return q.held }

// release lets the frame at an index go, by a worker with the given identity, and returns what it held.
func (q *keepQueue) release(i int, by pagemem.OwnerID) []byte {
	q.mu.Lock()
	defer q.mu.Unlock()
	data := make([]byte, q.kept[i].Len)
	q.kept[i].CopyTo(data, 0)
	q.kept[i].Release(q.res.Arena, by)
	q.kept = append(q.kept[:i], q.kept[i+1:]...)
	return data
}

// TestTxAllocSwitch changes the allocator while frames of the others are under way, which are released at any time, by this
// worker or another one: every frame keeps its bytes, and at the end everything is back (rig.close looks).
func TestTxAllocSwitch(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		k := newKeepPort()
		features := rapid.SampledFrom([]virtio.Features{baseFeatures, baseFeatures | virtio.FRingPacked, baseFeatures | virtio.FNetCSum}).Draw(rt, "features")
		r := newRig(t, k, rigOptions{features: features, alloc: rapid.SampledFrom(allTxAllocs).Draw(rt, "first")})
		defer r.finishEarly()
		seed, want := 0, []frame(nil)
		let := func(i int, by pagemem.OwnerID) {
			var data []byte
			r.loop.Do(func() { data = k.release(i, by) })
			if string(data) != string(want[i].data) {
				rt.Fatalf("frame %d changed while it waited", i)
			}
			want = append(want[:i], want[i+1:]...)
		}
		rt.Repeat(map[string]func(*rapid.T){
			"send": func(rt *rapid.T) {
				for range rapid.IntRange(1, 40).Draw(rt, "n") {
					seed++
					want = append(want, plain(rapid.SampledFrom([]int{14, 60, 1514, 4000, 9000}).Draw(rt, "bytes"), seed))
					r.send(want[len(want)-1])
				}
				r.run()
				r.used(1)
			},
			"switch": func(rt *rapid.T) { r.dev.SetTxAlloc(rapid.SampledFrom(allTxAllocs).Draw(rt, "to")) },
			"copy":   func(rt *rapid.T) { r.dev.SetCopy(CopyPolicy(rapid.IntRange(0, 2).Draw(rt, "policy"))) },
			"release": func(rt *rapid.T) {
				if len(want) == 0 {
					rt.Skip("nothing under way")
				}
				by := pagemem.OwnerID(0)
				if rapid.Bool().Draw(rt, "own") {
					by = r.loop.Owner()
				}
				let(rapid.IntRange(0, len(want)-1).Draw(rt, "which"), by)
			},
		})
		for len(want) > 0 {
			let(0, 0)
		}
	})
}

// TestTxAllocShown: the snapshot tells what is in use; a switch to the same changes nothing, and it outlives the front-end.
func TestTxAllocShown(t *testing.T) {
	r := newRig(t, null.New(), rigOptions{features: baseFeatures, alloc: TxRefPage, copy: CopyAlways})
	if s := r.dev.Snapshot(); s.TxAlloc != TxRefPage || s.Copy != CopyAlways {
		t.Errorf("in use are %v and %v", s.TxAlloc, s.Copy)
	}
	var before, after txAllocator
	r.loop.Do(func() { before = r.pair().alloc })
	r.dev.SetTxAlloc(TxRefPage)
	r.loop.Do(func() { after = r.pair().alloc })
	if before != after {
		t.Error("the allocator was exchanged for one of the same kind")
	}
	r.dev.SetTxAlloc(TxFragPool)
	r.dev.SetCopy(CopyNever)
	r.disconnect()
	if s := r.dev.Snapshot(); s.TxAlloc != TxFragPool || s.Copy != CopyNever {
		t.Errorf("in use are %v and %v after the front-end left", s.TxAlloc, s.Copy)
	}
}

// TestFragPoolOnThePath: in steady state all pages are recycled ones, and the counters say so.
func TestFragPoolOnThePath(t *testing.T) {
	for _, p := range []port.Port{null.New(), must(echo.New(echo.Options{}))} {
		r := newRig(t, p, rigOptions{features: baseFeatures, alloc: TxFragPool})
		r.loop.Do(func() {
			for range 2000 {
				r.lap(r.pair(), 32, 1500)
			}
			r.pair().publishCounters()
		})
		s := r.dev.Snapshot()
		if pages := s.Pools.Fast + s.Pools.Slow + s.Pools.Refill + s.Pools.Borrowed; pages < 2000*32/2 || s.Pools.Slow > 8 {
			t.Errorf("%s: %d pages for %d frames: %+v", p.Kind(), pages, 2000*32, s.Pools)
		}
		r.disconnect()
		if after := r.dev.Snapshot().Pools; after.Fast < s.Pools.Fast || after.InFlight != 0 {
			t.Errorf("%s: counters after the end %+v", p.Kind(), after)
		}
	}
}

// TestFragPoolIdle: a guest that fell silent gives what its allocator kept ready back, after a second and not at once.
func TestFragPoolIdle(t *testing.T) {
	r := newRig(t, null.New(), rigOptions{features: baseFeatures, alloc: TxFragPool})
	r.send(plain(4000, 1))
	start := time.Now()
	r.forceKick(1)
	resting := func() (n int) {
		r.loop.Do(func() { n = r.pair().alloc.(*fragPoolAlloc).Resting() })
		return n
	}
	waitFor(t, "the frame", r.tx.HasUsed)
	if n := resting(); n == 0 && time.Since(start) < shrinkAfter {
		t.Error("nothing is kept ready after a frame")
	}
	waitFor(t, "the allocator to shrink", func() bool { return resting() == 0 })
	if d := time.Since(start); d < shrinkAfter {
		t.Errorf("it shrank after %v", d)
	}
	sleeps := r.loop.Stats().Sleeps
	time.Sleep(1200 * time.Millisecond)
	if n := r.loop.Stats().Sleeps - sleeps; n > 3 {
		t.Errorf("the worker woke %d times for a silent guest", n)
	}
}

// TestTxAllocsAllocateNothing pins the steady state with every allocator.
func TestTxAllocsAllocateNothing(t *testing.T) {
	for _, a := range allTxAllocs {
		for _, size := range []uint32{64, 1500, 9000} {
			r := newRig(t, must(echo.New(echo.Options{})), rigOptions{features: baseFeatures, alloc: a})
			buffers := uint32(4096)
			r.loop.Do(func() {
				for range 100 {
					r.lap(r.pair(), 16, min(size, buffers-12))
				}
				if n := testing.AllocsPerRun(300, func() { r.lap(r.pair(), 16, min(size, buffers-12)) }); n != 0 {
					t.Errorf("%v, %d bytes: a batch allocates %v times", a, size, n)
				}
			})
			r.finishEarly()
		}
	}
}

// TestCopyCounters: bytes and fences are counted as they were stored, under each policy, and "auto" follows what the port says.
func TestCopyCounters(t *testing.T) {
	const frames, bytes = 10, 1536 - 64 // a frame's NT part: from the second line behind the head on
	for _, c := range []struct {
		policy CopyPolicy
		held   int
		past   bool
	}{{CopyNever, 1 << 30, false}, {CopyAlways, 0, true}, {CopyAuto, 0, false}, {CopyAuto, 1 << 30, true}} {
		t.Run(fmt.Sprintf("%v/%d held", c.policy, c.held), func(t *testing.T) {
			k := newKeepPort()
			k.held = c.held
			r := newRig(t, k, rigOptions{features: baseFeatures, copy: c.policy})
			want := CopyStats{}
			for i := range frames {
				r.send(plain(bytes, i))
				r.send(plain(300, i)) // for "always" alone
				want.Cached += bytes + 300
			}
			r.run()
			r.loop.Do(r.pair().publishCounters)
			got := r.dev.Snapshot().Copied
			if c.past && fragalloc.CopyKernel() != "go" {
				// Fragments start at lines: 128 bytes of head, whole lines, the rest of the last line.
				want.PastCache = frames * ((bytes - 128) &^ 63)
				if c.policy == CopyAlways {
					want.PastCache += frames * 128
				}
				want.Cached -= want.PastCache
				want.Fences = got.Fences
				if got.Fences == 0 || got.Fences > frames {
					t.Errorf("%d fences", got.Fences)
				}
			}
			if got != want {
				t.Errorf("%+v, want %+v", got, want)
			}
			for i := range 2 * frames {
				r.loop.Do(func() {
					if f := plain([]int{bytes, 300}[i%2], i/2); string(k.release(0, r.loop.Owner())) != string(f.data) {
						t.Errorf("frame %d differs", i)
					}
				})
			}
		})
	}
}
