package attach

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// namespace is a network namespace and, where this process may see it, the user namespace that it belongs to.
type namespace struct{ net, user *os.File }

// namespacePath is what Options.Netns stands for.
func namespacePath(text string) string {
	if strings.Contains(text, "/") {
		return text
	}
	if pid, err := strconv.ParseUint(text, 10, 31); err == nil {
		return fmt.Sprintf("/proc/%d/ns/net", pid)
	}
	return filepath.Join("/run/netns", text)
}

// openNamespace opens it. Errors say what is wrong with it.
func openNamespace(text string) (*namespace, error) {
	path := namespacePath(text)
	// Whatever the path leads to, opening it must not wait.
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("network namespace %s: open %s: %w", text, path, err)
	}
	ns := &namespace{net: os.NewFile(uintptr(fd), path)}
	if kind, err := unix.IoctlRetInt(fd, unix.NS_GET_NSTYPE); err != nil || kind != unix.CLONE_NEWNET {
		return nil, errors.Join(fmt.Errorf("network namespace %s: %s is no network namespace", text, path), ns.close())
	}
	// It is refused for a namespace that is not below this process's.
	if user, err := unix.IoctlRetInt(fd, unix.NS_GET_USERNS); err == nil {
		ns.user = os.NewFile(uintptr(user), path+" (user namespace)")
	}
	return ns, nil
}

func (ns *namespace) close() error {
	err := ns.net.Close()
	if ns.user != nil {
		err = errors.Join(err, ns.user.Close())
	}
	return err
}

// spawn starts this program as a helper inside, with sock as its socket. A namespace of an ordinary user is entered through the user
// namespace that it belongs to, which util-linux's nsenter does: it takes a process with one thread.
func (ns *namespace) spawn(sock *os.File) (*exec.Cmd, error) {
	cmd := exec.Command("/proc/self/exe", helperArgument)
	cmd.ExtraFiles = []*os.File{sock}
	err := ns.spawnInside(cmd)
	if !errors.Is(err, unix.EPERM) {
		return cmd, err
	}
	if ns.user == nil {
		return nil, fmt.Errorf("enter the network namespace: %w (it belongs to another user, or needs root)", err)
	}
	nsenter, lookErr := exec.LookPath("nsenter")
	if lookErr != nil {
		return nil, fmt.Errorf("enter the network namespace: %w (without root this needs nsenter, of util-linux)", err)
	}
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return nil, err
	}
	defer self.Close()
	cmd = exec.Command(nsenter, "--preserve-credentials", "--user=/proc/self/fd/4", "--net=/proc/self/fd/5", "--",
		"/proc/self/fd/6", helperArgument, enteredArgument)
	cmd.ExtraFiles = []*os.File{sock, ns.user, ns.net, self}
	cmd.Stderr = os.Stderr
	return cmd, cmd.Start()
}

// spawnInside starts cmd from a thread that has entered the network namespace.
func (ns *namespace) spawnInside(cmd *exec.Cmd) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := unix.Setns(int(ns.net.Fd()), unix.CLONE_NEWNET); err != nil {
			result <- os.NewSyscallError("setns", err)
			return
		}
		cmd.Stderr = os.Stderr
		result <- cmd.Start()
	}()
	return <-result
}
