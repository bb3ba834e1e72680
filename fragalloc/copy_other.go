//go:build !amd64

package fragalloc

func bestKernel() kernel { return kernelGo }

// kernels lists what this processor can run.
func kernels() []kernel { return []kernel{kernelGo} }

func copyVec(_ kernel, v []CopyOp) { copyVecGo(v) }

func copyVecNoCache(_ kernel, v []CopyOp, _, _ uint64) { copyVecGo(v) }
