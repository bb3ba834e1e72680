package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// program is the real binary, built once.
var program string

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "vhostd-test")
	if err == nil {
		program = filepath.Join(dir, "vhostd")
		err = build()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Setenv(trapVariable, "1")
	code := m.Run()
	os.RemoveAll(dir)
	os.Exit(code)
}

func build() error {
	args := []string{"build", "-o", program}
	if raceEnabled {
		args = append(args, "-race")
	}
	out, err := exec.Command("go", append(args, ".")...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("go build: %w\n%s", err, out)
	}
	return nil
}

// process is a running vhostd.
type process struct {
	t      *testing.T
	cmd    *exec.Cmd
	out    *bufio.Reader
	stderr *syncBuffer
	ended  chan struct{}
	err    error
}

type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// start runs vhostd with args; the test's end kills what is left of it.
func start(t *testing.T, args ...string) *process {
	t.Helper()
	return startCommand(t, exec.Command(program, args...))
}

func startCommand(t *testing.T, cmd *exec.Cmd) *process {
	t.Helper()
	p := &process{t: t, cmd: cmd, stderr: &syncBuffer{}, ended: make(chan struct{})}
	// A pipe of our own: Wait must not close it under the reader.
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stdout, cmd.Stderr = w, p.stderr
	p.out = bufio.NewReader(r)
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	w.Close()
	go func() {
		p.err = cmd.Wait()
		close(p.ended)
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // fails when it has ended, which is fine
		<-p.ended
		r.Close()
	})
	return p
}

// ready waits for the readiness line and returns it.
func (p *process) ready() string {
	p.t.Helper()
	line, err := p.out.ReadString('\n')
	if err != nil {
		p.t.Fatalf("no readiness line: %v; stderr:\n%s", err, p.stderr)
	}
	return strings.TrimSuffix(line, "\n")
}

func (p *process) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatal(err)
	}
}

// exit waits for the end and returns the exit status.
func (p *process) exit() int {
	p.t.Helper()
	select {
	case <-p.ended:
	case <-time.After(8 * time.Second):
		p.t.Fatalf("still running after 8 s; stderr:\n%s", p.stderr)
	}
	var status *exec.ExitError
	if p.err != nil && !errors.As(p.err, &status) {
		p.t.Fatal(p.err)
	}
	if strings.Contains(p.stderr.String(), "panic:") || strings.Contains(p.stderr.String(), "DATA RACE") {
		p.t.Errorf("stderr:\n%s", p.stderr)
	}
	return p.cmd.ProcessState.ExitCode()
}

// stop sends SIGTERM and demands a clean end within five seconds.
func (p *process) stop() {
	p.t.Helper()
	begin := time.Now()
	p.signal(syscall.SIGTERM)
	if code := p.exit(); code != 0 {
		p.t.Errorf("exit status %d; stderr:\n%s", code, p.stderr)
	}
	if d := time.Since(begin); d > 5*time.Second {
		p.t.Errorf("stopping took %v", d)
	}
}

// run runs vhostd to its end.
func run(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	return runCommand(t, exec.Command(program, args...))
}

func runCommand(t *testing.T, cmd *exec.Cmd) (code int, stdout, stderr string) {
	t.Helper()
	p := startCommand(t, cmd)
	out, err := io.ReadAll(p.out)
	if err != nil {
		t.Fatal(err)
	}
	return p.exit(), string(out), p.stderr.String()
}

// wantError demands an exit status, silence on stdout and one line on stderr that contains text.
// Log lines before it are allowed for run-time failures.
func wantError(t *testing.T, code int, text string, gotCode int, stdout, stderr string) {
	t.Helper()
	lines := strings.Split(strings.TrimSuffix(stderr, "\n"), "\n")
	last := lines[len(lines)-1]
	if gotCode != code || stdout != "" || !strings.HasPrefix(last, "vhostd: ") || !strings.Contains(last, text) {
		t.Errorf("exit status %d, stdout %q, stderr %q; want status %d and a last line that contains %q", gotCode, stdout, stderr, code, text)
	}
	if code == exitUsage && len(lines) != 1 {
		t.Errorf("%d lines on stderr, want 1:\n%s", len(lines), stderr)
	}
}

func absent(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); err == nil {
		t.Errorf("%s was left behind", path)
	}
}
