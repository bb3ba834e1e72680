package integration

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
)

const (
	testpmdPages = 288 // 512 MiB and some
	testpmdRing  = 256 // queue_size of package rig's testpmd
	burst        = 32  // packets of a testpmd burst
)

// dpdkCell is one arrangement of front-end and traffic.
type dpdkCell struct{ size, mergeable, queues, packed, inOrder, vectorized int }

func (c dpdkCell) String() string {
	return fmt.Sprintf("%d bytes, %d queues, %s", c.size, c.queues, c.device())
}

// device are the properties of the virtio-user port.
func (c dpdkCell) device() string {
	return fmt.Sprintf("mrg_rxbuf=%d,packed_vq=%d,in_order=%d,vectorized=%d", c.mergeable, c.packed, c.inOrder, c.vectorized)
}

// features are the names of those that the daemon must have seen acknowledged, and of those that it must not.
func (c dpdkCell) features() (want, unwanted []string) {
	for name, on := range map[string]int{"MRG_RXBUF": c.mergeable, "RING_PACKED": c.packed, "IN_ORDER": c.inOrder} {
		if on == 1 {
			want = append(want, name)
		} else {
			unwanted = append(unwanted, name)
		}
	}
	return want, unwanted
}

// dpdkCells are all arrangements, or eight in which every two properties meet in every way (the orthogonal array L8).
func dpdkCells() (cells []dpdkCell) {
	sizes := [...]int{64, 1500}
	if os.Getenv("VHOSTD_LONG") != "1" {
		for i := range 8 {
			a, b, c := i&1, i>>1&1, i>>2
			cells = append(cells, dpdkCell{sizes[a], b, 1 + c, a ^ b, a ^ c, b ^ c})
		}
		return cells
	}
	for i := range 64 {
		cells = append(cells, dpdkCell{sizes[i&1], i >> 1 & 1, 1 + i>>5, i >> 2 & 1, i >> 3 & 1, i >> 4 & 1})
	}
	return cells
}

// TestDPDKTransmit lets testpmd send to the network that discards: every packet counted sent was received (tx).
func TestDPDKTransmit(t *testing.T) {
	runDPDK(t, "txonly", func(int) string { return "null" }, func(t *testing.T, pmd *rig.Testpmd, daemon *rig.Daemon, before rig.GuestStats, _ dpdkCell) {
		forward(t, pmd, "start", 500*time.Millisecond)
		front := readPort(t, pmd)
		back := settle(t, daemon, func(now rig.GuestStats) bool { return since(now, before, 1).packets == front.Sent })
		got := since(back, before, 1)
		if got.packets != front.Sent || got.dropped != 0 || front.Sent < 1000 {
			t.Errorf("testpmd sent %d, vhostd received %d and dropped %d", front.Sent, got.packets, got.dropped)
		}
		t.Logf("%d packets", front.Sent)
	})
}

// TestDPDKReceive lets testpmd receive from the generating network. Before and after, the rings are full of what it has not taken,
// so the counts differ by a ring at most. (What lay in rings that testpmd sets up again while it starts is not counted.)
func TestDPDKReceive(t *testing.T) {
	network := func(size int) string { return fmt.Sprintf("source,size=%d", size) }
	runDPDK(t, "rxonly", network, func(t *testing.T, pmd *rig.Testpmd, daemon *rig.Daemon, _ rig.GuestStats, cell dpdkCell) {
		before := settle(t, daemon, nil)
		forward(t, pmd, "start", 500*time.Millisecond)
		front := readPort(t, pmd)
		got := since(settle(t, daemon, nil), before, 0)
		difference, limit := int64(got.packets)-int64(front.Received), int64(cell.queues*testpmdRing)
		if difference < -limit || difference > limit || front.Received < 1000 || front.Errors != 0 {
			t.Errorf("vhostd delivered %d, testpmd received %d with %d errors; %d can wait in the rings", got.packets, front.Received, front.Errors, limit)
		}
		t.Logf("%d packets", front.Received)
	})
}

