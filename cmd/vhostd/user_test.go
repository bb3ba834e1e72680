package main

import (
	"context"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/link/channel"
	"gvisor.dev/gvisor/pkg/tcpip/link/ethernet"
	"gvisor.dev/gvisor/pkg/tcpip/network/arp"
	"gvisor.dev/gvisor/pkg/tcpip/network/ipv4"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/tcpip/transport/udp"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// machine is a TCP/IP stack behind a front-end: a guest of the user network at 10.0.2.15.
func machine(t *testing.T, c *frontend.Client) *stack.Stack {
	t.Helper()
	pair, err := c.StartPair(0)
	if err != nil {
		t.Fatal(err)
	}
	card := channel.New(256, 1500, tcpip.LinkAddress([]byte{0x52, 0x54, 0, 0, 0, 1}))
	card.LinkEPCapabilities = stack.CapabilityRXChecksumOffload // the device leaves checksums to us
	s := stack.New(stack.Options{
		NetworkProtocols:   []stack.NetworkProtocolFactory{ipv4.NewProtocol, arp.NewProtocol},
		TransportProtocols: []stack.TransportProtocolFactory{tcp.NewProtocol, udp.NewProtocol, icmp.NewProtocol4},
	})
	if err := s.CreateNIC(1, ethernet.New(card)); err != nil {
		t.Fatal(err)
	}
	address := tcpip.AddressWithPrefix{Address: tcpip.AddrFrom4([4]byte{10, 0, 2, 15}), PrefixLen: 24}
	if err := s.AddProtocolAddress(1, tcpip.ProtocolAddress{Protocol: header.IPv4ProtocolNumber, AddressWithPrefix: address}, stack.AddressProperties{}); err != nil {
		t.Fatal(err)
	}
	s.SetRouteTable([]tcpip.Route{{Destination: address.Subnet(), NIC: 1},
		{Destination: header.IPv4EmptySubnet, Gateway: tcpip.AddrFrom4([4]byte{10, 0, 2, 2}), NIC: 1}})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for ctx.Err() == nil {
			if err := exchange(pair, card); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	t.Cleanup(func() {
		stop()
		<-done
		s.Destroy()
	})
	return s
}

// exchange moves the frames that wait in both directions.
func exchange(pair *frontend.Pair, card *channel.Endpoint) error {
	if _, err := pair.PostRx(64); err != nil {
		return err
	}
	for pkt := card.Read(); pkt != nil; pkt = card.Read() {
		err := pair.SendTx(virtio.NetHdr{}, pkt.ToView().AsSlice(), frontend.Direct)
		pkt.DecRef()
		if err != nil {
			return err
		}
	}
	if _, err := pair.ReapTx(); err != nil {
		return err
	}
	_, frame, ok, err := pair.TryRecv()
	if err != nil || !ok {
		time.Sleep(200 * time.Microsecond)
		return err
	}
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{Payload: buffer.MakeWithData(frame)})
	card.InjectInbound(0, pkt)
	pkt.DecRef()
	return nil
}

// TestUserNetworkOfAnOrdinaryUser: the default network works without privileges, in the sandbox, where a system call that is not
// allowed would end the process: TCP and UDP to the host, DNS, a port that is published on a Unix socket.
func TestUserNetworkOfAnOrdinaryUser(t *testing.T) {
	testmain.NeedRoot(t)
	dir, err := os.MkdirTemp("", "vhostd-user")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chown(dir, nobody, nobody); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			_, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
			c.Close()
		}
	}()
	published := filepath.Join(dir, "web.sock")
	cmd := asNobody(t, "serve", "--socket", dir+"/vm.sock", "--network", "user,host-loopback=on,dns=127.0.0.1:9,publish=unix:"+published+":80")
	p := startCommand(t, cmd)
	p.ready()
	wantThreads(t, p, noCapability)
	s := machine(t, connect(t, dir+"/vm.sock"))
	wantEcho := func(c net.Conn) {
		t.Helper()
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		sent := make([]byte, 300_000)
		go c.Write(sent)
		if n, err := io.ReadFull(c, make([]byte, len(sent))); err != nil {
			t.Errorf("%d bytes came back, %v", n, err)
		}
	}
	port := netip.MustParseAddrPort(l.Addr().String()).Port()
	gateway := tcpip.FullAddress{Addr: tcpip.AddrFrom4([4]byte{10, 0, 2, 2}), Port: port}
	out, err := gonet.DialTCP(s, gateway, header.IPv4ProtocolNumber)
	if err != nil {
		t.Fatalf("%v\n%s", err, p.stderr)
	}
	wantEcho(out)

	in, err := gonet.ListenTCP(s, tcpip.FullAddress{Addr: tcpip.AddrFrom4([4]byte{10, 0, 2, 15}), Port: 80}, header.IPv4ProtocolNumber)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	go func() {
		if c, err := in.Accept(); err == nil {
			_, _ = io.Copy(c, c)
			c.Close()
		}
	}()
	client, err := net.Dial("unix", published)
	if err != nil {
		t.Fatal(err)
	}
	wantEcho(client)

	gateway.Port = 53
	question, err := gonet.DialUDP(s, nil, &gateway, header.IPv4ProtocolNumber)
	if err != nil {
		t.Fatal(err)
	}
	defer question.Close()
	_, _ = question.Write([]byte("\x12\x34\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x01a\x00\x00\x01\x00\x01")) // A of "a."
	answer := make([]byte, 512)
	_ = question.SetReadDeadline(time.Now().Add(15 * time.Second))
	if n, err := question.Read(answer); err != nil || n < 12 || answer[3]&15 != 2 {
		t.Errorf("answer % x, %v, want SERVFAIL: nobody listens there", answer[:n], err)
	}
	p.stop()
	absent(t, published)
}
