package fragalloc

import (
	"fmt"
	"math"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
)

// BenchmarkPolicy is how the rule of PastCache was found: batches of 32 frames are copied through an area, what is copied is read
// when it has gone round half of the area, by nobody, by this processor or by another one. One operation is one frame; best-ns/packet is the best
// of many windows, copying and reading together where this processor reads.
func BenchmarkPolicy(b *testing.B) {
	const size = 1536
	for _, area := range []int{256 << 10, 1 << 20, 4 << 20, 64 << 20} {
		src, _ := newArea(b, 64*size)
		dst, _ := newArea(b, area)
		clear(src.bytes)
		clear(dst.bytes)
		for _, reader := range []string{"none", "self", "other"} {
			for _, kind := range []string{"cached", "hybrid", "stream"} {
				b.Run(fmt.Sprintf("area=%dK/reader=%s/kind=%s", area>>10, reader, kind), func(b *testing.B) {
					benchPolicy(b, src, dst, size, reader, kind)
				})
			}
		}
	}
}

func benchPolicy(b *testing.B, src, dst area, size int, reader, kind string) {
	const batch, window = 32, 8
	rounds := len(dst.bytes) / (batch * size)
	var done, read atomic.Int64 // batches
	quit, ended := make(chan struct{}), make(chan struct{})
	if reader == "other" {
		go func() {
			defer close(ended)
			for n := int64(0); ; {
				if n+int64(rounds/2) < done.Load() {
					touch(dst.bytes[int(n)%rounds*batch*size:][:batch*size])
					n++
					read.Store(n)
					continue
				}
				select {
				case <-quit:
					return
				default:
					runtime.Gosched()
				}
			}
		}()
	} else {
		close(ended)
	}
	v := make([]CopyOp, batch)
	best, at := time.Duration(math.MaxInt64), 0
	b.ResetTimer()
	for n := 0; n < b.N; n += batch * window {
		for reader == "other" && read.Load()+int64(rounds) < done.Load() {
			runtime.Gosched()
		}
		start := time.Now()
		for range window {
			for i := range v {
				v[i] = CopyOp{dst.base + uintptr((at*batch+i)*size), src.base + uintptr(i*size), uint64(size)}
			}
			switch kind {
			case "cached":
				CopyVec(v)
			case "hybrid":
				CopyVecNoCache(v, AutoMin)
			default:
				CopyVecStream(v, AutoMin)
			}
			if reader == "self" {
				touch(dst.bytes[(at+rounds/2)%rounds*batch*size:][:batch*size])
			}
			if at++; at == rounds {
				at = 0
			}
			done.Add(1)
		}
		best = min(best, time.Since(start))
	}
	close(quit)
	<-ended
	b.ReportMetric(float64(best.Nanoseconds())/(batch*window), "best-ns/packet")
}

var touched byte

// touch reads a byte of each cache line.
func touch(b []byte) {
	sum := byte(0)
	for i := 0; i < len(b); i += Line {
		sum += b[i]
	}
	touched = sum
}
