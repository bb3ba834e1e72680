package vhostuser

import (
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/virtqueue"
)

const maxRingSize = 32768

func (s *Session) stateOf(m *message) (*ring, uint32, error) {
	v := DecodeVringState(m.body)
	r, err := s.ring(v.Index)
	return r, v.Num, err
}

func checkRingSize(num uint32, packed bool) error {
	if num == 0 || num > maxRingSize || !packed && num&(num-1) != 0 {
		return fmt.Errorf("size %d, accepted are 1 to %d, of a split ring powers of two", num, maxRingSize)
	}
	return nil
}

func (s *Session) setVringNum(m *message) error {
	r, num, err := s.stateOf(m)
	if err != nil {
		return err
	}
	if err := checkRingSize(num, s.packed()); err != nil {
		return fmt.Errorf("ring %d: %w", r.index, err)
	}
	if err := s.fitsInflight(r, num); err != nil {
		return err
	}
	if uint16(num) == r.size {
		return nil
	}
	if err := s.reconfigure(r); err != nil {
		return err
	}
	old := r.size
	r.size = uint16(num)
	if err := s.start(r); err != nil {
		r.size = old
		return err
	}
	return nil
}

func (s *Session) setVringBase(m *message) error {
	r, base, err := s.stateOf(m)
	if err != nil {
		return err
	}
	if s.featuresSet && (r.size != 0 || !s.packed()) {
		if _, err := virtqueue.ParsePosition(base, r.size, s.packed()); err != nil {
			return fmt.Errorf("ring %d: %w", r.index, err)
		}
	}
	if err := s.reconfigure(r); err != nil {
		return err
	}
	r.base, r.hasBase = base, true
	return nil
}

// setVringAddr accepts the same addresses for a running ring: QEMU sends them
// again to switch the logging of the used ring.
func (s *Session) setVringAddr(m *message) error {
	a := decodeVringAddr(m.body)
	r, err := s.ring(a.Index)
	if err != nil {
		return err
	}
	if a.Flags&^vringAddrFLog != 0 {
		return fmt.Errorf("ring %d: unknown address flags %#x", r.index, a.Flags)
	}
	if a.Desc%descAlign != 0 || a.Avail%availAlign != 0 || a.Used%usedAlign != 0 {
		return fmt.Errorf("ring %d: descriptor table %#x, available ring %#x, used ring %#x must be aligned to %d, %d, %d", r.index, a.Desc, a.Avail, a.Used, descAlign, availAlign, usedAlign)
	}
	if err := checkLogAddr(a); err != nil {
		return err
	}
	same := r.hasAddr && a.Desc == r.addr.Desc && a.Avail == r.addr.Avail && a.Used == r.addr.Used
	if r.started && same {
		r.addr = a
		s.relog(r)
		return nil
	}
	moved := ring{index: r.index, size: r.size, addr: a}
	if s.mem.Len() > 0 && r.size != 0 {
		if _, err := s.locate(&moved, s.mem); err != nil && !errors.Is(err, errUntranslated) {
			return err
		}
	}
	if err := s.reconfigure(r); err != nil {
		return err
	}
	r.addr, r.hasAddr = a, true
	return s.start(r)
}

// getVringBase stops the ring and answers its position, also for a ring that never
// ran. The num field of the request means nothing (DPDK sends what it likes).
func (s *Session) getVringBase(m *message) error {
	r, _, err := s.stateOf(m)
	if err != nil {
		return err
	}
	s.stopAt(m, r, s.dropRecord, s.endTracking)
	return nil
}

// stopAt stops a ring and answers where. What an earlier life left for a ring that ran
// goes once that is sent: whoever is killed before has told nobody.
func (s *Session) stopAt(m *message, r *ring, drop ...func(*ring)) {
	if r.started {
		s.afterReply = func() {
			for _, f := range drop {
				f(r)
			}
		}
	}
	s.stop(r)
	base, err := s.position(r)
	if err != nil {
		base = virtqueue.Position(r.base) // such a ring never started
	}
	m.reply = VringState{Index: uint32(r.index), Num: uint32(base)}.Append(nil)
}

func (s *Session) setVringEnable(m *message) error {
	r, num, err := s.stateOf(m)
	if err != nil {
		return err
	}
	if num > 1 {
		return fmt.Errorf("ring %d: enable %d, 0 or 1 is accepted", r.index, num)
	}
	s.enable(r, num == 1)
	return nil
}

// vringFD decodes a vring descriptor message: the ring, and the descriptor or none.
func (s *Session) vringFD(m *message) (*ring, fd, error) {
	v := m.u64()
	if v&^(vringIndexMask|VringNoFD) != 0 {
		return nil, fd{}, fmt.Errorf("payload %#x: only the ring index (bits 0 to 7) and bit 8 may be set", v)
	}
	r, err := s.ring(uint32(v & vringIndexMask))
	if err != nil {
		return nil, fd{}, err
	}
	want := 1
	if v&VringNoFD != 0 {
		want = 0
	}
	if len(m.fds) != want {
		return nil, fd{}, fmt.Errorf("ring %d: %d file descriptors attached, payload %#x announces %d", r.index, len(m.fds), v, want)
	}
	if want == 0 {
		return r, fd{}, nil
	}
	if err := m.fds[0].notifies(); err != nil {
		return nil, fd{}, fmt.Errorf("ring %d: %w", r.index, err)
	}
	return r, m.fds[0].take(), nil
}

// setVringKick starts the ring, or replaces the descriptor of a ring that runs.
// The form without a descriptor asks the back-end to poll, which is refused: a
// polling worker would have to spin for a guest that is idle.
func (s *Session) setVringKick(m *message) error {
	r, f, err := s.vringFD(m)
	if err != nil {
		return err
	}
	if !f.ok() {
		return fmt.Errorf("ring %d: a kick descriptor is needed, polling without one is not supported", r.index)
	}
	old := r.kick
	r.kick = f
	if r.started {
		s.dev.SetKick(r.index, f.num())
	} else if err := s.start(r); err != nil {
		r.kick.close()
		r.kick = old
		return err
	}
	old.close()
	return nil
}

func (s *Session) setVringCall(m *message) error {
	r, f, err := s.vringFD(m)
	if err != nil {
		return err
	}
	s.replaceFD(r, &r.call, f, s.dev.SetCall)
	return nil
}

func (s *Session) setVringErr(m *message) error {
	r, f, err := s.vringFD(m)
	if err != nil {
		return err
	}
	s.replaceFD(r, &r.err, f, s.dev.SetErr)
	return nil
}

// replaceFD stores f and closes the descriptor before it, which the device has
// let go of by then.
func (s *Session) replaceFD(r *ring, slot *fd, f fd, tell func(i, fd int)) {
	old := *slot
	*slot = f
	if r.started {
		tell(r.index, f.num())
	}
	old.close()
}
