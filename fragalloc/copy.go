package fragalloc

// CopyOp is one copy of N bytes between two places in mmap'd memory, which must
// not overlap. Neither may be on the Go heap.
type CopyOp struct {
	Dst, Src uintptr
	N        uint64
}

// maxVec bounds one call into assembly, which cannot be preempted: with
// operations of at most 64 KiB it lasts some hundred microseconds at worst.
const maxVec = 64

// NoCacheMin is the shortest operation that can be made with non-temporal stores.
const NoCacheMin = 256

// headBytes of each such operation are stored as usual: the headers, which will be read.
const headBytes = 128

// Copied says how bytes were stored.
type Copied struct {
	PastCache uint64 // bytes by non-temporal stores
	Fences    uint64 // that these needed
}

// kernel is one implementation of the copy loops.
type kernel uint8

const (
	kernelGo kernel = iota
	kernelSSE2
	kernelAVX2
	kernelAVX512
)

func (k kernel) String() string {
	return [...]string{"go", "sse2", "avx2", "avx512"}[k]
}

// active is what this processor runs best. Tests change it.
var active = bestKernel()

// CopyKernel names the implementation in use: "avx512", "avx2", "sse2" or "go".
func CopyKernel() string { return active.String() }

// CopyVec does all copies with ordinary stores. Callers bound an operation to
// 64 KiB. The addresses must be valid; memory that vanished is a fault, which a
// goroutine with debug.SetPanicOnFault(true) can recover from.
func CopyVec(v []CopyOp) {
	for len(v) > maxVec {
		copyVec(active, v[:maxVec])
		v = v[maxVec:]
	}
	copyVec(active, v)
}

// CopyVecNoCache is CopyVec for data that this core will not read soon. Of every
// operation of min bytes or more (NoCacheMin at least), the first 128 bytes (the headers, which will
// be read) and the parts of cache lines at the ends are stored as usual, all
// whole lines between them past the cache. The stores are ordered before
// everything that the caller stores afterwards, by one fence for each 64 copies.
// Where there are no such stores (other architectures) it equals CopyVec.
func CopyVecNoCache(v []CopyOp, min uint64) Copied { return copyPast(v, min, headBytes) }

// CopyVecStream is CopyVecNoCache without a head: all whole lines go past the cache. It is there to be compared with.
func CopyVecStream(v []CopyOp, min uint64) Copied { return copyPast(v, min, 0) }

func copyPast(v []CopyOp, least, head uint64) (c Copied) {
	least = max(least, NoCacheMin)
	for len(v) > 0 {
		part := v[:min(len(v), maxVec)]
		c.count(part, least, head)
		copyVecNoCache(active, part, least, head)
		v = v[len(part):]
	}
	return c
}

// count adds what one call into assembly does.
func (c *Copied) count(v []CopyOp, least, head uint64) {
	if active == kernelGo {
		return
	}
	before := c.PastCache
	for i := range v {
		if op := &v[i]; op.N >= least {
			c.PastCache += (op.N - head - uint64(-op.Dst&63)) &^ 63
		}
	}
	if c.PastCache != before {
		c.Fences++
	}
}

// CopyNoCache is CopyVecNoCache for one copy. A fence each time is dear: a batch
// of packets wants the vector.
func CopyNoCache(dst, src uintptr, n uint64) {
	v := [1]CopyOp{{dst, src, n}}
	CopyVecNoCache(v[:], NoCacheMin)
}
