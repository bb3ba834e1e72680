package fragalloc

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"testing"

	"golang.org/x/sys/unix"
)

var allKernels = []kernel{kernelGo, kernelSSE2, kernelAVX2, kernelAVX512}

// eachKernel runs f for every implementation, both cached and not.
func eachKernel(t *testing.T, f func(t *testing.T, copyAll func([]CopyOp))) {
	for _, k := range allKernels {
		for name, copyAll := range map[string]func(kernel, []CopyOp){"cached": copyVec, "nocache": hybrid, "stream": stream} {
			t.Run(fmt.Sprintf("%v/%s", k, name), func(t *testing.T) {
				needKernel(t, k)
				f(t, func(v []CopyOp) { copyAll(k, v) })
			})
		}
	}
}

func hybrid(k kernel, v []CopyOp) { copyVecNoCache(k, v, NoCacheMin, headBytes) }
func stream(k kernel, v []CopyOp) { copyVecNoCache(k, v, NoCacheMin, 0) }

func needKernel(t testing.TB, k kernel) {
	t.Helper()
	for _, have := range kernels() {
		if have == k {
			return
		}
	}
	if runtime.GOARCH == "amd64" {
		t.Skipf("not applicable: this processor has no %v, its copy loops did not run", k)
	}
	t.Skipf("not applicable: %v is for amd64 only", k)
}

func fill(b []byte, seed uint64) {
	r := rand.New(rand.NewPCG(seed, 1))
	for i := range b {
		b[i] = byte(r.Uint32())
	}
}

// sizes are the lengths at which the loops change their way.
func sizes() []int {
	var all []int
	for n := 0; n <= 300; n++ {
		all = append(all, n)
	}
	for _, around := range []int{383, 512, 768, 1024, 1500, 4096, 65536} {
		for n := around - 3; n <= around+3 && n <= 65536; n++ {
			all = append(all, n)
		}
	}
	return all
}

// TestCopyAtGuards copies areas that start right after, or end right before, a
// guard page: reading or writing one byte too many faults.
func TestCopyAtGuards(t *testing.T) {
	const n = 65536
	src, _ := newArea(t, n)
	dst, _ := newArea(t, n)
	fill(src.bytes, 1)
	eachKernel(t, func(t *testing.T, copyAll func([]CopyOp)) {
		for _, size := range sizes() {
			for corner := range 4 {
				from, to := 0, 0
				if corner&1 != 0 {
					from = n - size
				}
				if corner&2 != 0 {
					to = n - size
				}
				checkCopy(t, copyAll, src, dst, from, to, size)
			}
		}
	})
}

// TestCopyAlignments copies with every alignment of source and destination
// within a cache line.
func TestCopyAlignments(t *testing.T) {
	src, _ := newArea(t, 8192)
	dst, _ := newArea(t, 8192)
	fill(src.bytes, 2)
	lengths := []int{1, 7, 15, 31, 33, 64, 65, 127, 129, 191, 255, 256, 257, 319, 511, 1500}
	eachKernel(t, func(t *testing.T, copyAll func([]CopyOp)) {
		for _, size := range lengths {
			for from := range 64 {
				for to := range 64 {
					checkCopy(t, copyAll, src, dst, 100+from, 200+to, size)
				}
			}
		}
		for size := range 301 {
			for to := range 64 {
				checkCopy(t, copyAll, src, dst, 100+(3*size+5*to)%64, 200+to, size)
			}
		}
	})
}

// untouched is what surrounds a destination.
var untouched = bytes.Repeat([]byte{0xa5}, 256)

