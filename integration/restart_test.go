package integration

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/internal/testmain"
)

// rounds is how often a test repeats itself: short, or long in `make test-long`.
func rounds(short, long int) int {
	if os.Getenv("VHOSTD_LONG") == "1" {
		return long
	}
	return short
}

// TestBackendRestart is RCN-01 and SHUT-01: the daemon is killed, or stopped in order, under traffic and started again. The guest
// has its network back within a second of the front-end's new connection (it tries once a second), nothing that was completed comes
// again, and no ring slot is lost.
func TestBackendRestart(t *testing.T) {
	e := newEnv(t, 1500)
	ends := e.boot(t, rig.VMConfig{})
	for i := range rounds(5, 60) {
		numbered(t, ends, func() {
			if i%6 == 4 {
				e.stopDaemon()
			} else {
				e.daemon.Kill()
			}
			e.restarted(ends)
		})
	}
	checkFullRing(t, e, ends)
	checkAll(t, ends, 16*mebibyte)
	e.stopDaemon()
}

// restarted starts the daemon again and waits for the guest's answer.
func (e *env) restarted(ends rig.Ends) {
	e.t.Helper()
	e.startDaemon()
	if err := e.daemon.WaitConnected(true, 6*time.Second); err != nil {
		e.t.Fatal(err)
	}
	awaitPing(e.t, ends, 3*time.Second) // one second, three times that under emulation
}

// numbered runs f, which ends the back-end once, while numbered datagrams flow both ways. The host may see those again that were sent
// but not completed: a batch at most. The guest may see nothing twice.
func numbered(t *testing.T, ends rig.Ends, f func()) {
	t.Helper()
	const batch = 64
	addr, stopSink, err := ends.SinkHost()
	if err != nil {
		t.Fatal(err)
	}
	stopFlood, err := ends.FloodGuest(1400)
	if err != nil {
		t.Fatal(err)
	}
	var inGuest guest.SinkResult
	ended := make(chan error, 2)
	go func() {
		ended <- ends.VM.Agent.Call(guest.CommandSink, guest.SinkArgs{Port: 9, For: flowing, Idle: flowing}, &inGuest, slow)
	}()
	go func() {
		ended <- ends.VM.Agent.Call(guest.CommandFlood, guest.FloodArgs{Addr: addr, Size: 1400, For: flowing}, nil, slow)
	}()
	time.Sleep(moment)
	f()
	time.Sleep(moment)
	calm(ends)
	for range cap(ended) {
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}
	sent, onHost := stopFlood(), stopSink()
	t.Logf("host sent %+v, guest saw %+v; host saw %+v", sent, inGuest, onHost)
	if inGuest.Repeated+inGuest.Corrupt > 0 || onHost.Corrupt > 0 || onHost.Repeated > batch || inGuest.Received == 0 || onHost.Received == 0 {
		t.Errorf("the guest saw %+v, the host %+v; only the host may see up to %d datagrams again", inGuest, onHost, batch)
	}
}

// TestPackedRestart is the same with packed rings, whose positions QEMU 7.2 cannot restore: they come from the state directory. While
// there is no back-end QEMU serves the transmitq from a position that is out of date, so that the guest has to be quiet.
func TestPackedRestart(t *testing.T) {
	e := newEnv(t, 1500, "--state-dir", t.TempDir())
	ends := e.boot(t, rig.VMConfig{Device: "packed=on"})
	checkAll(t, ends, 4*mebibyte)
	for range rounds(5, 50) {
		stop, err := ends.FloodGuest(1400)
		if err != nil {
			t.Fatal(err)
		}
		var inGuest guest.SinkResult
		ended := make(chan error, 1)
		go func() {
			ended <- ends.VM.Agent.Call(guest.CommandSink, guest.SinkArgs{Port: 9, For: flowing, Idle: flowing}, &inGuest, slow)
		}()
		time.Sleep(moment)
		e.daemon.Kill()
		e.startDaemon()
		if err := e.daemon.WaitConnected(true, 6*time.Second); err != nil {
			t.Fatal(err)
		}
		time.Sleep(2 * moment)
		calm(ends)
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if sent := stop(); inGuest.Received == 0 || inGuest.Repeated+inGuest.Corrupt > 0 {
			t.Errorf("host sent %+v, guest saw %+v", sent, inGuest)
		}
		awaitPing(t, ends, 3*time.Second)
		if !strings.Contains(e.daemon.Output(), "ring resumed where it was") {
			t.Error("no ring resumed")
		}
	}
	checkFullRing(t, e, ends)
	checkAll(t, ends, 16*mebibyte)
	e.stopDaemon()
}

