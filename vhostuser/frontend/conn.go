package frontend

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
)

// Conn is one vhost-user connection seen from the front-end. One goroutine uses
// it at a time, and in between the client's IOMMU, if there is one.
type Conn struct {
	conn *net.UnixConn
	// Timeout bounds each send and each wait for a reply. 0: 10 s.
	Timeout time.Duration
	// NeedReply sets need_reply in every message, as cloud-hypervisor does, so
	// that those without a reply of their own are acknowledged. It has effect once
	// REPLY_ACK is acknowledged.
	NeedReply bool

	protocol vhostuser.ProtocolFeatures
	mu       sync.Mutex // held from a message to its reply: an IOMMU uses the connection too
}

// NewConn takes over conn.
func NewConn(conn *net.UnixConn) *Conn { return &Conn{conn: conn} }

// Dial connects to a back-end that listens on the Unix socket at path.
func Dial(path string) (*Conn, error) {
	c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	return NewConn(c), nil
}

// Listener waits for back-ends that dial (server mode of a front-end).
type Listener struct{ l *net.UnixListener }

// Listen creates the Unix socket at path, which Close removes.
func Listen(path string) (*Listener, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	return &Listener{l}, nil
}

// Accept waits for the next back-end, at most timeout (0: without limit).
func (l *Listener) Accept(timeout time.Duration) (*Conn, error) {
	var deadline time.Time
	if timeout > 0 {
		deadline = time.Now().Add(timeout)
	}
	if err := l.l.SetDeadline(deadline); err != nil {
		return nil, err
	}
	c, err := l.l.AcceptUnix()
	if err != nil {
		return nil, err
	}
	return NewConn(c), nil
}

// Close stops listening and removes the socket.
func (l *Listener) Close() error { return l.l.Close() }

// Close closes the connection.
func (c *Conn) Close() error { return c.conn.Close() }

// CloseWrite ends the stream towards the back-end and leaves the other direction.
func (c *Conn) CloseWrite() error { return c.conn.CloseWrite() }

func (c *Conn) deadline() time.Time {
	if c.Timeout > 0 {
		return time.Now().Add(c.Timeout)
	}
	return time.Now().Add(10 * time.Second)
}

// SendRaw sends any bytes, with descriptors on the first of them. The caller
// keeps the descriptors.
func (c *Conn) SendRaw(b []byte, fds ...int) error {
	if err := c.conn.SetWriteDeadline(c.deadline()); err != nil {
		return err
	}
	if len(fds) == 0 {
		_, err := c.conn.Write(b)
		return err
	}
	n, _, err := c.conn.WriteMsgUnix(b, unix.UnixRights(fds...), nil)
	if err != nil || n == len(b) {
		return err
	}
	_, err = c.conn.Write(b[n:])
	return err
}

// Send sends one message with any flags.
func (c *Conn) Send(req vhostuser.Request, flags uint32, payload []byte, fds ...int) error {
	h := vhostuser.Header{Request: req, Flags: flags, Size: uint32(len(payload))}
	b := append(h.Append(make([]byte, 0, vhostuser.HeaderLen+len(payload))), payload...)
	if err := c.SendRaw(b, fds...); err != nil {
		return fmt.Errorf("%v: %w", req, err)
	}
	return nil
}

// Reply is a message from the back-end. The receiver owns FDs.
type Reply struct {
	vhostuser.Header
	Payload []byte
	FDs     []int
}

// U64 is the payload as a number; ok is false unless it has exactly 8 bytes.
func (r Reply) U64() (v uint64, ok bool) {
	if len(r.Payload) != 8 {
		return 0, false
	}
	return binary.LittleEndian.Uint64(r.Payload), true
}

func (r Reply) closeFDs() {
	for _, fd := range r.FDs {
		_ = unix.Close(fd)
	}
}

// Recv reads the next message of the back-end, whatever its header says. It waits
// at most wait (0: the connection's timeout); then the error matches
// os.ErrDeadlineExceeded.
func (c *Conn) Recv(wait time.Duration) (Reply, error) {
	deadline := c.deadline()
	if wait > 0 {
		deadline = time.Now().Add(wait)
	}
	if err := c.conn.SetReadDeadline(deadline); err != nil {
		return Reply{}, err
	}
	var r Reply
	var header [vhostuser.HeaderLen]byte
	err := c.recvFull(header[:], &r)
	if err == nil {
		r.Header = vhostuser.DecodeHeader(header[:])
		if r.Size > 1<<16 {
			err = fmt.Errorf("reply to %v announces %d bytes", r.Request, r.Size)
		} else {
			r.Payload = make([]byte, r.Size)
			err = c.recvFull(r.Payload, &r)
		}
	}
	if err != nil {
		r.closeFDs()
		return Reply{}, err
	}
	return r, nil
}

