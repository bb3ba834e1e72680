package worker

import "runtime"

// asFault tells whether a recovered panic is a memory fault, and at which address.
// The runtime gives such errors an Addr method when SetPanicOnFault is in force.
func asFault(recovered any) (addr uintptr, ok bool) {
	fault, ok := recovered.(interface {
		runtime.Error
		Addr() uintptr
	})
	if !ok {
		return 0, false
	}
	return fault.Addr(), true
}
