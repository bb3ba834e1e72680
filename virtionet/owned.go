package virtionet

import (
	"sync"

	"github.com/vhostd/vhostd/guestmem"
)

// owned is what the front-end can make vanish under the device's rings. Sessions change it, and close what was in it before; a worker looks
// at it when one of its accesses faulted, which may be at any time. So nobody looks without the lock, and who has changed it knows
// that no worker still looks at what it was.
type owned struct {
	mu   sync.Mutex
	mem  *guestmem.Table
	next *guestmem.Table // which rings move to, or are led into already
	side *guestmem.Table // the inflight region, nil without
	log  *guestmem.Log
	then *guestmem.Log // while pairs move from log to it
}

// setMem says which table is in use.
func (o *owned) setMem(t *guestmem.Table) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.mem, o.next = t, nil
}

// addMem has next in use as well.
func (o *owned) addMem(next *guestmem.Table) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.next = next
}

func (o *owned) setSide(t *guestmem.Table) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.side = t
}

// setLog says which log is in use.
func (o *owned) setLog(l *guestmem.Log) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.log, o.then = l, nil
}

// addLog has then in use as well.
func (o *owned) addLog(then *guestmem.Log) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.then = then
}

func (o *owned) dirtyLog() *guestmem.Log {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.log
}

// vanished says what it is whose page at addr the front-end made vanish, nil if the page is none of it.
func (o *owned) vanished(addr uintptr) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch {
	case o.then.Owns(addr), o.log.Owns(addr):
		return errDirtyLog
	case o.next.Owns(addr), o.mem.Owns(addr), o.side.Owns(addr):
		return errGuestMemory
	}
	return nil
}
