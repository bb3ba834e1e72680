package rig

import (
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"
)

// keepLines bounds the output kept of a process.
const keepLines = 2000

// Process is a child with its output, standard output and error together, kept line by line.
type Process struct {
	Name  string
	cmd   *exec.Cmd
	stdin io.WriteCloser
	ended chan struct{}
	err   error // of Wait, valid once ended is closed

	mutex   sync.Mutex
	lines   []string
	partial string
	excerpt excerpt
	changed chan struct{} // closed and replaced when output came
}

// spawner is the thread of children that need no namespace of their own.
var spawner = sync.OnceValue(newThread)

// Start runs a program in the namespace (nil: that of the test process).
func Start(ns *Namespace, program string, args ...string) (*Process, error) {
	return start(ns, program, exec.Command(program, args...), syscall.SysProcAttr{})
}

// start runs the command, which ends with the thread that started it. attr may ask for namespaces.
func start(ns *Namespace, name string, cmd *exec.Cmd, attr syscall.SysProcAttr) (*Process, error) {
	if ns == nil {
		ns = spawner()
	}
	p := &Process{Name: name, cmd: cmd, ended: make(chan struct{}), changed: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = (*output)(p), (*output)(p)
	attr.Setpgid, attr.Pdeathsig = true, syscall.SIGKILL
	p.cmd.SysProcAttr = &attr
	stdin, err := p.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	p.stdin = stdin
	if err := ns.Do(p.cmd.Start); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	go func() {
		p.err = p.cmd.Wait()
		p.endLine()
		close(p.ended)
	}()
	return p, nil
}

// output is the process seen as the writer of its own output.
type output Process

func (o *output) Write(b []byte) (int, error) {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	text := o.partial + strings.ReplaceAll(string(b), "\r", "")
	lines := strings.Split(text, "\n")
	o.partial = lines[len(lines)-1]
	o.lines = append(o.lines, lines[:len(lines)-1]...)
	for _, line := range lines[:len(lines)-1] {
		o.excerpt.add(line)
	}
	if extra := len(o.lines) - keepLines; extra > 0 {
		o.lines = append([]string(nil), o.lines[extra:]...)
	}
	close(o.changed)
	o.changed = make(chan struct{})
	return len(b), nil
}

// endLine ends the last line of a process that did not.
func (p *Process) endLine() {
	p.mutex.Lock()
	unfinished := p.partial != ""
	p.mutex.Unlock()
	if unfinished {
		_, _ = (*output)(p).Write([]byte("\n"))
	}
}

// Output returns the lines so far, an unfinished last one included.
func (p *Process) Output() string {
	text, _ := p.snapshot()
	return text
}

func (p *Process) snapshot() (string, <-chan struct{}) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return strings.Join(append(p.lines[:len(p.lines):len(p.lines)], p.partial), "\n"), p.changed
}

// WaitOutput waits until the output satisfies found. It fails when the process ends or the time is over.
func (p *Process) WaitOutput(what string, timeout time.Duration, found func(output string) bool) error {
	timer := time.NewTimer(timeout)
	defer timer.Stop()
	for {
		text, changed := p.snapshot()
		if found(text) {
			return nil
		}
		select {
		case <-changed:
		case <-timer.C:
			return fmt.Errorf("%s: no %s within %v; output:\n%s", p.Name, what, timeout, p.Output())
		case <-p.ended:
			if text, _ := p.snapshot(); found(text) {
				return nil
			}
			return fmt.Errorf("%s: ended (%v) before %s; output:\n%s", p.Name, p.err, what, p.Output())
		}
	}
}

// Send writes a line to the standard input.
func (p *Process) Send(line string) error {
	_, err := io.WriteString(p.stdin, line+"\n")
	return err
}

// PID is the process's id.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.ended }

// Ended says whether the process has ended.
func (p *Process) Ended() bool {
	select {
	case <-p.ended:
		return true
	default:
		return false
	}
}

// Wait waits for the end; the error is that of exec.Cmd.Wait.
func (p *Process) Wait(timeout time.Duration) error {
	select {
	case <-p.ended:
		return p.err
	case <-time.After(timeout):
		return fmt.Errorf("%s: still running after %v", p.Name, timeout)
	}
}

// Stop asks the process to end (SIGTERM) and kills it after the timeout, which is an error, as is an exit status other than 0.
func (p *Process) Stop(timeout time.Duration) error {
	if p.Ended() {
		return p.err
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	err := p.Wait(timeout)
	if !p.Ended() {
		p.Kill()
	}
	return err
}

// Kill ends the process at once (SIGKILL) and waits for it.
func (p *Process) Kill() {
	if err := p.cmd.Process.Kill(); err != nil && !p.Ended() {
		return
	}
	<-p.ended
}

// ExitCode is the exit status once the process has ended by itself, -1 otherwise.
func (p *Process) ExitCode() int {
	if !p.Ended() {
		return -1
	}
	var exit *exec.ExitError
	if errors.As(p.err, &exit) {
		return exit.ExitCode()
	}
	if p.err != nil {
		return -1
	}
	return 0
}
