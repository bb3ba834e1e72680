package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/vhostd/vhostd/internal/control"
	"github.com/vhostd/vhostd/internal/daemon"
	"github.com/vhostd/vhostd/port/user"
)

// served is a daemon with a configuration file and a guest vm1 on a user network.
type served struct {
	*process
	t                  *testing.T
	dir, file, control string
}

const patient = 20 * time.Second

func serveFile(t *testing.T, text string) *served {
	t.Helper()
	dir := t.TempDir()
	s := &served{t: t, dir: dir, file: filepath.Join(dir, "etc", "vhostd.yaml"), control: filepath.Join(dir, "c")}
	if err := os.Mkdir(filepath.Dir(s.file), 0o755); err != nil {
		t.Fatal(err)
	}
	s.write(text)
	s.process = start(t, "serve", "--config", s.file, "--control", s.control)
	s.ready()
	return s
}

// write replaces the file as editors do. DIR stands for the test's directory.
func (s *served) write(text string) {
	s.t.Helper()
	next := s.file + ".new"
	if err := os.WriteFile(next, []byte(strings.ReplaceAll(text, "DIR", s.dir)), 0o600); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Rename(next, s.file); err != nil {
		s.t.Fatal(err)
	}
}

// reload runs vhostd reload.
func (s *served) reload(text string) (code int, report daemon.Reload, stderr string) {
	s.t.Helper()
	s.write(text)
	code, stdout, stderr := run(s.t, "reload", "--control", s.control, "--json")
	if stdout != "" {
		if err := json.Unmarshal([]byte(stdout), &report); err != nil {
			s.t.Fatalf("%v in %s", err, stdout)
		}
	}
	return code, report, stderr
}

func (s *served) ask(method, path, body string) (string, error) {
	got, err := control.Do(s.t.Context(), s.control, method, path, []byte(body))
	return string(got), err
}

// until waits for a condition.
func (s *served) until(what string, holds func() bool) {
	s.t.Helper()
	for end := time.Now().Add(patient); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			s.t.Fatalf("never: %s; stderr:\n%s", what, s.stderr)
		}
	}
}

// view runs vhostd stats VIEW --json and returns what it says of the only network.
func (s *served) view(into any, args ...string) {
	s.t.Helper()
	code, stdout, stderr := run(s.t, append([]string{"stats", "--control", s.control, "--json"}, args...)...)
	var all struct{ Networks []networkView }
	if err := json.Unmarshal([]byte(stdout), &all); err != nil || code != 0 || len(all.Networks) != 1 {
		s.t.Fatalf("%d %v %s %s", code, err, stdout, stderr)
	}
	if err := json.Unmarshal(all.Networks[0].View, into); err != nil {
		s.t.Fatal(err)
	}
}

// echoOnHost is an echo server on the host's loopback; it returns its port.
func echoOnHost(t *testing.T) uint16 {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			go func() {
				_, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
				c.Close()
			}()
		}
	}()
	return netip.MustParseAddrPort(l.Addr().String()).Port()
}

