package worker

import "time"

// Event is a bit mask that a task chose when it watched a descriptor; the loop
// hands it back when that descriptor became ready.
type Event uint32

// Readiness is what a task reports when it is asked to go idle.
type Readiness struct {
	// Ready means that work arrived while the task was arming: it stays active.
	Ready bool
	// Retry, when positive, is the time after which the task wants a turn even if no
	// descriptor becomes ready.
	Retry time.Duration
}

// Task is what a loop runs. All methods are called on the loop's thread.
type Task interface {
	// Run does one bounded turn and reports whether it moved anything. It must not
	// block. A turn without progress lets the task go idle.
	Run() (progress bool)
	// Arm asks for notifications before the loop sleeps; it must look for work once
	// more after asking, so that nothing that arrived in between is lost.
	Arm() Readiness
	// Notify reports that watched descriptors became ready.
	Notify(Event)
	// Fault reports a memory fault at addr inside Run, Arm, Notify or a DoFor function.
	// The task returns true when the address belongs to its guest and it has taken
	// itself out of service; false means a defect of the program.
	Fault(addr uintptr) bool
}
