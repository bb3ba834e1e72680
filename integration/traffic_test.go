package integration

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/guest"
	"github.com/vhostd/vhostd/integration/rig"
)

const mebibyte = 1 << 20

// checkPing wants every echo request answered.
func checkPing(t *testing.T, ends rig.Ends, sizes ...int) {
	t.Helper()
	for _, size := range sizes {
		const count = 5
		result, err := ends.Ping(size, count)
		if err != nil {
			t.Fatal(err)
		}
		if result.Received != count || result.Corrupt != 0 {
			t.Errorf("ping with %d bytes: %+v", size, result)
		}
		t.Logf("ping %d bytes: %d of %d, mean %v", size, result.Received, result.Sent, result.MeanRTT)
	}
}

// checkStreams moves n bytes each way and wants both digests equal.
func checkStreams(t *testing.T, ends rig.Ends, n int64) {
	t.Helper()
	for _, toGuest := range []bool{false, true} {
		direction := "guest to host"
		if toGuest {
			direction = "host to guest"
		}
		sent, received, err := ends.Stream(n, uint64(n), toGuest, slow)
		if err != nil {
			t.Fatalf("TCP %s: %v", direction, err)
		}
		if sent.Bytes != n || received.Bytes != n || sent.SHA256 != received.SHA256 {
			t.Fatalf("TCP %s: sent %+v, received %+v", direction, sent, received)
		}
		t.Logf("TCP %s: %d MiB, %.0f Mbit/s, digests equal", direction, n/mebibyte, guest.Rate(n, received.Took))
	}
}

// checkDatagrams wants every datagram of a small window echoed, of several sizes.
func checkDatagrams(t *testing.T, ends rig.Ends, sizes ...int) {
	t.Helper()
	for _, size := range sizes {
		args := guest.EchoArgs{Size: size, Count: 200, Window: 8, Timeout: 2 * time.Second}
		result, err := ends.Echo(args)
		if err != nil {
			t.Fatalf("UDP with %d bytes: %v", size, err)
		}
		if result.Echoed != args.Count || result.Corrupt != 0 {
			t.Errorf("UDP with %d bytes: %+v", size, result)
		}
	}
}

// checkAll is the short form of all of them.
func checkAll(t *testing.T, ends rig.Ends, n int64) {
	t.Helper()
	checkPing(t, ends, 56, 1472, 8972)
	checkDatagrams(t, ends, 18, 1472, 30000)
	checkStreams(t, ends, n)
}

// awaitPing wants an answer of the guest within the limit.
func awaitPing(t *testing.T, ends rig.Ends, limit time.Duration) {
	t.Helper()
	start := time.Now()
	for time.Since(start) < limit {
		result, err := ends.PingGuest(guest.PingArgs{Size: 56, Count: 1, Timeout: 200 * time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		if result.Received == 1 {
			t.Logf("the guest answers after %v", time.Since(start).Round(time.Millisecond))
			return
		}
	}
	t.Fatalf("the guest does not answer within %v", limit)
}

const (
	moment  = 300 * time.Millisecond // how long traffic flows before and after what is done to it
	flowing = 20 * time.Second       // what it lasts at most
)

// calm ends the guest's floods and sinks. A guest that f has reset has none, and loses the command.
func calm(ends rig.Ends) { _ = ends.VM.Agent.Call(guest.CommandCalm, struct{}{}, nil, slow) }

// underTraffic runs f while datagrams flow both ways.
func underTraffic(t *testing.T, ends rig.Ends, f func()) {
	t.Helper()
	stop, err := ends.FloodGuest(1400)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { t.Logf("meanwhile towards the guest: %+v", stop()) }()
	done := make(chan struct{})
	go func() {
		defer close(done)
		// It may end with the guest.
		_ = ends.VM.Agent.Call(guest.CommandFlood, guest.FloodArgs{Addr: ends.HostIP + ":9", Size: 1400, For: flowing}, nil, slow)
	}()
	time.Sleep(moment)
	f()
	time.Sleep(moment)
	calm(ends)
	<-done
}

// checkCounters compares the guest's packet counters with the daemon's over some traffic; nothing may be lost between them.
func checkCounters(t *testing.T, e *env, ends rig.Ends) {
	t.Helper()
	before := readSettled(t, e, ends)
	checkDatagrams(t, ends, 100)
	var now counters
	for range 20 {
		now = readBoth(t, e, ends)
		if now.guestTx-before.guestTx == now.daemonTx-before.daemonTx && now.guestRx-before.guestRx == now.daemonRx-before.daemonRx {
			return
		}
		time.Sleep(100 * time.Millisecond)
	}
	t.Errorf("packets over the same traffic: before %+v, after %+v", before, now)
}

type counters struct{ guestTx, guestRx, daemonTx, daemonRx uint64 }

// readSettled waits until no packet of earlier steps is under way: the two sides are read one after the other, and the
// driver counts a packet only once it has taken it back.
func readSettled(t *testing.T, e *env, ends rig.Ends) counters {
	t.Helper()
	last := readBoth(t, e, ends)
	for range 50 {
		time.Sleep(200 * time.Millisecond)
		now := readBoth(t, e, ends)
		if now == last {
			return now
		}
		last = now
	}
	t.Fatalf("the counters did not come to rest: %+v", last)
	return counters{}
}

func readBoth(t *testing.T, e *env, ends rig.Ends) counters {
	t.Helper()
	stats, err := e.daemon.Stats()
	if err != nil {
		t.Fatal(err)
	}
	link, err := ends.VM.Link(guest.LinkArgs{Name: "eth0"})
	if err != nil {
		t.Fatal(err)
	}
	c := counters{guestTx: link.Counters["tx_packets"], guestRx: link.Counters["rx_packets"]}
	c.daemonRx, _ = stats.Sum(0)
	c.daemonTx, _ = stats.Sum(1)
	return c
}

// idleCPU is the share of one CPU that a process uses over the time, in percent.
func idleCPU(t *testing.T, pid int, over time.Duration) float64 {
	t.Helper()
	before := cpuTicks(t, pid)
	time.Sleep(over)
	const ticksPerSecond = 100 // USER_HZ
	return 100 * float64(cpuTicks(t, pid)-before) / ticksPerSecond / over.Seconds()
}

// cpuTicks reads utime and stime, fields 14 and 15 of /proc/PID/stat (proc(5)).
func cpuTicks(t *testing.T, pid int) (ticks uint64) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	for _, field := range fields[11:13] {
		var n uint64
		if _, err := fmt.Sscan(field, &n); err != nil {
			t.Fatal(err)
		}
		ticks += n
	}
	return ticks
}

// countMemfd counts mappings of memory files in /proc/PID/maps: guest memory and the page arena.
func countMemfd(maps string) int { return strings.Count(maps, "/memfd:") }
