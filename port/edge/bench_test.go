package edge

import (
	"log/slog"
	"math"
	"net/netip"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/ratelimit"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/port/user"
)

// BenchmarkUser shows what the edge costs that the user network always has, with nothing for it to do: batches of 32 frames of 64 bytes.
// foreign is the cheapest that the network does with a frame of the guest (it is for another station), so that the edge weighs most; arp
// has every request answered, and the answer received.
func BenchmarkUser(b *testing.B) {
	const batch = 32
	mac := [6]byte{2, 0, 0, 0, 0, 9}
	foreign, arp := make([]byte, 64), make([]byte, 64)
	copy(foreign, []byte{2, 0, 0, 0, 0, 8})
	copy(foreign[6:], mac[:])
	copy(arp, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	copy(arp[6:], mac[:])
	copy(arp[12:], []byte{8, 6, 0, 1, 8, 0, 6, 4, 0, 1}) // a request (RFC 826)
	copy(arp[22:], mac[:])
	copy(arp[28:], []byte{10, 0, 2, 15})
	copy(arp[38:], []byte{10, 0, 2, 2})
	for _, what := range []struct {
		name    string
		frame   []byte
		answers int
	}{{"foreign", foreign, 0}, {"arp", arp, batch}} {
		for _, with := range []string{"none", "edge"} {
			b.Run(what.name+"/"+with, func(b *testing.B) {
				var p port.Port
				p, err := user.New(user.Options{
					Subnet: netip.MustParsePrefix("10.0.2.0/24"), Gateway: netip.MustParseAddr("10.0.2.2"), NoIPv6: true,
					Logger: slog.New(slog.DiscardHandler),
				})
				if err != nil {
					b.Fatal(err)
				}
				if with == "edge" { // as internal/network makes it without any parameter
					p = Wrap(p, Options{Guard: newGuard(b, Source{}), FromGuest: ratelimit.New(0), ToGuest: ratelimit.New(0)})
				}
				defer p.Close()
				rig := porttest.NewRig(b)
				q := rig.Open(b, p, 0)
				var pkts [batch]packet.Packet
				var back [port.MaxBatch]packet.Packet
				work := func() {
					for i := range pkts {
						pkts[i] = rig.Packet(b, what.frame, len(what.frame))
					}
					if n := q.Send(pkts[:]); n != batch {
						b.Fatal(n)
					}
					n := q.Recv(back[:])
					if n != what.answers {
						b.Fatalf("%d answers", n)
					}
					rig.Release(back[:n])
				}
				best := math.Inf(1)
				for b.Loop() {
					best = min(best, cpuOf(work)/batch)
				}
				b.ReportMetric(best, "best-ns/frame")
				b.ReportMetric(1e9/best, "frames/s")
			})
		}
	}
}

// cpuOf is the processor time of this thread, in nanoseconds, for one of many calls: other work on the machine does not count, and the best
// of many is what no interrupt was charged to.
func cpuOf(work func()) float64 {
	const calls = 32
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var from, to unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &from) // always there on Linux
	for range calls {
		work()
	}
	_ = unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &to)
	return float64(to.Nano()-from.Nano()) / calls
}