// checkCopy copies size bytes and compares them and up to 256 bytes on both sides.
func checkCopy(t *testing.T, copyAll func([]CopyOp), src, dst area, from, to, size int) {
	t.Helper()
	before := dst.bytes[max(0, to-256):to]
	after := dst.bytes[to+size : min(len(dst.bytes), to+size+256)]
	copy(before, untouched)
	copy(after, untouched)
	clear(dst.bytes[to : to+size])
	v := [1]CopyOp{{dst.base + uintptr(to), src.base + uintptr(from), uint64(size)}}
	copyAll(v[:])
	if !bytes.Equal(dst.bytes[to:to+size], src.bytes[from:from+size]) {
		t.Fatalf("%d bytes from %d to %d: wrong bytes", size, from, to)
	}
	if !bytes.Equal(before, untouched[:len(before)]) || !bytes.Equal(after, untouched[:len(after)]) {
		t.Fatalf("%d bytes from %d to %d: wrote outside", size, from, to)
	}
}

// TestCopyVector copies vectors of mixed sizes, longer than one assembly call.
func TestCopyVector(t *testing.T) {
	src, _ := newArea(t, 1<<20)
	dst, _ := newArea(t, 1<<20)
	fill(src.bytes, 3)
	for _, k := range kernels() {
		for name, copyAll := range map[string]func([]CopyOp){
			"cached": CopyVec, "nocache": func(v []CopyOp) { CopyVecNoCache(v, 700) }, "stream": func(v []CopyOp) { CopyVecStream(v, 0) },
		} {
			t.Run(fmt.Sprintf("%v/%s", k, name), func(t *testing.T) {
				useKernel(t, k)
				if CopyKernel() != k.String() {
					t.Errorf("%v in use", CopyKernel())
				}
				r := rand.New(rand.NewPCG(4, 4))
				for _, count := range []int{0, 1, 2, 63, 64, 65, 128, 150} {
					vectorRound(t, copyAll, r, src, dst, count)
				}
			})
		}
	}
}

func vectorRound(t *testing.T, copyAll func([]CopyOp), r *rand.Rand, src, dst area, count int) {
	t.Helper()
	want := make([]byte, len(dst.bytes))
	clear(dst.bytes)
	var v []CopyOp
	to := 0
	for range count {
		size, from := r.IntN(3000), r.IntN(len(src.bytes)-3000)
		v = append(v, CopyOp{dst.base + uintptr(to), src.base + uintptr(from), uint64(size)})
		copy(want[to:], src.bytes[from:from+size])
		to += size + r.IntN(70)
	}
	copyAll(v)
	if !bytes.Equal(dst.bytes, want) {
		t.Fatalf("vector of %d: areas differ", count)
	}
}

func useKernel(t testing.TB, k kernel) {
	before := active
	active = k
	t.Cleanup(func() { active = before })
}

func TestCopyNoCacheSingle(t *testing.T) {
	src, _ := newArea(t, 8192)
	dst, _ := newArea(t, 8192)
	fill(src.bytes, 5)
	CopyNoCache(dst.base+1, src.base+3, 8000)
	if !bytes.Equal(dst.bytes[1:8001], src.bytes[3:8003]) {
		t.Fatal("wrong bytes")
	}
	CopyNoCache(dst.base, src.base, 0)
}

// TestCopyFault truncates the memory under a copy: each loop must fault in a
// recoverable way and work again afterwards.
func TestCopyFault(t *testing.T) {
	const n = 65536
	eachKernel(t, func(t *testing.T, copyAll func([]CopyOp)) {
		for _, side := range []string{"source", "destination"} {
			for _, size := range []int{8, 40, 100, 200, 1500, 40000} {
				src, srcFD := newArea(t, n)
				dst, dstFD := newArea(t, n)
				fd, gone := srcFD, src
				if side == "destination" {
					fd, gone = dstFD, dst
				}
				if err := unix.Ftruncate(fd, n/2); err != nil {
					t.Fatal(err)
				}
				start := uintptr(n/2 - 4)
				v := []CopyOp{{dst.base + start, src.base + start, uint64(min(size, n/2))}}
				fault := recovered(func() { copyAll(v) })
				if fault == nil {
					t.Fatalf("%s truncated, %d bytes: no fault", side, size)
				}
				at, ok := fault.(interface{ Addr() uintptr })
				if ok && (at.Addr() < gone.base+n/2 || at.Addr() >= gone.base+n) || !ok && runtime.GOARCH == "amd64" {
					t.Fatalf("%s truncated, %d bytes: %v, area at %#x", side, size, fault, gone.base)
				}
				v[0] = CopyOp{dst.base, src.base, 3000}
				copyAll(v)
			}
		}
	})
}

