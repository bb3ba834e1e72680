package integration

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/port"
)

const (
	bridgeName    = "br0"
	etherTypeRARP = 0x8035
	// migrationBandwidth makes several passes of a guest with little memory in use.
	migrationBandwidth = 24 << 20
)

// site is a host that guests migrate from and to: a daemon whose tap is in the bridge.
type site struct {
	*env
	vm *rig.VM
}

// newSites makes two of them in one namespace, on one bridge.
func newSites(t *testing.T) (a, b *site, ns *rig.Namespace) {
	t.Helper()
	testmain.NeedTun(t)
	ns, err := rig.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ns.Close)
	if err := ns.AddBridge(bridgeName, hostCIDR); err != nil {
		t.Fatal(err)
	}
	return newSite(t, ns, "tapA"), newSite(t, ns, "tapB"), ns
}

func newSite(t *testing.T, ns *rig.Namespace, tap string) *site {
	t.Helper()
	folder, err := os.MkdirTemp(shared.folder, "site")
	if err != nil {
		t.Fatal(err)
	}
	s := &site{env: &env{t: t, folder: folder, mtu: 1500, ns: ns}}
	network := fmt.Sprintf("tap,name=%s,bridge=%s", tap, bridgeName)
	if s.daemon, err = rig.StartDaemon(ns, folder, network, "--queue-pairs", "4"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.daemon.Kill()
		if t.Failed() {
			t.Logf("output of vhostd at %s:\n%s", tap, s.daemon.Output())
		}
	})
	return s
}

// TestMigration moves a guest between two QEMUs and two daemons while TCP flows both ways and datagrams towards the guest. What
// the device wrote into the guest's memory is at the destination before the guest runs there, the streams go on undamaged, pings are lost
// only around the switch-over, and the network is told where the guest is now.
func TestMigration(t *testing.T) {
	variants := []rig.VMConfig{{}, {Device: "packed=on"}, {Device: "mrg_rxbuf=off"}, {QueuePairs: 2, CPUs: 2}, {Device: "event_idx=off,indirect_desc=off"}}
	for _, cfg := range variants[:rounds(1, len(variants))] {
		t.Run(fmt.Sprintf("%s,pairs=%d", cfg.Device, max(cfg.QueuePairs, 1)), func(t *testing.T) {
			a, b, ns := newSites(t)
			a.vm = a.startVM(t, cfg)
			ends := rig.Ends{NS: ns, VM: a.vm, HostIP: hostIP, GuestIP: guestIP}
			waitBoot(t, ends)
			for range rounds(1, 2) { // there, and back
				migrate(t, ns, a, b, cfg)
				a, b = b, a
			}
			ends.VM = a.vm
			checkPing(t, ends, 56, 1472)
			checkDatagrams(t, ends, 18, 1472)
			a.stopDaemon()
		})
	}
}

// stopDaemon is env's for a tap in a bridge.
func (s *site) stopDaemon() {
	s.t.Helper()
	if err := s.daemon.Stop(); err != nil {
		s.t.Error(err)
	}
}

// migrate moves the guest from one site to the other under load.
func migrate(t *testing.T, ns *rig.Namespace, from, to *site, cfg rig.VMConfig) {
	t.Helper()
	uri := "unix:" + filepath.Join(to.folder, "migration")
	cfg.Incoming, cfg.Paused = uri, true
	to.vm = to.startVM(t, cfg)
	rarps, err := ns.Sniff(bridgeName, etherTypeRARP)
	if err != nil {
		t.Fatal(err)
	}
	defer rarps.Close()
	load := startLoad(t, ns, from.vm)
	late := load.sent.Load()
	info, err := from.vm.Migrate(uri, migrationBandwidth, slow)
	if err != nil {
		t.Fatal(err)
	}
	load.mustRun(t)
	if err := to.vm.WaitRunState("paused", 10*time.Second); err != nil {
		t.Fatal(err)
	}
	source, destination := mapMemory(t, from.vm), mapMemory(t, to.vm)
	checkPayload(t, source, destination, late)
	if !strings.Contains(cfg.Device, "packed=on") {
		checkUsedRings(t, from.vm, max(cfg.QueuePairs, 1), source, destination)
	}
	repair(t, source, destination)
	to.vm.Agent.Adopt(from.vm.Agent)
	if err := to.vm.QMP.Execute("cont", nil, nil, 10*time.Second); err != nil {
		t.Fatal(err)
	}
	switched := time.Now()
	load.finish(t, to.vm, switched.Add(-time.Duration(info.Downtime)*time.Millisecond-10*time.Second), switched.Add(5*time.Second))
	if err := from.vm.Quit(); err != nil {
		t.Errorf("QEMU at the source: %v", err)
	}
	if err := from.daemon.WaitConnected(false, 5*time.Second); err != nil {
		t.Error(err)
	}
	checkRARPs(t, rarps)
	t.Logf("%d passes, %d MiB, QEMU's downtime %d ms of %d ms", info.RAM.Rounds, info.RAM.Sent/mebibyte, info.Downtime, info.Total)
}

