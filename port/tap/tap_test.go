package tap

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

func TestConformance(t *testing.T) {
	for _, queues := range []int{2, 4} {
		s := newSpace(t)
		porttest.Run(t, porttest.Config{
			New: func(t testing.TB) port.Port { return s.tap(t, Options{Queues: queues, MTU: MaxMTU}) },
			Inject: func(t testing.TB, p port.Port, frame []byte) {
				s.host(t, p.(*Port).Name(), false).send(t, frame)
			},
			MaxInject: MaxMTU + virtio.EthernetHdrLen,
		})
	}
}

func TestValidate(t *testing.T) {
	for _, tc := range []struct {
		opts   Options
		option string // that is wrong
	}{
		{Options{}, ""},
		{Options{Name: "tap0", Queues: MaxQueues, Bridge: "br0", MTU: MaxMTU, Owner: "root", Group: "0"}, ""},
		{Options{Name: "guest%d", MTU: MinMTU}, ""},
		{Options{Name: "a-name-of-16-chr"}, "name"},
		{Options{Name: "a/b"}, "name"},
		{Options{Name: "a b"}, "name"},
		{Options{Name: "a%s"}, "name"},
		{Options{Name: "a%d%d"}, "name"},
		{Options{Name: ".."}, "name"},
		{Options{Name: "a:1"}, "name"},
		{Options{Bridge: "br%d"}, "bridge"},
		{Options{Bridge: strings.Repeat("b", 16)}, "bridge"},
		{Options{Queues: -1}, "queues"},
		{Options{Queues: MaxQueues + 1}, "queues"},
		{Options{MTU: MinMTU - 1}, "mtu"},
		{Options{MTU: MaxMTU + 1}, "mtu"},
		{Options{Owner: "no such user"}, "owner"},
		{Options{Group: "-1"}, "group"},
	} {
		err := tc.opts.Validate()
		var wrong *port.OptionError
		if tc.option == "" && err != nil || tc.option != "" && (!errors.As(err, &wrong) || wrong.Option != tc.option) {
			t.Errorf("%+v: error %v, want one about %q", tc.opts, err, tc.option)
		}
	}
}

func TestTraffic(t *testing.T) {
	s, rig := newSpace(t), porttest.NewRig(t)
	p := s.tap(t, Options{MTU: 9000})
	q := rig.Open(t, p, 0)
	h := s.host(t, p.Name(), false)
	for _, size := range []int{14, 60, 1514, 9014} {
		frame := porttest.Frame(size, 1)
		if q.Send([]packet.Packet{rig.Packet(t, frame, 0)}); !bytes.Equal(h.recv(t), frame) {
			t.Errorf("%d bytes did not reach the host", size)
		}
		h.send(t, frame)
		if got := rig.Recv(t, q, 1); len(got) != 1 || !bytes.Equal(got[0], frame) {
			t.Errorf("%d bytes did not reach the guest", size)
		}
	}
	if n := porttest.DropCount(q, ""); n != 0 {
		t.Errorf("%d frames were dropped", n)
	}
}

// TestTAP03JumboAndVLAN receives the longest frames of an interface with a large MTU.
func TestTAP03JumboAndVLAN(t *testing.T) {
	s, rig := newSpace(t), porttest.NewRig(t)
	for _, mtu := range []int{9000, MaxMTU} {
		p := s.tap(t, Options{MTU: mtu})
		q := rig.Open(t, p, 0)
		h := s.host(t, p.Name(), false)
		for _, tagged := range []bool{false, true} {
			frame := porttest.Frame(mtu+virtio.EthernetHdrLen, 2)
			if tagged {
				frame = append(frame[:12:12], append([]byte{0x81, 0, 0, 5}, frame[12:]...)...)
			}
			h.send(t, frame)
			if got := rig.Recv(t, q, 1); len(got) != 1 || !bytes.Equal(got[0], frame) {
				t.Errorf("MTU %d, tagged %v: frame of %d bytes did not come whole", mtu, tagged, len(frame))
			}
		}
	}
}

// tcpFrame is a TCP segment of n payload bytes over IPv4, unfinished as its header says.
func tcpFrame(n, mss int) (virtio.NetHdr, []byte) {
	frame := make([]byte, 54+n)
	copy(frame, udpFrame(0)[:34])
	frame[16], frame[17] = byte((40+n)>>8), byte(40+n)
	frame[23] = 6
	sum := ipSum(frame[14:34])
	frame[24], frame[25] = byte(sum>>8), byte(sum)
	frame[46] = 5 << 4 // header length
	frame[47] = 0x10   // ACK
	pseudo := ^ipSum(append(append([]byte{}, frame[26:34]...), 0, 6, byte((20+n)>>8), byte(20+n)))
	frame[50], frame[51] = byte(pseudo>>8), byte(pseudo)
	for i := range n {
		frame[54+i] = byte(i)
	}
	return virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, GSOType: virtio.GSOTCPv4, HdrLen: 54, GSOSize: uint16(mss), CsumStart: 34, CsumOffset: 16}, frame
}

