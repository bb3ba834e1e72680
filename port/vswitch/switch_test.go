package vswitch

import (
	"bytes"
	"fmt"
	"net"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

func TestConformance(t *testing.T) {
	porttest.Run(t, porttest.Config{
		New: func(t testing.TB) port.Port {
			s, err := New(Options{Name: "lan"})
			if err != nil {
				t.Fatal(err)
			}
			p, err := s.NewPort(PortOptions{})
			if err != nil {
				t.Fatal(err)
			}
			return p
		},
		Inject: func(t testing.TB, p port.Port, frame []byte) {
			s := p.(*Port).sw
			peer, err := s.NewPort(PortOptions{})
			if err != nil {
				t.Fatal(err)
			}
			defer peer.Close()
			rig := &porttest.Rig{Arena: s.memory()}
			q, err := peer.OpenQueue(0, rig.Resources())
			if err != nil {
				t.Fatal(err)
			}
			q.Send([]packet.Packet{rig.Packet(t, frame, 0)})
		},
	})
}

func TestValidate(t *testing.T) {
	for d, good := range map[time.Duration]bool{0: true, MinAgeing: true, MaxAgeing: true, time.Millisecond: false, -1: false, MaxAgeing + 1: false} {
		if _, err := New(Options{Ageing: d}); (err == nil) != good {
			t.Errorf("ageing %v: %v", d, err)
		}
	}
	for _, c := range []struct {
		opts PortOptions
		good bool
	}{
		{PortOptions{}, true}, {PortOptions{MAC: mac(1), Backlog: MinBacklog}, true}, {PortOptions{Backlog: MaxBacklog}, true},
		{PortOptions{MAC: broadcast}, false}, {PortOptions{MAC: make(net.HardwareAddr, 6)}, false}, {PortOptions{MAC: make(net.HardwareAddr, 8)}, false},
		{PortOptions{Backlog: MinBacklog - 1}, false}, {PortOptions{Backlog: MaxBacklog + 1}, false}, {PortOptions{Backlog: -1}, false},
	} {
		if err := c.opts.Validate(); (err == nil) != c.good {
			t.Errorf("%+v: %v", c.opts, err)
		}
	}
}

// TestSW01LearntUnicast: a frame for a known station reaches its port alone, also after the guest behind it disconnected and after its
// port was removed; once it aged out, it is looked for everywhere again.
func TestSW01LearntUnicast(t *testing.T) {
	g := newSegment(t, Options{})
	a, b, c := g.guest(t, 1, PortOptions{}), g.guest(t, 1, PortOptions{}), g.guest(t, 1, PortOptions{})
	to := frame(mac(2), mac(1))
	a.send(to)
	b.wants("unknown station, B", to)
	c.wants("unknown station, C", to)
	back := frame(mac(1), mac(2))
	b.send(back)
	a.wants("answer", back)
	for range 3 {
		a.send(to, to)
	}
	b.wants("known station", to, to, to, to, to, to)
	b.disconnect()
	a.send(to)
	if n := a.lost("station_down"); n != 1 {
		t.Errorf("%d frames lost because the station is gone, want 1", n)
	}
	b.connect(1)
	a.send(to)
	b.wants("connected again", to)
	b.disconnect()
	if err := b.Port.Close(); err != nil {
		t.Fatal(err)
	}
	other := g.guest(t, 1, PortOptions{}) // gets the index of the port that was removed
	a.send(to)
	other.wants("in the removed port's place")
	c.wants("known station, C", [][]byte{}...)
	g.wait(DefaultAgeing)
	a.send(to)
	c.wants("aged out", to)
	other.wants("aged out", to)
	a.wants("own frames")
}

// TestSW01PinnedAddresses: behind a port with a pinned address nobody is looked for, and its own frames arrive before it ever sent.
func TestSW01PinnedAddresses(t *testing.T) {
	g := newSegment(t, Options{})
	a, b, c := g.guest(t, 1, PortOptions{MAC: mac(1)}), g.guest(t, 1, PortOptions{MAC: mac(2)}), g.guest(t, 1, PortOptions{MAC: mac(3)})
	a.send(frame(mac(2), mac(1)), frame(mac(9), mac(1)))
	b.wants("pinned", frame(mac(2), mac(1)))
	g.wait(2 * DefaultAgeing)
	a.send(frame(mac(2), mac(1)))
	b.wants("pinned addresses do not age", frame(mac(2), mac(1)))
	b.disconnect()
	a.send(frame(mac(2), mac(1)))
	_ = b.Port.Close()
	a.send(frame(mac(2), mac(1)))
	c.wants("the other guest")
}

// TestTakeOver: nobody takes a pinned address, whatever it sends and whoever had it before.
func TestTakeOver(t *testing.T) {
	g := newSegment(t, Options{})
	evil, a := g.guest(t, 1, PortOptions{}), g.guest(t, 1, PortOptions{MAC: mac(1)})
	evil.send(frame(mac(1), mac(5)))
	evil.send(frame(mac(7), mac(2))) // is known behind evil before it is pinned to b
	a.wants("to a", frame(mac(1), mac(5)))
	b := g.guest(t, 1, PortOptions{MAC: mac(2)})
	evil.send(frame(mac(1), mac(2)), frame(broadcast, mac(1)), frame(broadcast, mac(2)))
	if n := evil.lost("stolen_source"); n != 3 {
		t.Errorf("%d frames from stolen addresses lost, want 3", n)
	}
	a.send(frame(mac(2), mac(1)))
	b.wants("for b", frame(mac(2), mac(1)))
	evil.wants("nothing for evil")
	a.send(frame(mac(2), mac(6)), frame(broadcast, mac(2)))
	if n := a.lost("foreign_source"); n != 2 {
		t.Errorf("%d frames from foreign addresses lost, want 2", n)
	}
	if err := evil.Announce([6]byte(mac(2))); err == nil {
		t.Error("a pinned address can be announced elsewhere")
	}
	if err := b.Announce([6]byte(mac(3))); err == nil {
		t.Error("a port with a pinned address can announce another one")
	}
	if _, err := g.NewPort(PortOptions{MAC: mac(2)}); err == nil {
		t.Error("an address can be pinned twice")
	}
}

// TestSW03Groups: broadcasts and multicasts reach every other guest once, whatever its number of queues, and never the sender.
func TestSW03Groups(t *testing.T) {
	g := newSegment(t, Options{})
	a, b, c := g.guest(t, 4, PortOptions{}), g.guest(t, 4, PortOptions{}), g.guest(t, 1, PortOptions{MAC: mac(3)})
	for i, dst := range []net.HardwareAddr{broadcast, multicast, {1, 0, 0x5e, 0, 0, 1}} {
		f := udp(dst, mac(1), i)
		a.send(f)
		a.wants("sender")
		b.wants("four queues", f)
		c.wants("pinned", f)
	}
	f := frame(mac(1), mac(1))
	a.send(f)
	a.wants("to itself")
	b.wants("to another's self")
	if n := a.lost("same_port"); n != 1 {
		t.Errorf("%d frames for the sender's own port lost, want 1", n)
	}
}

// TestAnnounce: the announcement arrives and moves the station.
func TestAnnounce(t *testing.T) {
	g := newSegment(t, Options{})
	a, b, c := g.guest(t, 1, PortOptions{}), g.guest(t, 1, PortOptions{}), g.guest(t, 1, PortOptions{})
	b.send(frame(mac(1), mac(9)))
	a.received()
	c.received()
	if err := c.Announce([6]byte(mac(9))); err != nil {
		t.Fatal(err)
	}
	want := port.RARP([6]byte(mac(9)))
	a.wants("announcement", want[:])
	b.wants("announcement", want[:])
	a.send(frame(mac(9), mac(1)))
	c.wants("moved station", frame(mac(9), mac(1)))
	b.wants("former place")
}

// TestFramesPassUnchanged: tags, marks and fragments arrive as they were sent, at several receivers.
func TestFramesPassUnchanged(t *testing.T) {
	g := newSegment(t, Options{})
	a, b, c := g.guest(t, 1, PortOptions{}), g.guest(t, 1, PortOptions{}), g.guest(t, 1, PortOptions{})
	for _, f := range [][]byte{
		tagged(udp(broadcast, mac(1), 1), etherTypeVLAN, 7), tagged(tagged(udp(broadcast, mac(1), 1), etherTypeVLAN, 7), etherTypeQinQ, 8),
		append(udp(broadcast, mac(1), 1), make([]byte, 65000)...), tagged(udp(broadcast, mac(1), 1), 0x1234, 7),
	} {
		hdr := virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, GSOType: virtio.GSOTCPv4 | virtio.GSOECN, HdrLen: 54, GSOSize: 1448, CsumStart: 34, CsumOffset: 16}
		pkts := []packet.Packet{g.rig.Packet(t, f, 0)}
		pkts[0].Hdr = hdr
		a.queues[0].Send(pkts)
		var got [2]packet.Packet
		if b.queues[0].Recv(got[:1]) != 1 || c.queues[0].Recv(got[1:]) != 1 {
			t.Fatal("not received")
		}
		for i := range got {
			if got[i].Hdr != hdr || !bytes.Equal(porttest.Bytes(&got[i]), f) || !got[i].LenCheck() {
				t.Errorf("%d bytes: receiver %d got something else", len(f), i)
			}
			if got[i].Frags[0].Addr != got[0].Frags[0].Addr {
				t.Error("the pages are not shared")
			}
		}
		g.rig.Release(got[:])
	}
}

