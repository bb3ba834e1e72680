package vhostuser

import (
	"encoding/binary"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// Directions of SET_DEVICE_STATE_FD and the only phase there is (vhost-user.rst,
// "Migrating back-end state").
const (
	StateSave    = 0
	StateLoad    = 1
	StateStopped = 0
	// stateOwnFD is the answer that the front-end's descriptor is used.
	stateOwnFD = 0x100
)

// maxTransfers bounds the transfers of the process: the lock of a pipe can be held
// by its other users for as long as they like, and each would cost a thread.
const maxTransfers = 64

var transfers atomic.Int32

// transfer moves device state in the background. Its fields are the goroutine's until
// done is closed.
type transfer struct {
	load    bool
	done    chan struct{}
	end     time.Time // when it fails
	abandon atomic.Bool
	state   deviceState
	empty   bool // nothing came, which is a state of a device that has none
	err     error
}

var errAbandoned = errors.New("the transfer was abandoned")

// setDeviceStateFD begins a transfer, which ends one before it. The front-end reads
// or writes only after the answer, so that the work is left to a goroutine.
func (s *Session) setDeviceStateFD(m *message) error {
	direction, phase := binary.LittleEndian.Uint32(m.body), binary.LittleEndian.Uint32(m.body[4:])
	if direction > StateLoad || phase != StateStopped {
		return fmt.Errorf("transfer direction %d, phase %d: accepted are 0 (save) and 1 (load), and phase 0", direction, phase)
	}
	if err := s.allStopped(); err != nil {
		return err
	}
	kind, err := m.fds[0].streams()
	if err != nil {
		return err
	}
	if !s.dropTransfer() {
		return errors.New("the transfer before cannot end: somebody holds its pipe")
	}
	if transfers.Add(1) > maxTransfers {
		transfers.Add(-1)
		return fmt.Errorf("%d transfers of device state are under way, at most that many are accepted", maxTransfers)
	}
	t := &transfer{load: direction == StateLoad, done: make(chan struct{}), end: time.Now().Add(s.stateTimeout)}
	if !t.load {
		t.state = s.saveState()
	}
	s.transfer = t
	go t.run(&stream{fd: m.fds[0].take(), kind: kind, t: t})
	m.replyU64(stateOwnFD)
	return nil
}

func (t *transfer) run(f *stream) {
	defer transfers.Add(-1)
	defer close(t.done)
	defer f.close()
	if !t.load {
		t.err = f.writeAll(t.state.encode())
		return
	}
	b, err := f.readAll(maxState)
	if err != nil || len(b) == 0 {
		t.err, t.empty = err, true
		return
	}
	t.state, t.err = decodeState(b)
}

// checkDeviceState waits for the transfer and takes over what was loaded.
func (s *Session) checkDeviceState(*message) error {
	t := s.transfer
	if t == nil {
		return errors.New("no transfer of device state was begun")
	}
	const grace = time.Second // to notice the end by itself
	select {
	case <-t.done:
		s.transfer = nil
	case <-s.closing:
		return errAbandoned
	case <-time.After(time.Until(t.end) + grace):
		s.dropTransfer()
		return errAbandoned
	}
	switch {
	case t.err != nil:
		return t.err
	case t.load && !t.empty:
		return s.loadState(t.state)
	}
	return nil
}

// dropTransfer ends a transfer that nobody will ask about, and reports whether it has
// ended. It waits a moment, so that the descriptor is closed unless somebody holds it up.
func (s *Session) dropTransfer() (ended bool) {
	if t := s.transfer; t != nil {
		s.transfer, s.abandoned = nil, t
		t.abandon.Store(true)
	}
	if s.abandoned == nil {
		return true
	}
	select {
	case <-s.abandoned.done:
		s.abandoned = nil
		return true
	case <-time.After(time.Second):
		return false
	}
}

// awaitTransfer waits for a transfer that somebody holds up, so that a guest has one of
// them at most, however often it connects.
func (s *Session) awaitTransfer() {
	if s.abandoned == nil {
		return
	}
	select {
	case <-s.abandoned.done:
	case <-s.closing:
	}
}
