package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/adapters/gonet"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/icmp"
	"gvisor.dev/gvisor/pkg/waiter"

	"github.com/vhostd/vhostd/internal/testmain"
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
	s := startFloodSite(t)
	for i := range uint16(5000) {
		frames := [][]byte{udpFrame(1024+i, s.at, 0, false, 10), udpFrame(1, s.at, i, true, 800)}
		if i < 2000 {
			frames = append(frames, synFrame(1024+i, s.at))
		}
		flood(t, s.pair, frames)
		if i%1000 == 999 {
			wantGatewayEcho(t, s.good, s.at)
		}
	}
	s.end()
}

// TestLongNAT21_Flood: for half a minute 50,000 frames a second, SYNs with any ports among them, flows, and pieces of datagrams that never
// end. Another guest pings and downloads all the time, and when it is over the flooding guest itself is served again.
func TestLongNAT21_Flood(t *testing.T) {
	testmain.Long(t)
	const rate, length, slot = 50_000, 30 * time.Second, 10 * time.Millisecond
	s := startFloodSite(t)
	stop, served := make(chan struct{}), make(chan string, 1)
	go func() { served <- useGateway(t, s.good, s.at, stop) }()
	end := sync.OnceValue(func() string {
		close(stop)
		return <-served
	})
	t.Cleanup(func() { end() })
	resident, sent := 0, 0
	start := time.Now()
	for due := start; time.Since(start) < length; due = due.Add(slot) {
		time.Sleep(time.Until(due))
		var frames [][]byte
		for len(frames) < int(rate*slot/time.Second) {
			from, to := uint16(rand.Uint32()), uint16(rand.Uint32())
			frame := synFrame(from, to)
			switch sent % 10 {
			case 0:
				frame = synFrame(from, s.at)
			case 1:
				frame = udpFrame(from, to, 0, false, 10)
			case 2:
				frame = udpFrame(from, s.at, uint16(sent), true, 800)
			}
			frames = append(frames, frame)
			sent++
		}
		flood(t, s.pair, frames)
		resident = max(resident, residentKiB(t, s.p.cmd.Process.Pid))
	}
	took := time.Since(start)
	other := end()
	t.Logf("%d frames in %v (%.0f a second), at most %d KiB resident", sent, took, float64(sent)/took.Seconds(), resident)
	t.Logf("the other guest: %s", other)
	if resident > 1<<20 {
		t.Errorf("%d KiB are resident", resident)
	}
	s.end()
	t.Logf("the flooding guest is served again after %v", time.Since(start)-took)
}

// useGateway pings the gateway and has bytes returned by the host until stop is closed, and says what it saw.
func useGateway(t *testing.T, s *stack.Stack, at uint16, stop chan struct{}) string {
	pings, streams, slowest := 0, 0, time.Duration(0)
	for {
		select {
		case <-stop:
			return fmt.Sprintf("%d pings, the slowest took %v, and %d downloads", pings, slowest, streams)
		default:
		}
		took, err := pingGateway(s, uint16(pings))
		if err == nil {
			slowest = max(slowest, took)
			pings++
			err = gatewayEcho(s, at)
		}
		if err != nil {
			t.Errorf("the other guest, after %d pings: %v", pings, err)
			<-stop
			return "failed"
		}
		streams++
	}
}

// pingGateway sends one echo request and waits for the answer; a lost one is tried again, as ping(8) goes on.
func pingGateway(s *stack.Stack, seq uint16) (time.Duration, error) {
	var queue waiter.Queue
	ep, failed := s.NewEndpoint(icmp.ProtocolNumber4, header.IPv4ProtocolNumber, &queue)
	if failed != nil {
		return 0, errors.New(failed.String())
	}
	defer ep.Close()
	if failed := ep.Connect(tcpip.FullAddress{Addr: tcpip.AddrFrom4([4]byte{10, 0, 2, 2})}); failed != nil {
		return 0, errors.New(failed.String())
	}
	entry, readable := waiter.NewChannelEntry(waiter.ReadableEvents)
	queue.EventRegister(&entry)
	defer queue.EventUnregister(&entry)
	for range 5 {
		request := header.ICMPv4(make([]byte, header.ICMPv4MinimumSize+56))
		request.SetType(header.ICMPv4Echo)
		request.SetSequence(seq)
		start := time.Now()
		if _, failed := ep.Write(bytes.NewReader(request), tcpip.WriteOptions{}); failed != nil {
			return 0, errors.New(failed.String())
		}
		select {
		case <-readable:
			return time.Since(start), nil
		case <-time.After(5 * time.Second):
		}
	}
	return 0, errors.New("no ping is answered")
}

// floodSite is a vhostd that may have 256 descriptors, with a guest that floods and a good one, and a server on the host.
type floodSite struct {
	t    *testing.T
	dir  string
	p    *process
	at   uint16 // the server's port
	good *stack.Stack
	evil *frontend.Client
	pair *frontend.Pair
}

func startFloodSite(t *testing.T) *floodSite {
	t.Helper()
	s := &floodSite{t: t, dir: t.TempDir()}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	s.at = netip.MustParseAddrPort(l.Addr().String()).Port()
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			go func() {
				defer c.Close()
				_, _ = io.Copy(struct{ io.Writer }{c}, struct{ io.Reader }{c})
			}()
		}
	}()
	file := filepath.Join(s.dir, "f.yaml")
	text := "guests:\n"
	for _, name := range []string{"flood", "good"} {
		text += fmt.Sprintf("  - {name: %[1]s, socket: %[2]s/%[1]s, network: \"user,host-loopback=on,dns=off\"}\n", name, s.dir)
	}
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s.p = startCommand(t, exec.Command("sh", "-c", `ulimit -n 256; exec "$0" serve --config "$1"`, program, file))
	s.p.ready()
	s.good = machine(t, connect(t, s.dir+"/good"))
	wantGatewayEcho(t, s.good, s.at)
	s.evil = connect(t, s.dir+"/flood")
	if s.pair, err = s.evil.StartPair(0); err != nil {
		t.Fatal(err)
	}
	return s
}

// end wants the memory bounded, the flooding guest served again as soon as it behaves, and a clean end.
func (s *floodSite) end() {
	s.t.Helper()
	if rss := residentKiB(s.t, s.p.cmd.Process.Pid); rss > 1<<20 {
		s.t.Errorf("%d KiB are resident", rss)
	}
	s.evil.Close()
	wantGatewayEcho(s.t, machine(s.t, connectAgain(s.t, s.dir+"/flood")), s.at)
	s.p.stop()
}

// flood sends frames, as many at a time as the ring has room for, and throws away what comes.
func flood(t *testing.T, p *frontend.Pair, frames [][]byte) {
	t.Helper()
	for _, frame := range frames {
		for p.Stage(virtio.NetHdr{}, frame, frontend.Direct) != nil {
			if err := errors.Join(p.TX.Flush(), p.DrainTx(10*time.Second)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := p.TX.Flush(); err != nil {
		t.Fatal(err)
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
	if err := gatewayEcho(s, port); err != nil {
		t.Fatal(err)
	}
}

func gatewayEcho(s *stack.Stack, port uint16) error {
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
			return nil
		}
	}
	return fmt.Errorf("a connection to the gateway: %w", err)
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
