package source

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Mappings("vhostd-arena"), testmain.Goroutines()))
}

func newPort(t testing.TB, opts Options) *Port {
	t.Helper()
	p, err := New(opts)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestConformance(t *testing.T) {
	for _, opts := range []Options{
		{Flows: 7}, {Size: 20}, {Size: MaxSize}, {Size: 9018, Rate: 50000},
	} {
		t.Run(fmt.Sprintf("size=%d,rate=%g", opts.Size, opts.Rate), func(t *testing.T) {
			porttest.Run(t, porttest.Config{
				New:       func(t testing.TB) port.Port { return newPort(t, opts) },
				Generates: true,
			})
		})
	}
}

func TestValidate(t *testing.T) {
	for _, tc := range []struct {
		opts   Options
		option string // that is wrong
	}{
		{Options{}, ""},
		{Options{Size: MinSize, Rate: 1, Flows: MaxFlows, MAC: net.HardwareAddr{2, 0, 0, 0, 0, 5}}, ""},
		{Options{Size: MaxSize, Rate: MaxRate}, ""},
		{Options{Size: MinSize - 1}, "size"},
		{Options{Size: MaxSize + 1}, "size"},
		{Options{Size: -1}, "size"},
		{Options{Rate: -1}, "rate"},
		{Options{Rate: 2 * MaxRate}, "rate"},
		{Options{Flows: -1}, "flows"},
		{Options{Flows: MaxFlows + 1}, "flows"},
		{Options{MAC: net.HardwareAddr{1}}, "mac"},
	} {
		err := tc.opts.Validate()
		var wrong *port.OptionError
		if tc.option == "" && err != nil || tc.option != "" && (!errors.As(err, &wrong) || wrong.Option != tc.option) {
			t.Errorf("%+v: error %v, want one about %q", tc.opts, err, tc.option)
		}
	}
}

// TestFramesAreValid takes frames from recycled pages and has another library look at them.
func TestFramesAreValid(t *testing.T) {
	mac := net.HardwareAddr{2, 0, 0, 0, 0, 5}
	for _, size := range []int{60, 64, 65, 1514, 4096, 4097, 8191, 9018, maxUntagged, maxUntagged + 1, MaxSize} {
		t.Run(fmt.Sprint(size), func(t *testing.T) {
			const flows = 3
			rig := porttest.NewRig(t)
			q := rig.Open(t, newPort(t, Options{Size: size, Flows: flows, MAC: mac}), 0)
			pages := pagesOf(size)
			for i, frame := range rig.Recv(t, q, 400/pages) {
				if len(frame) != size {
					t.Fatalf("frame %d has %d bytes", i, len(frame))
				}
				checkFrame(t, frame, mac, uint32(i), uint16(firstPort+i%flows))
			}
		})
	}
}

func checkFrame(t *testing.T, frame []byte, mac net.HardwareAddr, seq uint32, port uint16) {
	t.Helper()
	p := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.DecodeOptions{NoCopy: true})
	if e := p.ErrorLayer(); e != nil {
		t.Fatalf("frame %d: %v", seq, e.Error())
	}
	ether, _ := p.Layer(layers.LayerTypeEthernet).(*layers.Ethernet)
	udp, ok := p.Layer(layers.LayerTypeUDP).(*layers.UDP)
	if ok {
		if err := udp.SetNetworkLayerForChecksum(p.NetworkLayer()); err != nil {
			t.Fatal(err)
		}
	}
	if err, wrong := p.VerifyChecksums(); err != nil || len(wrong) != 0 {
		t.Fatalf("frame %d: checksums %v %+v", seq, err, wrong)
	}
	switch {
	case !ok || ether.DstMAC.String() != mac.String():
		t.Fatalf("frame %d: %v", seq, p)
	case udp.SrcPort != layers.UDPPort(port) || udp.DstPort != sinkPort || udp.Checksum == 0:
		t.Fatalf("frame %d: UDP %d to %d, checksum %#x, want source port %d", seq, udp.SrcPort, udp.DstPort, udp.Checksum, port)
	case binary.BigEndian.Uint32(udp.Payload[2:]) != seq:
		t.Fatalf("frame %d has sequence number %d", seq, binary.BigEndian.Uint32(udp.Payload[2:]))
	}
	for i := headLen; i < len(frame); i++ {
		if frame[i] != pattern(i) {
			t.Fatalf("frame %d: byte %d is %#x", seq, i, frame[i])
		}
	}
}

