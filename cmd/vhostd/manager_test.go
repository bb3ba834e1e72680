package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/control"
)

// listenFile makes a listening socket as a service manager does.
func listenFile(t *testing.T, path string) *os.File {
	t.Helper()
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	f, err := l.File()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// activated prepares vhostd with inherited sockets (sd_listen_fds(3)); LISTEN_PID must be its own.
func activated(files []*os.File, names string, args ...string) *exec.Cmd {
	cmd := exec.Command("sh", append([]string{"-c", `LISTEN_PID=$$ exec "$0" "$@"`, program}, args...)...)
	cmd.Env = append(os.Environ(), fmt.Sprint("LISTEN_FDS=", len(files)), "LISTEN_FDNAMES="+names)
	cmd.ExtraFiles = files
	return cmd
}

func TestSocketActivation(t *testing.T) {
	path := socketIn(t)
	f := listenFile(t, path)
	for _, args := range [][]string{
		{"serve", "--network", "echo"},
		{"serve", "--network", "echo", "--name", "vm1"},
		{"serve", "--network", "echo", "--socket", path},
	} {
		p := startCommand(t, activated([]*os.File{f}, "vm1", args...))
		if got := p.ready(); got != "listening "+path {
			t.Errorf("%v: readiness line %q", args, got)
		}
		c := connect(t, path)
		echo(t, c, 1)
		p.stop()
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("the service manager's socket was removed: %v", err)
		}
	}
	code, stdout, stderr := runCommand(t, activated([]*os.File{f}, "vm1", "serve", "--network", "echo", "--socket", path+"2"))
	wantError(t, exitUsage, "no guest has this name or path", code, stdout, stderr)
}

func TestSocketActivationOfManyGuests(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "f.yaml")
	text := fmt.Sprintf("guests:\n  - {name: a, socket: %[1]s/a, network: echo}\n  - {name: b, socket: %[1]s/b, network: echo}\n", dir)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	files := []*os.File{listenFile(t, dir+"/c"), listenFile(t, dir+"/b"), listenFile(t, dir+"/a")}
	p := startCommand(t, activated(files, "control:x:a", "serve", "--config", file))
	p.ready()
	echo(t, connect(t, dir+"/a"), 1)
	echo(t, connect(t, dir+"/b"), 1)
	if _, err := control.Get(t.Context(), dir+"/c", "/healthz"); err != nil {
		t.Error(err)
	}
	p.stop()
}

func TestNotify(t *testing.T) {
	dir := t.TempDir()
	notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: dir + "/notify", Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer notify.Close()
	cmd := exec.Command(program, "serve", "--socket", dir+"/s", "--network", "null")
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+dir+"/notify", "WATCHDOG_USEC=200000")
	p := startCommand(t, cmd)
	next := func(want string) {
		t.Helper()
		b := make([]byte, 100)
		if err := notify.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Fatal(err)
		}
		n, err := notify.Read(b)
		if err != nil || string(b[:n]) != want {
			t.Fatalf("told %q, %v; want %q", b[:n], err, want)
		}
	}
	next("FDSTORE=1\nFDNAME=rings-vm0") // where the positions of packed rings outlive the process
	next("READY=1")
	next("WATCHDOG=1")
	p.stop()
	for {
		b := make([]byte, 100)
		n, err := notify.Read(b)
		if err != nil {
			t.Fatal("STOPPING=1 was not told")
		}
		if string(b[:n]) == "STOPPING=1" {
			return
		}
	}
}

func TestConventions(t *testing.T) {
	path := socketIn(t)
	p := start(t, "--socket-path="+path)
	if got := p.ready(); got != "listening "+path {
		t.Errorf("readiness line %q", got)
	}
	connect(t, path)
	p.stop()
	absent(t, path)

	cmd := exec.Command(program, "--fd=3")
	cmd.ExtraFiles = []*os.File{listenFile(t, path)}
	p = startCommand(t, cmd)
	if got := p.ready(); got != "listening "+path {
		t.Errorf("readiness line %q", got)
	}
	connect(t, path)
	p.stop()
}

