//go:build !race

package user

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port/porttest"
)

// TestAllocatesNothing: in steady state what is ours of a frame's way allocates nothing: a datagram from the guest's frame into the host's
// socket and from there into the guest's pages, and a packet of the stack into them. The stack's own part is bounded: a segment that
// it takes costs a packet of its pools and a few small things.
func TestAllocatesNothing(t *testing.T) {
	p := newPort(t, Options{})
	rig := porttest.NewRig(t)
	q := rig.Open(t, p, 0)
	g := &guest{v4: p.opts.Guest, card: &card{mac: [6]byte{2, 0, 0, 0, 0, 1}, port: p}}
	host, from := hostSocket(t)
	const batch = 16
	var pkts [batch]packet.Packet
	buf := make([]byte, 2048)
	send := func(frame []byte) {
		for i := range pkts {
			pkts[i] = rig.Packet(t, frame, 0)
		}
		q.Send(pkts[:])
	}
	drain := func() {
		for n := 0; n < batch; {
			got := q.Recv(pkts[n:])
			rig.Release(pkts[n : n+got])
			n += got
		}
	}
	check := func(what string, limit float64, run func()) {
		t.Helper()
		run()
		if n := testing.AllocsPerRun(100, run); n > limit {
			t.Errorf("%v allocations for %d %s, want at most %v", n, batch, what, limit)
		}
	}
	datagram := g.datagramFrame(5000, from, buf[:300])
	check("datagrams to the host", 0, func() {
		send(datagram)
		for range batch {
			if _, err := unix.Read(host, buf); err != nil {
				t.Fatal(err)
			}
		}
	})
	check("datagrams to the guest", 0, func() {
		for range batch {
			if r := p.sendUDP(from, netip.AddrPortFrom(g.v4, 5000), buf[:300]); r != accepted {
				t.Fatal(reasonNames[r])
			}
		}
		drain()
	})
	pkt := stackPacket(p)
	defer pkt.DecRef()
	check("packets of the stack", 0, func() {
		for range batch {
			if r := p.link.write(pkt); r != accepted {
				t.Fatal(reasonNames[r])
			}
		}
		drain()
	})
	reset := g.segment(5000, from, 1, flagRST)
	check("segments to the stack", 8*batch, func() { send(reset) })
	if n := porttest.DropCount(q, ""); n != 0 {
		t.Errorf("%d frames were dropped", n)
	}
}

// hostSocket is a datagram socket of the host.
func hostSocket(t *testing.T) (fd int, at netip.AddrPort) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: netip.MustParseAddr(live4).As4()}); err != nil {
		t.Fatal(err)
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return fd, addrPortOf(sa)
}

// stackPacket is a segment of 1000 bytes as the stack would send it to the guest.
func stackPacket(p *Port) *stack.PacketBuffer {
	v := newIP(netip.MustParseAddr(live4), p.opts.Guest, protoTCP, tcpMin+1000, false)
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{
		ReserveHeaderBytes: ipv4Len + tcpMin, Payload: buffer.MakeWithData(make([]byte, 1000)),
	})
	copy(pkt.TransportHeader().Push(tcpMin), make([]byte, tcpMin))
	copy(pkt.NetworkHeader().Push(ipv4Len), v.AsSlice())
	v.Release()
	pkt.NetworkProtocolNumber = header.IPv4ProtocolNumber
	return pkt
}
