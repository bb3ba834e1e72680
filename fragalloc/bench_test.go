package fragalloc

import (
	"fmt"
	"testing"
)

// BenchmarkCopy copies 32 packets a call, between areas of 32 packets (hot) or
// 64 MiB (cold) on both sides. One operation is one packet.
func BenchmarkCopy(b *testing.B) {
	const cold = 64 << 20
	src, _ := newArea(b, cold)
	dst, _ := newArea(b, cold)
	clear(src.bytes)
	clear(dst.bytes)
	for _, area := range []struct {
		name  string
		bytes int
	}{{"hot", 0}, {"cold", cold}} {
		for _, size := range []int{64, 128, 256, 1500, 4096} {
			for _, k := range kernels() {
				b.Run(fmt.Sprintf("area=%s/size=%d/path=%v", area.name, size, k), func(b *testing.B) {
					benchCopy(b, src, dst, size, area.bytes, func(v []CopyOp) { copyVec(k, v) })
				})
				if k == kernelGo || size < NoCacheMin {
					continue
				}
				b.Run(fmt.Sprintf("area=%s/size=%d/path=%v-nocache", area.name, size, k), func(b *testing.B) {
					benchCopy(b, src, dst, size, area.bytes, func(v []CopyOp) { copyVecNoCache(k, v, NoCacheMin, headBytes) })
				})
			}
		}
	}
}

func benchCopy(b *testing.B, src, dst area, size, bytes int, copyAll func([]CopyOp)) {
	const batch = 32
	stride := (size + 63) &^ 63
	rounds := max(1, bytes/(batch*stride))
	v := make([]CopyOp, batch)
	b.SetBytes(int64(size))
	b.ResetTimer()
	for n := 0; n < b.N; n += batch {
		at := (n / batch % rounds) * batch * stride
		for i := range v {
			off := uintptr(at + i*stride)
			v[i] = CopyOp{dst.base + off, src.base + off, uint64(size)}
		}
		copyAll(v)
	}
}

// BenchmarkAlloc allocates and releases 64 fragments a batch, as a transmit
// batch does. One operation is one fragment.
func BenchmarkAlloc(b *testing.B) {
	for _, size := range []uint32{768, 1984, 4096} {
		for _, mode := range []string{"alloc", "prepare"} {
			b.Run(fmt.Sprintf("size=%d/mode=%s", size, mode), func(b *testing.B) {
				benchAlloc(b, size, mode == "prepare")
			})
		}
	}
}

func benchAlloc(b *testing.B, size uint32, prepare bool) {
	a := newArena(b, 64, 0)
	c := NewCache(a)
	var out [64]Frag
	for n := 0; n < b.N; n += len(out) {
		for i := range out {
			if prepare {
				out[i], _ = c.Prepare(size, 64)
				c.Commit(out[i], size)
			} else {
				out[i], _ = c.Alloc(size, 64)
			}
		}
		for i := 0; i < len(out); {
			run := 1
			for i+run < len(out) && out[i+run].Page == out[i].Page {
				run++
			}
			a.Release(out[i].Page, run, 0)
			i += run
		}
	}
	c.Drain()
}