// TestDroppedFrames: what must not cross the switch, with its reason.
func TestDroppedFrames(t *testing.T) {
	g := newSegment(t, Options{})
	a, b := g.guest(t, 1, PortOptions{}), g.guest(t, 1, PortOptions{})
	pause := net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 1}
	for why, f := range map[string][]byte{
		"too_short": frame(broadcast, mac(1))[:13], "link_local": frame(pause, mac(1)),
		"bad_source": frame(broadcast, multicast),
	} {
		a.send(f)
		if n := a.lost(why); n != 1 {
			t.Errorf("%s: %d counted, want 1", why, n)
		}
	}
	a.send(frame(broadcast, make(net.HardwareAddr, 6)))
	b.wants("bad frames")
	b.disconnect()
	a.send(frame(broadcast, mac(1)))
	if n := a.lost("no_receiver"); n != 1 {
		t.Errorf("%d frames without a receiver counted, want 1", n)
	}
}

// TestMQ03EnabledQueues: all flows arrive while queues are disabled and enabled, and one flow stays on one queue.
func TestMQ03EnabledQueues(t *testing.T) {
	const flows = 600
	g := newSegment(t, Options{})
	g.budget.SetLimit(1 << 40) // far more frames wait than a small arena allows
	a, b := g.guest(t, 1, PortOptions{}), g.guest(t, 4, PortOptions{Backlog: 2048})
	b.send(frame(broadcast, mac(2)))
	a.received()
	for enabled := range 1 << 4 {
		serving := 0
		for i, q := range b.queues {
			on := enabled>>i&1 != 0
			if err := q.(port.Enabler).SetEnabled(on); err != nil {
				t.Fatal(err)
			}
			if on {
				serving++
			}
		}
		if serving == 0 {
			continue
		}
		for range 2 {
			for flow := range flows {
				a.send(udp(mac(2), mac(1), flow))
			}
		}
		total := 0
		for i := range b.queues {
			seen := map[string]int{}
			for _, f := range b.receivedOn(i) {
				seen[string(f)]++
			}
			for _, n := range seen {
				if n != 2 {
					t.Fatalf("a flow is on several queues: %d of 2 frames", n)
				}
			}
			if on := enabled>>i&1 != 0; on != (len(seen) > flows/serving/2) {
				t.Errorf("queues %04b: queue %d got %d flows", enabled, i, len(seen))
			}
			total += len(seen)
		}
		if total != flows {
			t.Errorf("queues %04b: %d flows, want %d", enabled, total, flows)
		}
	}
}