// checkFullRing sends several rings full of datagrams at once: a lost slot of the transmitq or receiveq would lose packets.
func checkFullRing(t *testing.T, e *env, ends rig.Ends) {
	t.Helper()
	const count = 1024
	args := guest.EchoArgs{Size: 100, Count: count, Window: 200, Timeout: 2 * time.Second}
	result, err := ends.Echo(args)
	if err != nil {
		t.Fatal(err)
	}
	if result.Echoed != count {
		stats, _ := e.daemon.Stats()
		t.Errorf("windows of %d datagrams: %+v; %+v", args.Window, result, stats)
	}
}

// TestClientMode is RCN-03: vhostd dials, before there is a socket, and again for each new machine.
func TestClientMode(t *testing.T) {
	e := newClientEnv(t)
	for range rounds(3, 10) {
		vm := e.startVM(t, rig.VMConfig{Listen: true, Paused: true})
		if err := e.daemon.WaitConnected(true, 6*time.Second); err != nil {
			t.Fatal(err)
		}
		if err := vm.Quit(); err != nil {
			t.Errorf("QEMU: %v", err)
		}
		if err := e.daemon.WaitConnected(false, 5*time.Second); err != nil {
			t.Fatal(err)
		}
	}
	ends := e.boot(t, rig.VMConfig{Listen: true})
	checkAll(t, ends, 4*mebibyte)
	underTraffic(t, ends, func() {
		e.daemon.Kill()
		e.startDaemon()
		awaitPing(t, ends, 9*time.Second)
	})
	checkFullRing(t, e, ends)
}

func newClientEnv(t *testing.T) *env { return newEnv(t, 1500, "--client") }

// TestQueueCounts is NEG-12: QEMU reads the number of queues as pairs; every number up to the answer starts, and one more is
// refused by QEMU with a message, after which the daemon serves on.
func TestQueueCounts(t *testing.T) {
	e := newEnv(t, 1500, "--queue-pairs", "8")
	for _, pairs := range []int{1, 2, 8, 16, 17} {
		vm := e.startVM(t, rig.VMConfig{QueuePairs: pairs, Paused: true})
		if err := vm.Quit(); err != nil {
			t.Errorf("QEMU with %d pairs: %v", pairs, err)
		}
	}
	image, err := shared.image()
	if err != nil {
		t.Fatal(err)
	}
	refused, err := rig.StartQEMU(e.folder, image, rig.VMConfig{Socket: e.daemon.Socket, QueuePairs: 18, Paused: true})
	if err != nil {
		t.Fatal(err)
	}
	// QEMU tries again for ever.
	err = refused.WaitOutput("message about 17 queues", 20*time.Second, func(output string) bool { return strings.Contains(output, "more queues than supported: 17") })
	refused.Close()
	if err != nil {
		t.Error(err)
	}
	vm := e.startVM(t, rig.VMConfig{Paused: true})
	if err := vm.Quit(); err != nil {
		t.Error(err)
	}
}

// TestPrivateMemory is MEM-06: a guest whose memory is not shared has no network, and the log says why and what to do.
func TestPrivateMemory(t *testing.T) {
	e := newEnv(t, 1500)
	vm := e.startVM(t, rig.VMConfig{Private: true})
	if _, err := vm.Boot(); err != nil {
		testmain.Skip(t, "QEMU refused by itself: %v", err)
	}
	// The guest's driver starts the device; its interface stays without traffic.
	_, _ = vm.SetUp(guestIP + "/24")
	err := e.daemon.WaitOutput("a message about shared memory", 10*time.Second, func(output string) bool { return strings.Contains(output, "share=on") })
	if err != nil {
		t.Error(err)
	}
}
