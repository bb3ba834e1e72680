package user

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

// TestNAT07_MemoryIsFlat: rounds of everything that a guest does, malformed frames too, leave nothing behind. The packet buffers of the
// stack are counted at the end of all tests (leakedPackets).
func TestNAT07_MemoryIsFlat(t *testing.T) {
	round := mixedTraffic(t)
	for range 4 {
		round()
	}
	base := heap()
	for range 8 {
		round()
	}
	// What the runtime and the test keep by themselves: a round moves 4 MiB and more.
	if now := heap(); now > base+base/20+1<<20 {
		t.Errorf("the heap has grown from %d to %d KiB in 8 rounds", base>>10, now>>10)
	}
}

// TestLongNAT07_MemoryIsFlat: three minutes of the same. Resident memory is flat in the second half, and after a minute of silence the
// heap is what it was; in that minute nothing runs.
func TestLongNAT07_MemoryIsFlat(t *testing.T) {
	testmain.Long(t)
	const length, idle, residentSlack = 3 * time.Minute, time.Minute, 4 << 10
	round := mixedTraffic(t)
	round()
	var samples []int
	n, start := 0, time.Now()
	var base uint64
	for ; time.Since(start) < length; n++ {
		if since := time.Since(start); since > length/2 {
			if base == 0 {
				base = heap()
			}
			samples = append(samples, residentKiB(t))
		}
		round()
	}
	third, fourth := samples[:len(samples)/2], samples[len(samples)/2:]
	slices.Sort(third)
	slices.Sort(fourth)
	before, after := third[len(third)/2], fourth[len(fourth)/2]
	used := processorTime(t)
	time.Sleep(idle)
	used = processorTime(t) - used
	now := heap()
	t.Logf("%d rounds in %v; resident in the third quarter %d to %d KiB (median %d), in the fourth %d to %d (%d)",
		n, length, third[0], third[len(third)-1], before, fourth[0], fourth[len(fourth)-1], after)
	t.Logf("heap %d KiB, after a minute of silence %d KiB, which took %v of processor time", base>>10, now>>10, used)
	// The process is small: what the runtime keeps of spans and stacks varies by more than a twentieth of it.
	if after > before+before/20+residentSlack {
		t.Errorf("resident memory has grown from %d to %d KiB", before, after)
	}
	if now > base+base/20+1<<20 {
		t.Errorf("the heap has grown from %d to %d KiB", base>>10, now>>10)
	}
	if used > idle/20 {
		t.Errorf("%v of processor time in %v without traffic", used, idle)
	}
}

// residentKiB is the resident memory of the process.
func residentKiB(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		t.Fatal(err)
	}
	var size, pages int
	if _, err := fmt.Sscan(string(text), &size, &pages); err != nil {
		t.Fatal(err)
	}
	return pages * os.Getpagesize() / 1024
}

// mixedTraffic makes a network with a guest, and returns a round of everything: streams both ways, a connect that is refused, datagrams,
// pings, frames of every kind that are whole, broken or pieces of what is never finished.
func mixedTraffic(t *testing.T) (round func()) {
	t.Helper()
	p := newServed(t, Options{}, Services{NoDNS: true})
	g := newGuest(t, p)
	streams := listenTCP(t, live4+":0", echoTCP)
	datagrams, _ := listenUDP(t, net.JoinHostPort(live6, "0"))
	to := netip.MustParseAddrPort(datagrams)
	lost, data := fuzzSeeds(), make([]byte, 256<<10)
	return func() {
		var flows sync.WaitGroup
		for range 8 {
			flows.Go(func() {
				c, err := g.dial(streams)
				if err != nil {
					t.Error(err)
					return
				}
				defer c.Close()
				flows.Go(func() { _, _ = c.Write(data) })
				if n, err := io.CopyN(io.Discard, c, int64(len(data))); err != nil {
					t.Errorf("%d bytes came back, %v", n, err)
				}
			})
		}
		if c, err := g.dial(live4 + ":1"); err == nil {
			c.Close()
			t.Error("connected to a closed port")
		}
		for i := range uint16(50) {
			g.card.send(g.datagramFrame(1000+i, to, data[:25*i]), virtio.NetHdr{})
			g.card.send(g.pingFrame(netip.MustParseAddr(live4), i, i, 100, 64), virtio.NetHdr{})
			g.card.send(lost[int(i)%len(lost)], virtio.NetHdr{})
			g.card.send(g.pieces(i, to, g.datagram(i, to, data[:3000]))[0], virtio.NetHdr{})
		}
		flows.Wait()
		if !porttest.Eventually(func() bool { // flows may still begin
			p.flows.ahead.Add(1000)
			p.flows.sweep()
			return p.FlowCount() == 0
		}) {
			noFlows(t, p)
		}
	}
}

// heap is what is reachable.
func heap() uint64 {
	var m runtime.MemStats
	for range 3 { // pools are emptied by the second collection
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}
