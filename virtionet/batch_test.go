package virtionet

import (
	"fmt"
	"math"
	"reflect"
	"testing"
	"time"

	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/echo"
	"github.com/vhostd/vhostd/port/null"
	"github.com/vhostd/vhostd/port/source"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

func ports(frame int) map[string]func() port.Port {
	return map[string]func() port.Port{
		"null":   func() port.Port { return null.New() },
		"source": func() port.Port { return must(source.New(source.Options{Size: frame})) },
		"echo":   func() port.Port { return must(echo.New(echo.Options{Swap: true})) },
	}
}

// TestBatchAllocatesNothing pins the steady state of both directions.
func TestBatchAllocatesNothing(t *testing.T) {
	for name, p := range ports(64) {
		for _, features := range formats(baseFeatures) {
			t.Run(fmt.Sprintf("%s/%v", name, features), func(t *testing.T) {
				r := newRig(t, p(), rigOptions{features: features})
				r.loop.Do(func() {
					pair := r.dev.pairs[0]
					for range 100 {
						r.lap(pair, 32, 64)
					}
					if n := testing.AllocsPerRun(1000, func() { r.lap(pair, 32, 64) }); n != 0 {
						t.Errorf("a batch allocates %v times, want 0", n)
					}
				})
			})
		}
	}
}

// TestPathsAllocateNothing pins the paths beside the common one: frames that come back
// over several buffers, over very many, with marks, finished in software, refused.
func TestPathsAllocateNothing(t *testing.T) {
	const sender = virtio.FNetCSum | virtio.FNetHostTSO4
	csum, _ := unfinished(t, false, false, 1000)
	for _, test := range []struct {
		name     string
		features virtio.Features
		f        frame
		buffer   uint32
		buffers  int
	}{
		{"merged", baseFeatures, plain(9000, 1), 1526, 6},
		{"merged, packed ring", baseFeatures | virtio.FRingPacked, plain(9000, 1), 1526, 6},
		{"very many buffers, packed ring", baseFeatures | virtio.FRingPacked, plain(65000, 1), 1526, 43},
		{"very many buffers", baseFeatures, plain(65000, 1), 1526, 43},
		{"single", modernSingle, plain(1500, 1), 2000, 1},
		{"legacy", legacyFeatures, plain(1500, 1), 2000, 1},
		{"marks", baseFeatures | sender | guestOffloads, csum, 2000, 1},
		{"large with marks", baseFeatures | sender | guestOffloads, segmented(t, false, false, 20000, 1448), 4096, 5},
		{"finished checksum", baseFeatures | sender, csum, 2000, 1},
		{"finished segments", baseFeatures | sender, segmented(t, false, false, 20000, 1448), 2000, 14},
		{"refused", baseFeatures, plain(3, 1), 2000, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t, must(echo.New(echo.Options{})), rigOptions{features: test.features})
			raw := r.raw(test.f.hdr, test.f.data)
			at := r.place(raw)
			into := r.place(make([]byte, 4096))
			returned := 0
			lap := func() {
				_, _ = r.tx.AddDirect(driver.Buf{Addr: at, Len: uint32(len(raw))})
				r.tx.Publish()
				for r.rx.Free() > 0 {
					_, _ = r.rx.AddDirect(driver.Buf{Addr: into, Len: test.buffer, Write: true})
				}
				r.rx.Publish()
				for r.pair().Run() {
				}
				for _, _, ok := r.tx.GetUsed(); ok; _, _, ok = r.tx.GetUsed() {
				}
				for _, _, ok := r.rx.GetUsed(); ok; _, _, ok = r.rx.GetUsed() {
					returned++
				}
			}
			r.loop.Do(func() {
				for range 100 {
					lap()
				}
				returned = 0
				if n := testing.AllocsPerRun(200, lap); n != 0 {
					t.Errorf("a frame allocates %v times, want 0", n)
				}
				if want := 201 * test.buffers; returned != want {
					t.Errorf("%d buffers came back, want %d", returned, want)
				}
			})
		})
	}
}

// TestPacketsStartAtLines: the packets of a pair do not straddle more cache lines than they must.
func TestPacketsStartAtLines(t *testing.T) {
	r := newRig(t, null.New(), rigOptions{features: baseFeatures})
	p := reflect.ValueOf(r.pair())
	for _, name := range []string{"out", "incoming"} {
		field, _ := p.Type().Elem().FieldByName(name)
		if at := p.Pointer() + field.Offset; at%64 != 0 || field.Type.Elem().Size()%64 != 0 {
			t.Errorf("%s begins at %#x, %d bytes each", name, at, field.Type.Elem().Size())
		}
	}
}

// BenchmarkTxAlloc is BenchmarkBatch for the allocators of transmit buffers.
func BenchmarkTxAlloc(b *testing.B) {
	for _, name := range []string{"null", "echo"} {
		for _, size := range []int{64, 256, 1500} {
			for _, a := range allTxAllocs {
				b.Run(fmt.Sprintf("port=%s/size=%d/alloc=%v", name, size, a), func(b *testing.B) {
					benchBatch(b, ports(size)[name](), rigOptions{features: baseFeatures, alloc: a}, size)
				})
			}
		}
	}
}

// BenchmarkBatch reports, besides the mean, the best of many windows of a fraction of a millisecond: on a
// machine with noisy neighbors it is what two builds can be compared by.
func BenchmarkBatch(b *testing.B) {
	for _, size := range []int{64, 1500} {
		for name, p := range ports(size) {
			for _, features := range formats(baseFeatures) {
				b.Run(fmt.Sprintf("port=%s/size=%d/%v", name, size, features&(virtio.FRingPacked|virtio.FInOrder)), func(b *testing.B) {
					benchBatch(b, p(), rigOptions{features: features}, size)
				})
			}
		}
	}
}

func benchBatch(b *testing.B, p port.Port, o rigOptions, size int) {
	const window = 100
	r := newRig(b, p, o)
	r.loop.Do(func() {
		pair := r.dev.pairs[0]
		b.ResetTimer()
		best := time.Duration(math.MaxInt64)
		for done := 0; done < b.N; done += window {
			start := time.Now()
			for range window {
				r.lap(pair, 32, uint32(size))
			}
			best = min(best, time.Since(start))
		}
		b.ReportMetric(float64(best.Nanoseconds())/(window*32), "best-ns/packet")
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(max(b.N, window)*32), "ns/packet")
	})
}
