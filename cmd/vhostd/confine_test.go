package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/control"
	"github.com/vhostd/vhostd/internal/daemon"
	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// capability makes a set of one.
func capability(c int) string { return fmt.Sprintf("%016x", uint64(1)<<c) }

const noCapability = "0000000000000000"

// wantThreads looks at every thread of the process.
func wantThreads(t *testing.T, p *process, capabilities string) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", p.cmd.Process.Pid))
	if err != nil || len(files) < 4 {
		t.Fatalf("threads: %v %v", files, err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if os.IsNotExist(err) {
			continue
		}
		for _, want := range []string{"Seccomp:\t2\n", "NoNewPrivs:\t1\n", "CapEff:\t" + capabilities, "CapPrm:\t" + capabilities, "CapInh:\t" + noCapability, "CapAmb:\t" + noCapability} {
			if !bytes.Contains(text, []byte(want)) {
				t.Errorf("%s: no %q in\n%s", file, want, text)
			}
		}
	}
}

// post adds a guest by the control socket and returns the status and the body.
func post(t *testing.T, path, guest string) (int, string) {
	t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", path)
	}}}
	r, err := client.Post("http://vhostd/v1/guests", "application/json", strings.NewReader(guest))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	var body bytes.Buffer
	_, _ = body.ReadFrom(r.Body)
	return r.StatusCode, body.String()
}