func ipSum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(b[i])<<8 | uint32(b[i+1])
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// TestOffloadsFollowTheGuest sends a large TCP frame towards guests that can and cannot take it, in turn.
func TestOFF11OffloadsFollowTheGuest(t *testing.T) {
	s, rig := newSpace(t), porttest.NewRig(t)
	p := s.tap(t, Options{})
	if want := sendable | every; p.Features() != want {
		t.Fatalf("offers %v, want %v", p.Features(), want)
	}
	q := rig.Open(t, p, 0)
	h := s.host(t, p.Name(), true)
	hdr, frame := tcpFrame(60000, 1448)
	sent := make([]byte, virtio.NetHdrLenLegacy)
	hdr.Encode(sent)
	sent = append(sent, frame...)
	for _, step := range []struct {
		acked  virtio.Features
		frames int
	}{
		{0, 42}, {every, 1}, {every &^ virtio.FNetGuestTSO4, 42}, {every, 1}, {virtio.FNetGuestTSO4, 42}, {0, 42},
	} {
		must(t, p.Configure(step.acked))
		h.send(t, sent)
		got := rig.Recv(t, q, step.frames)
		payload := 0
		for _, f := range got {
			payload += len(f) - 54
		}
		if len(got) != step.frames || payload != 60000 {
			t.Errorf("guest with %v: %d frames with %d bytes, want %d with 60000", step.acked, len(got), payload, step.frames)
		}
	}
	if n := porttest.DropCount(q, ""); n != 0 {
		t.Errorf("%d frames were dropped", n)
	}
}

// TestOFF11SendUnfinished sends what a guest with checksum and segmentation offload sends.
func TestOFF11SendUnfinished(t *testing.T) {
	s, rig := newSpace(t), porttest.NewRig(t)
	p := s.tap(t, Options{})
	q := rig.Open(t, p, 0)
	h := s.host(t, p.Name(), true)
	hdr, frame := tcpFrame(60000, 1448)
	pkt := rig.Packet(t, frame, 0)
	pkt.Hdr = hdr
	q.Send([]packet.Packet{pkt})
	var got virtio.NetHdr
	b := h.recv(t)
	if len(b) != virtio.NetHdrLenLegacy+len(frame) {
		t.Fatalf("%d bytes arrived", len(b))
	}
	if got.Decode(b[:virtio.NetHdrLenLegacy]); got.GSOType != hdr.GSOType || got.GSOSize != hdr.GSOSize || got.Flags != hdr.Flags {
		t.Errorf("marks %+v, want %+v", got, hdr)
	}
}

func TestOFF11RefusedFlagsAreNotOffered(t *testing.T) {
	s := newSpace(t)
	for _, tc := range []struct {
		refused int
		want    virtio.Features
	}{
		{unix.TUN_F_CSUM, sendable},
		{unix.TUN_F_TSO6, sendable | every&^virtio.FNetGuestTSO6},
		{unix.TUN_F_TSO_ECN, sendable | every&^virtio.FNetGuestECN},
	} {
		s.do(t, func() error {
			p, err := newPort(Options{}, func(fd, flags int) error {
				if flags&tc.refused != 0 {
					return unix.EINVAL
				}
				return setOffload(fd, flags)
			})
			if err != nil {
				return err
			}
			defer p.Close()
			if p.Features() != tc.want {
				t.Errorf("refusing %#x: offers %v, want %v", tc.refused, p.Features(), tc.want)
			}
			return p.Configure(p.Features())
		})
	}
	// Another failure than "no such flag" is one of New, which leaves nothing.
	s.do(t, func() error {
		if _, err := newPort(Options{Name: "broken", Persist: true}, func(int, int) error { return unix.EIO }); !errors.Is(err, unix.EIO) {
			t.Errorf("New: %v", err)
		}
		return nil
	})
	if s.exists("broken") {
		t.Error("a failed New left the interface")
	}
}

func TestMTU(t *testing.T) {
	s := newSpace(t)
	p := s.tap(t, Options{MTU: 9000})
	if got := s.find(t, p.Name()).Attrs().MTU; got != 9000 || p.MTU() != 9000 {
		t.Errorf("MTU %d, port says %d", got, p.MTU())
	}
	for _, mtu := range []int{MinMTU, 1500, MaxMTU} {
		must(t, p.SetMTU(mtu))
		if got := s.find(t, p.Name()).Attrs().MTU; got != mtu || p.MTU() != mtu {
			t.Errorf("MTU %d, port says %d, want %d", got, p.MTU(), mtu)
		}
	}
	for _, mtu := range []int{-1, 0, MinMTU - 1, MaxMTU + 1, 1 << 40} {
		if err := p.SetMTU(mtu); err == nil {
			t.Errorf("SetMTU(%d) succeeded", mtu)
		}
	}
	if p.MTU() != MaxMTU {
		t.Errorf("a refused MTU was remembered: %d", p.MTU())
	}
}

