package user

import (
	"context"
	"net"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/ethernet"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv6"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

// guest is a machine on a network: a TCP/IP stack whose network card is one queue pair of the port, served by a worker of its own.
type guest struct {
	t     testing.TB
	stack *stack.Stack
	card  *card
	v4    netip.Addr
	v6    netip.Addr
}

// card is the guest's network card. It implements [stack.LinkEndpoint] below Ethernet.
type card struct {
	mac        [6]byte
	mtu        uint32
	gso        bool
	port       *Port
	queue      port.Queue
	rig        *porttest.Rig
	dispatcher atomic.Pointer[stack.NetworkDispatcher]
	tap        atomic.Pointer[func(frame []byte)] // sees what the guest receives
	lose       atomic.Int64                       // one frame of so many, in each direction; 0 loses none
	passed     [2]atomic.Int64

	wake int // eventfd
	stop atomic.Bool
	done chan struct{}

	mu  sync.Mutex
	out []queued
}

type queued struct {
	frame []byte
	pkt   *stack.PacketBuffer
	hdr   virtio.NetHdr
}

func newCard(t testing.TB, p *Port, n byte) *card {
	t.Helper()
	rig := porttest.NewRig(t)
	c := &card{mac: [6]byte{2, 0, 0, 0, 0, n}, mtu: uint32(p.MTU()), gso: true, port: p, rig: rig, done: make(chan struct{})}
	var err error
	if c.queue, err = p.OpenQueue(int(n), rig.Resources()); err != nil {
		t.Fatal(err)
	}
	if c.wake, err = unix.Eventfd(0, unix.EFD_NONBLOCK|unix.EFD_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	go c.work()
	t.Cleanup(func() {
		c.stop.Store(true)
		c.ring()
		<-c.done
		c.queue.Close()
		unix.Close(c.wake)
		for _, q := range c.out {
			q.pkt.DecRef()
		}
	})
	return c
}

func (c *card) ring() { _, _ = unix.Write(c.wake, []byte{1, 0, 0, 0, 0, 0, 0, 0}) }

// send queues a frame as a driver would.
func (c *card) send(frame []byte, hdr virtio.NetHdr) {
	c.mu.Lock()
	c.out = append(c.out, queued{frame: frame, hdr: hdr})
	c.mu.Unlock()
	c.ring()
}

// turn is how many frames a worker moves in each direction before it moves those of the other one (virtionet).
const turn = 256

// work is the queue pair's worker.
func (c *card) work() {
	defer close(c.done)
	var in [port.MaxBatch]packet.Packet
	for !c.stop.Load() {
		busy := c.transmit()
		for range turn / len(in) {
			n := c.queue.Recv(in[:])
			if n == 0 {
				break
			}
			busy = true
			for i := range in[:n] {
				c.receive(&in[i])
			}
			c.rig.Release(in[:n])
		}
		if busy || c.queue.Arm() {
			runtime.Gosched()
			continue
		}
		fds := []unix.PollFd{{Fd: int32(c.queue.ReadyFD()), Events: unix.POLLIN}, {Fd: int32(c.wake), Events: unix.POLLIN}}
		_, _ = unix.Poll(fds, 1000)
		var b [8]byte
		_, _ = unix.Read(c.wake, b[:])
		if fds[0].Revents != 0 {
			_, _ = unix.Read(int(fds[0].Fd), b[:]) // edge-triggered in the worker
		}
	}
}

// transmit sends up to a turn of what waits. A worker that only sent would let the network's ring run over.
func (c *card) transmit() bool {
	c.mu.Lock()
	list := c.out
	if len(list) > turn {
		c.out = append([]queued(nil), list[turn:]...)
		list = list[:turn]
		defer func() { c.ring() }()
	} else {
		c.out = nil
	}
	c.mu.Unlock()
	for len(list) > 0 {
		var pkts [port.MaxBatch]packet.Packet
		n := min(len(list), len(pkts))
		for i := range n {
			c.build(&pkts[i], &list[i])
		}
		sent := c.queue.Send(pkts[:n])
		c.rig.Release(pkts[sent:n])
		if sent < n {
			c.mu.Lock()
			c.out = append(append([]queued(nil), list[sent:]...), c.out...)
			c.mu.Unlock()
			time.Sleep(time.Millisecond)
			n = sent
		}
		for _, q := range list[:n] {
			if q.pkt != nil {
				q.pkt.DecRef()
			}
		}
		if n == sent && sent < min(len(list), len(pkts)) {
			return true
		}
		list = list[n:]
	}
	return false
}

// build copies a frame into pages.
func (c *card) build(p *packet.Packet, q *queued) {
	p.Reset()
	p.Hdr = q.hdr
	var room []byte
	put := func(b []byte) {
		for len(b) > 0 {
			if len(room) == 0 {
				page, ok := c.rig.Pool.Alloc()
				if !ok {
					panic("the guest's arena is exhausted")
				}
				p.Append(packet.Frag{Addr: c.rig.Arena.Addr(page), Len: pagemem.PageSize, Page: page})
				room = p.Bytes(int(p.NFrag - 1))
			}
			n := copy(room, b)
			b, room = b[n:], room[n:]
		}
	}
	if q.pkt == nil {
		put(q.frame)
	} else {
		for _, b := range q.pkt.AsSlices() {
			put(b)
		}
	}
	if len(room) > 0 {
		p.Frags[p.NFrag-1].Len -= uint32(len(room))
		p.Len -= uint32(len(room))
	}
}

// lost says whether the next frame of a direction is.
func (c *card) lost(way int) bool {
	n := c.lose.Load()
	return n > 0 && c.passed[way].Add(1)%n == 0
}

func (c *card) receive(p *packet.Packet) {
	if c.lost(0) {
		return
	}
	if tap := c.tap.Load(); tap != nil {
		(*tap)(porttest.Bytes(p))
	}
	d := c.dispatcher.Load()
	if d == nil {
		return
	}
	v := buffer.NewViewSize(int(p.Len))
	p.CopyTo(v.AsSlice(), 0)
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithView(v)})
	(*d).DeliverNetworkPacket(0, pkt)
	pkt.DecRef()
}