// checkPayload looks for the load's datagrams in the memory of the source: each that is whole there must be so at the destination.
func checkPayload(t *testing.T, source, destination []byte, late uint64) {
	t.Helper()
	var sequence [8]byte
	whole, after, lost := 0, 0, 0
	for at := 0; ; at++ {
		next := bytes.Index(source[at:], datagramMark)
		if at += next; next < 0 || at+datagramBytes > len(source) {
			break
		}
		copy(sequence[:], source[at+len(datagramMark):])
		number := binary.LittleEndian.Uint64(sequence[:])
		datagram := newDatagram(number)
		if !bytes.Equal(source[at:at+datagramBytes], datagram) {
			continue // the guest has used its memory for something else since
		}
		whole++
		if number >= late {
			after++
		}
		if !bytes.Equal(destination[at:at+datagramBytes], datagram) {
			lost++
		}
	}
	if lost > 0 || after < 10 {
		t.Fatalf("of %d datagrams in the source's memory, %d of them sent while the guest migrated, %d are not at the destination", whole, after, lost)
	}
	t.Logf("%d datagrams of the source's memory are at the destination, %d of them sent while the guest migrated", whole, after)
}

// checkUsedRings wants the rings' used parts to be the same, which in a split ring only the device writes.
func checkUsedRings(t *testing.T, vm *rig.VM, pairs int, source, destination []byte) {
	t.Helper()
	for i := range 2 * pairs {
		used, size, err := vm.UsedRing(i)
		if err != nil {
			t.Fatal(err)
		}
		end := used + 6 + 8*size
		if end > uint64(len(source)) || !bytes.Equal(source[used:end], destination[used:end]) {
			t.Errorf("ring %d: the used ring at %#x differs", i, used)
		}
	}
}

// repair copies the pages that still differ. They were written by the guest's CPU: QEMU 7.2 loses some of those when it emulates, also of
// a guest that has no vhost-user device, and such guests crash soon.
func repair(t *testing.T, source, destination []byte) {
	const page = 4096
	pages := 0
	for at := 0; at < len(source); at += page {
		if !bytes.Equal(source[at:at+page], destination[at:at+page]) {
			copy(destination[at:at+page], source[at:at+page])
			pages++
		}
	}
	t.Logf("%d pages of the CPU's own were lost by QEMU and put right", pages)
}

// mapMemory maps the guest's memory until the test's end.
func mapMemory(t *testing.T, vm *rig.VM) []byte {
	t.Helper()
	f, err := vm.Memory()
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(b) })
	return b
}

// datagramMark is what the load's datagrams begin with.
var datagramMark = []byte("vhostd:migration")

const datagramBytes = 1400

// newDatagram is the datagram of that number: the mark, the number, and bytes that depend on it.
func newDatagram(number uint64) []byte {
	b := binary.LittleEndian.AppendUint64(append(make([]byte, 0, datagramBytes), datagramMark...), number)
	for i := len(b); i < datagramBytes; i++ {
		b = append(b, byte(number*31+uint64(i)*7))
	}
	return b
}