// TestDisabledQueueIsEmptied: what waits when a queue is disabled is counted and gives its memory back.
func TestDisabledQueueIsEmptied(t *testing.T) {
	g := newSegment(t, Options{})
	a, b := g.guest(t, 1, PortOptions{}), g.guest(t, 1, PortOptions{})
	for range 20 {
		a.send(frame(broadcast, mac(1)))
	}
	if err := b.queues[0].(port.Enabler).SetEnabled(false); err != nil {
		t.Fatal(err)
	}
	if n := b.lost("disabled"); n != 20 || g.budget.Held() != 0 || g.rig.Arena.InUse() != 0 {
		t.Errorf("%d frames lost, %d bytes and %d pages held", n, g.budget.Held(), g.rig.Arena.InUse())
	}
	late := []packet.Packet{g.rig.Packet(t, frame(broadcast, mac(1)), 0)} // of a sender that saw it enabled
	b.queues[0].(*queue).accept(late, a.Port, 0)
	if err := b.queues[0].(port.Enabler).SetEnabled(true); err != nil {
		t.Fatal(err)
	}
	if b.wants("enabled again"); b.lost("disabled") != 21 {
		t.Error("a frame from before is delivered")
	}
}

// TestPERF03SlowGuest: a guest that does not read loses its own frames, bounded in number and memory, and delays nobody.
func TestPERF03SlowGuest(t *testing.T) {
	g := newSegment(t, Options{})
	a, b, slow := g.guest(t, 1, PortOptions{}), g.guest(t, 1, PortOptions{}), g.guest(t, 2, PortOptions{Backlog: 128})
	slow.send(frame(broadcast, mac(3)))
	b.send(frame(broadcast, mac(2)))
	a.received()
	b.received()
	slow.received()
	for i := range 1000 {
		a.send(frame(mac(3), mac(1)), frame(mac(2), mac(1)), udp(broadcast, mac(1), i))
		b.wants("the other guest", frame(mac(2), mac(1)), udp(broadcast, mac(1), i))
	}
	lost := slow.lost("backlog_full") + slow.lost("memory_full")
	if held := len(slow.received()); held > 256 || uint64(held)+lost != 2000 {
		t.Errorf("%d frames waited and %d were lost, want 2000 together and 256 waiting at most", held, lost)
	}
}

