package vhostuser

import (
	"fmt"
	"net"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// State is a snapshot of a session for status views.
type State struct {
	// Phase is connected (features not yet acknowledged), negotiated, running
	// (a ring is started), suspended (all rings were stopped again) or closed.
	Phase string
	// Peer names the front-end: process id and command.
	Peer string
	// Features and ProtocolFeatures are the acknowledged bits by name.
	Features, ProtocolFeatures []string
	// Status is the last virtio device status byte.
	Status uint8
	// Regions is the number of memory regions.
	Regions int
	// Rings are the rings that the front-end has mentioned, by index.
	Rings []RingState
}

// RingState is a snapshot of one ring.
type RingState struct {
	Index            int
	Control          bool // the control queue, started
	Size             int
	Started, Enabled bool
	// Base is the value of SET_VRING_BASE or the position at the last stop.
	Base                     uint32
	HasKick, HasCall, HasErr bool
}

// State returns a snapshot, not older than the message handled last. It may be
// called from any goroutine; the result is shared and must not be changed.
func (s *Session) State() State { return *s.published.Load() }

func (s *Session) publish() { s.publishPhase(s.phase()) }

func (s *Session) publishPhase(phase string) {
	s.config.setRunning(phase == phaseRunning)
	st := &State{
		Phase:            phase,
		Peer:             s.peer,
		Features:         s.acked.Names(),
		ProtocolFeatures: s.protocol.Names(),
		Status:           s.status,
		Regions:          s.mem.Len(),
	}
	for _, r := range s.rings {
		if r != nil {
			st.Rings = append(st.Rings, r.state())
		}
	}
	s.published.Store(st)
}

const phaseRunning = "running"

func (s *Session) phase() string {
	for _, r := range s.rings {
		if r != nil && r.started {
			s.everRan = true
			return phaseRunning
		}
	}
	switch {
	case s.everRan:
		return "suspended"
	case s.featuresSet:
		return "negotiated"
	}
	return "connected"
}

// peerName names the process at the other end, as it was when it connected.
func peerName(conn *net.UnixConn) string {
	raw, err := conn.SyscallConn()
	if err != nil {
		return "unknown"
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) {
		cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err != nil || credErr != nil {
		return "unknown"
	}
	comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", cred.Pid))
	if err != nil {
		return fmt.Sprintf("pid %d", cred.Pid)
	}
	return fmt.Sprintf("pid %d (%s)", cred.Pid, strings.TrimSpace(string(comm)))
}
