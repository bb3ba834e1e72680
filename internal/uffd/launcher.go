package uffd

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A process that has confined itself can start no other. [Prelaunch] starts a launcher before, which starts helpers
// on request for as long as the process lives. It does nothing else, and no front-end has power over it.

// launcherName is the launcher's name.
const launcherName = "vhostd-postcopy-launcher"

const (
	opStart op = 100 + iota // with the helper's socket; answered with the process id
	opStop                  // the process with that id; answered when it was reaped
)

// launched is the launcher, nil without one.
var launched struct {
	sync.Mutex
	*link
}

// link is the way to the launcher.
type link struct {
	cmd  *exec.Cmd
	sock int
}

// Prelaunch starts the launcher, through which all helpers are started from then on. stop ends it, and its helpers.
func Prelaunch() (stop func(), err error) {
	if !prepared.Load() {
		return nil, errUnprepared
	}
	cmd, sock, err := spawn(launcherName)
	if err != nil {
		return nil, err
	}
	limit := unix.NsecToTimeval(startTimeout.Nanoseconds())
	if err := unix.SetsockoptTimeval(sock, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err != nil {
		return nil, errors.Join(os.NewSyscallError("setsockopt", err), unix.Close(sock), cmd.Wait())
	}
	launched.Lock()
	launched.link = &link{cmd: cmd, sock: sock}
	launched.Unlock()
	return func() {
		launched.Lock()
		defer launched.Unlock()
		_ = unix.Close(sock) // is what ends it
		_ = cmd.Wait()
		launched.link = nil
	}, nil
}

// spawn starts this program under another name, with one end of a new socket pair.
func spawn(name string) (cmd *exec.Cmd, sock int, err error) {
	ours, theirs, err := pair()
	if err != nil {
		return nil, -1, err
	}
	cmd, err = run(name, theirs)
	if err != nil {
		_ = unix.Close(ours)
		return nil, -1, err
	}
	return cmd, ours, nil
}

func pair() (ours int, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, nil, os.NewSyscallError("socketpair", err)
	}
	return fds[0], os.NewFile(uintptr(fds[1]), name(fds[1])), nil
}

func name(fd int) string { return fmt.Sprintf("socket %d", fd) }

// run starts this program under another name and closes sock, which becomes helperSocket there.
func run(name string, sock *os.File) (*exec.Cmd, error) {
	defer sock.Close() // so that the end of the process ends the connection
	cmd := exec.Command("/proc/self/exe")
	cmd.Args, cmd.Env, cmd.Dir = []string{name}, []string{}, "/"
	cmd.Stderr = os.Stderr
	cmd.ExtraFiles = []*os.File{sock}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // a terminal's signals are for the program
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return cmd, nil
}

// launch starts a helper, through the launcher if there is one. end kills and reaps it.
func launch() (sock int, end func(), err error) {
	launched.Lock()
	defer launched.Unlock()
	if launched.link == nil {
		cmd, sock, err := spawn(helperName)
		if err != nil {
			return -1, nil, err
		}
		return sock, func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }, nil
	}
	ours, theirs, err := pair()
	if err != nil {
		return -1, nil, err
	}
	defer theirs.Close()
	l := launched.link
	m, err := l.call(message{op: opStart}, int(theirs.Fd()))
	if err != nil {
		_ = unix.Close(ours)
		return -1, nil, fmt.Errorf("launch a helper process: %w", err)
	}
	return ours, func() {
		launched.Lock()
		defer launched.Unlock()
		if launched.link == l {
			_, _ = l.call(message{op: opStop, value: m.value})
		}
	}, nil
}

// call gives an order and waits for the answer. Without one in time the launcher is let go, with its helpers.
func (l *link) call(m message, fds ...int) (answer message, err error) {
	if err = send(l.sock, unix.MSG_DONTWAIT, m, fds...); err != nil {
		return answer, err
	}
	answer, got, err := recv(l.sock)
	closeAll(got)
	if err != nil {
		_ = unix.Shutdown(l.sock, unix.SHUT_RDWR)
		return answer, err
	}
	return answer, answer.err()
}

// launchHelpers is the launcher process. It ends with the program that started it.
func launchHelpers(sock int) error {
	running := make(map[int]*exec.Cmd)
	defer func() {
		for _, cmd := range running {
			_ = cmd.Process.Kill()
		}
	}()
	for {
		m, fds, err := recv(sock)
		if err == errClosed {
			return nil
		}
		if err != nil {
			return err
		}
		answer := message{op: m.op, value: m.value}
		switch cmd := running[int(m.value)]; {
		case m.op == opStart && len(fds) == 1:
			cmd, err := run(helperName, os.NewFile(uintptr(fds[0]), name(fds[0])))
			if err == nil {
				running[cmd.Process.Pid] = cmd
				answer.value = uint64(cmd.Process.Pid)
			}
			answer.errno = errnoOf(err)
		case m.op == opStop && cmd != nil:
			closeAll(fds)
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			delete(running, int(m.value))
		default:
			closeAll(fds)
			answer.errno = uint32(unix.EINVAL)
		}
		if err := send(sock, 0, answer); err != nil {
			return err
		}
	}
}

// within calls f if the returned function is not called in time.
func within(f func()) (stop func() bool) { return time.AfterFunc(startTimeout, f).Stop }
