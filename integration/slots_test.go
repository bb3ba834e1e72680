package integration

import (
	"fmt"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/rig"
)

// dimms is how many memory devices are plugged in: with the guest's own memory more regions than SET_MEM_TABLE could name.
const dimms = 10

// plugVariant is TestGuestVariants' guest that gets and loses memory. QEMU 7.2 says everything once per queue pair.
var plugVariant = variant{name: "memory slots, two queue pairs", pairs: 2, slotsMiB: dimms * 128, then: plugAndUnplug}

// plugAndUnplug is MEM-02 b and MEM-03: memory devices come and go under traffic, as regions of the back-end.
func plugAndUnplug(t *testing.T, e *env, ends rig.Ends) {
	before := e.memory(t)
	if !slices.Contains(before.ProtocolFeatures, "CONFIGURE_MEM_SLOTS") {
		t.Fatalf("QEMU did not acknowledge memory slots: %v", before.ProtocolFeatures)
	}
	rounds := 1
	if os.Getenv("VHOSTD_LONG") == "1" {
		rounds = 5
	}
	for range rounds {
		underTraffic(t, ends, func() {
			for i := range dimms {
				if err := ends.VM.Plug(fmt.Sprintf("dimm%d", i), 128); err != nil {
					t.Fatal(err)
				}
			}
		})
		e.awaitRegions(t, before.Regions+dimms)
		checkStreams(t, ends, 2*mebibyte)
		underTraffic(t, ends, func() {
			for i := range dimms {
				if err := ends.VM.Unplug(fmt.Sprintf("dimm%d", i)); err != nil {
					t.Fatal(err)
				}
			}
		})
		e.awaitRegions(t, before.Regions)
		checkStreams(t, ends, 2*mebibyte)
	}
}

// memory asks the daemon for its view of the guest's memory.
func (e *env) memory(t *testing.T) rig.GuestMemory {
	t.Helper()
	m, err := e.daemon.Memory()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func (e *env) awaitRegions(t *testing.T, want int) {
	t.Helper()
	for end := time.Now().Add(slow); e.memory(t).Regions != want; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("vhostd has %d memory regions, want %d", e.memory(t).Regions, want)
		}
	}
}