// TestMTUOfABridge: a front-end cannot change the MTU of what its tap is joined to, the operator can.
func TestMTUOfABridge(t *testing.T) {
	s := newSpace(t)
	must(t, s.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}))
	p := s.tap(t, Options{Bridge: "br0"})
	mtus := func() [2]int { return [2]int{s.find(t, p.Name()).Attrs().MTU, s.find(t, "br0").Attrs().MTU} }
	before := mtus()
	for _, mtu := range []int{MinMTU, 9000} {
		must(t, p.FollowMTU(mtu))
		if now := mtus(); now != before {
			t.Errorf("MTUs of tap and bridge are %v after %d, were %v", now, mtu, before)
		}
	}
	if p.FollowMTU(MinMTU-1) == nil || p.FollowMTU(MaxMTU+1) == nil {
		t.Error("an impossible MTU was accepted")
	}
	must(t, p.SetMTU(1400))
	if now := mtus(); now != [2]int{1400, 1400} {
		t.Errorf("MTUs of tap and bridge are %v, want 1400", now)
	}
	alone := s.tap(t, Options{Name: "alone0"})
	must(t, alone.FollowMTU(9000))
	if mtu := s.find(t, alone.Name()).Attrs().MTU; mtu != 9000 {
		t.Errorf("MTU of a tap alone is %d, want 9000", mtu)
	}
}

func TestAnnounce(t *testing.T) {
	s := newSpace(t)
	for _, queues := range []int{1, 2} {
		p := s.tap(t, Options{Queues: queues})
		h := s.host(t, p.Name(), false)
		mac := [6]byte{2, 1, 2, 3, 4, 5}
		must(t, p.Announce(mac))
		want := port.RARP(mac)
		if got := h.recv(t); !bytes.Equal(got, want[:]) {
			t.Errorf("%d queues: % x", queues, got)
		}
		must(t, s.LinkSetDown(s.find(t, p.Name())))
		if err := p.Announce(mac); !errors.Is(err, unix.EIO) || !strings.Contains(err.Error(), "down") {
			t.Errorf("on an interface that is down: %v", err)
		}
	}
}

func TestBridge(t *testing.T) {
	s := newSpace(t)
	must(t, s.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}}))
	p := s.tap(t, Options{Name: "guest%d", Bridge: "br0"})
	if p.Name() != "guest0" {
		t.Errorf("name %q", p.Name())
	}
	if got, want := s.find(t, p.Name()).Attrs().MasterIndex, s.find(t, "br0").Attrs().Index; got != want {
		t.Errorf("master %d, want %d", got, want)
	}
	if st := p.Status(); !st.Up || !strings.Contains(st.Detail, "guest0") {
		t.Errorf("status %+v", st)
	}
}

func TestLeaveDown(t *testing.T) {
	s := newSpace(t)
	p := s.tap(t, Options{LeaveDown: true})
	if st := p.Status(); st.Up || !strings.Contains(st.Detail, "ip link set") {
		t.Errorf("status %+v", st)
	}
}

// TestSHUT03 opens and closes taps without any traffic.
func TestSHUT03CloseWithoutTraffic(t *testing.T) {
	s, rig := newSpace(t), porttest.NewRig(t)
	cycle := func(i int) {
		p, err := s.newTap(Options{Name: "idle", Queues: 1 + i%3})
		must(t, err)
		for j := range 1 + i%3 {
			if _, err := p.OpenQueue(j, rig.Resources()); err != nil {
				t.Fatal(err)
			}
		}
		start := time.Now()
		must(t, p.Close())
		if took := time.Since(start); took > time.Second {
			t.Fatalf("Close took %v", took)
		}
		if s.exists("idle") {
			t.Fatal("the interface was left")
		}
	}
	for i := range 10 {
		cycle(i)
	}
	before := threads(t)
	for i := range 40 {
		cycle(i)
	}
	if after := threads(t); after > before+4 {
		t.Errorf("%d threads, %d before", after, before)
	}
}

func TestSHUT03ManyQueues(t *testing.T) {
	s, rig := newSpace(t), porttest.NewRig(t)
	p := s.tap(t, Options{Queues: MaxQueues})
	for i := range MaxQueues {
		if _, err := p.OpenQueue(i, rig.Resources()); err != nil {
			t.Fatal(err)
		}
	}
	start := time.Now()
	must(t, p.Close())
	if took := time.Since(start); took > 5*time.Second {
		t.Errorf("Close took %v", took)
	}
}