func (c *card) WritePackets(list stack.PacketBufferList) (int, tcpip.Error) {
	c.mu.Lock()
	for _, pkt := range list.AsSlice() {
		if c.lost(1) {
			continue
		}
		q := queued{pkt: pkt.IncRef()}
		if g := &pkt.GSOOptions; g.Type != stack.GSONone && g.NeedsCsum {
			q.hdr = virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: 14 + g.L3HdrLen, CsumOffset: g.CsumOffset}
			if pkt.Data().Size() > int(g.MSS) {
				q.hdr.GSOType, q.hdr.GSOSize, q.hdr.HdrLen = virtio.GSOTCPv4, g.MSS, uint16(pkt.HeaderSize())
				if g.Type == stack.GSOTCPv6 {
					q.hdr.GSOType = virtio.GSOTCPv6
				}
			}
		}
		c.out = append(c.out, q)
	}
	c.mu.Unlock()
	c.ring()
	return list.Len(), nil
}

func (c *card) MTU() uint32                                { return c.mtu }
func (*card) SetMTU(uint32)                                {}
func (*card) MaxHeaderLength() uint16                      { return 0 }
func (c *card) LinkAddress() tcpip.LinkAddress             { return tcpip.LinkAddress(c.mac[:]) }
func (*card) SetLinkAddress(tcpip.LinkAddress)             {}
func (*card) Capabilities() stack.LinkEndpointCapabilities { return stack.CapabilityRXChecksumOffload }
func (*card) IsAttached() bool                             { return true }
func (*card) Wait()                                        {}
func (*card) ARPHardwareType() header.ARPHardwareType      { return header.ARPHardwareEther }
func (*card) AddHeader(*stack.PacketBuffer)                {}
func (*card) ParseHeader(*stack.PacketBuffer) bool         { return true }
func (*card) Close()                                       {}
func (*card) SetOnCloseAction(func())                      {}
func (*card) GSOMaxSize() uint32                           { return 65000 }
func (c *card) SupportedGSO() (gso stack.SupportedGSO) {
	if c.gso {
		gso = stack.HostGSOSupported
	}
	return gso
}

