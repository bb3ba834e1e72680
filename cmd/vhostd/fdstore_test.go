package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// manager stands for a service manager with a file descriptor store.
type manager struct {
	t    *testing.T
	conn *net.UnixConn
	path string
	kept map[string]*os.File
}

func newManager(t *testing.T) *manager {
	m := &manager{t: t, path: filepath.Join(t.TempDir(), "notify"), kept: map[string]*os.File{}}
	var err error
	if m.conn, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: m.path, Net: "unixgram"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		m.conn.Close()
		for _, f := range m.kept {
			f.Close()
		}
	})
	return m
}

// await reads notifications until one has the text, and does what they ask for.
func (m *manager) await(text string) {
	m.t.Helper()
	for {
		b, oob := make([]byte, 4096), make([]byte, 128)
		if err := m.conn.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
			m.t.Fatal(err)
		}
		n, oobn, _, _, err := m.conn.ReadMsgUnix(b, oob)
		if err != nil {
			m.t.Fatalf("waiting for %s: %v", text, err)
		}
		state := string(b[:n])
		_, name, _ := strings.Cut(state, "FDNAME=")
		switch {
		case strings.HasPrefix(state, "FDSTORE=1"):
			controls, err := unix.ParseSocketControlMessage(oob[:oobn])
			if err != nil || len(controls) != 1 {
				m.t.Fatal(controls, err)
			}
			fds, err := unix.ParseUnixRights(&controls[0])
			if err != nil || len(fds) != 1 {
				m.t.Fatal(fds, err)
			}
			m.kept[name] = os.NewFile(uintptr(fds[0]), name)
		case strings.HasPrefix(state, "FDSTOREREMOVE=1"):
			m.kept[name].Close()
			delete(m.kept, name)
		}
		if strings.Contains(state, text) {
			return
		}
	}
}

// start runs vhostd as the manager would, with what is kept.
func (m *manager) start(args ...string) *exec.Cmd {
	m.t.Helper()
	var names []string
	script := `export LISTEN_PID=$$; exec "$0" "$@"`
	cmd := exec.Command("/bin/sh", append([]string{"-c", script, program}, args...)...)
	for name, f := range m.kept {
		names = append(names, name)
		cmd.ExtraFiles = append(cmd.ExtraFiles, f)
	}
	cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+m.path, fmt.Sprint("LISTEN_FDS=", len(names)), "LISTEN_FDNAMES="+strings.Join(names, ":"))
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		m.t.Fatal(err)
	}
	m.t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	m.await("READY=1")
	return cmd
}

// TestRingsInTheStore: the service manager keeps where the packed rings are, and a program that was killed resumes them.
func TestRingsInTheStore(t *testing.T) {
	m := newManager(t)
	socket := socketIn(t)
	mem, err := frontend.NewMemory(16 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	opts := frontend.Options{Features: virtio.FVersion1 | virtio.FNetMrgRxBuf | virtio.FRingPacked}
	args := []string{"serve", "--socket", socket, "--network", "echo"}
	var pair *frontend.Pair
	for round := range 4 {
		cmd := m.start(args...)
		if len(m.kept) != 1 || m.kept["rings-vm0"] == nil {
			t.Fatalf("kept %v", m.kept)
		}
		c, err := frontend.Connect(socket, mem, opts)
		if err != nil {
			t.Fatal(err)
		}
		if pair != nil {
			c.Adopt(pair)
		}
		if pair, err = c.StartPair(0); err != nil {
			t.Fatal(err)
		}
		for i := range 70 {
			if _, err := pair.PostRx(10); err != nil {
				t.Fatal(err)
			}
			if err := pair.SendTx(virtio.NetHdr{}, make([]byte, 60+i), frontend.Direct); err != nil {
				t.Fatal(err)
			}
			if _, frame, err := pair.RecvFrame(20 * time.Second); err != nil || len(frame) != 60+i {
				t.Fatalf("round %d, frame %d: %d bytes, %v", round, i, len(frame), err)
			}
		}
		if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		var exit *exec.ExitError
		if err := cmd.Wait(); !errors.As(err, &exit) {
			t.Error(err)
		}
		c.Release()
		c.Close()
	}
	if err := pair.Close(); err != nil {
		t.Error(err)
	}
}

// TestStateDir: a guest's state is a file for its user alone, is there as long as the guest is, over a stop and a kill too, and goes
// with a guest that is removed. All of it happens inside the sandbox.
func TestStateDir(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "made", "by vhostd")
	socket := socketIn(t)
	control := socket + "-control"
	args := []string{"serve", "--socket", socket, "--network", "echo", "--state-dir", dir, "--control", control}
	file := filepath.Join(dir, "vm0.rings")
	look := func(when string) {
		t.Helper()
		if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v", when, info, err)
		}
	}
	p := start(t, args...)
	p.ready()
	look("started")
	p.stop()
	look("stopped")
	p = start(t, args...)
	p.ready()
	p.signal(syscall.SIGKILL)
	p.exit()
	look("killed")
	p = start(t, args...)
	p.ready()
	for _, step := range []struct{ method, url, body string }{
		{"POST", "/v1/guests", fmt.Sprintf(`{"name": "second", "socket": %q, "network": "null"}`, socket+"2")},
		{"DELETE", "/v1/guests/second", ""},
		{"DELETE", "/v1/guests/vm0", ""},
	} {
		out, err := exec.Command("curl", "-sSf", "--unix-socket", control, "-X", step.method, "-d", step.body, "http://vhostd"+step.url).CombinedOutput()
		if err != nil {
			t.Errorf("%+v: %v: %s", step, err, out)
		}
		if step.method == "POST" {
			if _, err := os.Stat(filepath.Join(dir, "second.rings")); err != nil {
				t.Error(err)
			}
		}
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 0 {
		t.Errorf("%v, %v are left", entries, err)
	}
	p.stop()
}
