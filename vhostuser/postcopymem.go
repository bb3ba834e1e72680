package vhostuser

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vhostd/vhostd/guestmem"
)

// exchange is memory that the front-end shared while it listens for faults: it was told where the helper has
// it mapped, and must confirm that it knows before anything is touched. Both sides' messages have
// the ids of SET_MEM_TABLE or ADD_MEM_REG; the confirmation has 8 bytes instead of regions (vhost-user.rst,
// "VHOST_USER_SET_MEM_TABLE" and "VHOST_USER_ADD_MEM_REG").
type exchange struct {
	due   bool            // the confirmation
	slots bool            // more regions may precede it
	table *guestmem.Table // with what is new, nil if nothing is
	fresh []uint32        // parts that the helper has to register
}

const postcopyAckLen = 8

// Rows of the messages that mean something else while the front-end listens.
var (
	postcopyTableRow   = row{ReqSetMemTable, "SET_MEM_TABLE", 8, maxMemTable, anyFDs, replyOwn, 0, (*Session).postcopyTable}
	postcopyRegionRow  = row{ReqAddMemReg, "ADD_MEM_REG", memRegLen, memRegLen, oneFD, replyOwn, ProtoMemSlots, (*Session).postcopyRegion}
	postcopyAckRow     = row{ReqSetMemTable, "SET_MEM_TABLE", postcopyAckLen, postcopyAckLen, noFD, replyAck, 0, (*Session).postcopyAck}
	postcopyPendingRow = row{0, "message before a confirmation", 0, MaxPayload, anyFDs, replyOwn, 0, (*Session).postcopyPending}
)

// row is the row for a message in the session's present state.
func (s *Session) row(m *message) *row {
	r := lookup(m.Request)
	if s.post == nil || !s.post.listening || r == nil {
		return r
	}
	asked := &s.post.asked
	short := m.Size == postcopyAckLen
	switch m.Request {
	case ReqSetMemTable:
		if asked.due && !asked.slots && short {
			return &postcopyAckRow
		}
		if !asked.due {
			return &postcopyTableRow
		}
	case ReqAddMemReg:
		if short && (asked.slots || !asked.due) {
			return &postcopyAckRow
		}
		if asked.slots || !asked.due {
			return &postcopyRegionRow
		}
	case ReqRemMemReg:
		if short && !asked.due {
			return &postcopyAckRow // QEMU confirms a change that only removed, too
		}
	}
	if asked.due {
		return &postcopyPendingRow
	}
	return r
}

// postcopyPending ends the connection: libvhost-user would take the message for the confirmation.
func (s *Session) postcopyPending(*message) error {
	return errors.New("the confirmation that the addresses of guest memory are known must come first")
}

// postcopyTable answers where the helper has the regions of a whole table.
func (s *Session) postcopyTable(m *message) error {
	specs, t, err := tableOf(m)
	if err != nil {
		return err
	}
	told := slices.Clone(specs)
	for i, spec := range specs {
		if told[i].UVA, err = s.expect(t, spec, m.fds[i].num()); err != nil {
			s.closeTable(t)
			return err
		}
	}
	s.post.asked.due, s.post.asked.table = true, t
	m.reply = AppendMemTable(nil, told)
	return nil
}

// postcopyRegion answers where the helper has one region more, to which others may be added before
// all are confirmed.
func (s *Session) postcopyRegion(m *message) error {
	spec, fd := decodeMemReg(m.body), m.fds[0].num()
	asked := &s.post.asked
	base := asked.table
	if base == nil {
		base = s.mem
	}
	t, err := base.With(spec, fd)
	same := errors.Is(err, guestmem.ErrPresent)
	if err != nil && !same {
		return err
	}
	told, in := spec, t
	if same {
		in = base
	}
	if told.UVA, err = s.expect(in, spec, fd); err != nil {
		s.closeTable(t)
		return err
	}
	asked.due, asked.slots = true, true
	if !same {
		s.closeTable(asked.table)
		asked.table = t
	}
	m.reply = AppendMemReg(nil, told)
	return nil
}

// expect has the helper map a region of t, unless it has, and returns its address there.
func (s *Session) expect(t *guestmem.Table, spec guestmem.RegionSpec, fd int) (addr uint64, err error) {
	p := s.post
	part, fresh := p.arrival.Await(t, spec.GPA)
	if !fresh {
		return p.bases[part.Number] + part.Head, nil
	}
	base, err := p.helper.Map(part.Number, fd, part.Start, uintptr(part.Length))
	if err != nil {
		return 0, fmt.Errorf("map the region at guest address %#x for postcopy: %w", spec.GPA, err)
	}
	p.bases[part.Number] = base
	p.asked.fresh = append(p.asked.fresh, part.Number)
	return base + part.Head, nil
}

// postcopyAck puts the memory to use whose addresses the front-end knows now. If that fails the connection
// ends: the front-end takes the memory for shared, and waits for no answer.
func (s *Session) postcopyAck(m *message) error {
	asked := s.post.asked
	s.post.asked = exchange{}
	err := s.register(asked, m.u64())
	if err != nil {
		s.closeTable(asked.table)
	} else if asked.table != nil {
		err = s.replaceTable(asked.table)
	}
	if err != nil {
		s.fail(err)
		return err
	}
	if asked.table != nil && !asked.slots {
		s.removed = nil
	}
	for _, spec := range s.mem.Regions() {
		s.removed = slices.DeleteFunc(s.removed, func(o guestmem.RegionSpec) bool { return sameSlot(o, spec) })
	}
	return nil
}

// register has the faults of what is new reported.
func (s *Session) register(asked exchange, ack uint64) error {
	if ack != 0 {
		return fmt.Errorf("the front-end does not know the memory's addresses (%#x)", ack)
	}
	for _, number := range asked.fresh {
		if err := s.post.helper.Register(number); err != nil {
			return err
		}
	}
	return nil
}