func TestShortFrames(t *testing.T) {
	for _, size := range []int{MinSize, 33, minUDP - 1} {
		rig := porttest.NewRig(t)
		q := rig.Open(t, newPort(t, Options{Size: size}), 0)
		for _, frame := range rig.Recv(t, q, 100) {
			if len(frame) != size || binary.BigEndian.Uint16(frame[12:]) != etherTypeLocal {
				t.Fatalf("size %d: frame % x", size, frame)
			}
		}
	}
}

func TestStopsWithoutMemory(t *testing.T) {
	for _, size := range []int{64, 9018} {
		rig := porttest.NewRig(t)
		q := rig.Open(t, newPort(t, Options{Size: size}), 0)
		var held []packet.Packet
		pkts := make([]packet.Packet, port.MaxBatch)
		for n := q.Recv(pkts); n > 0; n = q.Recv(pkts) {
			held = append(held, pkts[:n]...)
		}
		if len(held) == 0 {
			t.Fatal("no frames at all")
		}
		rig.Release(held)
		if n := q.Recv(pkts); n != len(pkts) {
			t.Errorf("size %d: Recv = %d after memory came back", size, n)
		} else {
			rig.Release(pkts)
		}
	}
}

func TestBucket(t *testing.T) {
	b := newBucket(1000, 0)
	if n := b.refill(0); n != 0 {
		t.Errorf("%d tokens at the start", n)
	}
	if n := b.refill(5 * time.Millisecond); n != 5 {
		t.Errorf("%d tokens after 5 ms at 1000 a second", n)
	}
	b.take(5)
	if wait := b.wait(); wait < 900*time.Microsecond || wait > 1100*time.Microsecond {
		t.Errorf("next token in %v, want about 1 ms", wait)
	}
	if n := b.refill(time.Hour); n != 10 {
		t.Errorf("%d tokens kept after an hour, want those of %v", n, burstTime)
	}
	fast := newBucket(MaxRate, 0)
	if wait := fast.wait(); wait != minSleep {
		t.Errorf("a fast source sleeps %v, want %v", wait, minSleep)
	}
	slow := newBucket(0.5, 0)
	if n := slow.refill(2 * time.Second); n != 1 {
		t.Errorf("%d tokens after 2 s at one in 2 s", n)
	}
}

// TestRate runs a source as a worker that sleeps does.
func TestRate(t *testing.T) {
	const rate = 5000
	rig := porttest.NewRig(t)
	q := rig.Open(t, newPort(t, Options{Rate: rate}), 0)
	var pkts [port.MaxBatch]packet.Packet
	start, frames, wakes := time.Now(), 0, 0
	for time.Since(start) < 300*time.Millisecond {
		n := q.Recv(pkts[:])
		rig.Release(pkts[:n])
		frames += n
		if n == 0 && !q.Arm() {
			porttest.Readable(q.ReadyFD(), time.Second)
			wakes++
		}
	}
	most := int(time.Since(start).Seconds()*rate) + 1
	if frames > most || frames < most/20 {
		t.Errorf("%d frames, want up to %d", frames, most)
	}
	if wakes > frames+1 {
		t.Errorf("%d wake-ups for %d frames", wakes, frames)
	}
}

func TestMarksAreAligned(t *testing.T) {
	for _, size := range []int{minUDP, MaxSize} {
		l := layoutOf(size)
		if l.port%2 != 0 || l.portNot%2 != 0 || l.seq%4 != 0 || l.portNot+2 > minUDP || l.seq+8 > minUDP {
			t.Errorf("size %d: %+v", size, l)
		}
		for addr := uintptr(0); addr < 1<<16; addr += 4096 {
			q := queue{colorMask: colorsOf(size) - 1}
			at := q.place(addr)
			if at%headLen != 0 || size <= 4096 && at+uintptr(size) > addr+4096 {
				t.Errorf("size %d: page %#x, frame at %#x", size, addr, at)
			}
		}
	}
}

func BenchmarkRecv(b *testing.B) {
	for _, opts := range []Options{{Size: 64}, {Size: 64, Flows: 100}, {Size: 1514}, {Size: 9018}} {
		b.Run(fmt.Sprintf("size=%d,flows=%d", opts.Size, opts.Flows), func(b *testing.B) {
			rig := porttest.NewRig(b)
			q := rig.Open(b, newPort(b, opts), 0)
			var pkts [port.MaxBatch]packet.Packet
			for b.Loop() {
				n := q.Recv(pkts[:])
				rig.Release(pkts[:n])
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/port.MaxBatch, "ns/frame")
		})
	}
}
