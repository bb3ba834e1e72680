package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// A back-end that dies more than maxRestarts times within restartPeriod is not started again.
	maxRestarts   = 5
	restartPeriod = time.Minute
	// endWithin is how long a child may take to end after SIGTERM; a back-end promises five seconds.
	endWithin = 8 * time.Second
	// signalled is added to the number of a signal to make an exit status of it, as shells do.
	signalled = 128
)

// exitStatus is the status of a program that was run in the place of this one. It is no error to tell about.
type exitStatus int

func (s exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(s)) }

// child is a process that was started, and its end.
type child struct {
	cmd   *exec.Cmd
	ended chan struct{}
}

// startChild starts a process that is told to end when this one dies. The calling thread must last as long as the child.
func startChild(cmd *exec.Cmd) (*child, error) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = unix.SIGTERM
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	c := &child{cmd: cmd, ended: make(chan struct{})}
	go func() {
		// How it ended is in ProcessState.
		_ = cmd.Wait()
		close(c.ended)
	}()
	return c, nil
}

// end asks the child to end, and makes it if it does not.
func (c *child) end() {
	_ = c.cmd.Process.Signal(unix.SIGTERM) // fails if it has ended
	select {
	case <-c.ended:
	case <-time.After(endWithin):
		_ = c.cmd.Process.Kill()
		<-c.ended
	}
}

// status is the exit status of a child that has ended.
func (c *child) status() exitStatus {
	if w, ok := c.cmd.ProcessState.Sys().(syscall.WaitStatus); ok && w.Signaled() {
		return exitStatus(signalled + int(w.Signal()))
	}
	return exitStatus(c.cmd.ProcessState.ExitCode())
}

// backEnd is a vhostd serve.
type backEnd struct {
	*child
	ready chan struct{} // closed when guests may connect
}

// startBackEnd starts this program again. It is in a process group of its own: what is typed at the terminal is for QEMU, and the
// back-end ends after it.
func startBackEnd(args []string) (*backEnd, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer w.Close()
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = w, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c, err := startChild(cmd)
	if err != nil {
		r.Close()
		return nil, fmt.Errorf("start the back-end: %w", err)
	}
	b := &backEnd{child: c, ready: make(chan struct{})}
	go func() {
		defer r.Close()
		if _, err := bufio.NewReader(r).ReadString('\n'); err == nil {
			close(b.ready)
		}
	}()
	return b, nil
}

// pair is a back-end and a QEMU.
type pair struct {
	serve   []string // arguments of the back-end
	b       *backEnd
	q       *child
	signals chan os.Signal
}

// runBoth runs a back-end and QEMU until QEMU has ended. The error is an exitStatus if QEMU ended by itself.
func runBoth(serve, words []string) error {
	runtime.LockOSThread() // the children end with the thread that started them
	defer runtime.UnlockOSThread()
	p := &pair{serve: serve, signals: make(chan os.Signal, 4)}
	signal.Notify(p.signals, unix.SIGINT, unix.SIGTERM)
	if !signal.Ignored(unix.SIGHUP) {
		signal.Notify(p.signals, unix.SIGHUP)
	}
	defer signal.Stop(p.signals)
	var err error
	if p.b, err = startBackEnd(serve); err != nil {
		return failure{err}
	}
	defer func() { p.b.end() }() // the last one
	select {
	case <-p.b.ready:
	case <-p.b.ended:
		return failure{fmt.Errorf("run: the back-end did not start (%v)", p.b.cmd.ProcessState)}
	case s := <-p.signals:
		return exitStatus(signalled + int(s.(syscall.Signal)))
	}
	cmd := exec.Command(words[0], words[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if p.q, err = startChild(cmd); err != nil {
		return failure{fmt.Errorf("run: start QEMU: %w", err)}
	}
	defer p.q.end()
	return p.watch()
}

// watch passes signals on and starts the back-end again, until QEMU has ended.
func (p *pair) watch() error {
	var starts []time.Time
	for {
		select {
		case <-p.q.ended:
			return p.q.status()
		case s := <-p.signals:
			_ = p.q.cmd.Process.Signal(s) // fails if it has ended
		case <-p.b.ended:
			var err error
			if starts, err = again(starts, time.Now()); err != nil {
				return failure{err}
			}
			fmt.Fprintf(os.Stderr, "vhostd: the back-end ended (%v) and is started again\n", p.b.cmd.ProcessState)
			next, err := startBackEnd(p.serve)
			if err != nil {
				return failure{err}
			}
			p.b = next
		}
	}
}

// again notes a restart, or says that there were too many.
func again(starts []time.Time, now time.Time) ([]time.Time, error) {
	for len(starts) > 0 && now.Sub(starts[0]) > restartPeriod {
		starts = starts[1:]
	}
	if len(starts) == maxRestarts {
		return starts, fmt.Errorf("run: the back-end ended %d times within %v, so QEMU was ended too; with --log-level info it tells more",
			maxRestarts+1, restartPeriod)
	}
	return append(starts, now), nil
}

// quiet says whether an error is the exit status of a program that was run, and which.
func quiet(err error) (status int, ok bool) {
	var s exitStatus
	ok = errors.As(err, &s)
	return int(s), ok
}
