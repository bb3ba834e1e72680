package vhostuser

import (
	"errors"
	"fmt"
	"time"
)

const (
	// minMTU and maxMTU are what an Ethernet-like device can carry over IPv4
	// (RFC 791 asks for 68) in a 16-bit field.
	minMTU = 68
	maxMTU = 65535
)

// rateLimit is a token bucket for announcements: QEMU sends five within a second
// after a migration (net/announce.c), a flood would burden the whole segment.
type rateLimit struct {
	tokens float64
	last   time.Time
}

const (
	rarpBurst     = 16
	rarpPerSecond = 8
)

func (l *rateLimit) allow(now time.Time) bool {
	if l.last.IsZero() {
		l.tokens = rarpBurst
	} else {
		l.tokens = min(rarpBurst, l.tokens+now.Sub(l.last).Seconds()*rarpPerSecond)
	}
	l.last = now
	if l.tokens < 1 {
		return false
	}
	l.tokens--
	return true
}

// sendRARP takes the MAC address from the first six bytes of the payload.
func (s *Session) sendRARP(m *message) error {
	mac := [6]byte(m.body)
	if mac == ([6]byte{}) || mac[0]&1 != 0 {
		return fmt.Errorf("MAC address %x: a unicast address other than zero is needed", mac)
	}
	if !s.rarps.allow(time.Now()) {
		return errors.New("too many announcements, this one is dropped")
	}
	return s.dev.SendRARP(mac)
}

func (s *Session) netSetMTU(m *message) error {
	mtu := m.u64()
	if mtu < minMTU || mtu > maxMTU {
		return fmt.Errorf("MTU %d, %d to %d is accepted", mtu, minMTU, maxMTU)
	}
	if err := s.config.changing(func() error { return s.dev.SetMTU(mtu) }); err != nil {
		return err
	}
	s.mtu = mtu
	return nil
}

// setStatus keeps the status byte for GET_STATUS. 0 resets nothing here: QEMU
// before 8.1 sends it ahead of GET_VRING_BASE and still needs the positions.
func (s *Session) setStatus(m *message) error {
	v := m.u64()
	if v > 0xff {
		return fmt.Errorf("status %#x, the device status is one byte", v)
	}
	s.status = uint8(v)
	s.dev.SetStatus(s.status)
	return nil
}

func (s *Session) getStatus(m *message) error {
	m.replyU64(uint64(s.status))
	return nil
}
