package vhostuser

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// scmMaxFD is the most descriptors that one sendmsg can attach (SCM_MAX_FD in the
// kernel's include/net/scm.h). With room for all of them a truncated control
// message can only mean that this process ran out of descriptors.
const scmMaxFD = 253

// errCut is the end of the stream inside a message.
var errCut = errors.New("the connection ended in the middle of a message")

// message is one message with everything that came with it. Descriptors that no
// handler took are closed by closeFDs.
type message struct {
	Header
	body  []byte
	fds   []fd
	reply []byte
	// replyFD goes with the reply, and is closed then or if there is none.
	replyFD fd
}

func (m *message) u64() uint64 { return binary.LittleEndian.Uint64(m.body) }

func (m *message) replyU64(v uint64) { m.reply = binary.LittleEndian.AppendUint64(nil, v) }

func (m *message) closeFDs() {
	for i := range m.fds {
		m.fds[i].close()
	}
	m.fds = nil
}

func (m *message) closeReplyFD() { m.replyFD.close() }

// errInterrupted is what the goroutine of the session sees after interrupt.
var errInterrupted = errors.New("the session is ending")

// transport reads and writes messages of one connection. One goroutine uses it; interrupt is for any.
type transport struct {
	conn           *net.UnixConn
	interrupted    atomic.Bool
	messageTimeout time.Duration
	writeTimeout   time.Duration
	header         [HeaderLen]byte
	body           [MaxPayload]byte
	oob            []byte
}

func newTransport(conn *net.UnixConn, opts Options) *transport {
	return &transport{
		conn:           conn,
		messageTimeout: opts.MessageTimeout,
		writeTimeout:   opts.WriteTimeout,
		oob:            make([]byte, unix.CmsgSpace(4*scmMaxFD)),
	}
}

// interrupt ends the read or write that is under way, and all later ones. The connection stays open: a front-end that sees it
// closed serves the rings itself, and they may still run.
func (t *transport) interrupt() {
	t.interrupted.Store(true)
	_ = t.conn.SetDeadline(time.Unix(1, 0)) // it fails when the connection is closed already
}

// limit sets the deadline of what comes next by set, one of the connection's methods.
func (t *transport) limit(set func(time.Time) error, at time.Time) error {
	if err := set(at); err != nil {
		return err
	}
	// After the deadline is set, so that either this sees the mark or interrupt's own deadline comes last.
	if t.interrupted.Load() {
		return errInterrupted
	}
	return nil
}

// read reads the next message: exactly the header, then exactly the payload, so
// that descriptors stay with the message whose bytes carried them. The body is
// valid until the next read. On error no descriptor stays open. io.EOF is the end
// between two messages, errCut the end within one.
func (t *transport) read() (*message, error) {
	m := &message{}
	if err := t.readMessage(m); err != nil {
		m.closeFDs()
		return nil, err
	}
	return m, nil
}

func (t *transport) readMessage(m *message) error {
	if err := t.limit(t.conn.SetReadDeadline, time.Time{}); err != nil {
		return err
	}
	n, err := t.recv(t.header[:], m)
	if err != nil {
		return err
	}
	// The peer has begun a message: from here on it owes the rest in time.
	if err := t.limit(t.conn.SetReadDeadline, time.Now().Add(t.messageTimeout)); err != nil {
		return err
	}
	if err := t.readFull(t.header[n:], m); err != nil {
		return err
	}
	m.Header = DecodeHeader(t.header[:])
	if err := checkHeader(m.Header); err != nil {
		return err
	}
	m.body = t.body[:m.Size]
	return t.readFull(m.body, m)
}

func checkHeader(h Header) error {
	switch {
	case h.Flags&flagVersions != FlagVersion:
		return fmt.Errorf("header of %v: protocol version %d, only 1 exists (flags %#x)", h.Request, h.Flags&flagVersions, h.Flags)
	case h.Flags&FlagReply != 0:
		return fmt.Errorf("header of %v: a reply that nobody asked for (flags %#x)", h.Request, h.Flags)
	case h.Flags&^flagsKnown != 0:
		return fmt.Errorf("header of %v: unknown flags %#x, known are %#x", h.Request, h.Flags, flagsKnown)
	case h.Size > MaxPayload:
		return fmt.Errorf("header of %v: payload of %d bytes, at most %d are legal", h.Request, h.Size, MaxPayload)
	}
	return nil
}

func (t *transport) readFull(b []byte, m *message) error {
	for len(b) > 0 {
		n, err := t.recv(b, m)
		switch {
		case errors.Is(err, io.EOF):
			return errCut
		case errors.Is(err, os.ErrDeadlineExceeded):
			return fmt.Errorf("a message is still incomplete after %v: %w", t.messageTimeout, err)
		case err != nil:
			return err
		}
		b = b[n:]
	}
	return nil
}

// recv is one recvmsg; it appends received descriptors to m. The net package sets
// MSG_CMSG_CLOEXEC.
func (t *transport) recv(b []byte, m *message) (int, error) {
	n, oobn, flags, _, err := t.conn.ReadMsgUnix(b, t.oob)
	if oobn > 0 {
		if err := m.appendFDs(t.oob[:oobn]); err != nil {
			return n, err
		}
	}
	if err != nil {
		return n, err
	}
	if flags&unix.MSG_CTRUNC != 0 {
		return n, fmt.Errorf("file descriptors of a message were lost: this process has no descriptor left; raise its limit (LimitNOFILE= in systemd, ulimit -n)")
	}
	return n, nil
}

func (m *message) appendFDs(oob []byte) error {
	controls, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return fmt.Errorf("control message: %w", err)
	}
	for _, c := range controls {
		if c.Header.Level != unix.SOL_SOCKET || c.Header.Type != unix.SCM_RIGHTS {
			continue
		}
		nums, err := unix.ParseUnixRights(&c)
		if err != nil {
			return fmt.Errorf("control message: %w", err)
		}
		for _, n := range nums {
			m.fds = append(m.fds, ownFD(n))
		}
	}
	if len(m.fds) > scmMaxFD {
		// A peer that puts some on every byte would use up the process's descriptors.
		return fmt.Errorf("%d file descriptors came with one message, at most %d are accepted", len(m.fds), scmMaxFD)
	}
	return nil
}

// writeReply sends one reply. The flags are exactly version and reply: QEMU
// compares them for equality (vhost_user_read_header).
func (t *transport) writeReply(req Request, payload []byte, with fd) error {
	b := Header{Request: req, Flags: replyFlags, Size: uint32(len(payload))}.Append(make([]byte, 0, HeaderLen+len(payload)))
	b = append(b, payload...)
	if err := t.limit(t.conn.SetWriteDeadline, time.Now().Add(t.writeTimeout)); err != nil {
		return err
	}
	var rights []byte
	if with.ok() {
		rights = unix.UnixRights(with.num())
	}
	n, _, err := t.conn.WriteMsgUnix(b, rights, nil)
	if err == nil && n < len(b) {
		_, err = t.conn.Write(b[n:])
	}
	if err != nil {
		return fmt.Errorf("reply to %v, time limit %v: %w", req, t.writeTimeout, err)
	}
	return nil
}
