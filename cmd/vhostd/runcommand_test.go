package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/vhostuser/frontend"
)

const (
	memoryOptions = "-object memory-backend-memfd,id=vhostd-mem0,size=1G,share=on -machine memory-backend=vhostd-mem0 "
	socketOptions = "-chardev socket,id=vhostd0,path=/s,reconnect=1 -netdev vhost-user,id=vhostd0,chardev=vhostd0"
)

func TestQEMUArgs(t *testing.T) {
	for args, want := range map[string]string{
		"": memoryOptions + socketOptions + " -device virtio-net-pci,netdev=vhostd0",
		"--queue-pairs 2 --mtu 9000 --mac 52:54:00:AA:00:01 --network tap": memoryOptions + socketOptions +
			",queues=2 -device virtio-net-pci,netdev=vhostd0,mq=on,vectors=6,mac=52:54:00:aa:00:01,host_mtu=9000",
		"--accel tcg --memory 1G": memoryOptions + socketOptions + " -device virtio-net-pci,netdev=vhostd0,vectors=0",
		"--client": memoryOptions + strings.Replace(socketOptions, "reconnect=1", "server=on,wait=off", 1) +
			" -device virtio-net-pci,netdev=vhostd0",
	} {
		words := append([]string{"qemu-args", "--socket", "/s"}, strings.Fields(args)...)
		code, stdout, stderr := run(t, words...)
		if code != 0 || stdout != want+"\n" {
			t.Errorf("%s: %d %q\n%s, want\n%s", args, code, stderr, stdout, want)
		}
		_, stdout, _ = run(t, append(words, "--json")...)
		var list []string
		if err := json.Unmarshal([]byte(stdout), &list); err != nil || strings.Join(list, " ") != want {
			t.Errorf("%s --json: %v %q", args, err, stdout)
		}
	}
	if _, stdout, _ := run(t, "qemu-args", "--socket", "/a b"); !strings.Contains(stdout, " 'socket,id=vhostd0,path=/a b,reconnect=1' ") {
		t.Errorf("a path with a space: %s", stdout)
	}
}

func TestRunUsageErrors(t *testing.T) {
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"qemu-args"}, "--socket is missing"},
		{[]string{"qemu-args", "--socket", "/s", "--memory", "much"}, `--memory: "much": accepted are sizes`},
		{[]string{"qemu-args", "--socket", "/s", "--accel", "xen"}, `--accel: "xen": accepted are kvm and tcg`},
		{[]string{"qemu-args", "--socket", "/s", "--publish", "80"}, "--publish: publish=80: one of the two ports is missing"},
		{[]string{"run"}, "run: give QEMU's command line behind --"},
		{[]string{"run", "--", "/no/such/qemu"}, "/no/such/qemu: no such file"},
		{[]string{"run", "--config", "f", "--", "sh"}, "--config names many guests and run starts one"},
		{[]string{"run", "--network", "user,mtu=1", "--", "sh"}, "mtu=1: accepted are"},
		{[]string{"run", "--wake", "soon", "--", "sh"}, "--wake"},
		{[]string{"run", "--publish", "2222:22", "--network", "tap", "--", "sh"},
			"--publish: 2222:22: the network tap publishes no ports: accepted with the network user"},
		{[]string{"run", "--", "sh", "-m", "x"}, `-m: "x": accepted are sizes`},
		{[]string{"run", "--", "sh", "-mem-path", "/x"}, "-mem-path /x: this memory is not shared"},
	} {
		t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
		code, stdout, stderr := run(t, tc.args...)
		t.Run(strings.Join(tc.args, " "), func(t *testing.T) { wantError(t, exitUsage, tc.want, code, stdout, stderr) })
		wantNoDir(t)
	}
}

