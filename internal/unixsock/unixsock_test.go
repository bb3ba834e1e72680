package unixsock

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var plain = Options{Mode: 0o600, UID: -1, GID: -1}

// stale leaves a socket file behind that nobody listens on, as a killed daemon does.
func stale(t *testing.T, path string) {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	l.SetUnlinkOnClose(false)
	l.Close()
}

func mustListen(t *testing.T, path string, o Options) *Listener {
	t.Helper()
	l, err := Listen(path, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// TestListenLeavesOthersAlone is SOCK-01: only a stale socket is replaced.
func TestListenLeavesOthersAlone(t *testing.T) {
	for _, tc := range []struct {
		name  string
		make  func(t *testing.T, path string)
		wrong string // empty: Listen works
	}{
		{"free", func(*testing.T, string) {}, ""},
		{"stale socket", stale, ""},
		{"live socket", func(t *testing.T, path string) { mustListen(t, path, plain) }, "another process is listening"},
		{"live socket with a full backlog", fullBacklog, "another process is listening"},
		{"datagram socket", func(t *testing.T, path string) {
			c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { c.Close() })
		}, "different type"},
		{"regular file", func(t *testing.T, path string) { write(t, path) }, "a regular file is there"},
		{"directory", func(t *testing.T, path string) {
			if err := os.Mkdir(path, 0o700); err != nil {
				t.Fatal(err)
			}
		}, "a directory is there"},
		{"symbolic link to a stale socket", func(t *testing.T, path string) {
			stale(t, path+".target")
			if err := os.Symlink(path+".target", path); err != nil {
				t.Fatal(err)
			}
		}, "a symbolic link is there"},
		{"named pipe", func(t *testing.T, path string) {
			if err := unix.Mkfifo(path, 0o600); err != nil {
				t.Fatal(err)
			}
		}, "a named pipe is there"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "s")
			tc.make(t, path)
			before, _ := inodeOf(path)
			l, err := Listen(path, plain)
			if tc.wrong == "" {
				if err != nil {
					t.Fatal(err)
				}
				l.Close()
				return
			}
			if err == nil || !strings.Contains(err.Error(), tc.wrong) || !strings.Contains(err.Error(), path) {
				t.Errorf("error = %v, want it to name %s and contain %q", err, path, tc.wrong)
			}
			if after, err := inodeOf(path); err != nil || after != before {
				t.Errorf("the file was touched: inode %v, before %v (%v)", after, before, err)
			}
		})
	}
}

func fullBacklog(t *testing.T, path string) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: path}), unix.Listen(fd, 0)); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
}

func write(t *testing.T, path string) {
	if err := os.WriteFile(path, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestListenErrors(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "file"))
	for path, want := range map[string]string{
		"":                                       "path is empty",
		"@abstract":                              "abstract sockets",
		"/tmp/" + strings.Repeat("x", 103):       "108 bytes long, at most 107",
		filepath.Join(dir, "absent", "s"):        "does not exist: create it first",
		filepath.Join(dir, "file", "s"):          "is not a directory",
		filepath.Join("/proc/self/fdinfo/", "s"): "socket /proc/self/fdinfo/s: ",
	} {
		l, err := Listen(path, plain)
		if err == nil {
			l.Close()
			t.Errorf("Listen(%q) works", path)
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("Listen(%q): %v, want it to contain %q", path, err, want)
		}
	}
	longest := filepath.Join("/tmp", "v"+strings.Repeat("x", MaxPath-len("/tmp/v")))
	l, err := Listen(longest, plain)
	if err != nil {
		t.Fatalf("a path of %d bytes: %v", len(longest), err)
	}
	l.Close()
}

func TestModeAndOwner(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l := mustListen(t, path, Options{Mode: 0o660, UID: -1, GID: os.Getgid()})
	var st unix.Stat_t
	if err := unix.Lstat(path, &st); err != nil {
		t.Fatal(err)
	}
	if st.Mode&0o777 != 0o660 || int(st.Gid) != os.Getgid() {
		t.Errorf("mode %o gid %d, want 660 and %d", st.Mode&0o777, st.Gid, os.Getgid())
	}
	l.Close()
	if os.Getuid() == 0 {
		return
	}
	if l, err := Listen(path, Options{Mode: 0o600, UID: 0, GID: -1}); err == nil {
		l.Close()
		t.Error("an ordinary user gave the socket to root")
	}
	if _, err := os.Lstat(path); err == nil {
		t.Error("the refused socket was left behind")
	}
}

// TestCloseKeepsSuccessor is SOCK-03: the file is removed only while it is ours.
func TestCloseKeepsSuccessor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	first := mustListen(t, path, plain)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	mustListen(t, path, plain)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	c, err := net.Dial("unix", path)
	if err != nil {
		t.Fatalf("the successor cannot be reached: %v", err)
	}
	c.Close()
}

func TestCloseRemovesOwnFileOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	l := mustListen(t, path, plain)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(path); err == nil {
		t.Error("the socket file is still there")
	}
	if err := l.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func TestFromFileKeepsFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	manager := mustListen(t, path, plain)
	f, err := manager.File()
	if err != nil {
		t.Fatal(err)
	}
	l, err := FromFile(f)
	if err != nil {
		t.Fatal(err)
	}
	if l.Path() != path {
		t.Errorf("Path = %q, want %q", l.Path(), path)
	}
	l.Close()
	if _, err := os.Lstat(path); err != nil {
		t.Errorf("the service manager's socket was removed: %v", err)
	}
}

// TestListenRace: of processes that start together on one stale path exactly one wins.
func TestListenRace(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	stale(t, path)
	var wins atomic.Int32
	var wg sync.WaitGroup
	listeners := make([]*Listener, 8)
	for i := range listeners {
		wg.Go(func() {
			if l, err := Listen(path, plain); err == nil {
				wins.Add(1)
				listeners[i] = l
			}
		})
	}
	wg.Wait()
	for _, l := range listeners {
		if l != nil {
			l.Close()
		}
	}
	if wins.Load() != 1 {
		t.Errorf("%d winners, want 1", wins.Load())
	}
}

// TestForeignLock: whoever may read the directory can lock it, and keeps nobody from listening by that.
func TestForeignLock(t *testing.T) {
	dir := t.TempDir()
	fd, err := unix.Open(dir, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Flock(fd, unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	mustListen(t, filepath.Join(dir, "s"), plain)
}