// TestConnectedFD: the process lives as long as the connection that it was given.
func TestConnectedFD(t *testing.T) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "ours"), os.NewFile(uintptr(fds[1]), "theirs")
	cmd := exec.Command(program, "--fd", "3")
	cmd.ExtraFiles = []*os.File{theirs}
	p := startCommand(t, cmd)
	theirs.Close()
	p.ready()
	ours.Close()
	if code := p.exit(); code != 0 {
		t.Errorf("exit status %d; stderr:\n%s", code, p.stderr)
	}
}

// TestControlSocket adds, uses and removes guests while the daemon runs.
func TestControlSocket(t *testing.T) {
	dir := t.TempDir()
	file, socket := filepath.Join(dir, "f.yaml"), filepath.Join(dir, "c")
	if err := os.WriteFile(file, []byte("guests: []\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p := start(t, "serve", "--config", file, "--control", socket)
	if got := p.ready(); got != "listening "+socket {
		t.Errorf("readiness line %q", got)
	}
	if fi, err := os.Stat(socket); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("control socket: %v %v", fi, err)
	}
	client := &http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", socket)
	}}}
	defer client.CloseIdleConnections()
	do := func(method, url, body string, want int) string {
		t.Helper()
		request, err := http.NewRequest(method, "http://vhostd"+url, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		response, err := client.Do(request)
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err != nil || response.StatusCode != want {
			t.Fatalf("%s %s: %s %s %v", method, url, response.Status, text, err)
		}
		return string(text)
	}
	do("POST", "/v1/guests/vm1", fmt.Sprintf(`{"socket":"%s/vm1","network":"echo"}`, dir), 201)
	do("POST", "/v1/guests/vm1", fmt.Sprintf(`{"socket":"%s/vm2","network":"echo"}`, dir), 409)
	do("POST", "/v1/guests/vm2", fmt.Sprintf(`{"socket":"%s/no/vm2","network":"echo"}`, dir), 500)
	echo(t, connect(t, dir+"/vm1"), 7)
	// The counters of a turn become visible at its end, after its frames.
	metrics := ""
	counted := func() bool {
		metrics = do("GET", "/metrics", "", 200)
		return strings.Contains(metrics, `vhostd_packets_total{guest="vm1",pair="0",queue="transmitq"} 7`)
	}
	for end := time.Now().Add(3 * time.Second); !counted(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("metrics:\n%s", metrics)
		}
	}
	var status control.StatusReply
	if err := json.Unmarshal([]byte(do("GET", "/v1/status", "", 200)), &status); err != nil || len(status.Guests) != 1 || status.Guests[0].Name != "vm1" {
		t.Errorf("%+v %v", status, err)
	}
	code, stdout, _ := run(t, "stats", "--control", socket)
	if code != 0 || !strings.Contains(stdout, "vm1    0     transmitq  7        448 B") {
		t.Errorf("%d\n%s", code, stdout)
	}
	_, stdout, _ = run(t, "stats", "--control", socket, "--json")
	if !json.Valid([]byte(stdout)) {
		t.Errorf("not JSON: %s", stdout)
	}
	do("DELETE", "/v1/guests/vm1", "", 204)
	do("DELETE", "/v1/guests/vm1", "", 404)
	absent(t, dir+"/vm1")
	p.stop()
	absent(t, socket)
}

func TestLogFormats(t *testing.T) {
	p := start(t, "serve", "--socket", socketIn(t), "--network", "null", "--log-format", "json")
	p.ready()
	p.stop()
	for line := range bytes.Lines([]byte(p.stderr.String())) {
		if !json.Valid(line) {
			t.Errorf("not JSON: %s", line)
		}
	}
	p = start(t, "serve", "--socket", socketIn(t), "--network", "null", "--log-level", "error")
	p.ready()
	p.stop()
	if got := p.stderr.String(); got != "" {
		t.Errorf("level error writes %q", got)
	}
}
