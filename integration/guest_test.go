package integration

import (
	"fmt"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
)

// TestGuest takes one guest with all features through a working day: traffic, changes under traffic, resets.
func TestGuest(t *testing.T) {
	e := newEnv(t, 9000)
	ends := e.boot(t, rig.VMConfig{Device: "host_mtu=9000", SlotsMiB: 1024})
	steps := []struct {
		name string
		run  func(*testing.T, *env, rig.Ends)
	}{
		{"link", testLink},
		{"traffic", func(t *testing.T, _ *env, ends rig.Ends) { checkAll(t, ends, 64*mebibyte) }},
		{"counters", checkCounters},
		{"ethtool offloads off", testOffloads},
		{"idle", testIdle},
		{"link down and up", testLinkDownUp},
		{"driver unbound and bound", testRebind},
		{"stop and continue", testStopContinue},
		{"memory plugged in", testPlug},
		{"system_reset", testReset},
	}
	for _, step := range steps {
		if !t.Run(step.name, func(t *testing.T) { step.run(t, e, ends) }) {
			t.Fatalf("%s failed; the steps after it need the guest as it was", step.name)
		}
	}
	if err := ends.VM.Quit(); err != nil {
		t.Errorf("QEMU: %v", err)
	}
	if err := e.daemon.WaitConnected(false, 5*time.Second); err != nil {
		t.Error(err)
	}
	e.stopDaemon()
}

func testLink(t *testing.T, _ *env, ends rig.Ends) {
	link, err := ends.VM.Link(guest.LinkArgs{Name: "eth0"})
	if err != nil {
		t.Fatal(err)
	}
	if !link.Carrier || link.MTU != 9000 || link.MAC != rig.GuestMAC {
		t.Errorf("carrier %v, MTU %d, MAC %s; expected a link with MTU 9000 and %s", link.Carrier, link.MTU, link.MAC, rig.GuestMAC)
	}
	for bit, name := range map[int]string{0: "CSUM", 1: "GUEST_CSUM", 7: "GUEST_TSO4", 11: "HOST_TSO4", 15: "MRG_RXBUF", 28: "INDIRECT_DESC", 29: "EVENT_IDX", 32: "VERSION_1"} {
		if !link.HasFeature(bit) {
			t.Errorf("%s (bit %d) was not negotiated: %s", name, bit, link.Features)
		}
	}
}

func testOffloads(t *testing.T, _ *env, ends rig.Ends) {
	for _, on := range []bool{false, true} {
		if err := ends.VM.Agent.Call(guest.CommandOffloads, guest.OffloadsArgs{Name: "eth0", On: on}, nil, time.Minute); err != nil {
			t.Fatal(err)
		}
		checkPing(t, ends, 1472)
		checkStreams(t, ends, 4*mebibyte)
	}
}

func testIdle(t *testing.T, e *env, _ rig.Ends) {
	time.Sleep(500 * time.Millisecond)
	if use := idleCPU(t, e.daemon.PID(), 5*time.Second); use > 1 {
		t.Errorf("vhostd with an idle guest uses %.1f %% of a CPU, at most 1 %% is right", use)
	}
}

func testLinkDownUp(t *testing.T, _ *env, ends rig.Ends) {
	underTraffic(t, ends, func() {
		down := false
		if _, err := ends.VM.Link(guest.LinkArgs{Name: "eth0", Up: &down}); err != nil {
			t.Fatal(err)
		}
		if _, err := ends.VM.SetUp(guestIP + "/24"); err != nil {
			t.Fatal(err)
		}
	})
	awaitPing(t, ends, 10*time.Second)
	checkStreams(t, ends, 4*mebibyte)
}

// testRebind is RING-16: after the driver has gone its pages belong to the guest; a file of them must keep its bytes.
func testRebind(t *testing.T, _ *env, ends rig.Ends) {
	file := guest.FileArgs{Name: "pages", Create: true, Bytes: 24 * mebibyte, Seed: 3}
	var written, read guest.FileResult
	for range 3 {
		underTraffic(t, ends, func() {
			callGuest(t, ends, guest.CommandDriver, guest.DriverArgs{Bind: false}, nil)
			callGuest(t, ends, guest.CommandFile, file, &written)
			callGuest(t, ends, guest.CommandDriver, guest.DriverArgs{Bind: true}, nil)
			if _, err := ends.VM.SetUp(guestIP + "/24"); err != nil {
				t.Fatal(err)
			}
		})
		awaitPing(t, ends, 10*time.Second)
	}
	file.Create = false
	callGuest(t, ends, guest.CommandFile, file, &read)
	if written != read {
		t.Errorf("a file of the guest changed: written %s, read %s", written.SHA256, read.SHA256)
	}
	checkStreams(t, ends, 4*mebibyte)
}

func testStopContinue(t *testing.T, _ *env, ends rig.Ends) {
	for range 2 {
		underTraffic(t, ends, func() {
			executeQMP(t, ends, "stop")
			time.Sleep(500 * time.Millisecond)
			executeQMP(t, ends, "cont")
		})
		awaitPing(t, ends, 10*time.Second)
	}
	checkStreams(t, ends, 4*mebibyte)
}

// testPlug is MEM-01 b: the memory table changes while the rings run.
func testPlug(t *testing.T, _ *env, ends rig.Ends) {
	var before, after guest.Memory
	callGuest(t, ends, guest.CommandMemory, struct{}{}, &before)
	underTraffic(t, ends, func() {
		for i := range 3 {
			if err := ends.VM.Plug(fmt.Sprintf("dimm%d", i), 128); err != nil {
				t.Fatal(err)
			}
			time.Sleep(200 * time.Millisecond)
		}
	})
	callGuest(t, ends, guest.CommandMemory, struct{}{}, &after)
	if after.Total < before.Total+3*100*mebibyte {
		t.Errorf("the guest has %d MiB after three times 128 MiB were added to %d", after.Total/mebibyte, before.Total/mebibyte)
	}
	// What was free before is used up, so that packets' buffers come from the new memory.
	callGuest(t, ends, guest.CommandFile, guest.FileArgs{Name: "fill", Create: true, Bytes: int64(before.Available)}, nil)
	awaitPing(t, ends, 10*time.Second)
	checkStreams(t, ends, 16*mebibyte)
}

// testReset is MEM-11: descriptors and mappings stay level over resets under traffic.
func testReset(t *testing.T, e *env, ends rig.Ends) {
	reset := func() {
		underTraffic(t, ends, func() { executeQMP(t, ends, "system_reset") })
		waitBoot(t, ends)
		awaitPing(t, ends, 10*time.Second)
	}
	reset()
	filesBefore, mapsBefore := processUse(t, e.daemon.PID())
	reset()
	files, maps := processUse(t, e.daemon.PID())
	if files > filesBefore || maps > mapsBefore {
		t.Errorf("vhostd after a reset: %d descriptors and %d mappings, before %d and %d", files, maps, filesBefore, mapsBefore)
	}
	checkStreams(t, ends, 4*mebibyte)
}

func callGuest(t *testing.T, ends rig.Ends, command string, args, result any) {
	t.Helper()
	if err := ends.VM.Agent.Call(command, args, result, slow); err != nil {
		t.Fatal(err)
	}
}

func executeQMP(t *testing.T, ends rig.Ends, command string) {
	t.Helper()
	if err := ends.VM.QMP.Execute(command, nil, nil, 30*time.Second); err != nil {
		t.Fatal(err)
	}
}
