package integration

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
)

const noOffloads = "csum=off,gso=off,guest_csum=off,guest_tso4=off,guest_tso6=off,guest_ecn=off,guest_ufo=off,host_tso4=off,host_tso6=off,host_ecn=off,host_ufo=off"

// variant is a device that lacks something, or has what it usually lacks: feature bits that must be absent or present.
type variant struct {
	name          string
	device        string
	pairs         int
	without, with []int
	slotsMiB      int                              // room for memory to plug in
	then          func(*testing.T, *env, rig.Ends) // after the traffic
	iommu         bool
}

var variants = []variant{
	{name: "offloads off", device: noOffloads, without: []int{0, 1, 7, 11}},
	{name: "mergeable off", device: "mrg_rxbuf=off", without: []int{15}},
	{name: "four queue pairs", pairs: 4},
	{name: "event index off", device: "event_idx=off", without: []int{29}},
	{name: "indirect off", device: "indirect_desc=off", without: []int{28}},
	{name: "packed", device: "packed=on", with: []int{34}},
	plugVariant,
	{name: "IOMMU", iommu: true, with: []int{33}},
	{name: "legacy", device: "disable-modern=on,disable-legacy=off", without: []int{32}},
}

// TestGuestVariants boots a guest for each variant, one after another on one daemon and socket (RCN-08).
func TestGuestVariants(t *testing.T) {
	e := newEnv(t, 1500)
	inode := socketInode(t, e)
	for _, v := range variants {
		t.Run(v.name, func(t *testing.T) { runVariant(t, e, v, 8*mebibyte) })
		if now := socketInode(t, e); now != inode {
			t.Fatalf("the socket's inode changed from %d to %d", inode, now)
		}
	}
	e.stopDaemon()
}

// TestGuestCrossing runs every combination of the properties.
func TestGuestCrossing(t *testing.T) {
	testmain.Long(t)
	axes := [][]string{
		{"", noOffloads}, {"", "mrg_rxbuf=off"}, {"", "event_idx=off"}, {"", "indirect_desc=off"}, {"", "disable-modern=on,disable-legacy=off"},
	}
	e := newEnv(t, 1500)
	for _, pairs := range []int{1, 4} {
		for mask := range 1 << len(axes) {
			var device []string
			for i, axis := range axes {
				if property := axis[mask>>i&1]; property != "" {
					device = append(device, property)
				}
			}
			v := variant{device: strings.Join(device, ","), pairs: pairs}
			t.Run(fmt.Sprintf("%d pairs %s", pairs, v.device), func(t *testing.T) { runVariant(t, e, v, 16*mebibyte) })
		}
	}
	e.stopDaemon()
}

func runVariant(t *testing.T, e *env, v variant, n int64) {
	cfg := rig.VMConfig{Device: v.device, IOMMU: v.iommu, QueuePairs: v.pairs, CPUs: min(max(v.pairs, 1), 2), SlotsMiB: v.slotsMiB}
	ends := e.boot(t, cfg)
	link, err := ends.VM.Link(guest.LinkArgs{Name: "eth0"})
	if err != nil {
		t.Fatal(err)
	}
	for _, bit := range v.without {
		if link.HasFeature(bit) {
			t.Errorf("feature bit %d is on: %s", bit, link.Features)
		}
	}
	for _, bit := range v.with {
		if !link.HasFeature(bit) {
			t.Errorf("feature bit %d is off: %s", bit, link.Features)
		}
	}
	checkAll(t, ends, n)
	if v.then != nil {
		v.then(t, e, ends)
	} else if v.pairs > 1 {
		checkChannels(t, ends, v.pairs)
	}
	if err := ends.VM.Quit(); err != nil {
		t.Errorf("QEMU: %v", err)
	}
	if err := e.daemon.WaitConnected(false, 5*time.Second); err != nil {
		t.Error(err)
	}
}

// checkChannels changes the number of pairs in use (ethtool -L) and back, with traffic at each.
func checkChannels(t *testing.T, ends rig.Ends, pairs int) {
	t.Helper()
	for _, n := range []int{pairs, 1, 3, pairs} {
		var now guest.Channels
		callGuest(t, ends, guest.CommandChannels, guest.ChannelsArgs{Name: "eth0", Combined: n}, nil)
		callGuest(t, ends, guest.CommandChannels, guest.ChannelsArgs{Name: "eth0"}, &now)
		if now.Combined != n || now.Max != pairs {
			t.Errorf("channels %+v after ethtool -L combined %d of %d", now, n, pairs)
		}
		// QEMU does not wait for its SET_VRING_ENABLE, and what a guest sends on a disabled ring is dropped.
		time.Sleep(200 * time.Millisecond)
		checkPing(t, ends, 1472)
		checkDatagrams(t, ends, 1472)
		checkStreams(t, ends, 2*mebibyte)
	}
}

func socketInode(t *testing.T, e *env) uint64 {
	t.Helper()
	info, err := os.Stat(e.daemon.Socket)
	if err != nil {
		t.Fatal(err)
	}
	return info.Sys().(*syscall.Stat_t).Ino
}
