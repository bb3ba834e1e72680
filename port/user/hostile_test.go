package user

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

// TestHostileMarks_B5_B7_B14_C65_C66 gives every kind of mark to frames of every protocol and of lengths about every boundary. The device
// refuses most of this before; the network does not rely on it. Each frame is taken or counted, and the network goes on.
func TestHostileMarks_B5_B7_B14_C65_C66(t *testing.T) {
	p := newPort(t, Options{Hooks: Hooks{Policy: denyAll{}}})
	rig := porttest.NewRig(t)
	q := rig.Open(t, p, 0)
	g := &guest{v4: p.opts.Guest, v6: nth(p.opts.Subnet6, 0x100), card: &card{mac: [6]byte{2, 0, 0, 0, 0, 1}, port: p}}
	send := func(frame []byte, hdr virtio.NetHdr) (dropped bool) {
		before := porttest.DropCount(q, "")
		pkts := []packet.Packet{rig.Packet(t, frame, len(frame)/(packet.MaxFrags-1)+1)}
		pkts[0].Hdr = hdr
		if q.Send(pkts) != 1 {
			t.Fatal("a frame was refused")
		}
		rig.Release(pktsOf(q))
		return porttest.DropCount(q, "") != before
	}
	for _, host := range []string{live4, live6} {
		to := netip.AddrPortFrom(netip.MustParseAddr(host), 80)
		l4 := uint16(virtio.EthernetHdrLen + ipLen(to.Addr()))
		tcp, udp := g.segment(1, to, 1, flagACK), g.datagramFrame(1, to, make([]byte, 100))
		for _, gso := range []uint8{0, 1, 2, 3, 4, 5, 6, 7, 0x7f, 0x80, 0x81, 0x83, 0x84, 0x85, 0xff} {
			for _, size := range []uint16{0, 1, 20, 1460, 65535} {
				for _, length := range []uint16{0, 13, 54, 65535} {
					hdr := virtio.NetHdr{GSOType: gso, GSOSize: size, HdrLen: length}
					if gso != virtio.GSONone && !send(tcp, hdr) {
						t.Fatalf("%s: segments that have their checksums already: %+v", host, hdr)
					}
					hdr.Flags, hdr.CsumStart, hdr.CsumOffset = virtio.HdrFNeedsCsum, l4, udpChecksumOffset
					if gso != virtio.GSONone && !send(udp, hdr) {
						t.Fatalf("%s: a datagram to be cut: %+v", host, hdr)
					}
				}
			}
		}
		for _, at := range []uint16{0, l4 - 1, l4 + 1, 60000, 65535} {
			for _, offset := range []uint16{0, udpChecksumOffset, 16, 60000, 65535} {
				if !send(udp, virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: at, CsumOffset: offset}) {
					t.Fatalf("%s: a checksum at %d+%d", host, at, offset)
				}
			}
		}
	}
	seeds := fuzzSeeds()
	for n := 1; n < 200; n++ {
		for _, frame := range seeds {
			send(frame[:min(n, len(frame))], virtio.NetHdr{})
		}
	}
	long := make([]byte, virtio.MaxFrame)
	copy(long, g.segment(1, netip.MustParseAddrPort("10.0.2.2:1"), 1, flagACK)[:12])
	if !send(long, virtio.NetHdr{}) {
		t.Error("65,553 bytes of nothing were taken")
	}
	if s := p.Status(); !s.Up {
		t.Error(s.Detail)
	}
	if n := p.FlowCount(); n != 0 {
		t.Errorf("%d flows, and all are denied", n)
	}
}

// pktsOf is what waits for the guest.
func pktsOf(q interface {
	Recv([]packet.Packet) int
}) []packet.Packet {
	pkts := make([]packet.Packet, 64)
	return pkts[:q.Recv(pkts)]
}