func (c *Conn) recvFull(b []byte, r *Reply) error {
	oob := make([]byte, unix.CmsgSpace(4*8))
	for len(b) > 0 {
		n, oobn, _, _, err := c.conn.ReadMsgUnix(b, oob)
		if oobn > 0 {
			r.appendFDs(oob[:oobn])
		}
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

func (r *Reply) appendFDs(oob []byte) {
	controls, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return
	}
	for _, c := range controls {
		if fds, err := unix.ParseUnixRights(&c); err == nil {
			r.FDs = append(r.FDs, fds...)
		}
	}
}

// RefusedError is a non-zero acknowledgement.
type RefusedError struct {
	Request vhostuser.Request
	Value   uint64
}

func (e *RefusedError) Error() string {
	return fmt.Sprintf("the back-end refuses %v (%#x)", e.Request, e.Value)
}

// Call sends a message that has a reply of its own and returns the reply's
// payload. The reply is judged as QEMU does: same request, flags exactly 5.
func (c *Conn) Call(req vhostuser.Request, payload []byte, fds ...int) ([]byte, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.Send(req, c.flags(), payload, fds...); err != nil {
		return nil, err
	}
	return c.await(req)
}

// flags are those of an ordinary message.
func (c *Conn) flags() uint32 {
	if c.NeedReply && c.protocol&vhostuser.ProtoReplyAck != 0 {
		return vhostuser.FlagVersion | vhostuser.FlagNeedReply
	}
	return vhostuser.FlagVersion
}

func (c *Conn) await(req vhostuser.Request) ([]byte, error) {
	r, err := c.Recv(0)
	if err != nil {
		return nil, fmt.Errorf("reply to %v: %w", req, err)
	}
	defer r.closeFDs()
	const flags = vhostuser.FlagVersion | vhostuser.FlagReply
	if r.Request != req || r.Flags != flags {
		return nil, fmt.Errorf("reply to %v: got %v with flags %#x, flags %#x are right", req, r.Request, r.Flags, flags)
	}
	return r.Payload, nil
}

func (c *Conn) callU64(req vhostuser.Request) (uint64, error) {
	b, err := c.Call(req, nil)
	if err != nil {
		return 0, err
	}
	if len(b) != 8 {
		return 0, fmt.Errorf("reply to %v has %d bytes, 8 are right", req, len(b))
	}
	return binary.LittleEndian.Uint64(b), nil
}

// Do sends a message that has no reply of its own. If NeedReply is in effect it
// waits for the acknowledgement; a non-zero one is a *RefusedError.
func (c *Conn) Do(req vhostuser.Request, payload []byte, fds ...int) error {
	if c.flags()&vhostuser.FlagNeedReply != 0 {
		return c.DoAck(req, payload, fds...)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.Send(req, vhostuser.FlagVersion, payload, fds...)
}

// DoAck is Do with need_reply in any case.
func (c *Conn) DoAck(req vhostuser.Request, payload []byte, fds ...int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.Send(req, vhostuser.FlagVersion|vhostuser.FlagNeedReply, payload, fds...); err != nil {
		return err
	}
	b, err := c.await(req)
	if err != nil {
		return err
	}
	if len(b) != 8 {
		return fmt.Errorf("acknowledgement of %v has %d bytes, 8 are right", req, len(b))
	}
	if v := binary.LittleEndian.Uint64(b); v != 0 {
		return &RefusedError{Request: req, Value: v}
	}
	return nil
}

// Sync waits until the back-end has handled everything sent so far.
func (c *Conn) Sync() error {
	_, err := c.GetFeatures()
	return err
}

// AwaitEnd waits until the connection cannot be used any more and says why: the back-end closed it (io.EOF, or
// ECONNRESET if it left something unread), or sent something that nobody asked for. It returns nil, and leaves the
// connection usable, when ctx is done. Nothing else may use the connection meanwhile.
func (c *Conn) AwaitEnd(ctx context.Context) error {
	if err := c.conn.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	interrupted := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(interrupted)
		_ = c.conn.SetReadDeadline(time.Unix(1, 0)) // fails only on a closed connection, on which nobody waits
	})
	var first [1]byte
	var r Reply
	err := c.recvFull(first[:], &r)
	r.closeFDs()
	if !stop() {
		<-interrupted
	}
	switch {
	case err == nil:
		return errors.New("the back-end sent something that nobody asked for")
	case ctx.Err() != nil && errors.Is(err, os.ErrDeadlineExceeded):
		return nil
	}
	return err
}

// AwaitClose waits until the back-end closes the connection, and fails if it
// sends something or stays.
func (c *Conn) AwaitClose(wait time.Duration) error {
	r, err := c.Recv(wait)
	switch {
	case err == nil:
		r.closeFDs()
		return fmt.Errorf("the back-end sent %v instead of closing", r.Request)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return errors.New("the back-end did not close the connection")
	case errors.Is(err, io.EOF), errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		return nil
	}
	return err
}
