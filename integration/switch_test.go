package integration

import (
	"fmt"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
)

// TestSwitch takes four guests on one switch through a day together: one with packed rings, one without any offload, one with two queue
// pairs and a pinned address.
func TestSwitch(t *testing.T) {
	l := newLAN(t, nil, []string{"", "", "", ",mac=" + macOf(4)}, []rig.VMConfig{
		{}, {Device: "packed=on"}, {Device: noOffloads}, {QueuePairs: 2, CPUs: 2},
	})
	steps := []struct {
		name string
		run  func(*testing.T, *lan)
	}{
		{"all pairs", func(t *testing.T, l *lan) { allPing(t, l.guests) }},
		{"duplicate address detection", testDuplicateAddress},
		{"segmentation", testSegmentation},
		{"VLANs", testVLANs},
		{"pinned address", testPinned},
		{"one guest stopped", testStopped},
		{"one guest moved", testMoved},
	}
	for i := range rounds(1, 5) {
		if i > 0 { // VLANs and addresses are new again
			inParallel(t, l.guests, func(g *lanGuest) error {
				g.Close()
				return l.boot(g)
			})
		}
		for _, step := range steps {
			if !t.Run(step.name, func(t *testing.T) { step.run(t, l) }) {
				t.Fatalf("%s failed; the steps after it need the guests as they were", step.name)
			}
		}
	}
	l.close(t)
}

// testDuplicateAddress is SW-03: a probe does not come back to its sender, where it would look like another station's, but reaches all
// others, so that the second owner of an address finds out.
func testDuplicateAddress(t *testing.T, l *lan) {
	inParallel(t, l.guests, func(g *lanGuest) error {
		own, err := g.detect(g.ip6())
		if err == nil && own.Failed {
			err = fmt.Errorf("%s, which nobody else has, is a duplicate", g.ip6())
		}
		return err
	})
	first := l.guests[0]
	inParallel(t, l.guests[1:], func(g *lanGuest) error {
		same, err := g.detect(first.ip6())
		if err == nil && !same.Failed {
			err = fmt.Errorf("did not find out that %s has %s", first.name, first.ip6())
		}
		if err == nil {
			remove := guest.AddressArgs{Name: "eth0", CIDR: same.CIDR, Remove: true}
			err = g.Agent.Call(guest.CommandAddress, remove, nil, slow)
		}
		return err
	})
	if own, err := first.find(first.ip6()); err != nil || own.Failed {
		t.Errorf("%s: %+v, %v after others probed for its address", first.name, own, err)
	}
}

// detect adds an IPv6 address, waits until detection has ended, and returns what came of it.
func (g *lanGuest) detect(ip string) (found guest.Address, err error) {
	if err := g.Agent.Call(guest.CommandAddress, guest.AddressArgs{Name: "eth0", CIDR: ip + "/64"}, nil, slow); err != nil {
		return found, err
	}
	for end := time.Now().Add(slow); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if found, err = g.find(ip); err != nil || found.Failed || !found.Tentative {
			return found, err
		}
	}
	return found, fmt.Errorf("%s is still tentative", ip)
}

// find describes one IPv6 address of the guest.
func (g *lanGuest) find(ip string) (guest.Address, error) {
	var all guest.Addresses
	if err := g.Agent.Call(guest.CommandAddress, guest.AddressArgs{Name: "eth0"}, &all, slow); err != nil {
		return guest.Address{}, err
	}
	for _, a := range all {
		if strings.HasPrefix(a.CIDR, ip+"/") {
			return a, nil
		}
	}
	return guest.Address{}, fmt.Errorf("no address %s among %+v", ip, all)
}

// testSegmentation wants large TCP segments to pass whole between guests that can take them, and in pieces to the one that cannot.
func testSegmentation(t *testing.T, l *lan) {
	const mtu, header = 1500, 14
	whole, packed, without, multi := l.guests[0], l.guests[1], l.guests[2], l.guests[3]
	n := int64(rounds(4, 64)) * mebibyte
	for _, c := range []struct {
		from, to *lanGuest
		ip       string
		large    bool
	}{
		{whole, packed, packed.ip(), true}, {packed, whole, whole.ip6(), true}, {whole, multi, multi.ip6(), true},
		{multi, packed, packed.ip(), true}, {whole, without, without.ip(), false}, {packed, without, without.ip6(), false},
		{without, whole, whole.ip(), false},
	} {
		size := c.to.frameSize(t, func() { transfer(t, c.from, c.to, c.ip, n) })
		if large := size > mtu+header; large != c.large {
			t.Errorf("frames from %s to %s (%s) have %.0f bytes on average; larger than the MTU: want %v", c.from.name, c.to.name, c.ip, size, c.large)
		}
		t.Logf("%.0f bytes a frame", size)
	}
}

// testVLANs wants tags to reach the other end: two guests in a VLAN reach each other, a third one in another VLAN does not.
func testVLANs(t *testing.T, l *lan) {
	up := true
	ip := func(g *lanGuest) string { return fmt.Sprintf("10.89.0.%d", g.number) }
	for i, g := range l.guests[:3] {
		vlan := []int{7, 8, 7}[i]
		g.call(t, guest.CommandLink, guest.LinkArgs{Name: "eth0", VLAN: vlan, Up: &up, CIDR: ip(g) + "/24"}, nil)
	}
	first, other, same := l.guests[0], l.guests[1], l.guests[2]
	if err := first.ping(ip(same), 1472, 3); err != nil {
		t.Error(err)
	}
	transfer(t, first, same, ip(same), 2*mebibyte)
	transfer(t, same, first, ip(first), 2*mebibyte)
	var result guest.PingResult
	first.call(t, guest.CommandPing, guest.PingArgs{Dst: ip(other), Size: 56, Count: 1, Timeout: time.Second}, &result)
	if result.Received > 0 {
		t.Errorf("%s in VLAN 7 reaches %s in VLAN 8", first.name, other.name)
	}
}

