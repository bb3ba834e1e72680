package guestmem

import (
	"fmt"
	"runtime"
	"runtime/debug"
)

// FaultError is an access to guest memory that is no longer there, usually
// because the front-end truncated the file behind it.
type FaultError struct {
	Addr uintptr // host address
}

func (e *FaultError) Error() string {
	return fmt.Sprintf("guestmem: guest memory at host address %#x vanished (was its file truncated?)", e.Addr)
}

// AsFault tells a memory fault from any other panic: recovered is what recover
// returned, addr where the access went. Without debug.SetPanicOnFault(true) on
// the goroutine such a fault ends the process instead.
func AsFault(recovered any) (addr uintptr, ok bool) {
	err, isRuntime := recovered.(runtime.Error)
	if !isRuntime {
		return 0, false
	}
	// The runtime promises Addr on the error of a fault (debug.SetPanicOnFault).
	f, ok := err.(interface{ Addr() uintptr })
	if !ok {
		return 0, false
	}
	return f.Addr(), true
}

// Guard runs f and turns a memory fault inside one of t's mappings into a
// *FaultError. Any other panic passes. f is abandoned at the fault: what it
// changed before stays changed.
func (t *Table) Guard(f func()) error { return guard(t.Owns, f) }

func guard(owns func(host uintptr) bool, f func()) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		r := recover()
		if r == nil {
			return
		}
		addr, ok := AsFault(r)
		if !ok || !owns(addr) {
			panic(r)
		}
		err = &FaultError{Addr: addr}
	}()
	f()
	return nil
}
