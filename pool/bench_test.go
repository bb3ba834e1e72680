package pool

import (
	"fmt"
	"testing"

	"github.com/vhostd/vhostd/pagemem"
)

// BenchmarkPool allocates and puts 64 pages a batch. One operation is one page.
func BenchmarkPool(b *testing.B) {
	for _, by := range []pagemem.OwnerID{me, other} {
		path := map[pagemem.OwnerID]string{me: "direct", other: "ring"}[by]
		for _, mode := range []string{"single", "bulk"} {
			b.Run(fmt.Sprintf("path=%s/mode=%s", path, mode), func(b *testing.B) {
				a := newArena(b, 1024, 0)
				p := newPool(b, Config{Arena: a})
				var ids [64]pagemem.PageID
				b.ReportAllocs()
				for n := 0; n < b.N; n += len(ids) {
					if mode == "bulk" {
						p.AllocN(ids[:])
						p.PutBulk(ids[:], by)
						continue
					}
					for i := range ids {
						ids[i], _ = p.Alloc()
					}
					for _, id := range ids {
						a.Release(id, 1, by)
					}
				}
			})
		}
	}
}

// BenchmarkPaths puts pages one by one on each of the three ways: into the owner's cache, through the ring, and to the arena
// because somebody else holds the page (bench_page_pool_simple of the kernel's prototype). One operation is one page.
func BenchmarkPaths(b *testing.B) {
	for _, path := range []string{"fast", "ring", "slow"} {
		b.Run("path="+path, func(b *testing.B) {
			a := newArena(b, 1024, 0)
			p := newPool(b, Config{Arena: a})
			by := map[string]pagemem.OwnerID{"fast": me, "ring": other, "slow": me}[path]
			b.ReportAllocs()
			for b.Loop() {
				id, _ := p.Alloc()
				if path == "slow" {
					a.Ref(id)
					p.Put(id, 1, by)
					a.Unref(id, 1)
					continue
				}
				p.Put(id, 1, by)
			}
		})
	}
}

// BenchmarkRefill never puts pages back into the pool, so that each comes from the arena in one of the three forms. One operation is one page.
func BenchmarkRefill(b *testing.B) {
	for _, form := range []Refill{RefillSingle, RefillList, RefillArray} {
		b.Run("form="+form.String(), func(b *testing.B) {
			a := newArena(b, 1024, 0)
			p := newPool(b, Config{Arena: a, Refill: form})
			var ids [64]pagemem.PageID
			for n := 0; n < b.N; n += len(ids) {
				p.AllocN(ids[:])
				for _, id := range ids {
					a.Ref(id)
				}
				p.PutBulk(ids[:], me)
				a.FreeBulk(ids[:])
			}
		})
	}
}

// BenchmarkFragPool allocates and puts fragments as BenchmarkFrag does.
func BenchmarkFragPool(b *testing.B) {
	for _, size := range []uint32{256, 1536} {
		b.Run(fmt.Sprintf("size=%d", size), func(b *testing.B) {
			a := newArena(b, 1024, 0)
			f := newFragPool(b, a, newPool(b, Config{Arena: a}), me)
			for b.Loop() {
				frag, _ := f.Alloc(size, 64)
				a.Release(frag.Page, 1, me)
			}
		})
	}
}

// BenchmarkFrag allocates and puts fragments. One operation is one fragment.
func BenchmarkFrag(b *testing.B) {
	for _, size := range []uint32{256, 1536} {
		b.Run(fmt.Sprintf("size=%d", size), func(b *testing.B) {
			a := newArena(b, 1024, 0)
			p := newPool(b, Config{Arena: a})
			for b.Loop() {
				id, _, _, _ := p.AllocFrag(size)
				p.Put(id, 1, me)
			}
		})
	}
}

// BenchmarkPublish is the cost of statistics a batch.
func BenchmarkPublish(b *testing.B) {
	p := newPool(b, Config{Arena: newArena(b, 64, 0)})
	for b.Loop() {
		p.ctx.own.fast++
		p.ctx.own.cached++
		p.Publish()
	}
}
