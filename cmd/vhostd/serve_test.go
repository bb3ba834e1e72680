package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

func socketIn(t *testing.T) string { return filepath.Join(t.TempDir(), "vm.sock") }

func connect(t *testing.T, path string) *frontend.Client {
	t.Helper()
	mem, err := frontend.NewMemory(8 << 20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	c, err := frontend.Connect(path, mem, frontend.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// echo sends n frames and waits for all of them to come back.
func echo(t *testing.T, c *frontend.Client, n int) {
	t.Helper()
	p, err := c.StartPair(0)
	if err != nil {
		t.Fatal(err)
	}
	frame := make([]byte, 64)
	for range n {
		if _, err := p.PostRx(16); err != nil {
			t.Fatal(err)
		}
		if err := p.SendTx(virtio.NetHdr{}, frame, frontend.Direct); err != nil {
			t.Fatal(err)
		}
		if _, _, err := p.RecvFrame(3 * time.Second); err != nil {
			t.Fatal(err)
		}
	}
}

func TestServeAndStop(t *testing.T) {
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP} {
		if signal.Ignored(s) {
			continue // the tests run under nohup, and so would the program
		}
		path := socketIn(t)
		control := path + ".control"
		p := start(t, "serve", "--socket", path, "--network", "echo", "--control", control)
		if got := p.ready(); got != "listening "+path {
			t.Errorf("readiness line %q", got)
		}
		echo(t, connect(t, path), 10)
		if s == syscall.SIGTERM {
			p.stop()
		} else {
			p.signal(s)
			if code := p.exit(); code != 0 {
				t.Errorf("%v: exit status %d", s, code)
			}
		}
		absent(t, path)
		absent(t, control)
	}
}

// TestStopUnderLoad is SHUT-01: traffic, a half message and an idle front-end do not delay the end.
func TestStopUnderLoad(t *testing.T) {
	dir := t.TempDir()
	text := "wake: adaptive\nguests:\n"
	for i, network := range []string{"echo", "source", "null", "echo"} {
		text += fmt.Sprintf("  - {name: vm%d, socket: %s/%d, network: %s}\n", i, dir, i, network)
	}
	file := filepath.Join(dir, "f.yaml")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, "serve", "--config", file)
	if got, want := p.ready(), fmt.Sprintf("listening %[1]s/0 %[1]s/1 %[1]s/2 %[1]s/3", dir); got != want {
		t.Errorf("readiness line %q, want %q", got, want)
	}
	busy := connect(t, dir+"/0")
	echo(t, busy, 5)
	flood := connect(t, dir+"/1")
	pair, err := flood.StartPair(0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pair.PostRx(256); err != nil {
		t.Fatal(err)
	}
	connect(t, dir+"/2")
	half, err := net.Dial("unix", dir+"/3")
	if err != nil {
		t.Fatal(err)
	}
	defer half.Close()
	if _, err := half.Write([]byte{1, 0, 0}); err != nil {
		t.Fatal(err)
	}
	p.stop()
	for i := range 4 {
		absent(t, fmt.Sprintf("%s/%d", dir, i))
	}
}

// TestDoubleSignal: two signals at once, as timeout(1) sends them, are one wish to stop.
func TestDoubleSignal(t *testing.T) {
	path := socketIn(t)
	p := start(t, "serve", "--socket", path, "--network", "null")
	p.ready()
	p.signal(syscall.SIGTERM)
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended already
	if code := p.exit(); code != 0 {
		t.Errorf("exit status %d", code)
	}
	absent(t, path)
}

// awaitOpen waits until the process has the file open.
func (p *process) awaitOpen(path string) {
	p.t.Helper()
	fds := fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid)
	for end := time.Now().Add(30 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		entries, _ := os.ReadDir(fds)
		for _, e := range entries {
			if target, err := os.Readlink(filepath.Join(fds, e.Name())); err == nil && target == path {
				return
			}
		}
	}
	p.t.Fatalf("%s was not opened", path)
}

// TestLaterSignalForces: a start that hangs (here on the lock of the socket's directory) can be
// ended by a second signal.
func TestLaterSignalForces(t *testing.T) {
	path := socketIn(t)
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	p := start(t, "serve", "--socket", path, "--network", "null")
	p.awaitOpen(filepath.Dir(path))
	p.signal(syscall.SIGTERM)
	time.Sleep(sameSignal + 100*time.Millisecond)
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // on a slow machine the lock was given up already
	if code := p.exit(); code != exitFailure {
		t.Errorf("exit status %d", code)
	}
	absent(t, path)
}

// TestConnectStorm is OPS-02: a peer cannot fill the disk through the log, and FD-01's baseline: it
// leaves no descriptor behind.
func TestConnectStorm(t *testing.T) {
	path := socketIn(t)
	p := start(t, "serve", "--socket", path, "--network", "null", "--log-level", "debug")
	p.ready()
	files := func() int {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", p.cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	begin := time.Now()
	before := 0
	for i := range 1000 {
		c, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 {
			_, _ = c.Write([]byte("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff")) // a refused peer has closed already
		}
		c.Close()
		if i == 10 {
			time.Sleep(100 * time.Millisecond)
			before = files()
		}
	}
	echoless := connect(t, path)
	echoless.Close()
	time.Sleep(100 * time.Millisecond)
	if after := files(); after > before {
		t.Errorf("%d descriptors, %d after ten connections", after, before)
	}
	p.stop()
	const causes = 8
	lines := strings.Count(p.stderr.String(), "\n")
	if most := int(time.Since(begin).Seconds()+2) * 11 * causes; lines > most {
		t.Errorf("%d lines in the log, want at most %d:\n%.3000s", lines, most, p.stderr)
	}
	if strings.Contains(p.stderr.String(), "\xff") {
		t.Error("the log holds the peer's bytes")
	}
}

// TestLogReaderGone: a closed log pipe costs the log, not the guests.
func TestLogReaderGone(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	path := socketIn(t)
	// The shell replaces the stderr that startCommand reads.
	cmd := exec.Command("sh", "-c", `exec "$0" "$@" 2>&3`, program, "serve", "--socket", path, "--network", "echo", "--log-level", "debug")
	cmd.ExtraFiles = []*os.File{w}
	p := startCommand(t, cmd)
	w.Close()
	p.ready()
	r.Close()
	for range 3 {
		c := connect(t, path)
		echo(t, c, 1)
		c.Close()
	}
	p.stop()
}

func TestStopDuringStart(t *testing.T) {
	for i := range 10 {
		path := socketIn(t)
		p := start(t, "serve", "--socket", path, "--network", "null")
		time.Sleep(time.Duration(i) * 3 * time.Millisecond)
		p.signal(syscall.SIGTERM)
		// Before the program has a say in it, the signal ends it as it ends any process.
		if code := p.exit(); code != 0 && code != -1 {
			t.Errorf("exit status %d", code)
		}
		absent(t, path)
	}
}

// TestKilledAndRestarted is SOCK-01 with the real thing, and RCN-01's first step.
func TestKilledAndRestarted(t *testing.T) {
	path := socketIn(t)
	first := start(t, "serve", "--socket", path, "--network", "echo")
	first.ready()
	code, stdout, stderr := run(t, "serve", "--socket", path, "--network", "echo")
	wantError(t, exitFailure, "socket "+path+": another process is listening on it", code, stdout, stderr)
	echo(t, connect(t, path), 1) // the first one is not disturbed
	first.signal(syscall.SIGKILL)
	first.exit()
	if _, err := os.Lstat(path); err != nil {
		t.Fatalf("the killed process left no socket: %v", err)
	}
	second := start(t, "serve", "--socket", path, "--network", "echo")
	second.ready()
	echo(t, connect(t, path), 1)
	second.stop()
}

// TestSuccessorKeepsSocket is SOCK-03 with the real thing.
func TestSuccessorKeepsSocket(t *testing.T) {
	path := socketIn(t)
	first := start(t, "serve", "--socket", path, "--network", "echo")
	first.ready()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	second := start(t, "serve", "--socket", path, "--network", "echo")
	second.ready()
	first.stop()
	echo(t, connect(t, path), 1)
	second.stop()
	absent(t, path)
}

func TestRunTimeFailures(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"serve", "--socket", file, "--network", "null"}, "socket " + file + ": a regular file is there"},
		{[]string{"serve", "--socket", dir + "/no/s", "--network", "null"}, "directory " + dir + "/no does not exist"},
		{[]string{"serve", "--socket", dir + "/s", "--network", "null", "--cpus", "1023"}, "CPU 1023"},
		{[]string{"serve", "--socket", dir + "/s", "--network", "null", "--control", file}, "socket " + file + ": a regular file is there"},
		{[]string{"--socket-path", file}, "a regular file is there"},
		{[]string{"stats", "--control", dir + "/s"}, "control socket " + dir + "/s: "},
	} {
		code, stdout, stderr := run(t, tc.args...)
		t.Run(strings.Join(tc.args, " "), func(t *testing.T) { wantError(t, exitFailure, tc.want, code, stdout, stderr) })
		absent(t, dir+"/s")
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "mine" {
		t.Errorf("the file was touched: %q %v", text, err)
	}
}