// TestDPDKEcho lets packets circulate between testpmd and the echo network: none gets lost.
func TestDPDKEcho(t *testing.T) {
	runDPDK(t, "io", func(int) string { return "echo" }, func(t *testing.T, pmd *rig.Testpmd, daemon *rig.Daemon, before rig.GuestStats, cell dpdkCell) {
		const bursts = 4
		forward(t, pmd, fmt.Sprintf("start tx_first %d", bursts), 500*time.Millisecond)
		front := readPort(t, pmd)
		back := settle(t, daemon, func(now rig.GuestStats) bool { return since(now, before, 0).packets == front.Sent })
		tx, rx := since(back, before, 1), since(back, before, 0)
		circulating := uint64(bursts * burst * cell.queues)
		if tx.packets != front.Sent || rx.packets != front.Sent || tx.dropped+rx.dropped != 0 || front.Sent < 1000 {
			t.Errorf("testpmd sent %d; vhostd received %d, returned %d, dropped %d", front.Sent, tx.packets, rx.packets, tx.dropped+rx.dropped)
		}
		if front.Received > front.Sent || front.Sent-front.Received > circulating {
			t.Errorf("testpmd sent %d and received %d; only %d packets circulate", front.Sent, front.Received, circulating)
		}
		t.Logf("%d packets", front.Sent)
	})
}

// TestDPDKReconnect is RCN-01 and RCN-03 with virtio-user as the server: it goes on while the daemon is killed and started again.
// virtio-user begins packed rings anew each time, and its daemon must not go on where the one before was.
func TestDPDKReconnect(t *testing.T) {
	pages := reservePages(t)
	for name, c := range map[string]struct{ network, forward, device string }{
		"split transmit":           {"null", "txonly", "server=1"},
		"packed transmit":          {"null", "txonly", "server=1,packed_vq=1"},
		"packed in order transmit": {"null", "txonly", "server=1,packed_vq=1,in_order=1"},
		"packed receive":           {"source", "rxonly", "server=1,packed_vq=1"},
		"split receive":            {"source", "rxonly", "server=1"},
	} {
		t.Run(name, func(t *testing.T) { reconnectDPDK(t, pages, c.network, c.forward, c.device) })
	}
}

func reconnectDPDK(t *testing.T, pages *rig.Hugepages, network, forward, device string) {
	folder, state := t.TempDir(), t.TempDir()
	parity := 1
	if forward == "rxonly" {
		parity = 0
	}
	start := func() *rig.Daemon {
		daemon, err := rig.StartDaemon(nil, folder, network, "--client", "--state-dir", state)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(daemon.Kill)
		return daemon
	}
	daemon := start()
	pmd := startTestpmd(t, pages, rig.TestpmdConfig{Socket: daemon.Socket, Forward: forward, Device: device, Name: "reconnect"})
	if _, err := pmd.Command("start"); err != nil {
		t.Fatal(err)
	}
	for range rounds(4, 50) {
		awaitPackets(t, daemon, parity, 1000)
		daemon.Kill()
		daemon = start()
	}
	awaitPackets(t, daemon, parity, 1000)
	if err := pmd.Quit(); err != nil {
		t.Errorf("%v; testpmd:\n%s", err, pmd.Output())
	}
	daemon.Kill()
	if err := pages.Clear(); err != nil {
		t.Error(err)
	}
}

// runDPDK runs check for every cell, with a testpmd of its own and one daemon for all, and wants the hugepages back after each (MEM-09).
func runDPDK(t *testing.T, mode string, network func(size int) string, check func(*testing.T, *rig.Testpmd, *rig.Daemon, rig.GuestStats, dpdkCell)) {
	pages := reservePages(t)
	daemons := map[string]*rig.Daemon{}
	for i, cell := range dpdkCells() {
		t.Run(cell.String(), func(t *testing.T) {
			daemon := daemons[network(cell.size)]
			if daemon == nil {
				daemon = startPlain(t, network(cell.size))
				daemons[network(cell.size)] = daemon
			}
			free, err := pages.Free()
			if err != nil {
				t.Fatal(err)
			}
			before, err := daemon.Stats()
			if err != nil {
				t.Fatal(err)
			}
			pmd := startTestpmd(t, pages, rig.TestpmdConfig{
				Socket: daemon.Socket, Queues: cell.queues, Forward: mode, Size: cell.size,
				Device: cell.device(), Name: fmt.Sprintf("%s%d", mode, i),
			})
			acknowledged(t, daemon, cell)
			check(t, pmd, daemon, before, cell)
			if err := pmd.Quit(); err != nil {
				t.Error(err)
			}
			if err := pages.Clear(); err != nil {
				t.Error(err)
			}
			if err := pages.WaitFree(free, 2*time.Second); err != nil {
				t.Error(err)
			}
			if t.Failed() {
				t.Logf("testpmd:\n%s\nvhostd:\n%s", pmd.Output(), daemon.Output())
			}
		})
	}
	for _, daemon := range daemons {
		if err := daemon.Stop(); err != nil {
			t.Error(err)
		}
	}
}

