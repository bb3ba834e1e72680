package fragalloc

import "golang.org/x/sys/cpu"

func bestKernel() kernel {
	all := kernels()
	return all[len(all)-1]
}

// kernels lists what this processor can run, best last. x/sys/cpu also looks at
// whether the operating system saves the registers.
func kernels() []kernel {
	all := []kernel{kernelGo, kernelSSE2}
	if cpu.X86.HasAVX2 {
		all = append(all, kernelAVX2)
	}
	if cpu.X86.HasAVX2 && cpu.X86.HasAVX512F && cpu.X86.HasAVX512VL && cpu.X86.HasAVX512BW {
		all = append(all, kernelAVX512)
	}
	return all
}

func copyVec(k kernel, v []CopyOp) {
	switch k {
	case kernelAVX512:
		copyVecAVX512(v)
	case kernelAVX2:
		copyVecAVX2(v)
	case kernelSSE2:
		copyVecSSE2(v)
	default:
		copyVecGo(v)
	}
}

func copyVecNoCache(k kernel, v []CopyOp, min, head uint64) {
	switch k {
	case kernelAVX512:
		copyVecNoCacheAVX512(v, min, head)
	case kernelAVX2:
		copyVecNoCacheAVX2(v, min, head)
	case kernelSSE2:
		copyVecNoCacheSSE2(v, min, head)
	default:
		copyVecGo(v)
	}
}

//go:noescape
func copyVecSSE2(v []CopyOp)

//go:noescape
func copyVecAVX2(v []CopyOp)

//go:noescape
func copyVecAVX512(v []CopyOp)

//go:noescape
func copyVecNoCacheSSE2(v []CopyOp, min, head uint64)

//go:noescape
func copyVecNoCacheAVX2(v []CopyOp, min, head uint64)

//go:noescape
func copyVecNoCacheAVX512(v []CopyOp, min, head uint64)
