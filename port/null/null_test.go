package null

import (
	"os"
	"testing"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("vhostd-arena"), testmain.Goroutines()))
}

func TestConformance(t *testing.T) {
	porttest.Run(t, porttest.Config{New: func(testing.TB) port.Port { return New() }})
}

func TestCountsWhatItDiscards(t *testing.T) {
	rig := porttest.NewRig(t)
	q := rig.Open(t, New(), 0)
	pkts := []packet.Packet{rig.Packet(t, porttest.Frame(60, 0), 0), rig.Packet(t, porttest.Frame(9000, 0), 0)}
	if n := q.Send(pkts); n != 2 {
		t.Fatalf("Send = %d", n)
	}
	if got := porttest.DropCount(q, "discarded"); got != 2 {
		t.Errorf("discarded = %d, want 2", got)
	}
}

func BenchmarkSend(b *testing.B) {
	rig := porttest.NewRig(b)
	q := rig.Open(b, New(), 0)
	var pkts [port.MaxBatch]packet.Packet
	for b.Loop() {
		for i := range pkts {
			page, _ := rig.Pool.Alloc()
			pkts[i].NFrag, pkts[i].Len = 1, 64
			pkts[i].Frags[0] = packet.Frag{Addr: rig.Arena.Addr(page), Len: 64, Page: page}
		}
		q.Send(pkts[:])
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/port.MaxBatch, "ns/frame")
}