// acknowledged demands that testpmd and the daemon have agreed on what the cell is about.
func acknowledged(t *testing.T, daemon *rig.Daemon, cell dpdkCell) {
	t.Helper()
	got, err := daemon.Features()
	if err != nil {
		t.Fatal(err)
	}
	want, unwanted := cell.features()
	for _, name := range want {
		if !slices.Contains(got, name) {
			t.Errorf("%s is not among the acknowledged features %v", name, got)
		}
	}
	for _, name := range unwanted {
		if slices.Contains(got, name) {
			t.Errorf("%s is among the acknowledged features %v", name, got)
		}
	}
}

// startPlain starts a daemon with a network that needs no namespace.
func startPlain(t *testing.T, network string) *rig.Daemon {
	t.Helper()
	folder, err := os.MkdirTemp(shared.folder, "plain")
	if err != nil {
		t.Fatal(err)
	}
	daemon, err := rig.StartDaemon(nil, folder, network)
	if err != nil {
		t.Fatal(err)
	}
	return daemon
}

func startTestpmd(t *testing.T, pages *rig.Hugepages, cfg rig.TestpmdConfig) *rig.Testpmd {
	t.Helper()
	pmd, err := rig.StartTestpmd(pages, cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pmd.Kill)
	return pmd
}

func reservePages(t *testing.T) *rig.Hugepages {
	t.Helper()
	testmain.NeedRoot(t)
	if _, err := exec.LookPath("dpdk-testpmd"); err != nil {
		testmain.Skip(t, "%v: %v", err, rig.ErrNotSetUp)
	}
	folder, err := os.MkdirTemp(shared.folder, "huge")
	if err != nil {
		t.Fatal(err)
	}
	pages, err := rig.ReserveHugepages(folder, testpmdPages)
	if err != nil {
		testmain.Skip(t, "%v", err)
	}
	t.Cleanup(func() {
		if err := pages.Clear(); err != nil {
			t.Error(err)
		}
		if err := pages.Close(); err != nil {
			t.Error(err)
		}
	})
	return pages
}

// forward starts testpmd's forwarding, lets it run and stops it.
func forward(t *testing.T, pmd *rig.Testpmd, start string, d time.Duration) {
	t.Helper()
	if _, err := pmd.Command(start); err != nil {
		t.Fatal(err)
	}
	time.Sleep(d)
	if _, err := pmd.Command("stop"); err != nil {
		t.Fatal(err)
	}
}

func readPort(t *testing.T, pmd *rig.Testpmd) rig.PortStats {
	t.Helper()
	stats, err := pmd.Stats()
	if err != nil {
		t.Fatal(err)
	}
	return stats
}

// settle reads the daemon's counters until they satisfy done, or have not changed for five seconds, in which also a worker that other
// programs keep from its processor has run. Without done half a second has to do.
func settle(t *testing.T, daemon *rig.Daemon, done func(rig.GuestStats) bool) rig.GuestStats {
	t.Helper()
	patience := 5
	if done != nil {
		patience = 50
	}
	var last uint64
	for same := 0; ; time.Sleep(100 * time.Millisecond) {
		stats, err := daemon.Stats()
		if err != nil {
			t.Fatal(err)
		}
		tx, _ := stats.Sum(1)
		rx, _ := stats.Sum(0)
		if same++; tx+rx != last {
			last, same = tx+rx, 0
		}
		if same == patience || done != nil && done(stats) {
			return stats
		}
	}
}

type packetCount struct{ packets, dropped uint64 }

// since is what the rings of one parity have counted between two readings.
func since(now, before rig.GuestStats, parity int) packetCount {
	packets, dropped := now.Sum(parity)
	oldPackets, oldDropped := before.Sum(parity)
	return packetCount{packets - oldPackets, dropped - oldDropped}
}

// awaitPackets wants a number of packets through the rings of one parity within the time that a front-end may need to connect.
func awaitPackets(t *testing.T, daemon *rig.Daemon, parity int, want uint64) {
	t.Helper()
	var packets uint64
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
		stats, err := daemon.Stats()
		if err != nil {
			continue // not up yet
		}
		if packets, _ = stats.Sum(parity); packets >= want {
			return
		}
	}
	t.Fatalf("%d packets in ten seconds, expected %d; vhostd:\n%s", packets, want, daemon.Output())
}
