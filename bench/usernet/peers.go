package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/rig"
)

const (
	mtu      = 1500
	patience = 20 * time.Second // for anything that starts
)

// site is one back end with the namespaces that it joins: the host's, where it and servers are, and the guest's.
type site struct {
	host  *rig.Internet
	guest *rig.Namespace
	// procs are all that frames pass through; the first one is the back end in the narrow sense.
	procs []*rig.Process
}

// peer is a back end for a network namespace.
type peer struct {
	name string
	// program must be there; "" stands for one that is built.
	program string
	start   func(*settings, *site) error
}

// natives are the peers of the cell native.
var natives = []peer{
	{reference, "", func(s *settings, t *site) error { return t.startVhostd(s.vhostd, s.flags) }},
	{"old", "", func(s *settings, t *site) error { return t.startVhostd(s.baseline, s.oldFlags) }},
	{"slirp4netns", "slirp4netns", func(_ *settings, t *site) error { return t.startSlirp() }},
	{"passt", "pasta", func(_ *settings, t *site) error { return t.startPasta() }},
	{"gvproxy", "", func(s *settings, t *site) error { return t.startGvproxy(s) }},
}

// open makes namespaces and joins them by the peer. The guest's reaches the host's when it returns.
func (p peer) open(s *settings) (t *site, err error) {
	t = &site{}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%s: %w", p.name, err)
			for _, process := range t.procs {
				err = fmt.Errorf("%w; output of %s:\n%s", err, process.Name, process.Output())
			}
			t.close()
		}
	}()
	if t.host, err = rig.NewInternet(); err != nil {
		return t, err
	}
	if t.guest, err = rig.NewNamespace(); err != nil {
		return t, err
	}
	if err := p.start(s, t); err != nil {
		return t, err
	}
	return t, t.await()
}

// await returns when a connection has come about.
func (t *site) await() error {
	listener, err := t.host.Listen(rig.Live4 + ":0")
	if err != nil {
		return err
	}
	defer listener.Close()
	for end := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		conn, err := t.guest.DialTCP(listener.Addr().String(), time.Second)
		if err == nil {
			return conn.Close()
		}
		if time.Now().After(end) {
			return fmt.Errorf("the guest's namespace reaches nothing: %w", err)
		}
	}
}

func (t *site) close() {
	for i := len(t.procs) - 1; i >= 0; i-- {
		t.procs[i].Kill()
	}
	if t.guest != nil {
		t.guest.Close()
	}
	if t.host != nil {
		t.host.Close()
	}
}

// pids are the processes' numbers.
func (t *site) pids() (list []string) {
	for _, p := range t.procs {
		list = append(list, strconv.Itoa(p.PID()))
	}
	return list
}

// launch starts a part of the back end in a namespace.
func (t *site) launch(ns *rig.Namespace, program string, args ...string) (*rig.Process, error) {
	p, err := rig.Start(ns, program, args...)
	if err == nil {
		t.procs = append(t.procs, p)
	}
	return p, err
}

// path names the guest's namespace.
func (t *site) path() (path string, err error) {
	err = t.guest.Do(func() error {
		path = fmt.Sprintf("/proc/%d/task/%d/ns/net", os.Getpid(), unix.Gettid())
		return nil
	})
	return path, err
}

func (t *site) startVhostd(binary string, flags []string) error {
	socket := filepath.Join(t.host.Folder, "net.sock")
	serve, err := t.serve(binary, socket, flags)
	if err != nil {
		return err
	}
	has := func(text string) func(string) bool {
		return func(out string) bool { return strings.Contains(out, text) }
	}
	if err := serve.WaitOutput("readiness line", patience, has("listening")); err != nil {
		return err
	}
	path, err := t.path()
	if err != nil {
		return err
	}
	attach, err := t.launch(nil, binary, append([]string{"attach", "--socket", socket, "--netns", path, "--dhcp"}, flags...)...)
	if err != nil {
		return err
	}
	return attach.WaitOutput("readiness line", patience, has("attached eth0 in "))
}

// serve runs the back end as an ordinary user, with the network that it has by default.
func (t *site) serve(binary, socket string, flags []string) (*rig.Process, error) {
	const nobody = "65534"
	content, err := os.ReadFile(binary) // it may lie where that user cannot go
	if err != nil {
		return nil, err
	}
	copied := filepath.Join(t.host.Folder, "vhostd-measured")
	if err := os.WriteFile(copied, content, 0o755); err != nil {
		return nil, err
	}
	args := []string{"--reuid=" + nobody, "--regid=" + nobody, "--clear-groups", copied, "serve", "--socket", socket, "--network", "user"}
	return t.launch(t.host.Namespace, "setpriv", append(args, flags...)...)
}