// TestBudget: guests that do not read, all of them together, leave memory for those that do.
func TestBudget(t *testing.T) {
	g := newSegment(t, Options{})
	a, b := g.guest(t, 1, PortOptions{}), g.guest(t, 1, PortOptions{MAC: mac(2)})
	large := append(frame(broadcast, mac(1)), make([]byte, 60000)...)
	for range 6 {
		g.guest(t, 4, PortOptions{})
	}
	for range 60 {
		a.send(large)
		b.wants("the guest that reads", large)
	}
	if held, limit := g.budget.Held(), g.budget.Limit(); held > limit || limit != int64(g.rig.Arena.Bytes()/4) {
		t.Errorf("%d bytes held, %d allowed", held, limit)
	}
}

// TestFloodLimit: copies of one sender are bounded in a millisecond.
func TestFloodLimit(t *testing.T) {
	g := newSegment(t, Options{})
	a := g.guest(t, 1, PortOptions{})
	g.wait(time.Second)
	for range 20 {
		g.guest(t, 1, PortOptions{})
	}
	for range 300 {
		a.send(frame(broadcast, mac(1)))
	}
	const want = 300 - floodCopies/20
	if n := a.lost("flood_limit"); n != want {
		t.Errorf("%d frames over the limit, want %d", n, want)
	}
	g.wait(time.Millisecond)
	a.send(frame(broadcast, mac(1)))
	if n := a.lost("flood_limit"); n != want {
		t.Error("the limit lasts")
	}
}

// wire stands for the network behind an uplink.
type wire struct {
	port.Port
	up bool
}

func (w wire) Kind() string        { return "wire" }
func (w wire) MTU() int            { return 9000 }
func (w wire) Status() port.Status { return port.Status{Up: w.up, Detail: "cable"} }