// TestFewFiles is OPS-07: the limit is named, and the remedy.
func TestFewFiles(t *testing.T) {
	path := socketIn(t)
	code, stdout, stderr := runCommand(t, exec.Command("sh", "-c", `ulimit -n 9; exec "$0" serve --socket "$1" --network null`, program, path))
	wantError(t, exitFailure, "raise the limit of open files", code, stdout, stderr)
	absent(t, path)
}

// TestOrdinaryUser is OPS-07 for permissions: directory, tap and somebody else's socket.
func TestOrdinaryUser(t *testing.T) {
	testmain.NeedTun(t)
	dir := t.TempDir()
	readOnly, own := filepath.Join(dir, "ro"), filepath.Join(dir, "own")
	for d, uid := range map[string]int{readOnly: 0, own: nobody} {
		if err := os.Mkdir(d, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chown(d, uid, uid); err != nil {
			t.Fatal(err)
		}
	}
	for d := dir; d != "/"; d = filepath.Dir(d) {
		if d == filepath.Clean(os.TempDir()) {
			break
		}
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	other := start(t, "serve", "--socket", own+"/root.sock", "--network", "null")
	other.ready()
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"--socket", readOnly + "/s", "--network", "null"}, "directory " + readOnly + " must be writable"},
		{[]string{"--socket", own + "/root.sock", "--network", "null"}, "cannot tell whether somebody listens"},
		{[]string{"--socket", own + "/s", "--network", "null", "--socket-owner", "root"}, "only root may give files away"},
		{[]string{"--socket", own + "/s", "--network", "tap,name=vhdtest0"}, "network tap vhdtest0: "},
	} {
		code, stdout, stderr := runCommand(t, asNobody(t, append([]string{"serve"}, tc.args...)...))
		t.Run(strings.Join(tc.args, " "), func(t *testing.T) { wantError(t, exitFailure, tc.want, code, stdout, stderr) })
		absent(t, own+"/s")
	}
}

const nobody = 65534

// asNobody prepares vhostd as an ordinary user, from a copy that this user may execute.
func asNobody(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	if err := os.Chmod(filepath.Dir(program), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, args...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	return cmd
}

func TestTapLife(t *testing.T) {
	testmain.NeedTun(t)
	path := socketIn(t)
	const name = "vhdtest1"
	code, stdout, stderr := run(t, "serve", "--socket", path, "--network", "tap,name="+name+",bridge=vhdnobr")
	wantError(t, exitFailure, "vhdnobr", code, stdout, stderr)
	absent(t, "/sys/class/net/"+name)
	p := start(t, "serve", "--socket", path, "--network", "tap,name="+name)
	p.ready()
	if _, err := os.Stat("/sys/class/net/" + name); err != nil {
		t.Errorf("no tap: %v", err)
	}
	p.stop()
	absent(t, "/sys/class/net/"+name)
}
