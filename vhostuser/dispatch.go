package vhostuser

import (
	"errors"
	"fmt"
)

// refused is the value of a u64 reply that means failure. SET_DEVICE_STATE_FD
// reads it as "error, and no descriptor attached" (bits 0-7, bit 8).
const refused = 0x101

var errUnserved = errors.New("the message is not served here")

// dispatch handles one message and sends what the front-end waits for: never
// nothing where it waits, never two replies. An error ends the connection.
func (s *Session) dispatch(m *message) error {
	// SET_PROTOCOL_FEATURES itself counts under the bits that were valid before.
	ack := m.Flags&FlagNeedReply != 0 && s.protocol&ProtoReplyAck != 0
	r := s.row(m)
	err := s.handle(r, m)
	defer m.closeReplyFD()
	// Before the reply, which tells the front-end that the message is done with.
	m.closeFDs()
	s.publish()
	if err != nil {
		s.once.log(kindOf(r), "front-end message refused", "message", m.Request.String(), "err", err)
	}
	kind := replyOf(r)
	if kind == replyServed && r.needs&^s.protocol == 0 {
		kind = replyStatus
	}
	switch {
	case kind == replyOwn && err != nil:
		return fmt.Errorf("%v needs a reply that cannot be given: %w", m.Request, err)
	case kind == replyOwn:
	case kind == replyStatus || ack:
		if err != nil {
			m.replyU64(refused)
		} else if m.reply == nil {
			m.replyU64(0)
		}
	default:
		return nil
	}
	if err := s.transport.writeReply(m.Request, m.reply, m.replyFD); err != nil {
		return err
	}
	if done := s.afterReply; done != nil {
		s.afterReply = nil
		done()
	}
	return nil
}

func (s *Session) handle(r *row, m *message) error {
	if r == nil {
		return errUnserved
	}
	if err := s.check(r, m); err != nil {
		return err
	}
	if r.handle == nil {
		return errUnserved
	}
	return r.handle(s, m)
}

// check does what is common to all messages.
func (s *Session) check(r *row, m *message) error {
	if m.Size < r.min || m.Size > r.max {
		return fmt.Errorf("payload of %d bytes, %d to %d are legal", m.Size, r.min, r.max)
	}
	if r.needs&^s.protocol != 0 {
		return fmt.Errorf("protocol feature %v was not acknowledged", r.needs)
	}
	want := 0
	switch r.fds {
	case anyFDs:
		return nil
	case oneFD:
		want = 1
	}
	if len(m.fds) == want {
		return nil
	}
	if r.reply == replyOwn && len(m.fds) > want {
		// The front-end waits for the contents; the surplus is closed with m.
		return nil
	}
	return fmt.Errorf("%d file descriptors attached, %d belong to it", len(m.fds), want)
}

func replyOf(r *row) replyKind {
	if r == nil {
		return replyAck
	}
	return r.reply
}

func kindOf(r *row) string {
	if r == nil {
		return "unknown message"
	}
	return r.name
}