// testPinned has a guest take another one's pinned address: its frames go nowhere, and the owner keeps getting its own.
func testPinned(t *testing.T, l *lan) {
	peer, thief, owner := l.guests[0], l.guests[1], l.guests[3]
	setMAC := func(mac string) { thief.call(t, guest.CommandLink, guest.LinkArgs{Name: "eth0", MAC: mac}, nil) }
	before := l.lost(t, thief, "port_stolen_source")
	setMAC(macOf(owner.number))
	var result guest.PingResult
	thief.call(t, guest.CommandPing, guest.PingArgs{Dst: peer.ip(), Size: 56, Count: 2, Timeout: time.Second}, &result)
	if result.Received > 0 {
		t.Errorf("%s was answered under the address of %s", thief.name, owner.name)
	}
	if n := l.lost(t, thief, "port_stolen_source"); n == before {
		t.Errorf("no frame from %s under the address of %s was counted as lost", thief.name, owner.name)
	}
	if err := peer.ping(owner.ip(), 1472, 5); err != nil {
		t.Errorf("while %s poses as %s: %v", thief.name, owner.name, err)
	}
	setMAC(macOf(thief.number))
	allPing(t, l.guests)
}

// testStopped is PERF-03: machines that take nothing leave the others what they had. One that QEMU stops has stopped rings; one whose
// QEMU stops has running ones and never looks at them.
func testStopped(t *testing.T, l *lan) {
	a, b, stopped, c := l.guests[0], l.guests[1], l.guests[2], l.guests[3]
	n := int64(rounds(4, 64)) * mebibyte
	before := transfer(t, a, b, b.ip(), n)
	for _, way := range []struct {
		name       string
		stop, cont func() error
		loser      *lanGuest
		reason     string
	}{
		{"stopped by QMP", stopped.execute("stop"), stopped.execute("cont"), c, "port_station_down"},
		{"stopped by SIGSTOP", stopped.signal(syscall.SIGSTOP), stopped.signal(syscall.SIGCONT), stopped, "port_backlog_full"},
	} {
		lost := l.lost(t, way.loser, way.reason)
		if err := way.stop(); err != nil {
			t.Fatal(err)
		}
		flood := make(chan error, 1)
		go func() {
			args := guest.FloodArgs{Addr: stopped.ip() + ":9", Size: 100, For: flowing}
			flood <- c.Agent.Call(guest.CommandFlood, args, nil, slow)
		}()
		during := transfer(t, a, b, b.ip(), n)
		for end := time.Now().Add(flowing); l.lost(t, way.loser, way.reason) == lost && time.Now().Before(end); {
			time.Sleep(20 * time.Millisecond)
		}
		calm(rig.Ends{VM: c.VM})
		if err := <-flood; err != nil {
			t.Error(err)
		}
		allPing(t, []*lanGuest{a, b, c})
		// A stall would be at least ten times as long; the flood itself takes its share of an emulated machine.
		if during < before/10 {
			t.Errorf("TCP with %.0f Mbit/s while another guest is %s, %.0f before", during, way.name, before)
		}
		if l.lost(t, way.loser, way.reason) == lost {
			t.Errorf("no frame for a guest that is %s was counted as %s of %s", way.name, way.reason, way.loser.name)
		}
		if err := way.cont(); err != nil {
			t.Fatal(err)
		}
		allPing(t, l.guests)
	}
}

func (g *lanGuest) execute(command string) func() error {
	return func() error { return g.QMP.Execute(command, nil, nil, 30*time.Second) }
}

func (g *lanGuest) signal(s syscall.Signal) func() error {
	return func() error { return syscall.Kill(g.PID(), s) }
}

// testMoved kills a machine while it is sent data and boots one with its addresses at another port, where the switch has to find it.
func testMoved(t *testing.T, l *lan) {
	a, gone, bystander := l.guests[0], l.guests[1], l.guests[3]
	flood := make(chan error, 1)
	go func() {
		flood <- a.Agent.Call(guest.CommandFlood, guest.FloodArgs{Addr: gone.ip() + ":9", Size: 1400, For: time.Second}, nil, slow)
	}()
	time.Sleep(300 * time.Millisecond)
	gone.Close()
	if err := <-flood; err != nil {
		t.Error(err)
	}
	if l.lost(t, a, "port_station_down") == 0 {
		t.Errorf("no frame for %s, which was killed, was counted as lost", gone.name)
	}
	if err := a.ping(bystander.ip(), 1472, 3); err != nil {
		t.Error(err)
	}
	gone.name += "-moved"
	gone.cfg.Socket = l.addPort(gone.name, "")
	if err := l.boot(gone); err != nil {
		t.Fatal(err)
	}
	// Frames for a station that left are dropped until it is heard of again.
	if err := gone.ping(bystander.ip(), 56, 1); err != nil {
		t.Error(err)
	}
	allPing(t, l.guests)
	// Three guests whose addresses are not pinned; the address that one of them tried to steal was never learnt.
	if s, err := l.daemon.Switch(); err != nil || s.Stations != 3 {
		t.Errorf("switch after a guest moved: %+v, %v", s, err)
	}
}
