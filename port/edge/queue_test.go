package edge

import (
	"encoding/binary"
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"
	"github.com/gopacket/gopacket/pcapgo"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/ratelimit"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port/echo"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

// TestFromGuestRate: frames beyond the rate are pushed back, and pass when their time has come.
func TestFromGuestRate(t *testing.T) {
	rig := porttest.NewRig(t)
	p := Wrap(newEcho(t, echo.Options{}), Options{FromGuest: ratelimit.New(8_000_000)})
	t.Cleanup(func() { p.Close() })
	q := rig.Open(t, p, 0)
	frame := porttest.Frame(9000, 1)
	send := func() (sent int) {
		for range 20 {
			pkts := []packet.Packet{rig.Packet(t, frame, 0)}
			n := q.Send(pkts)
			rig.Release(pkts[n:])
			sent += n
		}
		return sent
	}
	begin := time.Now()
	first := send()
	if took := time.Since(begin); first < 8 || first > 9+int(took/(9*time.Millisecond)) {
		t.Errorf("%d frames of 9000 bytes at once", first)
	}
	time.Sleep(30 * time.Millisecond)
	if send() == 0 {
		t.Error("nothing passes after a pause")
	}
	rig.Recv(t, q, first)
}

// TestRefusedFramesArePaidBack: what the network does not take costs nothing.
func TestRefusedFramesArePaidBack(t *testing.T) {
	rig := porttest.NewRig(t)
	bucket := ratelimit.New(ratelimit.MinRate)
	p := Wrap(newEcho(t, echo.Options{Backlog: 1}), Options{FromGuest: bucket})
	t.Cleanup(func() { p.Close() })
	q := rig.Open(t, p, 0)
	for range 1000 {
		pkts := []packet.Packet{rig.Packet(t, porttest.Frame(9000, 1), 0), rig.Packet(t, porttest.Frame(9000, 1), 0)}
		n := q.Send(pkts)
		rig.Release(pkts[n:])
	}
	if wait := bucket.Take(0); wait != 0 {
		t.Errorf("one frame passed, and the next one waits %v", wait)
	}
}

// TestToGuestRate wants a worker that sleeps on ReadyFD to receive what the rate allows, and to be woken for it.
func TestToGuestRate(t *testing.T) {
	rig := porttest.NewRig(t)
	p := Wrap(newEcho(t, echo.Options{}), Options{ToGuest: ratelimit.New(8_000_000)}) // a byte each microsecond
	t.Cleanup(func() { p.Close() })
	q := rig.Open(t, p, 0)
	poll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(poll)
	if err := unix.EpollCtl(poll, unix.EPOLL_CTL_ADD, q.ReadyFD(), &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET}); err != nil {
		t.Fatal(err)
	}
	const n = 40
	for range n {
		q.Send([]packet.Packet{rig.Packet(t, porttest.Frame(9000, 1), 0)})
	}
	begin := time.Now()
	var pkts [64]packet.Packet
	got, sleeps := 0, 0
	for got < n && time.Since(begin) < 20*time.Second {
		m := q.Recv(pkts[:])
		rig.Release(pkts[:m])
		if got += m; m > 0 || q.Arm() {
			continue
		}
		var events [1]unix.EpollEvent
		k, err := unix.EpollWait(poll, events[:], 2000)
		if err != nil && !errors.Is(err, unix.EINTR) || err == nil && k == 0 {
			t.Fatalf("the worker was not woken (%v); %d of %d frames came", err, got, n)
		}
		sleeps++
	}
	took := time.Since(begin)
	if want := time.Duration(n*9000-ratelimit.MinBurst-9000) * time.Microsecond; got != n || took < want || sleeps == 0 {
		t.Errorf("%d frames in %v with %d sleeps, want %d in at least %v", got, took, sleeps, n, want)
	}
}

