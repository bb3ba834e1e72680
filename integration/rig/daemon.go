package rig

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// stopTimeout is what a clean stop may take, rings drained and taps removed.
const stopTimeout = 5 * time.Second

// Binary returns the vhostd to test: VHOSTD_BINARY, or one built once from this module. With VHOSTD_RACE=1 it is the race build.
var Binary = sync.OnceValues(func() (string, error) {
	if path := os.Getenv("VHOSTD_BINARY"); path != "" {
		return filepath.Abs(path)
	}
	folder, err := CacheFolder()
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(folder, 0o755); err != nil {
		return "", err
	}
	race := os.Getenv("VHOSTD_RACE") == "1"
	path := filepath.Join(folder, "vhostd-under-test")
	if race {
		path = filepath.Join(folder, "vhostd-race")
	}
	return path, buildVhostd(path, race)
})

// Build puts a vhostd into folder that is built from this module, with the race detector or without it.
func Build(folder string, race bool) (path string, err error) {
	cache, err := CacheFolder()
	if err != nil {
		return "", err
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return "", err
	}
	// Go does not link a program again that is up to date, so that the test packages share it. One builds at a time, and each has its own
	// name for what it has built: others may put another one in its place.
	lock, err := os.OpenFile(filepath.Join(cache, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return "", err
	}
	name := fmt.Sprint("vhostd-race-", race)
	built := filepath.Join(cache, name)
	if err := buildVhostd(built, race); err != nil {
		return "", err
	}
	path = filepath.Join(folder, name)
	if os.Link(built, path) == nil {
		return path, nil
	}
	content, err := os.ReadFile(built) // folder is in another file system
	if err == nil {
		err = os.WriteFile(path, content, 0o755)
	}
	return path, err
}

func buildVhostd(path string, race bool) error {
	const pkg = "github.com/vhostd/vhostd/cmd/vhostd"
	if race {
		return goBuild(path, pkg, "CGO_ENABLED=1", "GOFLAGS=-race")
	}
	return goBuild(path, pkg, "CGO_ENABLED=0")
}

// Daemon is a running vhostd with one guest of the command line.
type Daemon struct {
	*Process
	Socket  string
	Control string
	http    http.Client
}

// StartDaemon runs `vhostd serve` in the namespace and returns when it says that it is listening. folder holds its sockets,
// so the same folder gives the same socket again. With --client among the flags it returns at once.
func StartDaemon(ns *Namespace, folder, network string, flags ...string) (*Daemon, error) {
	binary, err := Binary()
	if err != nil {
		return nil, err
	}
	return startDaemon(ns, binary, folder, network, flags, syscall.SysProcAttr{})
}

// DialDaemon is a vhostd that another process has started, by its control socket. Everything but the questions to it is about that process.
func DialDaemon(process *Process, control string) *Daemon {
	d := &Daemon{Process: process, Control: control}
	d.dialControl()
	return d
}

func (d *Daemon) dialControl() {
	d.http.Transport = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", d.Control)
	}}
}

func startDaemon(ns *Namespace, binary, folder, network string, flags []string, attr syscall.SysProcAttr) (*Daemon, error) {
	d := &Daemon{Socket: filepath.Join(folder, "net.sock"), Control: filepath.Join(folder, "control.sock")}
	args := append([]string{"serve", "--socket", d.Socket, "--network", network, "--control", d.Control}, flags...)
	var err error
	if d.Process, err = start(ns, binary, exec.Command(binary, args...), attr); err != nil {
		return nil, err
	}
	d.dialControl()
	err = d.WaitOutput("readiness line", 10*time.Second, func(output string) bool {
		return strings.Contains(output, "listening") || strings.Contains(strings.Join(flags, " "), "--client")
	})
	if err != nil {
		d.Kill()
		return nil, err
	}
	return d, nil
}

// Stop ends the daemon as a service manager would. It must exit with status 0 and remove its sockets.
func (d *Daemon) Stop() error {
	d.http.CloseIdleConnections()
	if err := d.Process.Stop(stopTimeout); err != nil {
		return fmt.Errorf("vhostd: %w; output:\n%s", err, d.Output())
	}
	for _, path := range []string{d.Socket, d.Control} {
		if _, err := os.Stat(path); err == nil && !strings.Contains(strings.Join(d.cmd.Args, " "), "--client") {
			return fmt.Errorf("vhostd left %s behind", path)
		}
	}
	return nil
}

// Ring is one ring's counters as the control API gives them.
type Ring struct {
	Index   int               `json:"index"`
	Control bool              `json:"control"` // the control queue, whose packets are commands
	Packets uint64            `json:"packets"`
	Bytes   uint64            `json:"bytes"`
	Drops   map[string]uint64 `json:"drops"`
}

// GuestStats is one guest's counters.
type GuestStats struct {
	Name      string `json:"name"`
	Connected bool   `json:"connected"`
	Rings     []Ring `json:"rings"`
}

// Drops are the frames lost on all rings, by reason.
func (g GuestStats) Drops() map[string]uint64 {
	drops := map[string]uint64{}
	for _, ring := range g.Rings {
		for reason, n := range ring.Drops {
			drops[reason] += n
		}
	}
	return drops
}

// Sum adds up the packets and drops of the rings with the given parity: 0 receiveqs, 1 transmitqs. What the network null discards
// is no drop here, it is what that network is for.
func (g GuestStats) Sum(parity int) (packets, dropped uint64) {
	for _, ring := range g.Rings {
		if ring.Control || ring.Index%2 != parity {
			continue
		}
		packets += ring.Packets
		for reason, n := range ring.Drops {
			if reason != "port_discarded" {
				dropped += n
			}
		}
	}
	return packets, dropped
}

// Stats asks the control API for the counters of the only guest.
func (d *Daemon) Stats() (GuestStats, error) { return onlyGuest[GuestStats](d, "/v1/stats") }

// GuestMemory is how the daemon sees the memory of its only guest.
type GuestMemory struct {
	Regions          int      `json:"memory-regions"`
	ProtocolFeatures []string `json:"protocol-features"`
}

// Memory asks the control API for it.
func (d *Daemon) Memory() (GuestMemory, error) { return onlyGuest[GuestMemory](d, "/v1/status") }

// Features asks the control API for what the only guest's front-end has acknowledged.
func (d *Daemon) Features() ([]string, error) {
	type guest struct {
		Features []string `json:"features"`
	}
	g, err := onlyGuest[guest](d, "/v1/status")
	return g.Features, err
}

// onlyGuest is what the control API says of the only guest at a path.
func onlyGuest[T any](d *Daemon, path string) (guest T, err error) {
	var body struct {
		Guests []T `json:"guests"`
	}
	if err := d.get(path, &body); err != nil {
		return guest, err
	}
	if len(body.Guests) != 1 {
		return guest, fmt.Errorf("%d guests in %s, expected one", len(body.Guests), path)
	}
	return body.Guests[0], nil
}

func (d *Daemon) get(path string, result any) error {
	answer, err := d.http.Get("http://vhostd" + path)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return fmt.Errorf("GET %s: %s", path, answer.Status)
	}
	return json.NewDecoder(answer.Body).Decode(result)
}

// WaitConnected waits until the daemon has a front-end, or has none any more.
func (d *Daemon) WaitConnected(want bool, timeout time.Duration) error {
	for end := time.Now().Add(timeout); ; time.Sleep(20 * time.Millisecond) {
		stats, err := d.Stats()
		if err == nil && stats.Connected == want {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("vhostd: connected is not %v after %v (%v); output:\n%s", want, timeout, err, lastLines(d.Output(), 20))
		}
	}
}
