package nettest

import (
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// source is where frames of a flow are sent.
type source interface {
	// send sends up to n frames, together if it can, and says how many it took.
	send(f *flow, n int) (int, error)
	// reap takes back what was sent and is of no use any more.
	reap() (int, error)
	// full says that send takes nothing before something was given back.
	full() bool
	arm() (sleep bool)
	called()
	waitFD() int
	stats() *Counts
}

// sink is where they arrive.
type sink interface {
	// receive checks what has come and says how many frames of the flow that was, at most sinkBatch.
	receive(f *flow) (int, error)
	// arm prepares to sleep until waitFD is readable; false means that something may be there already.
	arm() (sleep bool)
	// called empties what made waitFD readable.
	called()
	waitFD() int
	stats() *Counts
}

var (
	_ source = txQueue{}
	_ sink   = (*rxQueue)(nil)
	_ source = (*wire)(nil)
	_ sink   = (*wire)(nil)
)

// wire is a descriptor on which a message is a frame, both ways: a SEQPACKET or a packet socket.
type wire struct {
	fd      int
	buf     []byte
	blocked bool
	counts  Counts
}

func newWire(fd, longest int) *wire { return &wire{fd: fd, buf: make([]byte, longest+1)} }

// dialWire connects to a sock network.
func dialWire(path string, longest int) (*wire, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("socket: %w", err)
	}
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		err = unix.Connect(fd, &unix.SockaddrUnix{Name: path})
		if err == nil {
			break
		}
		if time.Now().After(end) {
			return nil, errors.Join(fmt.Errorf("connect to %s: %w", path, err), unix.Close(fd))
		}
	}
	_ = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUF, 1<<20)
	return newWire(fd, longest), nil
}

// openTap opens a packet socket at an interface, for frames of this test alone.
func openTap(name string, longest int) (*wire, error) {
	link, err := net.InterfaceByName(name)
	if err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(bigEndian(etherType)))
	if err != nil {
		return nil, fmt.Errorf("packet socket: %w", err)
	}
	for _, option := range []int{unix.SO_RCVBUFFORCE, unix.SO_SNDBUFFORCE} {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, option, 64<<20); err != nil {
			return nil, errors.Join(fmt.Errorf("buffer of the packet socket: %w", err), unix.Close(fd))
		}
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: bigEndian(etherType), Ifindex: link.Index}); err != nil {
		return nil, errors.Join(fmt.Errorf("bind to %s: %w", name, err), unix.Close(fd))
	}
	return newWire(fd, longest), nil
}

func bigEndian(n uint16) uint16 { return n<<8 | n>>8 }

func (w *wire) send(f *flow, n int) (sent int, err error) {
	w.blocked = false
	for sent < n {
		before := f.next
		length := f.write(w.buf)
		_, err := unix.Write(w.fd, w.buf[:length])
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOBUFS) {
			f.next, w.blocked = before, true
			break
		}
		if err != nil {
			return sent, fmt.Errorf("wire: frame %d: %w", before, err)
		}
		sent++
	}
	w.counts.Frames += uint64(sent)
	return sent, nil
}

func (w *wire) receive(f *flow) (n int, err error) {
	for n < sinkBatch {
		length, err := unix.Read(w.fd, w.buf)
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EINTR):
			w.counts.Frames += uint64(n)
			return n, nil
		case err != nil:
			return n, fmt.Errorf("wire: %w", err)
		case length == 0:
			return n, errors.New("wire: the back-end closed the socket")
		case !ours(w.buf[:length]):
			w.counts.Foreign++
			continue
		}
		if err := f.check(w.buf[:length]); err != nil {
			return n, fmt.Errorf("wire: %w", err)
		}
		n++
	}
	w.counts.Frames += uint64(n)
	return n, nil
}

func (w *wire) reap() (int, error) { return 0, nil }
func (w *wire) full() bool         { return w.blocked }
func (w *wire) arm() bool          { return true }
func (w *wire) called()            {}
func (w *wire) waitFD() int        { return w.fd }
func (w *wire) stats() *Counts     { return &w.counts }
func (w *wire) close() error       { return unix.Close(w.fd) }
