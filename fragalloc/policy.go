package fragalloc

import "github.com/klauspost/cpuid/v2"

// AutoMin is the shortest copy for which [PastCache] speaks: below it the head and the ends are most of it.
const AutoMin = 512

// defaultL2 is taken for the size of a processor's second-level cache where it does not say.
const defaultL2 = 1 << 20

// L2Bytes is the size of a processor's second-level cache in bytes.
func L2Bytes() int {
	if n := cpuid.CPU.Cache.L2; n > 0 {
		return n
	}
	return defaultL2
}

// pastCacheFrom is where both ways cost the same on the processor that BenchmarkPolicy was run on.
var pastCacheFrom = 2 * L2Bytes()

// PastCache is the rule of the copy policy "auto" (docs/performance.md says how it was found): copies of AutoMin bytes or more go past the
// cache if held, the bytes that wait between their copy and their first read, by another processor, are more than two
// second-level caches. They would have left it anyway, and would have pushed out what this processor still needs. Whoever reads on
// the same processor wants everything cached: for such data held is 0.
func PastCache(held int) bool { return held > pastCacheFrom }
