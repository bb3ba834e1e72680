package vhostuser

import (
	"fmt"

	"github.com/vhostd/vhostd/guestmem"
)

// tableOf maps the regions of a memory table message. The caller closes the table.
func tableOf(m *message) ([]guestmem.RegionSpec, *guestmem.Table, error) {
	specs, err := decodeMemTable(m.body)
	if err != nil {
		return nil, nil, err
	}
	nums := make([]int, len(m.fds))
	for i, f := range m.fds {
		nums[i] = f.num()
	}
	t, err := guestmem.NewTable(specs, nums)
	return specs, t, err
}

// setMemTable replaces the whole table, also under running rings (QEMU does so on
// memory hot-plug without stopping them).
func (s *Session) setMemTable(m *message) error {
	_, t, err := tableOf(m)
	if err != nil {
		return err
	}
	if err := s.replaceTable(t); err != nil {
		return err
	}
	s.removed = nil
	return nil
}

// replaceTable hands t to the device, closes the table used before and starts the
// rings that waited for memory. On error t is closed and the old table stays.
func (s *Session) replaceTable(t *guestmem.Table) error {
	old := s.mem
	s.dev.PrepareMemory(t)
	s.translateIn(t)
	if err := s.dev.SetMemory(t, s.relocate(t)); err != nil {
		s.translateIn(old)
		s.dev.PrepareMemory(nil)
		s.closeTable(t)
		return fmt.Errorf("memory table: %w", err)
	}
	s.mem = t
	s.dropArrived()
	s.closeTable(old)
	s.startReady()
	return nil
}

// translateIn moves what translates to t.
func (s *Session) translateIn(t *guestmem.Table) {
	if s.iotlb != nil {
		s.iotlb.SetTable(t)
	}
	if s.arrival != nil {
		s.arrival.SetTable(t)
	}
}

// relocate finds the started rings in t.
func (s *Session) relocate(t *guestmem.Table) (live []RingAddrs) {
	for _, r := range s.rings {
		if r != nil && r.started {
			s.relocateOne(r, t)
			live = append(live, r.at)
		}
	}
	return live
}

func (s *Session) closeTable(t *guestmem.Table) {
	if err := t.Close(); err != nil {
		s.logger.Error("guest memory was not unmapped", "peer", s.peer, "err", err)
	}
}
