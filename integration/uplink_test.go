package integration

import (
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
)

const outsideIP = "10.88.0.100"

// TestUplink has two guests on a switch, one with two queue pairs and one without offloads, reach the namespace through the uplink's tap.
func TestUplink(t *testing.T) {
	testmain.NeedTun(t)
	ns, err := rig.NewNamespace()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(ns.Close)
	l := newLAN(t, ns, []string{",uplink=tap,uplink-queues=2,uplink-name=" + tapName, ""}, []rig.VMConfig{
		{QueuePairs: 2, CPUs: 2}, {Device: noOffloads},
	})
	if err := ns.ConfigureTap(tapName, outsideIP+"/24", 0, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	ends := make([]rig.Ends, len(l.guests))
	for i, g := range l.guests {
		ends[i] = rig.Ends{NS: ns, VM: g.VM, HostIP: outsideIP, GuestIP: g.ip()}
	}
	n := int64(rounds(4, 64)) * mebibyte
	exchange := func() {
		for _, e := range ends {
			checkPing(t, e, 56, 1472, 8972)
			checkDatagrams(t, e, 18, 1472)
			checkStreams(t, e, n)
		}
		allPing(t, l.guests)
	}
	exchange()
	checkLearning(t, l, ends)
	checkUplinkDown(t, l, ns, ends[0])
	// A tap whose kernel side finishes everything itself before it hands it over.
	err = ns.Do(func() error {
		_, err := guest.SetOffloads(guest.OffloadsArgs{Name: tapName})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	exchange()
	l.close(t)
	if ns.HasLink(tapName) {
		t.Errorf("vhostd left the tap %s behind", tapName)
	}
}

// checkLearning wants streams between a guest and the namespace to stay between these two.
func checkLearning(t *testing.T, l *lan, ends []rig.Ends) {
	t.Helper()
	bystander := l.guests[1]
	received := func() uint64 {
		stats, err := l.daemon.GuestStats(bystander.name)
		if err != nil {
			t.Fatal(err)
		}
		packets, _ := stats.Sum(0)
		return packets
	}
	before := received()
	checkStreams(t, ends[0], 2*mebibyte)
	if n := received() - before; n > 20 { // ARP and IPv6 routers' discovery go to everybody
		t.Errorf("%s received %d frames while another guest and the namespace talked", bystander.name, n)
	}
	if s, err := l.daemon.Switch(); err != nil || s.Stations != 3 {
		t.Errorf("switch with two guests and the namespace: %+v, %v", s, err)
	}
}

// checkUplinkDown sets the tap down and up again.
func checkUplinkDown(t *testing.T, l *lan, ns *rig.Namespace, ends rig.Ends) {
	t.Helper()
	set := func(change func(netlink.Link) error, up bool) {
		t.Helper()
		if err := ns.Do(func() error {
			link, err := netlink.LinkByName(tapName)
			if err != nil {
				return err
			}
			return change(link)
		}); err != nil {
			t.Fatal(err)
		}
		for end := time.Now().Add(5 * time.Second); ; time.Sleep(20 * time.Millisecond) {
			s, err := l.daemon.Switch()
			if err == nil && s.UplinkUp == up {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("the uplink's state is not %v: %+v, %v", up, s, err)
			}
			if _, err := ends.Ping(56, 1); err != nil { // a down tap shows when it is written to
				t.Fatal(err)
			}
		}
	}
	set(netlink.LinkSetDown, false)
	if result, err := ends.Ping(56, 1); err != nil || result.Received != 0 {
		t.Errorf("ping through a tap that is down: %+v, %v", result, err)
	}
	allPing(t, l.guests)
	set(netlink.LinkSetUp, true)
	checkPing(t, ends, 1472)
	checkStreams(t, ends, 2*mebibyte)
}