func (t *site) startSlirp() error {
	path, err := t.path()
	if err != nil {
		return err
	}
	_, err = t.launch(t.host.Namespace, "slirp4netns", "--configure", "--mtu="+strconv.Itoa(mtu), "--netns-type=path", path, "eth0")
	return err
}

// passtFlags are common to both forms of passt: no port of the guest is forwarded, addresses are those of the other peers, and the Ethernet
// address is said because the interface has none.
func passtFlags(more ...string) []string {
	return append([]string{"-f", "-q", "--runas", "0", "-4", "-m", strconv.Itoa(mtu), "-i", rig.Interface, "-a", "10.0.2.15", "-n", "24",
		"-M", "9a:55:9a:55:9a:55", "-g", "10.0.2.2", "-t", "none", "-u", "none"}, more...)
}

// startPasta lets pasta make the guest's namespace, because the one of Debian 12 cannot enter one of another's making as root; our thread
// goes there.
func (t *site) startPasta() error {
	flags := passtFlags("-T", "none", "-U", "none", "--config-net", "-I", "eth0", "--", "sleep", "3600")
	pasta, err := t.launch(t.host.Namespace, "pasta", flags...)
	if err != nil {
		return err
	}
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", pasta.PID())) // is not there once it has ended
		for _, child := range strings.Fields(string(text)) {
			if readWord("/proc/"+child+"/comm") == "sleep" {
				return t.guest.Do(func() error { return enter("/proc/" + child + "/ns/net") })
			}
		}
		if time.Now().After(end) || pasta.Ended() {
			return errors.New("pasta has made no namespace")
		}
	}
}

// enter moves this thread into a network namespace.
func enter(path string) error {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open %s: %w", path, err)
	}
	defer unix.Close(fd)
	return os.NewSyscallError("setns", unix.Setns(fd, unix.CLONE_NEWNET))
}

func (t *site) startGvproxy(s *settings) error {
	socket := filepath.Join(t.host.Folder, "gv.sock")
	program := filepath.Join(s.gvproxy, "gvproxy")
	if _, err := t.launch(t.host.Namespace, program, "-listen", "unix://"+socket, "-mtu", strconv.Itoa(mtu)); err != nil {
		return err
	}
	for end := time.Now().Add(patience); ; time.Sleep(20 * time.Millisecond) {
		if _, err := os.Stat(socket); err == nil {
			break
		} else if time.Now().After(end) {
			return err
		}
	}
	if err := t.guest.AddTap("eth0", false); err != nil {
		return err
	}
	if err := t.guest.ConfigureTap("eth0", "192.168.127.2/24", mtu, patience); err != nil {
		return err
	}
	if err := t.guest.Do(func() error { return addDefault("eth0", "192.168.127.1") }); err != nil {
		return err
	}
	_, err := t.launch(t.guest, filepath.Join(s.gvproxy, "vm"), "-url", "unix://"+socket, "-iface", "eth0", "-preexisting",
		"-stop-if-exist", "none", "-mtu", strconv.Itoa(mtu))
	return err
}

func addDefault(name, gateway string) error {
	link, err := netlink.LinkByName(name)
	if err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: net.ParseIP(gateway)})
}

// present says whether a peer can be measured, and notes why not.
func (p peer) present(s *settings, r *report) bool {
	switch {
	case p.name == "old" && s.baseline == "":
		return false
	case p.name == "gvproxy":
		if err := buildGvproxy(s); err != nil {
			r.note("gvproxy is left out: %v", err)
			return false
		}
	case p.program != "":
		if _, err := exec.LookPath(p.program); err != nil {
			r.note("%s is left out: %v (Debian packages slirp4netns, passt)", p.name, err)
			return false
		}
	}
	return true
}

// gvproxyVersion is that of github.com/containers/gvisor-tap-vsock.
const gvproxyVersion = "v0.8.9"

var gvproxyOnce sync.Once

// buildGvproxy builds what -gvproxy does not name.
func buildGvproxy(s *settings) (err error) {
	gvproxyOnce.Do(func() {
		if s.gvproxy != "" {
			return
		}
		s.gvproxy = filepath.Join(os.Getenv("TMPDIR"), "gvproxy")
		const module = "github.com/containers/gvisor-tap-vsock/cmd/"
		build := exec.Command("go", "install", module+"gvproxy@"+gvproxyVersion, module+"vm@"+gvproxyVersion)
		build.Env = append(os.Environ(), "GOBIN="+s.gvproxy, "CGO_ENABLED=0", "GOFLAGS=")
		if text, failure := build.CombinedOutput(); failure != nil {
			err = fmt.Errorf("%w: %s", failure, text)
		}
	})
	if err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(s.gvproxy, "gvproxy")); err != nil {
		return errors.New("it could not be built")
	}
	return nil
}