// wantNoDir demands that the directory of the socket has gone.
func wantNoDir(t *testing.T) {
	t.Helper()
	left, err := filepath.Glob(os.Getenv("XDG_RUNTIME_DIR") + "/*")
	if err != nil || len(left) > 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

// startRun starts vhostd run with a shell script in the place of QEMU.
func startRun(t *testing.T, script string, flags ...string) *process {
	t.Helper()
	t.Setenv("XDG_RUNTIME_DIR", t.TempDir())
	return start(t, append(append([]string{"run", "--network", "echo"}, flags...), "sh", "-c", script, "qemu", "-m", "256")...)
}

// waiting prints the options and waits for a signal.
const waiting = `trap 'exit 7' TERM; trap 'exit 8' INT; echo "$@"; while :; do sleep 0.05; done`

// TestRunStatus: the exit status is the program's, and what it prints is all that is printed.
func TestRunStatus(t *testing.T) {
	for script, want := range map[string]int{"exit 0": 0, "exit 3": 3, "kill -KILL $$": 128 + 9, "kill -SEGV $$": 128 + 11} {
		p := startRun(t, "echo out; "+script)
		if line, code := p.ready(), p.exit(); line != "out" || code != want || p.stderr.String() != "" {
			t.Errorf("%s: %q, exit status %d, stderr %q; want status %d", script, line, code, p.stderr, want)
		}
		wantNoDir(t)
	}
}

// TestRunSignals: QEMU gets the signals, and decides.
func TestRunSignals(t *testing.T) {
	for s, want := range map[syscall.Signal]int{syscall.SIGTERM: 7, syscall.SIGINT: 8} {
		p := startRun(t, waiting)
		p.ready()
		children := childrenOf(t, p.cmd.Process.Pid)
		if len(children) != 2 {
			t.Errorf("children: %v", children)
		}
		p.signal(s)
		if code := p.exit(); code != want || p.stderr.String() != "" {
			t.Errorf("%v: exit status %d, stderr %q", s, code, p.stderr)
		}
		wantNoDir(t)
		wantEnded(t, children...)
	}
}

// TestRunOrdinaryUser: the default network needs no privileges, and what QEMU is to reach is the user's.
func TestRunOrdinaryUser(t *testing.T) {
	testmain.NeedRoot(t)
	dir, err := os.MkdirTemp("", "vhostd-run-test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chown(dir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	t.Setenv("XDG_RUNTIME_DIR", dir)
	script := `id -u; ls -ldn "$XDG_RUNTIME_DIR"/* | cut -c-10; test -w "$XDG_RUNTIME_DIR"/*/vm.sock`
	code, stdout, stderr := runCommand(t, asNobody(t, "run", "sh", "-c", script, "qemu"))
	if code != 0 || stdout != fmt.Sprintf("%d\ndrwx------\n", nobody) || strings.Contains(stderr, "sandbox") {
		t.Errorf("%d %q %q", code, stdout, stderr)
	}
	wantNoDir(t)
}

// TestRunKilled: without their parent both children end by themselves.
func TestRunKilled(t *testing.T) {
	p := startRun(t, waiting)
	p.ready()
	children := childrenOf(t, p.cmd.Process.Pid)
	p.signal(syscall.SIGKILL)
	p.exit()
	wantEnded(t, children...)
}

// TestRunClearsUp: the directory of one that was killed goes with the next start, those of others that run stay, and so does what only looks
// like one.
func TestRunClearsUp(t *testing.T) {
	alive := startRun(t, waiting)
	alive.ready()
	parent := os.Getenv("XDG_RUNTIME_DIR")
	dirs := func() []string {
		list, err := filepath.Glob(filepath.Join(parent, runDirPrefix+"*"))
		if err != nil {
			t.Fatal(err)
		}
		return list
	}
	kept := dirs()
	killed := start(t, "run", "--network", "echo", "sh", "-c", waiting, "qemu", "-m", "256")
	killed.ready()
	children := childrenOf(t, killed.cmd.Process.Pid)
	killed.signal(syscall.SIGKILL)
	killed.exit()
	wantEnded(t, children...)
	if got := dirs(); len(kept) != 1 || len(got) != 2 {
		t.Fatalf("directories %v, then %v, want one and then two", kept, got)
	}
	// Without a lock, with a lock that is a link, and open to others.
	elsewhere := filepath.Join(parent, "elsewhere")
	for i, mode := range []os.FileMode{0o700, 0o700, 0o755} {
		dir := filepath.Join(parent, runDirPrefix+strconv.Itoa(i))
		err := os.Mkdir(dir, mode)
		if err == nil && i > 0 {
			err = os.WriteFile(elsewhere, nil, 0o600)
		}
		switch {
		case err != nil:
		case i == 1:
			err = os.Symlink(elsewhere, filepath.Join(dir, runLock))
		case i == 2:
			err = os.WriteFile(filepath.Join(dir, runLock), nil, 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
		kept = append(kept, dir)
	}
	p := start(t, "run", "--network", "echo", "sh", "-c", "echo; exit 0", "qemu", "-m", "256")
	p.ready()
	if code := p.exit(); code != 0 {
		t.Errorf("exit status %d, stderr %q", code, p.stderr)
	}
	got := dirs()
	slices.Sort(got)
	slices.Sort(kept)
	if !slices.Equal(got, kept) {
		t.Errorf("left are %v, want %v", got, kept)
	}
	alive.signal(syscall.SIGTERM)
	alive.exit()
}

// TestRunRestarts: a back-end that dies is started again on the same socket; one that dies all the time ends everything.
func TestRunRestarts(t *testing.T) {
	p := startRun(t, waiting)
	path := regexp.MustCompile(`path=([^,]+)`).FindStringSubmatch(p.ready())[1]
	c := connect(t, path)
	echo(t, c, 3)
	for i := range maxRestarts + 1 {
		var backEnd int
		for _, pid := range childrenOf(t, p.cmd.Process.Pid) {
			if text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); strings.Contains(string(text), "\x00serve\x00") {
				backEnd = pid
			}
		}
		if backEnd == 0 {
			t.Fatalf("round %d: no back-end; stderr:\n%s", i, p.stderr)
		}
		if err := syscall.Kill(backEnd, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if i == maxRestarts {
			break
		}
		wantEnded(t, backEnd)
		echo(t, reconnect(t, path), 3)
	}
	if code := p.exit(); code != exitFailure || !strings.Contains(p.stderr.String(), "the back-end ended 6 times within 1m0s, so QEMU was ended too") {
		t.Errorf("exit status %d, stderr:\n%s", code, p.stderr)
	}
	wantNoDir(t)
}

// TestRunBackEndFails: what the back-end cannot do is told once by it and once by run, and QEMU is not started.
func TestRunBackEndFails(t *testing.T) {
	p := startRun(t, "echo started", "--cpus", "1023")
	if code := p.exit(); code != exitFailure || !strings.Contains(p.stderr.String(), "CPU 1023") || !strings.Contains(p.stderr.String(), "the back-end did not start (exit status 1)") {
		t.Errorf("exit status %d, stderr:\n%s", code, p.stderr)
	}
	wantNoDir(t)
}

// reconnect connects as soon as somebody serves the socket.
func reconnect(t *testing.T, path string) *frontend.Client {
	t.Helper()
	mem, err := frontend.NewMemory(8 << 20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		c, err := frontend.Connect(path, mem, frontend.Options{})
		if err == nil {
			t.Cleanup(func() { c.Close() })
			return c
		}
		if time.Now().After(end) {
			t.Fatalf("nobody serves %s: %v", path, err)
		}
	}
}

func childrenOf(t *testing.T, pid int) (list []int) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
	if err != nil || len(files) == 0 {
		t.Fatalf("children of %d: %v", pid, err)
	}
	for _, name := range files {
		text, err := os.ReadFile(name)
		if err != nil {
			continue // the thread has ended
		}
		for _, word := range strings.Fields(string(text)) {
			n, err := strconv.Atoi(word)
			if err != nil {
				t.Fatal(err)
			}
			list = append(list, n)
		}
	}
	return list
}

// wantEnded waits for the end of processes; what is left of one that nobody waited for counts as ended.
func wantEnded(t *testing.T, pids ...int) {
	t.Helper()
	for _, pid := range pids {
		for end := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
			text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
			if err != nil || strings.Contains(string(text), ") Z ") {
				break
			}
			if time.Now().After(end) {
				t.Errorf("process %d still runs: %s", pid, text)
				break
			}
		}
	}
}
