// Package unixsock creates and removes listening Unix sockets in the file system without ever
// touching what belongs to somebody else.
package unixsock

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// MaxPath is the longest path a Unix socket can have in bytes: sun_path of struct sockaddr_un
// without its terminating zero (unix(7)).
const MaxPath = 107

// lockWait bounds the wait for another process that creates or removes a socket in the same
// directory.
const lockWait = 2 * time.Second

// Options say how the file looks.
type Options struct {
	Mode fs.FileMode // permission bits of the socket file; connecting needs write permission
	// UID and GID own the file; -1 leaves the one of the process.
	UID, GID int
	// Packet makes a SEQPACKET socket instead of a STREAM socket.
	Packet bool
}

// network is the socket's name in package net, kind its number for socket(2).
func (o Options) network() string {
	if o.Packet {
		return "unixpacket"
	}
	return "unix"
}

func (o Options) kind() int {
	if o.Packet {
		return unix.SOCK_SEQPACKET
	}
	return unix.SOCK_STREAM
}

// Listener is a listening socket together with the file it made.
type Listener struct {
	*net.UnixListener
	path string
	id   inode
	made bool
	once sync.Once
}

type inode struct{ dev, ino uint64 }

// CheckPath reports whether path can name a Unix socket at all.
func CheckPath(path string) error {
	switch {
	case path == "":
		return errors.New("socket path is empty")
	case len(path) > MaxPath:
		return fmt.Errorf("socket path %s: %d bytes long, at most %d are possible: use a shorter directory, such as /run/vhostd", path, len(path), MaxPath)
	case path[0] == '@' || path[0] == 0:
		return fmt.Errorf("socket path %q: abstract sockets have no permissions and are not accepted: use a path in the file system", path)
	}
	return nil
}

// Listen binds and listens on path. A socket that nobody listens on any more (connecting gives
// ECONNREFUSED) is replaced; anything else at path is left as it is and refused.
func Listen(path string, o Options) (*Listener, error) {
	if err := CheckPath(path); err != nil {
		return nil, err
	}
	// Between bind and listen a fresh socket looks stale to another process, so all of them
	// take turns on the directory.
	unlock := lockDir(filepath.Dir(path))
	defer unlock()
	if err := removeStale(path, o.kind()); err != nil {
		return nil, err
	}
	l, err := bind(path, o)
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, explainBind(err, path))
	}
	if o.UID >= 0 || o.GID >= 0 {
		if err := os.Lchown(path, o.UID, o.GID); err != nil {
			l.Close()
			_ = os.Remove(path)
			return nil, fmt.Errorf("socket %s: change of owner to %d:%d: %w (only root may give files away; of its capabilities the sandbox keeps CAP_CHOWN if a guest of the start has a socket-owner)", path, o.UID, o.GID, errors.Unwrap(err))
		}
	}
	id, err := inodeOf(path)
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("socket %s vanished while it was made: %w", path, err)
	}
	return &Listener{UnixListener: l, path: path, id: id, made: true}, nil
}

// FromFile takes over a listening socket that another process made, such as the service manager
// (sd_listen_fds(3)). Closing it leaves the socket's file alone. f is consumed.
func FromFile(f *os.File) (*Listener, error) {
	defer f.Close()
	generic, err := net.FileListener(f)
	if err != nil {
		return nil, fmt.Errorf("inherited socket %s: %w", f.Name(), err)
	}
	l, ok := generic.(*net.UnixListener)
	if !ok {
		generic.Close()
		return nil, fmt.Errorf("inherited socket %s: is a %s socket, wanted a Unix stream socket", f.Name(), generic.Addr().Network())
	}
	l.SetUnlinkOnClose(false)
	return &Listener{UnixListener: l, path: l.Addr().String()}, nil
}

// Path returns the path that front-ends connect to.
func (l *Listener) Path() string { return l.path }

// Close stops listening and removes the file, provided it still is the one that Listen made: a
// successor may have taken the path over. Safe to call more than once and from any goroutine.
func (l *Listener) Close() error {
	var err error
	l.once.Do(func() {
		if l.made {
			err = l.unlink()
		}
		err = errors.Join(l.UnixListener.Close(), err)
	})
	return err
}

func (l *Listener) unlink() error {
	if id, err := inodeOf(l.path); err != nil || id != l.id {
		return nil
	}
	return os.Remove(l.path)
}