// TestUplink: frames for stations that left go there and nowhere else, its state is the switch's.
func TestUplink(t *testing.T) {
	g := newSegment(t, Options{Name: "lan"})
	a, b := g.guest(t, 1, PortOptions{}), g.guest(t, 1, PortOptions{})
	if a.MTU() != 0 || !a.Status().Up {
		t.Errorf("without an uplink: MTU %d, %+v", a.MTU(), a.Status())
	}
	w := &wire{up: true}
	up, c := g.guest(t, 2, PortOptions{Uplink: w}), g.guest(t, 1, PortOptions{})
	b.send(frame(mac(1), mac(2)))
	a.received()
	up.received()
	c.received()
	b.disconnect()
	a.send(frame(mac(2), mac(1)))
	up.wants("station that left", frame(mac(2), mac(1)))
	c.wants("other guest")
	if err := b.Port.Close(); err != nil {
		t.Fatal(err)
	}
	a.send(frame(mac(2), mac(1)))
	up.wants("station of a removed port", frame(mac(2), mac(1)))
	up.send(frame(mac(2), mac(50)))
	up.wants("its own frames")
	up.send(frame(mac(1), mac(2))) // it moved
	a.wants("from outside", frame(mac(1), mac(2)))
	a.send(frame(mac(2), mac(1)))
	up.wants("moved station", frame(mac(2), mac(1)))
	c.wants("other guest")
	if s := a.Status(); !s.Up || s.Detail != "switch lan with 3 ports, uplink wire: cable" || a.MTU() != 9000 {
		t.Errorf("status %+v, MTU %d", s, a.MTU())
	}
	w.up = false
	if a.Status().Up {
		t.Error("up although the uplink is down")
	}
	if _, err := g.NewPort(PortOptions{Uplink: w}); err == nil {
		t.Error("two uplinks")
	}
}

// TestArenas: frames of two arenas cannot meet.
func TestArenas(t *testing.T) {
	g, other := newSegment(t, Options{}), porttest.NewRig(t)
	a := g.guest(t, 1, PortOptions{})
	if _, err := a.OpenQueue(1, other.Resources()); err == nil {
		t.Error("a queue with another arena was opened")
	}
}

// TestWakesOnceASleep: an edge for each sleep that frames end, none for a receiver that is awake.
func TestWakesOnceASleep(t *testing.T) {
	g := newSegment(t, Options{})
	a, b := g.guest(t, 1, PortOptions{}), g.guest(t, 1, PortOptions{})
	q := b.queues[0]
	counter := func() uint64 {
		var n [8]byte
		if _, err := unix.Read(q.ReadyFD(), n[:]); err != nil {
			return 0
		}
		return uint64(n[0])
	}
	for round := range 3 {
		a.send(frame(broadcast, mac(1)))
		if n := counter(); n != 0 {
			t.Errorf("round %d: woken %d times while awake", round, n)
		}
		if !q.Arm() {
			t.Error("may sleep although a frame waits")
		}
		b.received()
		if q.Arm() {
			t.Error("may not sleep although nothing waits")
		}
		a.send(frame(broadcast, mac(1)), frame(broadcast, mac(1)), frame(broadcast, mac(1)))
		if n := counter(); n != 1 {
			t.Errorf("round %d: woken %d times from one sleep", round, n)
		}
		b.received()
	}
}

func TestMaxPorts(t *testing.T) {
	s, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	var ports []*Port
	for range MaxPorts {
		p := newPort(s, PortOptions{})
		if err := s.place(p); err != nil {
			t.Fatal(err)
		}
		s.ports = append(s.ports, p)
	}
	if err := s.place(newPort(s, PortOptions{})); err == nil {
		t.Error("one port too many")
	}
	s.publish()
	ports = slices.Clone(s.ports)
	for _, p := range ports {
		if p.sw.view.Load().at(p.index) != p {
			t.Fatal("ports share an index")
		}
	}
}

func TestFlowOf(t *testing.T) {
	flow := func(b []byte) string { return fmt.Sprint(flowOf(b[:min(len(b), maxHeader)])) }
	base := udp(mac(1), mac(2), 7)
	if flow(base) == flow(udp(mac(1), mac(2), 8)) {
		t.Error("ports do not count")
	}
	if flow(base) != flow(tagged(base, etherTypeVLAN, 5)) || flow(base) != flow(tagged(tagged(base, etherTypeVLAN, 5), etherTypeQinQ, 6)) {
		t.Error("a tag moves the flow")
	}
	first, later := udp(mac(1), mac(2), 7), udp(mac(1), mac(2), 9)
	first[20] |= 0x20 // more fragments
	later[21] = 100   // offset
	if flow(first) != flow(later) {
		t.Error("the fragments of a datagram part")
	}
	for n := virtio.EthernetHdrLen; n <= len(base); n++ {
		flow(base[:n])
		flow(tagged(base, etherTypeVLAN, 5)[:n])
	}
}
