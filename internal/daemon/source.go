package daemon

import (
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/unixsock"
)

// Source is where a guest's connections come from when not from its own socket path. The zero
// value means the path: listen on it or, for a client, dial it. A daemon that is given a Source
// owns it.
type Source struct {
	Listener *unixsock.Listener // made by another process, such as the service manager
	Conn     *net.UnixConn      // one connected front-end; the guest is not served again after it
	// Ended is called when Conn's session is over.
	Ended func(error)
}

// SourceFromFD takes over an inherited descriptor: a listening socket or a connected one. path is
// the name under which the socket is shown.
func SourceFromFD(fd int) (s Source, path string, err error) {
	if _, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil {
		return Source{}, "", fmt.Errorf("file descriptor %d is not open", fd)
	}
	listening, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
	if err != nil {
		return Source{}, "", fmt.Errorf("file descriptor %d is not a socket", fd)
	}
	unix.CloseOnExec(fd)
	f := os.NewFile(uintptr(fd), fmt.Sprintf("fd %d", fd))
	if listening != 0 {
		l, err := unixsock.FromFile(f)
		if err != nil {
			return Source{}, "", err
		}
		return Source{Listener: l}, l.Path(), nil
	}
	defer f.Close()
	generic, err := net.FileConn(f)
	if err != nil {
		return Source{}, "", fmt.Errorf("file descriptor %d: %w", fd, err)
	}
	conn, ok := generic.(*net.UnixConn)
	if !ok {
		generic.Close()
		return Source{}, "", fmt.Errorf("file descriptor %d is a %s socket, wanted a Unix stream socket", fd, generic.LocalAddr().Network())
	}
	return Source{Conn: conn}, f.Name(), nil
}

func (s Source) discard() {
	if s.Listener != nil {
		s.Listener.Close()
	}
	if s.Conn != nil {
		s.Conn.Close()
	}
}