func status(t *testing.T, path string) (s daemon.Status) {
	t.Helper()
	body, err := control.Get(context.Background(), path, "/v1/status")
	if err == nil {
		err = json.Unmarshal(body, &s)
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestConfined: what each network leaves to the process, on all its threads, before and after traffic.
func TestConfined(t *testing.T) {
	if os.Geteuid() != 0 {
		testmain.Skip(t, "needs root, to see it drop capabilities")
	}
	foreign := t.TempDir()
	if err := os.Chown(foreign, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		name, capabilities string
		args               []string // of serve; %s is the socket
	}{
		{"echo", noCapability, []string{"--socket", "%s", "--network", "echo"}},
		{"control", capability(unix.CAP_NET_ADMIN), []string{"--socket", "%s", "--network", "echo", "--control", "%s.control"}},
		{"switch", noCapability, []string{"--socket", "%s", "--network", "switch,name=a"}},
		{"sock", noCapability, []string{"--socket", "%s", "--network", "sock,path=%s.net"}},
		{"dialed sock", capability(unix.CAP_DAC_OVERRIDE), []string{"--socket", "%s", "--network", "sock,path=%s.net,connect=on"}},
		{"client", capability(unix.CAP_DAC_OVERRIDE), []string{"--socket", "%s", "--network", "echo", "--client"}},
		{"foreign directory", capability(unix.CAP_DAC_OVERRIDE), []string{"--socket", foreign + "/s", "--network", "echo"}},
		{"owner", noCapability, []string{"--socket", "%s", "--network", "echo", "--socket-owner", "0"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := socketIn(t)
			args := []string{"serve"}
			for _, a := range tc.args {
				args = append(args, strings.ReplaceAll(a, "%s", path))
			}
			p := start(t, args...)
			p.ready()
			wantThreads(t, p, tc.capabilities)
			if tc.name == "echo" || tc.name == "control" {
				echo(t, connect(t, path), 20)
				wantThreads(t, p, tc.capabilities)
			}
			if strings.HasSuffix(tc.name, "sock") {
				passSock(t, path, tc.name != "sock")
				wantThreads(t, p, tc.capabilities)
			}
			p.stop()
			absent(t, path+".net")
			absent(t, path)
			absent(t, foreign+"/s")
		})
	}
}

// passSock moves a frame in each direction between a guest and a peer of its socket network, twice.
func passSock(t *testing.T, path string, listens bool) {
	t.Helper()
	var l *net.UnixListener
	if listens {
		var err error
		if l, err = net.ListenUnix("unixpacket", &net.UnixAddr{Name: path + ".net", Net: "unixpacket"}); err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
	pair, err := connect(t, path).StartPair(0)
	if err != nil {
		t.Fatal(err)
	}
	for round := range 2 {
		var peer net.Conn
		if listens {
			peer, err = l.Accept()
		} else {
			peer, err = net.Dial("unixpacket", path+".net")
		}
		if err != nil {
			t.Fatal(err)
		}
		frame := bytes.Repeat([]byte{byte(round)}, 60)
		if _, err := peer.Write(frame); err != nil {
			t.Fatal(err)
		}
		if _, err := pair.PostRx(4); err != nil {
			t.Fatal(err)
		}
		if _, got, err := pair.RecvFrame(5 * time.Second); err != nil || !bytes.Equal(got, frame) {
			t.Errorf("the guest received %x, %v", got, err)
		}
		if err := pair.SendTx(virtio.NetHdr{}, frame, frontend.Direct); err != nil {
			t.Fatal(err)
		}
		_ = peer.SetReadDeadline(time.Now().Add(5 * time.Second))
		buf := make([]byte, 2048)
		if n, err := peer.Read(buf); err != nil || !bytes.Equal(buf[:n], frame) {
			t.Errorf("the peer received %x, %v", buf[:n], err)
		}
		peer.Close()
	}
}

// TestConfinedTap: taps are made after the start and cannot be without the sandbox's consent.
func TestConfinedTap(t *testing.T) {
	testmain.NeedTun(t)
	path := socketIn(t)
	cmd := exec.Command(program, "serve", "--socket", path, "--network", "tap,name=one", "--control", path+".control")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	p := startCommand(t, cmd)
	p.ready()
	for i, network := range []string{"tap,name=two", "switch,name=lan,uplink=tap,uplink-name=three", "tap,name=four,persist=on,owner=root"} {
		code, body := post(t, path+".control", fmt.Sprintf(`{"name":"later%d","socket":"%s%d","network":"%s"}`, i, path, i, network))
		if code != http.StatusCreated {
			t.Errorf("%s: %d %s", network, code, body)
			continue
		}
		connect(t, fmt.Sprint(path, i))
	}
	wantThreads(t, p, capability(unix.CAP_NET_ADMIN))
	p.stop()
}

// TestConfinedGuests: where guests that are added later may have their sockets, and what the status tells.
func TestConfinedGuests(t *testing.T) {
	base := t.TempDir()
	for _, dir := range []string{"start/below", "more", "other"} {
		if err := os.MkdirAll(filepath.Join(base, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	api := filepath.Join(base, "start", "control")
	p := start(t, "serve", "--socket", filepath.Join(base, "start", "s"), "--network", "echo", "--control", api, "--socket-dirs", filepath.Join(base, "more"))
	p.ready()
	s := status(t, api).Sandbox
	if s.Mode != "on" || !s.Seccomp || !s.NoNewPrivs || s.Dumpable {
		t.Errorf("status: %+v", s)
	}
	for dir, want := range map[string]int{"start": http.StatusCreated, "start/below": http.StatusCreated, "more": http.StatusCreated, "other": http.StatusForbidden} {
		if s.Landlock == 0 {
			want = http.StatusCreated
		}
		path := filepath.Join(base, dir, "later")
		code, body := post(t, api, fmt.Sprintf(`{"name":%q,"socket":%q,"network":"echo"}`, strings.ReplaceAll(dir, "/", "."), path))
		if code != want {
			t.Errorf("%s: %d %s, want %d", dir, code, body, want)
		}
		switch code {
		case http.StatusCreated:
			echo(t, connect(t, path), 3)
		case http.StatusForbidden:
			if !strings.Contains(body, filepath.Join(base, "more")) {
				t.Errorf("%s: the directories are not named: %s", dir, body)
			}
		}
	}
	code, stdout, stderr := runCommand(t, exec.Command(program, "stats", "--control", api))
	if code != 0 || !strings.Contains(stdout, "sandbox: on (") || !strings.Contains(stdout, "capabilities: ") {
		t.Errorf("stats: %d %s %s", code, stdout, stderr)
	}
	if metrics, err := control.Get(context.Background(), api, "/metrics"); err != nil || !bytes.Contains(metrics, []byte("process_open_fds")) {
		t.Errorf("metrics of the process are missing: %v", err)
	}
	p.stop()
}

// TestConfinedNobody: an ordinary user's process, which is not dumpable, serves front-ends and names them.
func TestConfinedNobody(t *testing.T) {
	if os.Geteuid() != 0 {
		testmain.Skip(t, "needs root, to become another user")
	}
	dir, err := os.MkdirTemp("", "vhostd-nobody")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chown(dir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, "s")
	p := startCommand(t, asNobody(t, "serve", "--socket", path, "--network", "echo", "--control", path+".control", "--socket-mode", "0666"))
	p.ready()
	c := connect(t, path)
	echo(t, c, 20)
	wantThreads(t, p, noCapability)
	if peer := status(t, path+".control").Guests[0].Peer; !strings.Contains(peer, "(") {
		t.Errorf("the front-end's name is missing: %q", peer)
	}
	p.stop()
	absent(t, path)
}

// TestSandboxOff: the process keeps its rights and says so.
func TestSandboxOff(t *testing.T) {
	path := socketIn(t)
	p := start(t, "serve", "--socket", path, "--network", "echo", "--control", path+".control", "--sandbox", "off")
	p.ready()
	if s := status(t, path+".control").Sandbox; s.Mode != "off" || s.Landlock != 0 {
		t.Errorf("status: %+v", s)
	}
	p.stop()
	if !strings.Contains(p.stderr.String(), "the sandbox is off") {
		t.Errorf("the log does not say that the sandbox is off:\n%s", p.stderr)
	}
}
