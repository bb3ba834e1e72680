package virtionet

import "github.com/vhostd/vhostd/fragalloc"

// A vector is copied early when it is full or this large: an assembly call cannot be
// preempted, so it must stay short.
const (
	maxCopies    = 64
	maxCopyBytes = 256 << 10
)

// copyVector collects the copies of a batch.
type copyVector struct {
	ops   [maxCopies]fragalloc.CopyOp
	n     int
	bytes uint64
	past  fragalloc.Copied // since the owner looked
}

// add appends a copy of n bytes; all addresses are outside the Go heap. pastMin is that of run.
func (v *copyVector) add(dst, src uintptr, n uint64, pastMin uint64) {
	if v.n == maxCopies || v.bytes >= maxCopyBytes {
		v.run(pastMin)
	}
	v.ops[v.n] = fragalloc.CopyOp{Dst: dst, Src: src, N: n}
	v.n++
	v.bytes += n
}

// run copies everything collected, what has pastMin bytes or more past the cache unless that is cachedOnly.
func (v *copyVector) run(pastMin uint64) {
	if v.n == 0 {
		return
	}
	ops := v.ops[:v.n]
	v.n, v.bytes = 0, 0
	if pastMin != cachedOnly {
		c := fragalloc.CopyVecNoCache(ops, pastMin)
		v.past.PastCache += c.PastCache
		v.past.Fences += c.Fences
		return
	}
	fragalloc.CopyVec(ops)
}