// checkRARPs wants announcements of the guest's address.
func checkRARPs(t *testing.T, s *rig.Sniffer) {
	t.Helper()
	mac, err := net.ParseMAC(rig.GuestMAC)
	if err != nil {
		t.Fatal(err)
	}
	want, seen := port.RARP([6]byte(mac)), 0
	for _, frame := range s.Frames() {
		if bytes.Equal(frame, want[:]) {
			seen++
		}
	}
	if seen == 0 {
		t.Error("the guest was not announced on the network")
	}
	t.Logf("%d announcements", seen)
}

// load is what flows while a guest migrates.
type load struct {
	streams [2]chan error
	sent    atomic.Uint64 // datagrams
	quit    chan struct{} // closed when it ends
	pings   chan pings
	once    sync.Once
}

// pings are the echo requests of a load: how many, and when those were sent that had no answer.
type pings struct {
	sent int
	lost []time.Time
}

const (
	endless    = 1 << 40         // bytes of a stream that lasts until the load ends
	afterwards = 2 * time.Second // how long the load goes on at the destination
)

func startLoad(t *testing.T, ns *rig.Namespace, vm *rig.VM) *load {
	t.Helper()
	l := &load{quit: make(chan struct{}), pings: make(chan pings, 1)}
	ends := rig.Ends{NS: ns, VM: vm, HostIP: hostIP, GuestIP: guestIP}
	for i := range l.streams {
		l.streams[i] = make(chan error, 1)
		go func() { l.streams[i] <- l.stream(ends, i == 0) }()
	}
	conn, err := ns.DialUDP(guestIP + ":9")
	if err != nil {
		t.Fatal(err)
	}
	go l.flood(conn)
	go l.ping(ends)
	t.Cleanup(l.end)
	time.Sleep(500 * time.Millisecond)
	l.mustRun(t)
	return l
}

func (l *load) stream(ends rig.Ends, toGuest bool) error {
	sent, received, err := ends.StreamUntil(l.quit, endless, 7, toGuest, slow)
	if err == nil && (sent.Bytes < mebibyte || received.Bytes != sent.Bytes || sent.SHA256 != received.SHA256) {
		err = fmt.Errorf("sent %+v, received %+v", sent, received)
	}
	return err
}

// flood sends datagrams in small lots, which leave the guest time for the streams. Refusals (port unreachable) are part of it.
func (l *load) flood(conn net.Conn) {
	defer conn.Close()
	for number := uint64(1); ; number++ {
		if number%8 == 0 {
			select {
			case <-l.quit:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
		_, _ = conn.Write(newDatagram(number))
		l.sent.Store(number)
	}
}

// ping sends one request after the other.
func (l *load) ping(ends rig.Ends) {
	var p pings
	for {
		select {
		case <-l.quit:
			l.pings <- p
			return
		case <-time.After(20 * time.Millisecond):
		}
		begin := time.Now()
		p.sent++
		result, err := ends.PingGuest(guest.PingArgs{Size: 56, Count: 1, Timeout: 3 * time.Second})
		if err != nil || result.Received == 0 {
			p.lost = append(p.lost, begin)
		}
	}
}

// mustRun wants both streams to be under way.
func (l *load) mustRun(t *testing.T) {
	t.Helper()
	for i, s := range l.streams {
		select {
		case err := <-s:
			t.Fatalf("stream %d ended before the guest had moved: %v", i, err)
		default:
		}
	}
}

// finish lets the load go on for a while with the guest where it is now, ends it, and judges what was lost: only what was sent between the
// two times may be.
func (l *load) finish(t *testing.T, vm *rig.VM, from, to time.Time) {
	t.Helper()
	time.Sleep(afterwards)
	l.end()
	calm(rig.Ends{VM: vm})
	for i, s := range l.streams {
		if err := <-s; err != nil {
			t.Errorf("stream %d: %v", i, err)
		}
	}
	p := <-l.pings
	elsewhere := 0
	for _, at := range p.lost {
		if at.Before(from) || at.After(to) {
			elsewhere++
			t.Logf("a ping was lost %v from the switch-over", at.Sub(to).Round(time.Millisecond))
		}
	}
	if elsewhere > p.sent/100+1 { // a few are the load's
		t.Errorf("%d pings were lost away from the switch-over", elsewhere)
	}
	t.Logf("%d of %d pings lost", len(p.lost), p.sent)
}

func (l *load) end() {
	l.once.Do(func() { close(l.quit) })
}