// TestWokenByNetwork: the inner descriptor's edges pass through, every one of them.
func TestWokenByNetwork(t *testing.T) {
	bell, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(bell)
	p, err := newPause(bell)
	if err != nil {
		t.Fatal(err)
	}
	defer p.close()
	poll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(poll)
	if err := unix.EpollCtl(poll, unix.EPOLL_CTL_ADD, p.poll, &unix.EpollEvent{Events: unix.EPOLLIN | unix.EPOLLET}); err != nil {
		t.Fatal(err)
	}
	var events [4]unix.EpollEvent
	wait := func(ms int) int {
		n, err := unix.EpollWait(poll, events[:], ms)
		if err != nil && !errors.Is(err, unix.EINTR) {
			t.Fatal(err)
		}
		return max(n, 0)
	}
	if wait(0) != 0 {
		t.Error("ready before anything came")
	}
	one := binary.NativeEndian.AppendUint64(nil, 1)
	for i := range 100 { // nobody reads the eventfd, as with a switch
		if _, err := unix.Write(bell, one); err != nil {
			t.Fatal(err)
		}
		if wait(1000) == 0 {
			t.Fatalf("edge %d of the network was lost", i)
		}
		if wait(0) != 0 {
			t.Fatalf("edge %d came twice", i)
		}
		if i%2 == 0 {
			if !p.set(time.Microsecond) {
				t.Fatal("the timer is not set")
			}
			if wait(1000) == 0 {
				t.Fatalf("the timer's edge %d was lost", i)
			}
		}
	}
	if _, err := newPause(1 << 20); err == nil {
		t.Error("a descriptor that is none is watched")
	}
}

// TestCapture sends frames with marks through an echo and reads the file.
func TestCapture(t *testing.T) {
	rig := porttest.NewRig(t)
	w, path := newCapture(t)
	p := Wrap(newEcho(t, echo.Options{Backlog: 3}), Options{Capture: w})
	t.Cleanup(func() { p.Close() })
	q := rig.Open(t, p, 0)
	udpFrame := build(t, ether(own, layers.EthernetTypeIPv4), ip4("10.0.2.15", 17), udp(1000, 2000), gopacket.Payload("hello, wire"))
	udpFrame[14+9] = 17
	pseudo := sum16(append(append([]byte{}, udpFrame[26:34]...), 0, 17, udpFrame[38], udpFrame[39]))
	binary.BigEndian.PutUint16(udpFrame[40:], pseudo)
	marked := rig.Packet(t, udpFrame, 7)
	marked.Hdr = virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: 34, CsumOffset: 6}
	wild := rig.Packet(t, udpFrame, 0)
	wild.Hdr = virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: 65535, CsumOffset: 65535}
	large := rig.Packet(t, porttest.Frame(60000, 1), 0)
	large.Hdr = virtio.NetHdr{GSOType: virtio.GSOTCPv4 | virtio.GSOECN, GSOSize: 1448}
	pkts := []packet.Packet{marked, wild, large, rig.Packet(t, porttest.Frame(60, 1), 0)}
	if n := q.Send(pkts); n != 3 {
		t.Fatalf("%d frames were taken", n)
	}
	rig.Recv(t, q, 3)
	q.Send(pkts[3:]) // it was pushed back, and is in the file once
	rig.Recv(t, q, 1)
	q.Close()
	w.Close()

	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	r, err := pcapgo.NewNgReader(file, pcapgo.NgReaderOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var lengths []int
	for {
		data, ci, opts, err := r.ReadPacketDataWithOptions()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		switch len(lengths) {
		case 0, 3:
			if sum16(append(append([]byte{}, data[26:34]...), append([]byte{0, 17, data[38], data[39]}, data[34:]...)...)) != 0xffff {
				t.Errorf("the checksum of %x is wrong", data)
			}
		case 1:
			if string(data) != string(udpFrame) {
				t.Error("marks outside of the frame changed it")
			}
		case 2, 5:
			if len(opts.Comments) != 1 || opts.Comments[0] != "to be cut into TCP segments over IPv4 of 1448 bytes" {
				t.Errorf("comments %q", opts.Comments)
			}
		}
		lengths = append(lengths, ci.Length)
	}
	want := []int{len(udpFrame), len(udpFrame), 60000, len(udpFrame), len(udpFrame), 60000, 60, 60}
	if len(lengths) != len(want) {
		t.Fatalf("frames of %v bytes, want %v", lengths, want)
	}
	for i := range want {
		if lengths[i] != want[i] {
			t.Errorf("frame %d has %d bytes, want %d", i, lengths[i], want[i])
		}
	}
}

// sum16 is the one's complement sum.
func sum16(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(b[i]) << 8
		if i+1 < len(b) {
			sum += uint32(b[i+1])
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}
