package vhostuser

import (
	"errors"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// stream reads or writes a pipe or socket of the front-end, whose flags must stay
// as they are (O_NONBLOCK belongs to the open file description, which is shared),
// without ever waiting in the kernel for the other side. One goroutine uses it.
type stream struct {
	fd   fd
	kind uint32 // S_IFSOCK or S_IFIFO
	own  [2]int // of a pipe: our pipe, through which bytes are spliced
	t    *transfer
}

const (
	spliceNonblock = 0x2                   // SPLICE_F_NONBLOCK (linux/splice.h)
	streamSlice    = 20 * time.Millisecond // between two looks whether the transfer is still wanted
)

// streams refuses what is neither a pipe nor a socket: a read from other files may
// wait for their server without end.
func (f fd) streams() (kind uint32, err error) {
	var st unix.Stat_t
	if err := unix.Fstat(f.num(), &st); err != nil {
		return 0, os.NewSyscallError("fstat", err)
	}
	if kind = st.Mode & unix.S_IFMT; kind != unix.S_IFIFO && kind != unix.S_IFSOCK {
		return 0, fmt.Errorf("the descriptor for device state is of file type %#o, a pipe or socket is accepted", kind)
	}
	return kind, nil
}

func (s *stream) close() {
	s.fd.close()
	if s.own != [2]int{} {
		_ = unix.Close(s.own[0])
		_ = unix.Close(s.own[1])
	}
}

// open makes our pipe if bytes have to be spliced.
func (s *stream) open() error {
	if s.kind != unix.S_IFIFO {
		return nil
	}
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		return os.NewSyscallError("pipe2", err)
	}
	s.own = p
	return nil
}

// readAll reads to the end of the stream, at most limit bytes.
func (s *stream) readAll(limit int) ([]byte, error) {
	if err := s.open(); err != nil {
		return nil, err
	}
	b := make([]byte, limit+1)
	for n := 0; ; {
		got, err := s.read(b[n:])
		switch {
		case err == nil && got == 0:
			return b[:n], nil
		case err == nil:
			if n += got; n > limit {
				return nil, fmt.Errorf("device state of more than %d bytes", limit)
			}
			continue
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EAGAIN):
			return nil, fmt.Errorf("reading device state: %w", err)
		}
		if err := s.wait(unix.POLLIN); err != nil {
			return nil, err
		}
	}
}

func (s *stream) read(b []byte) (int, error) {
	if s.kind == unix.S_IFSOCK {
		n, _, err := unix.Recvfrom(s.fd.num(), b, unix.MSG_DONTWAIT)
		return n, err
	}
	if n, err := unix.Splice(s.fd.num(), nil, s.own[1], nil, len(b), spliceNonblock); err != nil || n == 0 {
		return 0, err
	}
	return unix.Read(s.own[0], b)
}

// writeAll writes everything; b fits into a pipe.
func (s *stream) writeAll(b []byte) error {
	if err := s.open(); err != nil {
		return err
	}
	if s.kind == unix.S_IFIFO {
		if _, err := unix.Write(s.own[1], b); err != nil {
			return os.NewSyscallError("write", err)
		}
	}
	for len(b) > 0 {
		n, err := s.write(b)
		switch {
		case err == nil:
			b = b[n:]
			continue
		case errors.Is(err, unix.EINTR):
			continue
		case !errors.Is(err, unix.EAGAIN):
			return fmt.Errorf("writing device state: %w", err)
		}
		if err := s.wait(unix.POLLOUT); err != nil {
			return err
		}
	}
	return nil
}

func (s *stream) write(b []byte) (int, error) {
	if s.kind == unix.S_IFSOCK {
		return unix.SendmsgN(s.fd.num(), b, nil, nil, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	}
	n, err := unix.Splice(s.own[0], nil, s.fd.num(), nil, len(b), spliceNonblock)
	return int(n), err
}

// wait returns when the descriptor may be ready, or why there is nothing to wait for.
func (s *stream) wait(events int16) error {
	for {
		switch left := time.Until(s.t.end); {
		case s.t.abandon.Load():
			return errAbandoned
		case left <= 0:
			return errors.New("device state: the front-end left the transfer standing until its time was over")
		default:
			p := []unix.PollFd{{Fd: int32(s.fd.num()), Events: events}}
			n, err := unix.Poll(p, int(min(left, streamSlice)/time.Millisecond)+1)
			if n > 0 {
				return nil
			}
			if err != nil && !errors.Is(err, unix.EINTR) {
				return os.NewSyscallError("poll", err)
			}
		}
	}
}
