package tap

import (
	"testing"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
)

// BenchmarkSend includes what the kernel does with a frame that nobody on the host wants.
func BenchmarkSend(b *testing.B) {
	s, rig := newSpace(b), porttest.NewRig(b)
	q := rig.Open(b, s.tap(b, Options{}), 0)
	var pkts [port.MaxBatch]packet.Packet
	for b.Loop() {
		for i := range pkts {
			page, _ := rig.Pool.Alloc()
			pkts[i].Reset()
			pkts[i].Append(packet.Frag{Addr: rig.Arena.Addr(page), Len: 60, Page: page})
		}
		q.Send(pkts[:])
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/port.MaxBatch, "ns/frame")
}

// BenchmarkRecv includes what it costs the host to send the frame.
func BenchmarkRecv(b *testing.B) {
	s, rig := newSpace(b), porttest.NewRig(b)
	p := s.tap(b, Options{})
	q := rig.Open(b, p, 0)
	h := s.host(b, p.Name(), false)
	frame := porttest.Frame(60, 0)
	var pkts [port.MaxBatch]packet.Packet
	for b.Loop() {
		for range pkts {
			h.send(b, frame)
		}
		rig.Release(pkts[:q.Recv(pkts[:])])
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/port.MaxBatch, "ns/frame")
}

// BenchmarkRecvNothing is a polling worker's look at an idle tap.
func BenchmarkRecvNothing(b *testing.B) {
	s, rig := newSpace(b), porttest.NewRig(b)
	q := rig.Open(b, s.tap(b, Options{}), 0)
	var pkts [port.MaxBatch]packet.Packet
	for b.Loop() {
		q.Recv(pkts[:])
	}
}

// BenchmarkSetEnabled is how long a worker is kept from its other pairs when a guest changes its active queues.
func BenchmarkSetEnabled(b *testing.B) {
	s, rig := newSpace(b), porttest.NewRig(b)
	q := rig.Open(b, s.tap(b, Options{Queues: 2}), 0).(port.Enabler)
	for b.Loop() {
		must(b, q.SetEnabled(false))
		must(b, q.SetEnabled(true))
	}
}
