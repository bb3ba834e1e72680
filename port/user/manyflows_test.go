package user

import (
	"encoding/binary"
	"net/netip"
	"runtime"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

// crowd is a guest that makes any number of connections and keeps nothing of them, so that what they cost is what they cost the network: it
// acknowledges each SYN-ACK. The host's side are bare descriptors.
type crowd struct {
	guest
	server netip.AddrPort
	listen int

	mu       sync.Mutex
	accepted []int
}

func newCrowd(t testing.TB, p *Port) *crowd {
	t.Helper()
	c := &crowd{guest: guest{t: t, card: newCard(t, p, 0), v4: p.opts.Guest}}
	answer := func(f []byte) {
		const l4 = virtio.EthernetHdrLen + ipv4Len
		if len(f) < l4+tcpMin || f[23] != protoTCP || f[l4+13] != flagSYN|flagACK {
			return
		}
		ack := c.segment(port16(f[l4+2:]), c.server, binary.BigEndian.Uint32(f[l4+8:]), flagACK)
		binary.BigEndian.PutUint32(ack[l4+8:], binary.BigEndian.Uint32(f[l4+4:])+1)
		binary.BigEndian.PutUint16(ack[l4+16:], 0)
		binary.BigEndian.PutUint16(ack[l4+16:], ^checksum.Checksum(ack[l4:], pseudoSum(protoTCP, c.v4, c.server.Addr(), tcpMin)))
		c.card.send(ack, virtio.NetHdr{})
	}
	c.card.tap.Store(&answer)
	var err error
	if c.listen, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
		t.Fatal(err)
	}
	at := &unix.SockaddrInet4{Addr: netip.MustParseAddr(live4).As4()}
	if err := unix.Bind(c.listen, at); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(c.listen, backlogLen); err != nil {
		t.Fatal(err)
	}
	sa, err := unix.Getsockname(c.listen)
	if err != nil {
		t.Fatal(err)
	}
	c.server = addrPortOf(sa)
	var accepting sync.WaitGroup
	accepting.Go(c.accept)
	t.Cleanup(func() {
		_ = unix.Shutdown(c.listen, unix.SHUT_RD)
		accepting.Wait()
		unix.Close(c.listen)
		c.hangUp()
	})
	return c
}

func (c *crowd) accept() {
	for {
		fd, _, err := unix.Accept4(c.listen, unix.SOCK_CLOEXEC)
		if err != nil {
			return
		}
		c.mu.Lock()
		c.accepted = append(c.accepted, fd)
		c.mu.Unlock()
	}
}

// connect makes n connections at once and waits until they stand.
func (c *crowd) connect(n int) {
	c.t.Helper()
	p := c.card.port
	want := open(p) + n
	for i := range n {
		c.card.send(c.segment(uint16(1024+want-n+i), c.server, uint32(i), flagSYN), virtio.NetHdr{})
	}
	for end := time.Now().Add(time.Minute); open(p) < want; time.Sleep(100 * time.Microsecond) {
		if time.Now().After(end) {
			c.t.Fatalf("%d of %d connections", open(p), want)
		}
	}
}

func open(p *Port) int {
	p.tcp.mu.Lock()
	defer p.tcp.mu.Unlock()
	return len(p.tcp.conns)
}

// hangUp resets all connections from the host's side.
func (c *crowd) hangUp() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, fd := range c.accepted {
		resetOnClose(fd)
		unix.Close(fd)
	}
	c.accepted = nil
}

// TestIdleFlows: an idle TCP flow costs no goroutine and at most 16 KiB.
func TestIdleFlows(t *testing.T) {
	flows := sized(500, min(10_000, int(descriptors.limit()/2)/500*500-500)) // a network leaves half of the descriptors to others
	p := newPort(t, Options{})
	c := newCrowd(t, p)
	c.connect(10)
	before, goroutines := heap(), runtime.NumGoroutine()
	for n := 0; n < flows; n += 500 {
		c.connect(500)
	}
	if !porttest.Eventually(func() bool { return runtime.NumGoroutine() <= goroutines+10 }) {
		t.Errorf("%d goroutines more for %d idle flows", runtime.NumGoroutine()-goroutines, flows)
	}
	cost := (int(heap()) - int(before)) / flows
	t.Logf("%d bytes for each of %d flows", cost, flows)
	if cost > 16<<10 {
		t.Errorf("an idle flow costs %d bytes", cost)
	}
	c.hangUp()
	noFlows(t, p)
}

// BenchmarkConnect makes 1000 connections at once. The processor time contains the crowd's and the kernel's work.
func BenchmarkConnect(b *testing.B) {
	p := newPort(b, Options{})
	c := newCrowd(b, p)
	used := time.Duration(0)
	for b.Loop() {
		before := processorTime(b)
		c.connect(1000)
		used += processorTime(b) - before
		b.StopTimer()
		c.hangUp()
		if !porttest.Eventually(func() bool { return p.FlowCount() == 0 }) {
			b.Fatalf("%d flows stay", p.FlowCount())
		}
		b.StartTimer()
	}
	b.ReportMetric(float64(used.Microseconds())/float64(b.N)/1000, "cpu-us/conn")
}

// TestLongOneShotFlows: 50,000 flows of one datagram each in a minute cost as much processor time in each ten seconds as in the ten
// before, and their sockets are gone ten seconds after the last.
func TestLongOneShotFlows(t *testing.T) {
	testmain.Long(t)
	const flows, slices = 50_000, 6
	p := newPort(t, Options{})
	g := &guest{t: t, card: newCard(t, p, 0), v4: p.opts.Guest}
	at, _ := listenUDP(t, live4+":0")
	to := netip.MustParseAddrPort(at)
	var used [slices]time.Duration
	start, most := time.Now(), int64(0)
	for i := range flows {
		due := start.Add(time.Duration(i) * time.Minute / flows)
		if d := time.Until(due); d > 0 {
			time.Sleep(d)
		}
		if slice := i / (flows / slices); i%(flows/slices) == 0 && slice < slices {
			used[slice] = processorTime(t)
		}
		g.card.send(g.datagramFrame(uint16(1024+i), to, []byte("question")), virtio.NetHdr{})
		most = max(most, p.flows.fds.held.Load())
	}
	end := time.Now()
	for p.FlowCount() > 0 {
		if time.Since(end) > 30*time.Second {
			t.Fatalf("%d flows stay", p.FlowCount())
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Logf("%d flows in %v, at most %d sockets, the last gone after %v", flows, end.Sub(start), most, time.Since(end))
	last := processorTime(t)
	for i := range used {
		next := last
		if i+1 < slices {
			next = used[i+1]
		}
		t.Logf("processor time of slice %d: %v", i, next-used[i])
	}
	if first, late := used[2]-used[1], used[slices-1]-used[slices-2]; late > 2*first {
		t.Errorf("processor time grows from %v to %v", first, late)
	}
}

func processorTime(t testing.TB) time.Duration {
	t.Helper()
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
