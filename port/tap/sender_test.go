package tap

import (
	"bytes"
	"testing"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
)

// TestPairsBeyondTheTapsQueuesSend: a guest may use more pairs than the tap has queues, and may send on a pair on which it
// does not receive.
func TestPairsBeyondTheTapsQueuesSend(t *testing.T) {
	for _, queues := range []int{1, 2} {
		s, rig := newSpace(t), porttest.NewRig(t)
		p := s.tap(t, Options{Queues: queues})
		h := s.host(t, p.Name(), false)
		first := rig.Open(t, p, 0)
		beyond := rig.Open(t, p, queues)
		send := func(q port.Queue, mark byte) {
			t.Helper()
			frame := porttest.Frame(60, mark)
			pkts := []packet.Packet{rig.Packet(t, frame, len(frame))}
			if n := q.Send(pkts); n != 1 {
				t.Fatalf("Send took %d packets, want 1", n)
			}
			if got := h.recv(t); !bytes.Equal(got, frame) {
				t.Errorf("%d queues: the host got % x, want % x", queues, got, frame)
			}
		}
		send(beyond, 1)
		must(t, beyond.(port.Enabler).SetEnabled(true))
		var pkts [1]packet.Packet
		if beyond.ReadyFD() != -1 || beyond.Arm() || beyond.Recv(pkts[:]) != 0 {
			t.Error("a queue that only sends says that it has frames")
		}
		must(t, first.(port.Enabler).SetEnabled(false))
		send(first, 2)
		send(beyond, 3)
	}
}