func (c *card) Attach(d stack.NetworkDispatcher) {
	if d == nil {
		c.dispatcher.Store(nil)
		return
	}
	c.dispatcher.Store(&d)
}

// newGuest makes a machine with fixed addresses and the gateway as its router.
func newGuest(t testing.TB, p *Port) *guest { return newGuestN(t, p, 0) }

func newGuestN(t testing.TB, p *Port, n byte) *guest {
	t.Helper()
	g := &guest{t: t, card: newCard(t, p, n), v4: p.opts.Guest, v6: nth(p.opts.Subnet6, 0x100+int(n))}
	for range n {
		g.v4 = g.v4.Next()
	}
	g.stack = stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, ipv6.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4, icmp.NewProtocol6},
	})
	must := func(err tcpip.Error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	must(g.stack.CreateNIC(1, ethernet.New(g.card)))
	for _, a := range []struct {
		addr netip.Addr
		bits int
	}{{g.v4, p.opts.Subnet.Bits()}, {g.v6, 64}, {linkLocal(g.card.mac), 64}} {
		must(g.stack.AddProtocolAddress(1, tcpip.ProtocolAddress{
			Protocol: protocolOf(a.addr), AddressWithPrefix: tcpip.AddressWithPrefix{Address: addressOf(a.addr), PrefixLen: a.bits},
		}, stack.AddressProperties{}))
	}
	subnet := func(a netip.Prefix) tcpip.Subnet {
		return tcpip.AddressWithPrefix{Address: addressOf(a.Addr()), PrefixLen: a.Bits()}.Subnet()
	}
	g.stack.SetRouteTable([]tcpip.Route{
		{Destination: subnet(p.opts.Subnet), NIC: 1}, {Destination: subnet(p.opts.Subnet6), NIC: 1},
		{Destination: header.IPv4EmptySubnet, Gateway: addressOf(p.opts.Gateway), NIC: 1},
		{Destination: header.IPv6EmptySubnet, Gateway: addressOf(p.opts.Gateway6), NIC: 1},
	})
	recovery, size := tcpip.TCPRecovery(0), &tcpip.TCPReceiveBufferSizeRangeOption{Min: 4096, Default: 4 << 20, Max: 8 << 20}
	must(g.stack.SetTransportProtocolOption(tcp.ProtocolNumber, &recovery))
	must(g.stack.SetTransportProtocolOption(tcp.ProtocolNumber, size))
	t.Cleanup(func() { g.stack.Destroy() })
	return g
}

func full(a netip.AddrPort) tcpip.FullAddress {
	return tcpip.FullAddress{Addr: addressOf(a.Addr()), Port: a.Port()}
}

// dial connects to an address such as 192.0.2.1:80 over TCP.
func (g *guest) dial(to string) (*gonet.TCPConn, error) { return g.dialWithin(to, 10*time.Second) }

func (g *guest) dialWithin(to string, limit time.Duration) (*gonet.TCPConn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	a := netip.MustParseAddrPort(to)
	return gonet.DialContextTCP(ctx, g.stack, full(a), protocolOf(a.Addr()))
}

func (g *guest) mustDial(to string) *gonet.TCPConn {
	g.t.Helper()
	c, err := g.dial(to)
	if err != nil {
		g.t.Fatalf("connect to %s: %v", to, err)
	}
	g.t.Cleanup(func() { c.Close() })
	return c
}

func (g *guest) dialUDP(to string) *gonet.UDPConn {
	g.t.Helper()
	a := netip.MustParseAddrPort(to)
	at := full(a)
	c, err := gonet.DialUDP(g.stack, nil, &at, protocolOf(a.Addr()))
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { c.Close() })
	return c
}

// listenTCP listens on the host and serves each connection.
func listenTCP(t testing.TB, at string, serve func(*net.TCPConn)) string {
	t.Helper()
	l, err := net.Listen("tcp", at)
	if err != nil {
		t.Fatal(err)
	}
	var served sync.WaitGroup
	served.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			served.Go(func() {
				defer c.Close()
				serve(c.(*net.TCPConn))
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		served.Wait()
	})
	return l.Addr().String()
}
