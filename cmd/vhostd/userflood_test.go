package main

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// packet4 is a frame from the default guest to the default gateway. It is a piece of a longer datagram with more.
func packet4(proto tcpip.TransportProtocolNumber, id uint16, more bool, segment []byte) []byte {
	return frame4([4]byte{10, 0, 2, 15}, [4]byte{10, 0, 2, 2}, proto, id, more, segment)
}

// frame4 is the same between any two.
func frame4(src, dst [4]byte, proto tcpip.TransportProtocolNumber, id uint16, more bool, segment []byte) []byte {
	frame := make([]byte, header.EthernetMinimumSize+header.IPv4MinimumSize+len(segment))
	header.Ethernet(frame).Encode(&header.EthernetFields{
		SrcAddr: tcpip.LinkAddress([]byte{0x52, 0x54, 0, 0, 0, 9}), DstAddr: header.EthernetBroadcastAddress, Type: header.IPv4ProtocolNumber,
	})
	copy(frame, []byte{0x52, 0x56, 10, 0, 2, 2}) // the gateway's
	ip := header.IPv4(frame[header.EthernetMinimumSize:])
	fields := header.IPv4Fields{
		TotalLength: uint16(len(ip)), TTL: 64, Protocol: uint8(proto), ID: id,
		SrcAddr: tcpip.AddrFrom4(src), DstAddr: tcpip.AddrFrom4(dst),
	}
	if more {
		fields.Flags = header.IPv4FlagMoreFragments
	}
	ip.Encode(&fields)
	ip.SetChecksum(^ip.CalculateChecksum())
	copy(ip.Payload(), segment)
	return frame
}

func synFrame(from, to uint16) []byte {
	b := header.TCP(make([]byte, header.TCPMinimumSize))
	b.Encode(&header.TCPFields{
		SrcPort: from, DstPort: to, SeqNum: 7, DataOffset: header.TCPMinimumSize, Flags: header.TCPFlagSyn, WindowSize: 4096,
	})
	frame := packet4(header.TCPProtocolNumber, 0, false, b)
	ip := header.IPv4(frame[header.EthernetMinimumSize:])
	sum := header.PseudoHeaderChecksum(header.TCPProtocolNumber, ip.SourceAddress(), ip.DestinationAddress(), uint16(len(b)))
	header.TCP(ip.Payload()).SetChecksum(^b.CalculateChecksum(sum))
	return frame
}

// udpFrame has no checksum, which IPv4 allows.
func udpFrame(from, to, id uint16, more bool, payload int) []byte {
	b := header.UDP(make([]byte, header.UDPMinimumSize+payload))
	b.Encode(&header.UDPFields{SrcPort: from, DstPort: to, Length: uint16(len(b))})
	return packet4(header.UDPProtocolNumber, id, more, b)
}

// TestNAT21_FewDescriptors: a guest that opens more connections and flows than the process may have descriptors, and begins datagrams that
// it never ends, hurts nobody: the process lives, another guest's connections work meanwhile, and its own as soon as it stops.
func TestNAT21_FewDescriptors(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			go func() {
				defer c.Close()
				_, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
			}()
		}
	}()
	file := filepath.Join(dir, "f.yaml")
	text := "guests:\n"
	for _, name := range []string{"flood", "good"} {
		text += fmt.Sprintf("  - {name: %[1]s, socket: %[2]s/%[1]s, network: \"user,host-loopback=on,dns=off\"}\n", name, dir)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	p := startCommand(t, exec.Command("sh", "-c", `ulimit -n 256; exec "$0" serve --config "$1"`, program, file))
	p.ready()
	good := machine(t, connect(t, dir+"/good"))
	at := netip.MustParseAddrPort(l.Addr().String()).Port()
	wantGatewayEcho(t, good, at)

	evil := connect(t, dir+"/flood")
	pair, err := evil.StartPair(0)
	if err != nil {
		t.Fatal(err)
	}
	for i := range uint16(5000) {
		frames := [][]byte{udpFrame(1024+i, at, 0, false, 10), udpFrame(1, at, i, true, 800)}
		if i < 2000 {
			frames = append(frames, synFrame(1024+i, at))
		}
		for _, f := range frames {
			flood(t, pair, f)
		}
		if i%1000 == 999 {
			wantGatewayEcho(t, good, at)
		}
	}
	if rss := residentKiB(t, p.cmd.Process.Pid); rss > 1<<20 {
		t.Errorf("%d KiB are resident", rss)
	}
	evil.Close()
	wantGatewayEcho(t, machine(t, connectAgain(t, dir+"/flood")), at)
	p.stop()
}

// flood sends a frame and throws away what comes.
func flood(t *testing.T, p *frontend.Pair, frame []byte) {
	t.Helper()
	for p.SendTx(virtio.NetHdr{}, frame, frontend.Direct) != nil {
		if err := p.DrainTx(10 * time.Second); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := p.PostRx(64); err != nil {
		t.Fatal(err)
	}
	for {
		if _, _, ok, err := p.TryRecv(); err != nil {
			t.Fatal(err)
		} else if !ok {
			return
		}
	}
}

// connectAgain waits until the end of the connection before was noticed.
func connectAgain(t *testing.T, path string) *frontend.Client {
	t.Helper()
	mem, err := frontend.NewMemory(8 << 20)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { mem.Close() })
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		c, err := frontend.Connect(path, mem, frontend.Options{})
		if err == nil {
			t.Cleanup(func() { c.Close() })
			return c
		}
		if time.Now().After(end) {
			t.Fatal(err)
		}
	}
}

// wantGatewayEcho demands a connection to the host's loopback, by the gateway's name, on which everything comes back. The oldest of too
// many connects gives way, so that one may have to be tried again, as programs do.
func wantGatewayEcho(t *testing.T, s *stack.Stack, port uint16) {
	t.Helper()
	sent := make([]byte, 100_000)
	try := func() error {
		c, err := gonet.DialTCP(s, tcpip.FullAddress{Addr: tcpip.AddrFrom4([4]byte{10, 0, 2, 2}), Port: port}, header.IPv4ProtocolNumber)
		if err != nil {
			return err
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(30 * time.Second))
		go c.Write(sent)
		_, err = io.ReadFull(c, make([]byte, len(sent)))
		return err
	}
	var err error
	for range 3 {
		if err = try(); err == nil {
			return
		}
	}
	t.Fatalf("a connection to the gateway: %v", err)
}

func residentKiB(t *testing.T, pid int) (kib int) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		t.Fatal(err)
	}
	var size, resident int
	if _, err := fmt.Sscan(string(text), &size, &resident); err != nil {
		t.Fatal(err)
	}
	return resident * os.Getpagesize() / 1024
}