// umask is a property of the process, so only one bind may narrow it at a time.
var umask sync.Mutex

func bind(path string, o Options) (*net.UnixListener, error) {
	umask.Lock()
	old := unix.Umask(int(0o777 &^ o.Mode.Perm()))
	l, err := net.ListenUnix(o.network(), &net.UnixAddr{Name: path, Net: o.network()})
	unix.Umask(old)
	umask.Unlock()
	if err != nil {
		return nil, err
	}
	// The file is removed by Close after a look at its inode; net would remove whatever is there.
	l.SetUnlinkOnClose(false)
	return l, nil
}

func explainBind(err error, path string) error {
	var errno syscall.Errno
	if !errors.As(err, &errno) {
		return err
	}
	dir := filepath.Dir(path)
	switch errno {
	case unix.ENOENT:
		return fmt.Errorf("directory %s does not exist: create it first", dir)
	case unix.ENOTDIR:
		return fmt.Errorf("%s is not a directory", dir)
	case unix.EACCES, unix.EPERM:
		return fmt.Errorf("no permission to create it: directory %s must be writable for this user", dir)
	case unix.EROFS:
		return fmt.Errorf("directory %s is on a read-only file system", dir)
	case unix.EADDRINUSE:
		return errors.New("another process made it at this moment: stop one of the two")
	}
	return errno
}

// removeStale unlinks a socket that nobody listens on. nil: path is free.
func removeStale(path string, kind int) error {
	fi, err := os.Lstat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("socket %s: %w", path, explainBind(err, path))
	case fi.Mode().Type() != fs.ModeSocket:
		return fmt.Errorf("socket %s: a %s is there and is left alone: remove it or choose another path", path, typeName(fi.Mode()))
	}
	before, err := inodeOf(path)
	if err != nil {
		return fmt.Errorf("socket %s: %w", path, err)
	}
	switch err := probe(path, kind); {
	case err == nil, errors.Is(err, unix.EAGAIN):
		return fmt.Errorf("socket %s: another process is listening on it: stop that process or choose another path", path)
	case errors.Is(err, unix.EPROTOTYPE):
		return fmt.Errorf("socket %s: another program's socket of a different type is there and is left alone: choose another path", path)
	case errors.Is(err, unix.ENOENT):
		return nil
	case !errors.Is(err, unix.ECONNREFUSED):
		return fmt.Errorf("socket %s: cannot tell whether somebody listens on it, so it is left alone: %w", path, err)
	}
	if now, err := inodeOf(path); err != nil || now != before {
		return fmt.Errorf("socket %s: changed while it was examined: another process uses this path", path)
	}
	if err := os.Remove(path); err != nil {
		return fmt.Errorf("stale socket %s cannot be removed: %w", path, errors.Unwrap(err))
	}
	return nil
}

// probe connects without ever waiting: a full backlog (EAGAIN) also means that somebody listens.
func probe(path string, kind int) error {
	fd, err := unix.Socket(unix.AF_UNIX, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Connect(fd, &unix.SockaddrUnix{Name: path})
}

// lockDir takes the advisory lock of a directory, which only serves processes that start at the
// same moment. It does without if the directory cannot be read, or if another process keeps the
// lock: everybody who can read the directory can, and must not keep us from starting.
func lockDir(dir string) (unlock func()) {
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return func() {}
	}
	for deadline := time.Now().Add(lockWait); ; time.Sleep(10 * time.Millisecond) {
		err := unix.Flock(fd, unix.LOCK_EX|unix.LOCK_NB)
		if err == nil || (err != unix.EWOULDBLOCK && err != unix.EINTR) {
			return func() { unix.Close(fd) }
		}
		if time.Now().After(deadline) {
			unix.Close(fd)
			return func() {}
		}
	}
}

func inodeOf(path string) (inode, error) {
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		return inode{}, err
	}
	return inode{uint64(st.Dev), st.Ino}, nil
}

func typeName(m fs.FileMode) string {
	switch m.Type() {
	case 0:
		return "regular file"
	case fs.ModeDir:
		return "directory"
	case fs.ModeSymlink:
		return "symbolic link"
	case fs.ModeNamedPipe:
		return "named pipe"
	}
	return "device file"
}
