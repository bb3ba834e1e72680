package fragalloc

import "unsafe"

// copyVecGo is the portable twin of the assembly.
func copyVecGo(v []CopyOp) {
	for i := range v {
		op := &v[i]
		if op.N == 0 {
			continue
		}
		// SAFETY: the caller vouches for N bytes at both addresses, in mappings outside the Go heap; bytes have no alignment.
		// ORDER: plain accesses; the caller's release store of an index publishes them.
		copy(unsafe.Slice(pointer(&op.Dst), op.N), unsafe.Slice(pointer(&op.Src), op.N))
	}
}

func pointer(addr *uintptr) *byte {
	// SAFETY: *addr lies in a mapping outside the Go heap, so it may live in an integer.
	return (*byte)(*(*unsafe.Pointer)(unsafe.Pointer(addr)))
}