// TestNAT23_NeighborsAndErrors: messages of neighbor discovery, whose options have lengths that cannot be, and ICMP errors about packets
// that do not exist, to the gateway.
func TestNAT23_NeighborsAndErrors(t *testing.T) {
	p := newServed(t, Options{}, Services{NoDNS: true})
	rig := porttest.NewRig(t)
	q := rig.Open(t, p, 0)
	g := &guest{v4: p.opts.Guest, v6: nth(p.opts.Subnet6, 0x100), card: &card{mac: [6]byte{2, 0, 0, 0, 0, 1}, port: p}}
	send := func(f []byte) {
		hdr := virtio.NetHdr{}
		f = repaired(f, &hdr)
		pkts := []packet.Packet{rig.Packet(t, f, 0)}
		pkts[0].Hdr = hdr
		q.Send(pkts)
		rig.Release(pktsOf(q))
	}
	target := p.opts.Gateway6.As16()
	for kind := ndpFirst - 10; kind <= ndpLast+10; kind++ {
		for _, option := range [][]byte{
			nil, {1}, {1, 0}, {1, 0, 0, 0, 0, 0, 0, 0}, {2, 255, 0, 0, 0, 0, 0, 0}, {0, 0}, {255, 1, 0, 0, 0, 0, 0, 0},
		} {
			for _, n := range []int{0, 4, 8, 20, 24} {
				body := append(append([]byte{byte(kind), 0, 0, 0, 0, 0, 0, 0}, target[:]...)[:max(n, 4)], option...)
				f := g.transportFrame(linkLocal(g.card.mac), p.link6, protoICMPv6, body, false)
				f[virtio.EthernetHdrLen+7] = ndpHops
				send(f)
			}
		}
	}
	for _, src := range []netip.Addr{g.v4, g.v6} {
		gateway, proto, kinds := p.opts.Gateway, uint8(protoICMP), []byte{3, 4, 5, 11, 12}
		if src.Is6() {
			gateway, proto, kinds = p.opts.Gateway6, protoICMPv6, []byte{1, 2, 3, 4}
		}
		for _, kind := range kinds {
			for code := range byte(16) {
				for _, n := range []int{0, 1, 19, 20, 27, 28, 39, 40, 48, 100} {
					inner := g.transportFrame(gateway, src, protoTCP, make([]byte, 100), false)[virtio.EthernetHdrLen:]
					b := append([]byte{kind, code, 0, 0, 0, 0, 0, 0}, inner[:n]...)
					binary.BigEndian.PutUint32(b[4:], uint32(code)) // an MTU of nearly nothing
					send(g.transportFrame(src, gateway, proto, b, false))
				}
			}
		}
	}
	if s := p.Status(); !s.Up {
		t.Error(s.Detail)
	}
	q.Send([]packet.Packet{rig.Packet(t, g.pingFrame(p.opts.Gateway, 1, 1, 56, 64), 0)})
	if pkts := pktsOf(q); len(pkts) != 1 {
		t.Errorf("%d answers to a ping of the gateway", len(pkts))
	} else {
		rig.Release(pkts)
	}
}

// TestPrivilegedPort: a process without the capability says how to publish a low port all the same.
func TestPrivilegedPort(t *testing.T) {
	p := newPort(t, Options{})
	runtime.LockOSThread() // capabilities are a thread's
	defer runtime.UnlockOSThread()
	var have [2]unix.CapUserData
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	if err := unix.Capget(&header, &have[0]); err != nil {
		t.Fatal(err)
	}
	less := have
	less[0].Effective &^= 1 << unix.CAP_NET_BIND_SERVICE
	if err := unix.Capset(&header, &less[0]); err != nil {
		t.Fatal(err)
	}
	what := Publication{Proto: "tcp", Addr: netip.MustParseAddr(live4), Port: 80, GuestPort: 80}
	err := p.Publish(what)
	if restore := unix.Capset(&header, &have[0]); restore != nil {
		t.Fatal(restore)
	}
	for _, part := range []string{"publish=" + what.String(), "CAP_NET_BIND_SERVICE", "at its start", "ip_unprivileged_port_start to 80"} {
		if !strings.Contains(fmt.Sprint(err), part) {
			t.Errorf("%v: does not say %q", err, part)
		}
	}
	if len(p.Published()) != 0 {
		t.Errorf("published: %v", p.Published())
	}
	if err := p.Publish(what); err != nil {
		t.Errorf("with the capability: %v", err)
	}
}