// recovered runs f and returns its panic. Under qemu-user a fault has no address.
func recovered(f func()) (fault runtime.Error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() { fault, _ = recover().(runtime.Error) }()
	f()
	return nil
}

func TestCopyDoesNotAllocate(t *testing.T) {
	src, _ := newArea(t, 8192)
	dst, _ := newArea(t, 8192)
	n := testing.AllocsPerRun(100, func() {
		v := [2]CopyOp{{dst.base, src.base, 1500}, {dst.base + 2048, src.base + 2048, 64}}
		CopyVec(v[:])
		CopyVecNoCache(v[:], AutoMin)
		CopyVecStream(v[:], 0)
		CopyNoCache(dst.base, src.base, 600)
	})
	if n != 0 {
		t.Fatalf("%v allocations", n)
	}
}

// TestCopiedIsExact: what is counted as stored past the cache are the whole lines behind the head, of the operations that are long enough.
func TestCopiedIsExact(t *testing.T) {
	src, _ := newArea(t, 1<<16)
	dst, _ := newArea(t, 1<<16)
	for _, c := range []struct {
		off       uintptr
		size, min uint64
		hybrid    uint64
		stream    uint64
	}{
		{0, 255, 0, 0, 0},
		{0, 256, 0, 128, 256},
		{0, 511, 512, 0, 0},
		{0, 512, 512, 384, 512},
		{1, 512, 512, 320, 448},     // 63 bytes to the first line, 128 of head, 1 at the end
		{63, 1500, 512, 1344, 1472}, // 1 byte to the first line
		{0, 1500, 1501, 0, 0},
	} {
		v := []CopyOp{{dst.base + c.off, src.base, c.size}, {dst.base + 8192, src.base, 100}}
		want := map[bool]Copied{true: {c.hybrid, 1}, false: {c.stream, 1}}
		for head, w := range want {
			if w.PastCache == 0 {
				w.Fences = 0
			}
			if active == kernelGo {
				w = Copied{}
			}
			got := CopyVecStream(v, c.min)
			if head {
				got = CopyVecNoCache(v, c.min)
			}
			if got != w {
				t.Errorf("%d bytes at %d, %d at least, head %v: %+v, want %+v", c.size, c.off, c.min, head, got, w)
			}
		}
	}
	long := make([]CopyOp, 130)
	for i := range long {
		long[i] = CopyOp{dst.base, src.base, 1024}
	}
	if got := CopyVecNoCache(long, 0); active != kernelGo && got != (Copied{130 * 896, 3}) {
		t.Errorf("130 copies: %+v", got)
	}
}

func TestPastCache(t *testing.T) {
	if PastCache(0) || PastCache(2*L2Bytes()) || !PastCache(2*L2Bytes()+1) {
		t.Errorf("two second-level caches of %d bytes are not where it begins", L2Bytes())
	}
}

// FuzzCopy copies between any places of two areas with every implementation.
func FuzzCopy(f *testing.F) {
	f.Add(uint16(0), uint16(1), uint16(64))
	f.Add(uint16(63), uint16(1), uint16(1514))
	f.Add(uint16(4000), uint16(8000), uint16(192))
	src, _ := newArea(f, 1<<14)
	dst, _ := newArea(f, 1<<14)
	fill(src.bytes, 6)
	f.Fuzz(func(t *testing.T, from, to, size uint16) {
		from, to = from%(1<<13), to%(1<<13)
		n := int(size) % (1 << 13)
		for _, k := range kernels() {
			checkCopy(t, func(v []CopyOp) { copyVec(k, v) }, src, dst, int(from), int(to), n)
			checkCopy(t, func(v []CopyOp) { hybrid(k, v) }, src, dst, int(from), int(to), n)
			checkCopy(t, func(v []CopyOp) { stream(k, v) }, src, dst, int(from), int(to), n)
		}
	})
}
