package vhostuser

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vhostd/vhostd/guestmem"
)

func (s *Session) getMaxMemSlots(m *message) error {
	m.replyU64(guestmem.MaxSlots)
	return nil
}

// addMemReg adds one region to the table, also under running rings. To add the same
// region of the same file again is right: QEMU before 8.1 adds each once per queue pair.
func (s *Session) addMemReg(m *message) error {
	spec := decodeMemReg(m.body)
	t, err := s.mem.With(spec, m.fds[0].num())
	if errors.Is(err, guestmem.ErrPresent) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := s.replaceTable(t); err != nil {
		return err
	}
	s.removed = slices.DeleteFunc(s.removed, func(o guestmem.RegionSpec) bool { return sameSlot(o, spec) })
	return nil
}

// remMemReg removes one region, and parks the running rings that lie in it. The
// specification lets a front-end attach the region's file, which is not needed.
// Removing a region once more is right, for the same reason as with addMemReg.
func (s *Session) remMemReg(m *message) error {
	if len(m.fds) > 1 {
		return fmt.Errorf("%d file descriptors attached, at most one belongs to it", len(m.fds))
	}
	spec := decodeMemReg(m.body)
	t, err := s.mem.Without(spec)
	if errors.Is(err, guestmem.ErrAbsent) && slices.ContainsFunc(s.removed, func(o guestmem.RegionSpec) bool { return sameSlot(o, spec) }) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("%w: guest address %#x, size %#x, front-end address %#x", err, spec.GPA, spec.Size, spec.UVA)
	}
	if err := s.replaceTable(t); err != nil {
		return err
	}
	s.forget(spec)
	return nil
}

// forget keeps a removed region in mind, so that its repeated removal is told from that
// of a region that never was. As many are kept as there are slots.
func (s *Session) forget(spec guestmem.RegionSpec) {
	if len(s.removed) == guestmem.MaxSlots {
		s.removed = slices.Delete(s.removed, 0, 1)
	}
	s.removed = append(s.removed, spec)
}

// sameSlot compares what the specification says identifies a region.
func sameSlot(a, b guestmem.RegionSpec) bool {
	return a.GPA == b.GPA && a.UVA == b.UVA && a.Size == b.Size
}