// dialHost connects a guest to a port of the host's loopback, through the gateway.
func dialHost(t *testing.T, s *stack.Stack, port uint16) net.Conn {
	t.Helper()
	c, err := gonet.DialTCP(s, tcpip.FullAddress{Addr: tcpip.AddrFrom4([4]byte{10, 0, 2, 2}), Port: port}, header.IPv4ProtocolNumber)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// returnsByte says whether the connection still echoes.
func returnsByte(c net.Conn) error {
	_ = c.SetDeadline(time.Now().Add(patient))
	if _, err := c.Write([]byte{7}); err != nil {
		return err
	}
	_, err := io.ReadFull(c, make([]byte, 1))
	return err
}

const oneGuest = "guests:\n  - {name: vm1, socket: DIR/vm1, queue-pairs: 1, network: 'user,dns=127.0.0.1:9,host-loopback=on%s'}\n"

// TestReloadUnderTraffic: what a file says differently is applied under a guest's connections; only what it denies ends, and a wrong file
// changes nothing.
func TestReloadUnderTraffic(t *testing.T) {
	s := serveFile(t, fmt.Sprintf(oneGuest, ""))
	guest := machine(t, connect(t, s.dir+"/vm1"))
	denied, kept := echoOnHost(t), echoOnHost(t)
	ending, staying := dialHost(t, guest, denied), dialHost(t, guest, kept)
	for _, c := range []net.Conn{ending, staying} {
		if err := returnsByte(c); err != nil {
			t.Fatalf("%v\n%s", err, s.stderr)
		}
	}
	stays := func(when string) {
		t.Helper()
		if err := returnsByte(staying); err != nil {
			t.Fatalf("%s the connection is gone: %v\n%s", when, err, s.stderr)
		}
	}

	changed := fmt.Sprintf(oneGuest, fmt.Sprintf(
		",deny=10.0.2.2:%d,publish=unix:DIR/web:80,rate-in=1Gbit,max-flows=50,host=a.example:192.0.2.1", denied))
	code, report, stderr := s.reload(changed)
	want := []string{"network:deny", "network:host", "network:max-flows", "network:publish", "network:rate-in"}
	if code != 0 || stderr != "" || len(report.Changed) != 1 || !slices.Equal(report.Changed[0].Keys, want) || report.EndedFlows != 1 ||
		!report.Complete() {
		t.Errorf("%d %+v %q", code, report, stderr)
	}
	stays("after new rules")
	_ = ending.SetDeadline(time.Now().Add(patient))
	if _, err := ending.Read(make([]byte, 1)); err == nil || strings.Contains(err.Error(), "timeout") {
		t.Errorf("the connection that is denied goes on: %v", err)
	}
	if _, err := os.Lstat(s.dir + "/web"); err != nil {
		t.Errorf("not published: %v", err)
	}
	var rules user.PolicyView
	if s.view(&rules, "policy"); len(rules.Rules) != 1 || rules.Rules[0].Ended != 1 {
		t.Errorf("policy: %+v", rules)
	}
	if code, report, _ := s.reload(changed); code != 0 || !report.Idle() {
		t.Errorf("the same file again: %d %+v", code, report)
	}

	code, _, stderr = s.reload(strings.Replace(fmt.Sprintf(oneGuest, ",deny=x:y"), "vm1,", "vm2,", 1))
	wantError(t, exitFailure, "nothing is changed: "+s.file+":2:", code, "", stderr)
	s.signal(syscall.SIGHUP)
	s.until("SIGHUP tells of the wrong file", func() bool {
		return strings.Count(s.stderr.String(), "configuration was not reloaded") == 2
	})
	stays("after wrong files")

	code, report, stderr = s.reload("wake: poll\nguests:\n" +
		"  - {name: vm1, socket: DIR/vm1, queue-pairs: 2, network: 'user,dns=127.0.0.1:9,host-loopback=on,subnet=10.9.0.0/24'}\n" +
		"  - {name: vm2, socket: DIR/vm2, network: echo}\n")
	wantError(t, exitFailure, "not all of the configuration is in force", code, "", stderr)
	if !strings.Contains(s.stderr.String(), "needs=\"the guest to be removed and added\"") {
		t.Errorf("the log does not say what is needed:\n%s", s.stderr)
	}
	if code, stdout, _ := run(t, "reload", "--control", s.control); code != exitFailure ||
		stdout != "pending vm1: queue-pairs, network:subnet: needs the guest to be removed and added\npending: wake: needs the daemon to be started again\n" {
		t.Errorf("again: %d %q", code, stdout)
	}
	want = []string{"queue-pairs", "network:subnet"}
	if len(report.Pending) != 1 || !slices.Equal(report.Pending[0].Keys, want) || !slices.Equal(report.Added, []string{"vm2"}) ||
		!slices.Equal(report.Process, []string{"wake"}) || len(report.Changed) != 1 {
		t.Errorf("%+v", report)
	}
	stays("after what cannot change")
	absent(t, s.dir+"/web")
	echo(t, connect(t, s.dir+"/vm2"), 2)

	s.write(fmt.Sprintf(oneGuest, ""))
	s.signal(syscall.SIGHUP)
	s.until("SIGHUP removes the guest", func() bool {
		_, err := os.Lstat(s.dir + "/vm2")
		return err != nil
	})
	stays("after a signal")
	again := dialHost(t, guest, denied)
	if err := returnsByte(again); err != nil {
		t.Errorf("what is allowed again: %v", err)
	}
	s.stop()
}

// TestViewsOfARunningDaemon: flows and publications as people and programs see them.
func TestViewsOfARunningDaemon(t *testing.T) {
	s := serveFile(t, fmt.Sprintf(oneGuest, ""))
	guest := machine(t, connect(t, s.dir+"/vm1"))
	port := echoOnHost(t)
	c := dialHost(t, guest, port)
	if err := returnsByte(c); err != nil {
		t.Fatal(err)
	}
	var flows user.FlowList
	s.until("the bytes are counted that the guest has already", func() bool {
		flows = user.FlowList{}
		s.view(&flows, "flows", "vm1", "--proto", "tcp")
		return len(flows.Flows) == 1 && flows.Flows[0].ToGuest == 1
	})
	if len(flows.Flows) != 1 || flows.Total != 1 {
		t.Fatalf("flows: %+v", flows)
	}
	f := flows.Flows[0]
	remote := netip.AddrPortFrom(netip.MustParseAddr("10.0.2.2"), port)
	if f.Remote != remote || f.FromGuest != 1 || f.ToGuest != 1 || f.PacketsFrom == 0 || f.State != "open" {
		t.Errorf("flow: %+v", f)
	}
	code, stdout, _ := run(t, "stats", "--control", s.control, "flows")
	if code != 0 || !strings.HasPrefix(stdout, "guest vm1\nPROTO") || !strings.Contains(stdout, fmt.Sprintf("->   10.0.2.2:%d", port)) {
		t.Errorf("%d\n%s", code, stdout)
	}
	web := fmt.Sprintf(`{"publish":"unix:%s/web:80"}`, s.dir)
	const path = "/v1/guests/vm1/publish"
	if _, err := s.ask(http.MethodPost, path, web); err != nil {
		t.Error(err)
	}
	for body, want := range map[string]string{web: "it is published already", `{"publish":"unix:/etc/vhostd-web:80"}`: "the sandbox does not allow it"} {
		if _, err := s.ask(http.MethodPost, path, body); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", body, err, want)
		}
	}
	var published user.PublishView
	if s.view(&published, "publish"); len(published.Published) != 1 || published.Published[0].Guest != "10.0.2.15:80" {
		t.Errorf("published: %+v", published)
	}
	if _, err := os.Lstat(s.dir + "/web"); err != nil {
		t.Error(err)
	}
	if _, err := s.ask(http.MethodDelete, path, web); err != nil {
		t.Error(err)
	}
	absent(t, s.dir+"/web")
	for _, view := range []string{"leases", "dns", "policy"} {
		if code, stdout, stderr := run(t, "stats", "--control", s.control, view); code != 0 || !strings.HasPrefix(stdout, "guest vm1\n") {
			t.Errorf("%s: %d\n%s%s", view, code, stdout, stderr)
		}
	}
	code, stdout, stderr := run(t, "stats", "--control", s.control, "flows", "vm7")
	wantError(t, exitFailure, "guest vm7: does not exist", code, stdout, stderr)
	s.stop()
}

// TestReloadWithoutFile: a daemon of flags says that it has none.
func TestReloadWithoutFile(t *testing.T) {
	path := socketIn(t)
	p := start(t, "serve", "--socket", path, "--network", "null", "--control", path+".c")
	p.ready()
	code, stdout, stderr := run(t, "reload", "--control", path+".c")
	wantError(t, exitFailure, "it was started without --config", code, stdout, stderr)
	p.stop()
}
