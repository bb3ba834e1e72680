package user

import (
	"io"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"testing"

	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

// TestNAT07_MemoryIsFlat: rounds of everything that a guest does, malformed frames too, leave nothing behind. The packet buffers of the
// stack are counted at the end of all tests (leakedPackets).
func TestNAT07_MemoryIsFlat(t *testing.T) {
	p := newServed(t, Options{}, Services{NoDNS: true})
	g := newGuest(t, p)
	streams := listenTCP(t, live4+":0", echoTCP)
	datagrams, _ := listenUDP(t, net.JoinHostPort(live6, "0"))
	to := netip.MustParseAddrPort(datagrams)
	lost, data := fuzzSeeds(), make([]byte, 256<<10)
	round := func() {
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

// heap is what is reachable.
func heap() uint64 {
	var m runtime.MemStats
	for range 3 { // pools are emptied by the second collection
		runtime.GC()
	}
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}
