package vswitch

import (
	"net"
	"testing"
)

// TestFloodLeavesRoom: guests that fill another one's inbox, with groups, frames for unknown stations or frames for it alone, and on all
// their queues, leave room for the frames of others.
func TestFloodLeavesRoom(t *testing.T) {
	for name, dst := range map[string]net.HardwareAddr{"groups": broadcast, "unknown stations": mac(77), "unicast": mac(2)} {
		t.Run(name, func(t *testing.T) {
			g := newSegment(t, Options{})
			g.budget.SetLimit(1 << 40) // the arena of the test is small
			a, b := g.guest(t, 1, PortOptions{}), g.guest(t, 1, PortOptions{Backlog: 512})
			floods := []*guest{g.guest(t, 4, PortOptions{}), g.guest(t, 1, PortOptions{})}
			b.send(frame(broadcast, mac(2)))
			for i, flood := range floods {
				for range 2000 {
					for j := range flood.queues {
						flood.queues[j].Send(flood.packets(frame(dst, mac(10+i))))
						g.now++ // or else the limit on copies holds it up
					}
				}
			}
			honest := frame(mac(2), mac(1))
			for range 8 {
				a.send(honest)
			}
			arrived := 0
			got := b.received()
			for _, f := range got {
				if string(f) == string(honest) {
					arrived++
				}
			}
			if arrived != 8 {
				t.Errorf("%d of 8 frames arrived, among %d", arrived, len(got))
			}
			if own := 512 * 3 / 4; len(got) < own || len(got) > 512-16 {
				t.Errorf("%d frames waited; one guest may fill %d places of 512", len(got), own)
			}
		})
	}
}

// TestHeld: a sender is told how many bytes wait for a reader on another worker, and nothing of those that its own worker reads.
func TestHeld(t *testing.T) {
	g := newSegment(t, Options{})
	g.budget.SetLimit(1 << 40)
	a, b := g.guest(t, 1, PortOptions{}), g.guest(t, 1, PortOptions{Backlog: 512})
	b.send(frame(broadcast, mac(2)))
	a.received()
	from, to := a.queues[0].(*queue), b.queues[0].(*queue)
	f := frame(mac(2), mac(1))
	for i := range 10 {
		a.send(f)
		if got := from.Held(); got != i*len(f) {
			t.Fatalf("frame %d: %d bytes held, want %d", i, got, i*len(f))
		}
	}
	a.send(frame(mac(99), mac(1)))
	if from.Held() != 0 {
		t.Errorf("%d bytes held after a frame for nobody", from.Held())
	}
	to.sender.owner = from.sender.owner
	a.send(f)
	if from.Held() != 0 {
		t.Errorf("%d bytes held for the sender's own worker", from.Held())
	}
}
