package integration

import (
	"fmt"
	"net"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
)

// lan is a daemon with guests on one switch.
type lan struct {
	t      *testing.T
	folder string
	image  rig.Image
	daemon *rig.Daemon
	guests []*lanGuest
}

// lanGuest is a guest on a switch. Its number decides about its addresses, which a guest that is booted anew keeps.
type lanGuest struct {
	*rig.VM
	name   string // in the daemon
	number int
	cfg    rig.VMConfig
}

func (g *lanGuest) ip() string  { return fmt.Sprintf("10.88.0.%d", g.number) }
func (g *lanGuest) ip6() string { return fmt.Sprintf("fd88::%d", g.number) }

func macOf(number int) string { return fmt.Sprintf("52:54:00:88:00:%02x", number) }

// newLAN starts a daemon in the namespace (nil: the test's) and boots a guest for each configuration, all at the same time.
// params are the parameters of each guest's port, which the first one opens.
func newLAN(t *testing.T, ns *rig.Namespace, params []string, configs []rig.VMConfig) *lan {
	t.Helper()
	image, err := shared.image()
	if err != nil {
		testmain.Skip(t, "%v", err)
	}
	folder, err := os.MkdirTemp(shared.folder, "lan")
	if err != nil {
		t.Fatal(err)
	}
	l := &lan{t: t, folder: folder, image: image}
	if l.daemon, err = rig.StartDaemon(ns, folder, "switch,name=lan"+params[0]); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		l.daemon.Kill()
		if t.Failed() {
			t.Logf("output of vhostd:\n%s", l.daemon.Output())
		}
	})
	for i, cfg := range configs {
		cfg.Socket = l.daemon.Socket
		if i > 0 {
			cfg.Socket = l.addPort(fmt.Sprint("vm", i), params[i])
		}
		l.guests = append(l.guests, &lanGuest{name: fmt.Sprint("vm", i), number: i + 1, cfg: cfg})
	}
	start := time.Now()
	inParallel(t, l.guests, l.boot)
	t.Logf("%d guests booted in %.1f s", len(configs), time.Since(start).Seconds())
	return l
}

// addPort adds a guest to the daemon.
func (l *lan) addPort(name, params string) (socket string) {
	l.t.Helper()
	socket, err := l.daemon.AddGuest(name, "switch,name=lan"+params, 2)
	if err != nil {
		l.t.Fatal(err)
	}
	return socket
}

// boot starts a guest's machine, also after its end, and gives it its addresses.
func (l *lan) boot(g *lanGuest) (err error) {
	g.cfg.MAC, g.cfg.MemoryMiB = macOf(g.number), 256
	if g.VM, err = rig.StartVM(l.folder, l.image, g.cfg); err != nil {
		return err
	}
	vm := g.VM
	l.t.Cleanup(func() {
		vm.Close()
		if l.t.Failed() {
			l.t.Logf("console of %s:\n%s", g.name, vm.Output())
		}
	})
	if _, err = g.Boot(); err == nil {
		_, err = g.SetUp(g.ip() + "/24")
	}
	return err
}

// inParallel runs f for each guest at the same time.
func inParallel(t *testing.T, guests []*lanGuest, f func(*lanGuest) error) {
	t.Helper()
	var wait sync.WaitGroup
	for _, g := range guests {
		wait.Go(func() {
			if err := f(g); err != nil {
				t.Errorf("%s: %v", g.name, err)
			}
		})
	}
	wait.Wait()
	if t.Failed() {
		t.FailNow()
	}
}

// call runs a command of the guest.
func (g *lanGuest) call(t *testing.T, command string, args, result any) {
	t.Helper()
	if err := g.Agent.Call(command, args, result, slow); err != nil {
		t.Fatalf("%s: %v", g.name, err)
	}
}

// ping sends requests to an address and returns an error unless all are answered.
func (g *lanGuest) ping(ip string, size, count int) error {
	const each = 3 * time.Second
	var result guest.PingResult
	args := guest.PingArgs{Dst: ip, Size: size, Count: count, Timeout: each}
	if err := g.Agent.Call(guest.CommandPing, args, &result, time.Duration(count)*each+slow); err != nil {
		return err
	}
	if result.Received != count || result.Corrupt != 0 {
		return fmt.Errorf("ping %s with %d bytes: %+v", ip, size, result)
	}
	return nil
}

// allPing has every guest ping all others.
func allPing(t *testing.T, guests []*lanGuest) {
	t.Helper()
	inParallel(t, guests, func(g *lanGuest) error {
		for _, other := range guests {
			for _, size := range []int{56, 1472, 4000} {
				if other == g {
					continue
				}
				if err := g.ping(other.ip(), size, 2); err != nil {
					return err
				}
			}
		}
		return nil
	})
}

// transfer moves n bytes between two guests, wants them intact, and returns the rate in Mbit/s.
func transfer(t *testing.T, from, to *lanGuest, ip string, n int64) (rate float64) {
	t.Helper()
	sent, received, err := rig.Transfer(from.VM, to.VM, net.JoinHostPort(ip, "5000"), n, slow)
	if err != nil {
		t.Fatalf("TCP from %s to %s: %v", from.name, to.name, err)
	}
	if sent.Bytes != n || received.Bytes != n || sent.SHA256 != received.SHA256 {
		t.Fatalf("TCP from %s to %s: sent %+v, received %+v", from.name, to.name, sent, received)
	}
	rate = guest.Rate(n, received.Took)
	t.Logf("TCP from %s to %s: %d MiB, %.0f Mbit/s, digests equal", from.name, to.name, n/mebibyte, rate)
	return rate
}

// frameSize is the mean length of the frames that the guest received while f ran, as its own driver counted them.
func (g *lanGuest) frameSize(t *testing.T, f func()) float64 {
	t.Helper()
	count := func() (packets, bytes uint64) {
		link, err := g.Link(guest.LinkArgs{Name: "eth0"})
		if err != nil {
			t.Fatal(err)
		}
		return link.Counters["rx_packets"], link.Counters["rx_bytes"]
	}
	packets, bytes := count()
	f()
	packetsAfter, bytesAfter := count()
	return float64(bytesAfter-bytes) / float64(max(packetsAfter-packets, 1))
}

// lost is how many frames the daemon dropped for the reason on the rings of one guest.
func (l *lan) lost(t *testing.T, g *lanGuest, reason string) (n uint64) {
	t.Helper()
	stats, err := l.daemon.GuestStats(g.name)
	if err != nil {
		t.Fatal(err)
	}
	for _, ring := range stats.Rings {
		n += ring.Drops[reason]
	}
	return n
}

// close ends the guests and the daemon in order.
func (l *lan) close(t *testing.T) {
	t.Helper()
	for _, g := range l.guests {
		if err := g.Quit(); err != nil {
			t.Errorf("QEMU of %s: %v", g.name, err)
		}
	}
	if err := l.daemon.Stop(); err != nil {
		t.Error(err)
	}
}
