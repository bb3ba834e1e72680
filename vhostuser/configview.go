package vhostuser

import (
	"bytes"
	"sync"
)

// configView is the configuration space as the front-end sees it. While no ring
// runs the device is suspended: what the front-end has read does not change and
// nothing is sent to it (vhost-user.rst, "Suspended device state"); a change shows,
// and is told, when a ring starts.
type configView struct {
	dev Device

	mu      sync.Mutex // guards what follows, and orders reads of the device
	shown   []byte     // what the front-end read last, or was told of; nil: nothing
	running bool
	tell    func() // sends CONFIG_CHANGE_MSG without waiting; nil: the front-end cannot be told
}

// read returns the space as it is to be shown; the result must not be changed.
func (v *configView) read() []byte {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.running || v.shown == nil {
		v.shown = v.dev.Config()
	}
	return v.shown
}

// look compares what was shown with what is, and tells the front-end of a
// difference. Any goroutine may call it.
func (v *configView) look() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.lookLocked()
}

func (v *configView) lookLocked() {
	if !v.running || v.shown == nil {
		return
	}
	if now := v.dev.Config(); !bytes.Equal(now, v.shown) {
		v.shown = now
		if v.tell != nil {
			v.tell()
		}
	}
}

// changing runs a change that the front-end asked for, of which it need not be told.
func (v *configView) changing(change func() error) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.lookLocked()
	err := change()
	if v.shown != nil {
		v.shown = v.dev.Config()
	}
	return err
}

// setRunning says whether a ring runs.
func (v *configView) setRunning(on bool) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.running == on {
		return
	}
	v.running = on
	v.lookLocked()
}

// setTell says how to tell of changes, nil if it cannot be done.
func (v *configView) setTell(tell func()) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.tell = tell
}

// LookAtConfig tells the front-end if the device's configuration space, such as
// the state of its link, is not what it has read last. It may be called from any
// goroutine; the caller decides how soon a change is noticed.
func (s *Session) LookAtConfig() { s.config.look() }
