package tap

import (
	"bytes"
	"testing"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
)

func TestMQ03FramesOnlyReachServedPairs(t *testing.T) {
	const flows, queues = 600, 4
	s, rig := newSpace(t), porttest.NewRig(t)
	p := s.tap(t, Options{Queues: queues})
	h := s.host(t, p.Name(), false)
	q := make([]port.Queue, queues)
	q[0] = rig.Open(t, p, 0)

	// check floods and counts what each served queue gets.
	check := func(when string, served ...int) {
		t.Helper()
		for flow := range flows {
			h.send(t, udpFrame(flow))
		}
		var pkts [port.MaxBatch]packet.Packet
		counts, total := make([]int, queues), 0
		porttest.Eventually(func() bool {
			for _, i := range served {
				n := q[i].Recv(pkts[:])
				rig.Release(pkts[:n])
				counts[i] += n
				total += n
			}
			return total >= flows
		})
		if total != flows {
			t.Errorf("%s: %d of %d flows arrived: %v", when, total, flows, counts)
		}
		for _, i := range served {
			if counts[i] == 0 {
				t.Errorf("%s: queue %d got nothing: %v", when, i, counts)
			}
		}
	}
	check("only pair 0 is open", 0)
	for i := 1; i < queues; i++ {
		q[i] = rig.Open(t, p, i)
	}
	check("all pairs are open", 0, 1, 2, 3)
	disable := func(i int, on bool) { must(t, q[i].(port.Enabler).SetEnabled(on)) }
	disable(1, false)
	check("pair 1 is disabled", 0, 2, 3)
	disable(0, false)
	check("pairs 0 and 1 are disabled", 2, 3)
	var pkts [1]packet.Packet
	if q[0].Recv(pkts[:]) != 0 || q[0].Arm() {
		t.Error("a disabled queue has frames")
	}
	disable(0, true)
	disable(1, true)
	disable(1, true)
	must(t, q[3].Close())
	check("pair 3 is closed", 0, 1, 2)
	q[3] = rig.Open(t, p, 3)
	check("pair 3 is open again", 0, 1, 2, 3)
}

// TestMQ03SingleQueue: a tap with one queue cannot steer; what came while it was disabled or closed is old and goes.
func TestMQ03SingleQueue(t *testing.T) {
	b := newBench(t, Options{})
	e := b.q.(port.Enabler)
	must(t, e.SetEnabled(false))
	for i := range 20 {
		b.h.send(t, porttest.Frame(60, byte(i)))
	}
	var pkts [port.MaxBatch]packet.Packet
	if b.q.Recv(pkts[:]) != 0 || b.q.Arm() {
		t.Error("a disabled queue has frames")
	}
	must(t, e.SetEnabled(true))
	fresh := porttest.Frame(60, 99)
	b.h.send(t, fresh)
	if got := b.rig.Recv(t, b.q, 1); len(got) != 1 || !bytes.Equal(got[0], fresh) {
		t.Error("old frames came after enabling")
	}
	must(t, b.q.Close())
	b.h.send(t, porttest.Frame(60, 1))
	b.q = b.rig.Open(t, b.p, 0)
	b.h.send(t, fresh)
	if got := b.rig.Recv(t, b.q, 1); len(got) != 1 || !bytes.Equal(got[0], fresh) {
		t.Error("old frames came after opening again")
	}
}
