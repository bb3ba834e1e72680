// Package porttest checks that a port keeps the contract of package port, whatever network is behind it.
package porttest

import (
	"errors"
	"regexp"
	"testing"
	"time"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
)

// Config describes the port under test.
type Config struct {
	// New makes a port that serves at least two queue pairs. The suite closes it.
	New func(t testing.TB) port.Port
	// Generates says that Recv has frames although nothing was sent.
	Generates bool
	// Returns, if set, is what comes back through Recv for a frame that was sent.
	Returns func(frame []byte) []byte
	// Inject, if set, makes frame arrive from the network at queue pair 0.
	Inject func(t testing.TB, p port.Port, frame []byte)
	// MaxInject is the longest frame that Inject can make arrive; 0 means virtio.MaxFrame.
	MaxInject int
}

// sizes of frames that every port must carry or drop and count.
var sizes = []int{0, 1, 13, 14, 15, 59, 60, 64, 1514, 4096, 4097, 9018, virtio.MaxFrame}

// Run runs the suite.
func Run(t *testing.T, cfg Config) {
	for _, c := range []struct {
		name string
		test func(*testing.T, *subject)
	}{
		{"identity", testIdentity},
		{"configure", testConfigure},
		{"opening", testOpening},
		{"send", testSend},
		{"send in pieces", testPieces},
		{"back-pressure", testBackPressure},
		{"receive", testReceive},
		{"arm", testArm},
		{"inject", testInject},
		{"close with frames queued", testCloseQueued},
		{"port closes its queues", testPortCloses},
		{"drops", testDrops},
		{"allocations", testAllocations},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &subject{Config: cfg, rig: NewRig(t)}
			s.port = cfg.New(t)
			t.Cleanup(func() {
				if err := s.port.Close(); err != nil {
					t.Errorf("close port: %v", err)
				}
			})
			c.test(t, s)
		})
	}
}

// subject is a port with its surroundings.
type subject struct {
	Config
	rig  *Rig
	port port.Port
}

func (s *subject) open(t *testing.T) port.Queue {
	t.Helper()
	return s.rig.Open(t, s.port, 0)
}

func testIdentity(t *testing.T, s *subject) {
	if !regexp.MustCompile(`^[a-z]+$`).MatchString(s.port.Kind()) {
		t.Errorf("Kind() = %q, want lower-case letters", s.port.Kind())
	}
	if s.port.MTU() < 0 {
		t.Errorf("MTU() = %d", s.port.MTU())
	}
	if st := s.port.Status(); !st.Up {
		t.Errorf("a new port is not up: %+v", st)
	}
	if err := s.port.Announce([6]byte{2, 0, 0, 0, 0, 1}); err != nil {
		t.Errorf("Announce: %v", err)
	}
}

// network are the features that a port may offer.
const network = virtio.FNetCSum | virtio.FNetGuestCSum | virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6 | virtio.FNetGuestECN |
	virtio.FNetGuestUFO | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN | virtio.FNetHostUFO

func testConfigure(t *testing.T, s *subject) {
	f := s.port.Features()
	if extra := f &^ network; extra != 0 {
		t.Errorf("the port offers %v, which is not the network's business", extra)
	}
	device := virtio.FVersion1 | virtio.FNetMrgRxBuf
	for _, acked := range []virtio.Features{f | device, 0, device, f & virtio.FNetGuestCSum, f &^ virtio.FNetGuestTSO4, 0} {
		if err := s.port.Configure(acked); err != nil {
			t.Errorf("Configure(%v): %v", acked, err)
		}
	}
	for bit := virtio.Features(1); bit != 0 && bit <= network; bit <<= 1 {
		if network.Has(bit) && !f.Has(bit) && s.port.Configure(bit) == nil {
			t.Errorf("Configure accepts %v, which was not offered", bit)
		}
	}
}

func testOpening(t *testing.T, s *subject) {
	res := s.rig.Resources()
	for _, i := range []int{-1, port.MaxQueues} {
		if _, err := s.port.OpenQueue(i, res); err == nil {
			t.Errorf("OpenQueue(%d) succeeded", i)
		}
	}
	q := s.open(t)
	other := s.rig.Open(t, s.port, 1)
	if _, err := s.port.OpenQueue(0, res); err == nil {
		t.Error("a pair could be opened twice")
	}
	for range 2 {
		if err := q.Close(); err != nil {
			t.Errorf("close queue: %v", err)
		}
	}
	q.Drops(func(string, uint64) {})
	s.open(t)
	if other.Send(nil) != 0 || other.Recv(nil) != 0 {
		t.Error("empty batches moved frames")
	}
}

// testCloseQueued closes a queue that holds frames; the rig sees whether they were released.
func testCloseQueued(t *testing.T, s *subject) {
	q := s.open(t)
	q.Send(s.batch(t, Frame(1514, 5)))
	var pkts [1]packet.Packet
	n := q.Recv(pkts[:])
	if err := q.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
	s.rig.Release(pkts[:n]) // a packet may outlive the queue it came from
}

func testPortCloses(t *testing.T, s *subject) {
	q := s.open(t)
	pkts := s.batch(t, Frame(60, 6))
	s.rig.Release(pkts[q.Send(pkts):])
	start := time.Now()
	for range 2 {
		if err := s.port.Close(); err != nil {
			t.Fatalf("close port: %v", err)
		}
	}
	if took := time.Since(start); took > time.Second {
		t.Errorf("Close took %v", took)
	}
	if _, err := s.port.OpenQueue(1, s.rig.Resources()); !errors.Is(err, port.ErrClosed) {
		t.Errorf("OpenQueue on a closed port: %v, want ErrClosed", err)
	}
	s.port.Status()
}

// testDrops reads the counters while the owner works, for the race detector.
func testDrops(t *testing.T, s *subject) {
	q := s.open(t)
	names := func() (all []string) {
		q.Drops(func(reason string, _ uint64) { all = append(all, reason) })
		return all
	}
	label := regexp.MustCompile(`^[a-z][a-z0-9_]*$`)
	for _, reason := range names() {
		if !label.MatchString(reason) {
			t.Errorf("reason %q is no metric label", reason)
		}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range 100 {
			DropCount(q, "")
		}
	}()
	for range 20 {
		q.Send([]packet.Packet{s.rig.Packet(t, Frame(13, 7), 0)})
	}
	<-done
	if got := DropCount(q, ""); got != 20 {
		t.Errorf("20 frames too short for Ethernet, %d counted", got)
	}
}

// testAllocations pins the steady state of a worker's turn to zero allocations.
func testAllocations(t *testing.T, s *subject) {
	q := s.open(t)
	var out, in [port.MaxBatch]packet.Packet
	allocations := testing.AllocsPerRun(50, func() {
		for i := range out {
			page, ok := s.rig.Pool.Alloc()
			if !ok {
				return
			}
			out[i].Reset()
			out[i].Append(packet.Frag{Addr: s.rig.Arena.Addr(page), Len: 60, Page: page})
		}
		n := q.Send(out[:])
		s.rig.Release(out[n:])
		n = q.Recv(in[:])
		s.rig.Release(in[:n])
		q.Arm()
	})
	if allocations != 0 {
		t.Errorf("%v allocations a batch", allocations)
	}
}
