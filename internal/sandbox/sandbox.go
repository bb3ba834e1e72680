// Package sandbox takes from the running process what it does not need any more: paths (Landlock), system calls (seccomp),
// capabilities, and the chance to get any of them back. What it takes cannot be returned.
//
// Nothing here belongs to one goroutine or thread: everything is applied to all threads of the process, and threads that come later
// inherit it from the one that makes them.
package sandbox

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Options say what the process still needs. The zero value needs the files it has open, threads, memory and Unix sockets.
type Options struct {
	// SocketDirs are directories, with all below them, in which Unix sockets are made, removed and dialed. They must exist.
	SocketDirs []string
	// Dial are paths of Unix sockets of others that are dialed; they need not exist.
	Dial []string
	// StateDir is a directory in which files are read, made, written and removed; "" for none.
	StateDir string
	// Files are absolute paths of files that are read again, also after they were replaced; everything else in their directories can be
	// read then, too.
	Files []string
	// Taps allows to make and to configure network interfaces: /dev/net/tun, its ioctls, and netlink.
	Taps bool
	// Names allows to look up users and groups in the files that are there now.
	Names bool
	// Resolver allows to read the configuration of the name resolution, also after it was replaced.
	Resolver bool
	// Internet allows to reach the networks of the host, and to be reached, over TCP, UDP and echo requests (unprivileged ICMP sockets).
	Internet bool
	// Postcopy allows to talk to helper processes over socket pairs.
	Postcopy bool
	// Keep are the capabilities to keep of those that the process has (unix.CAP_*).
	Keep []int
	// Trap makes a refused system call end the process with a trace of its stack. Otherwise the call fails with EPERM and the
	// kernel logs it (audit, type 1326).
	Trap bool
}

// State is what holds the process, as the kernel tells it.
type State struct {
	Mode         string   `json:"mode"`         // on, off
	Landlock     int      `json:"landlock-abi"` // version of Landlock's interface that was enforced, 0 for none
	Seccomp      bool     `json:"seccomp"`      // a filter of system calls is in force, ours or one from outside
	NoNewPrivs   bool     `json:"no-new-privs"`
	Dumpable     bool     `json:"dumpable"`
	Capabilities []string `json:"capabilities"`
	// SocketDirs are the directories in which sockets can still be made; without Landlock it is empty, and anywhere is allowed.
	SocketDirs []string `json:"socket-dirs,omitempty"`
	// Missing lists what is not in force although it was wanted, and why.
	Missing []string `json:"missing,omitempty"`
}

// String is a line for people.
func (s State) String() string {
	parts := []string{}
	for _, part := range []struct {
		held bool
		text string
	}{
		{s.Landlock > 0, fmt.Sprint("landlock ", s.Landlock)}, {s.Seccomp, "seccomp"}, {s.NoNewPrivs, "no-new-privs"}, {!s.Dumpable, "not dumpable"},
	} {
		if part.held {
			parts = append(parts, part.text)
		}
	}
	capabilities := "none"
	if len(s.Capabilities) > 0 {
		capabilities = strings.Join(s.Capabilities, " ")
	}
	line := fmt.Sprintf("%s (%s; capabilities: %s)", s.Mode, strings.Join(parts, ", "), capabilities)
	if len(s.Missing) > 0 {
		line += "; missing: " + strings.Join(s.Missing, "; ")
	}
	return line
}

// Modes of a State.
const (
	On  = "on"
	Off = "off"
)

// Sandbox is what was entered. It never changes, so that it may be used by any goroutine.
type Sandbox struct {
	state State
	roots []directory // nil: no Landlock
}

// Enter confines the process. What the kernel does not have is left out and listed in the State; an error means that the process
// must not go on, for a part of it may be confined and another not.
func Enter(o Options) (*Sandbox, error) {
	// The time zone's file is read at the first use.
	_ = time.Now().Local().String()
	runtime.LockOSThread() // no_new_privs and seccomp are passed on from the calling thread
	defer runtime.UnlockOSThread()
	s := &Sandbox{}
	roots, err := directories(o.SocketDirs)
	if err != nil {
		return nil, fmt.Errorf("sandbox: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("sandbox: set no_new_privs: %w", err)
	}
	var missing []string
	abi, err := restrictPaths(o)
	switch {
	case errors.Is(err, errMissing):
		missing = append(missing, err.Error())
	case err != nil:
		return nil, fmt.Errorf("sandbox: landlock: %w", err)
	default:
		s.roots = roots
	}
	kept, err := dropCapabilities(o.Keep)
	if err != nil {
		return nil, fmt.Errorf("sandbox: drop capabilities: %w", err)
	}
	if err := harden(); err != nil {
		return nil, fmt.Errorf("sandbox: %w", err)
	}
	filtered := true
	if err := setFilter(o); errors.Is(err, errMissing) {
		filtered, missing = false, append(missing, err.Error())
	} else if err != nil {
		return nil, fmt.Errorf("sandbox: seccomp: %w", err)
	}
	if err := verify(filtered, kept); err != nil {
		return nil, fmt.Errorf("sandbox: %w", err)
	}
	s.state = Observe()
	s.state.Mode, s.state.Landlock, s.state.Missing = On, abi, missing
	for _, d := range s.roots {
		s.state.SocketDirs = append(s.state.SocketDirs, d.path)
	}
	return s, nil
}

// errMissing marks what this kernel, or a sandbox around this process, does not allow.
var errMissing = errors.New("not available here")

// harden keeps memory of the process, and of its guests, out of core files and away from other processes of the same user.
func harden() error {
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return fmt.Errorf("forbid core files: %w", err)
	}
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("make the process not dumpable: %w", err)
	}
	return nil
}

// State tells what is in force.
func (s *Sandbox) State() State { return s.state }

// AllowsSocket says why no socket can be made at path, or nil.
func (s *Sandbox) AllowsSocket(path string) error {
	if s.roots == nil {
		return nil
	}
	inside, err := below(path, s.roots)
	switch {
	case err != nil:
		return nil // whoever makes the socket tells it better
	case inside:
		return nil
	}
	return fmt.Errorf("socket %s: its directory must be one of %s, or below: those of the sockets of the start and of socket-dirs "+
		"(a directory that was made anew since the start is another one)", path, strings.Join(s.state.SocketDirs, ", "))
}

// directory is one of the allowed ones, as it was at the start.
type directory struct {
	path string
	info os.FileInfo
}

func directories(paths []string) ([]directory, error) {
	list := []directory{} // not nil: none is allowed
	for _, path := range paths {
		info, err := os.Stat(path)
		if err != nil {
			return nil, fmt.Errorf("directory for sockets: %w", err)
		}
		known := func(d directory) bool { return os.SameFile(d.info, info) }
		if !slices.ContainsFunc(list, known) {
			list = append(list, directory{path, info})
		}
	}
	return list, nil
}
