package cases

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// seam splits region r of mem at a page between the receive ring and the transmit ring of p, so that its second half is a region
// of its own from another offset of the same file.
func seam(mem *frontend.Memory, r int, p *frontend.Pair) (specs []guestmem.RegionSpec, fds []int) {
	all, files := mem.Table()
	whole := all[r]
	half := (p.TX.Addr().Desc - whole.UVA) / 2 &^ 4095
	low, high := whole, whole
	low.Size = half
	high.GPA, high.UVA, high.MmapOffset, high.Size = whole.GPA+half, whole.UVA+half, whole.MmapOffset+half, whole.Size-half
	specs = append(append(specs, low, high), all[r+1:]...)
	fds = append(append(fds, files[r], files[r]), files[r+1:]...)
	return append(specs, all[:r]...), append(fds, files[:r]...)
}

// TestMEM01_MemoryTableUnderTraffic replaces the table of running rings: nothing is lost, and rings whose memory is gone wait for
// its return.
func TestMEM01_MemoryTableUnderTraffic(t *testing.T) {
	for name, flags := range map[string][]string{
		"adaptive": nil, "block": {"--wake", "block"}, "poll": {"--wake", "poll"}, "completions held back": {"--wake", "poll", "--tx-lag", "32"},
		"two workers": {"--cpus", twoCPUs(t)},
	} {
		t.Run(name, func(t *testing.T) {
			d := serve(t, "echo", flags...)
			mem := memory(t, 64<<20, 64<<20, 1<<20)
			c := d.session(mem, plain)
			p, other := detached(t, mem, 0, plain), detached(t, mem, 1, plain)
			steps(t, rings(c, p), rings(c, other), on(c, 0, 1, 2, 3))
			base := d.use()
			traffic, more := startLoad(t, p), startLoad(t, other)
			swaps := rounds(100, 1000)
			for i := range swaps {
				swap(t, c, mem, p, i)
			}
			t.Logf("%d and %d frames during %d changes", traffic.end(t), more.end(t), swaps)
			d.flat(base)
			flows(t, p)
			flows(t, other)
		})
	}
}

// twoCPUs are the first two processors that may be used, or the only one.
func twoCPUs(t *testing.T) string {
	t.Helper()
	var set unix.CPUSet
	must(t, unix.SchedGetaffinity(0, &set))
	var list []string
	for cpu := 0; cpu < 1024 && len(list) < 2; cpu++ {
		if set.IsSet(cpu) {
			list = append(list, strconv.Itoa(cpu))
		}
	}
	return strings.Join(list, ",")
}

// swap replaces the table in one of five ways.
func swap(t *testing.T, c *frontend.Conn, mem *frontend.Memory, p *frontend.Pair, way int) {
	t.Helper()
	specs, fds := mem.Table()
	switch way % 5 {
	case 0: // identical
		must(t, table(c, specs[:2], fds[:2]))
	case 1: // one region more
		must(t, table(c, specs, fds))
	case 2: // the same memory from other offsets
		s, f := seam(mem, 0, p)
		must(t, table(c, s, f))
	case 3: // another order
		must(t, table(c, []guestmem.RegionSpec{specs[1], specs[0]}, []int{fds[1], fds[0]}))
	case 4: // without the rings, and back
		must(t, table(c, specs[1:2], fds[1:2]))
		time.Sleep(time.Millisecond)
		must(t, table(c, specs[:2], fds[:2]))
	}
}

// TestMEM01_ParkedRings: rings whose memory is gone are quiet. They go on by themselves when it returns, or are stopped at the right
// position, also when they are started again before it returns.
func TestMEM01_ParkedRings(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	c := d.session(mem, plain)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	specs, fds := mem.Table()
	echoed(t, p, 300)
	for name, wake := range map[string]func(){
		"the memory returns": func() { must(t, table(c, specs, fds)) },
		"stopped meanwhile": func() {
			stopped(t, c, p, uint32(p.TX.Ring.PeekUsedIdx()))
			must(t, table(c, specs, fds))
			for _, q := range []*frontend.Queue{p.RX, p.TX} {
				must(t, c.SetVringKick(q.Index, q.KickFD)) // addresses and base are those of before
			}
		},
		"stopped and started meanwhile": func() {
			stopped(t, c, p, uint32(p.TX.Ring.PeekUsedIdx()))
			for _, q := range []*frontend.Queue{p.RX, p.TX} {
				if err := c.SetVringKick(q.Index, q.KickFD); err == nil {
					t.Errorf("ring %d, whose memory is gone, is started", q.Index)
				}
			}
			must(t, table(c, specs, fds))
			for _, q := range []*frontend.Queue{p.RX, p.TX} {
				must(t, c.SetVringKick(q.Index, q.KickFD))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			must(t, table(c, specs[1:2], fds[1:2]))
			want := frameOf(60, 9)
			_, err := p.PostRx(1)
			must(t, err)
			must(t, p.SendTx(virtio.NetHdr{}, want, frontend.Direct))
			nothing(t, p.TX)
			wake()
			expect(t, p, want)
			must(t, p.DrainTx(patience))
		})
	}
}

// TestMEM01_ParkedRingsLogOnce: a front-end that takes the rings' memory away again and again does not fill the log.
func TestMEM01_ParkedRingsLogOnce(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	c := d.session(mem, plain)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	specs, fds := mem.Table()
	for range 100 {
		must(t, table(c, specs[1:], fds[1:]))
		must(t, table(c, specs, fds))
	}
	flows(t, p)
	if n := d.logged("parked"); n == 0 || n > 25 {
		t.Errorf("%d lines in the log about parked rings, want some and at most 25", n)
	}
}

// TestMEM02_NumberOfRegions: SET_MEM_TABLE takes up to eight regions; nine are refused and change nothing.
func TestMEM02_NumberOfRegions(t *testing.T) {
	d := serve(t, "echo")
	sizes := []uint64{16 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20, 1 << 20}
	mem := memory(t, sizes...)
	specs, fds := mem.Table()
	c := d.session(memory(t, 4096), plain)
	must(t, table(c, specs[:8], fds[:8]))
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	base := d.use()
	for r := range 8 {
		at, err := mem.Alloc(r, 2048, 64)
		must(t, err)
		throughMemory(t, mem, p, at, 1514, at)
	}
	mustRefuse(t, "nine regions", table(c, specs, fds))
	mustRefuse(t, "nine regions announced, eight sent", c.DoAck(vhostuser.ReqSetMemTable, announce(9, specs[:8]), fds[:8]...))
	mustRefuse(t, "0xffffffff regions announced", c.DoAck(vhostuser.ReqSetMemTable, announce(0xffffffff, specs[:8]), fds[:8]...))
	mustRefuse(t, "eight regions and seven descriptors", table(c, specs[:8], fds[:7]))
	mustRefuse(t, "one region and two descriptors", table(c, specs[:1], fds[:2]))
	flows(t, p)
	empty := table(c, nil, nil)
	if empty == nil { // the rings are parked
		must(t, table(c, specs[:8], fds[:8]))
	}
	flows(t, p)
	must(t, table(c, specs[:1], fds[:1]))
	flows(t, p)
	d.flat(base)
}

func announce(n uint32, specs []guestmem.RegionSpec) []byte {
	b := vhostuser.AppendMemTable(nil, specs)
	for i := range 4 {
		b[i] = byte(n >> (8 * i))
	}
	return b
}

// throughMemory sends a frame from guest address tx through the echo network into a receive buffer at rx, both chosen by the test.
// The two may be the same memory.
func throughMemory(t *testing.T, mem *frontend.Memory, p *frontend.Pair, tx uint64, n int, rx uint64) {
	t.Helper()
	frame := frameOf(n, 0x21)
	packet := append(make([]byte, virtio.NetHdrLen), frame...)
	store(mem, tx, packet)
	_, err := p.TX.Ring.AddDirect(driver.Buf{Addr: tx, Len: uint32(len(packet))})
	must(t, err)
	must(t, p.TX.Flush())
	used(t, p.TX, 0)
	_, err = p.RX.Ring.AddDirect(driver.Buf{Addr: rx, Len: uint32(len(packet)), Write: true})
	must(t, err)
	must(t, p.RX.Flush())
	used(t, p.RX, uint32(len(packet)))
	if got, want := loadBytes(mem, rx, len(packet))[virtio.NetHdrLen:], swapped(frame); string(got) != string(want) {
		t.Errorf("frame of %d bytes from %#x to %#x is not what was sent:\n% x\nwant\n% x", n, tx, rx, head(got), head(want))
	}
}

// used waits for one chain and its length.
func used(t *testing.T, q *frontend.Queue, want uint32) {
	t.Helper()
	must(t, q.WaitUsed(patience))
	_, n, ok := q.Ring.GetUsed()
	if !ok || n != want {
		t.Errorf("ring %d: chain used with %d bytes (%v, %v), want %d", q.Index, n, ok, q.Ring.Err(), want)
	}
}

// store writes bytes at a guest address, over the border of regions.
func store(mem *frontend.Memory, gpa uint64, b []byte) {
	for i := range b {
		mem.Bytes(gpa+uint64(i), 1)[0] = b[i]
	}
}

// loadBytes reads bytes over the border of regions.
func loadBytes(mem *frontend.Memory, gpa uint64, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = mem.Bytes(gpa+uint64(i), 1)[0]
	}
	return b
}

// TestMEM06_MemoryThatIsNotShared: a back-end that sees a private copy of the guest's memory gets kicks for rings that never move,
// and says so once.
func TestMEM06_MemoryThatIsNotShared(t *testing.T) {
	const text = "is its memory shared"
	d := serve(t, "echo")
	mem, private := memory(t), memory(t)
	c := d.session(private, plain)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	for end := time.Now().Add(3 * patience); d.logged(text) == 0; time.Sleep(100 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("no word about memory that is not shared")
		}
		must(t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
		must(t, p.TX.Kick())
	}
	must(t, c.Close())
	d.disconnected()
	d.serves()
	if n := d.logged(text); n != 1 {
		t.Errorf("%d lines about it, want one", n)
	}
}

// TestMEM07_BuffersAcrossRegions: buffers over two adjacent regions of different files are whole, buffers that leave the guest's
// memory are malformed and come back with length 0.
func TestMEM07_BuffersAcrossRegions(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t, 16<<20)
	const border, end = 16 << 20, 17 << 20
	_, err := mem.Add(guestmem.RegionSpec{GPA: border, Size: end - border, UVA: 0x7d00_0000_0000, MmapOffset: 8192})
	must(t, err)
	c := d.session(mem, plain)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	for _, before := range []uint64{100, 1, 6, 12, 13, 12 + 1514 - 1} {
		throughMemory(t, mem, p, border-before, 1514, border+8192)
		throughMemory(t, mem, p, border+8192, 1514, border-before)
		throughMemory(t, mem, p, border-before, 1514, border-before)
	}
	throughMemory(t, mem, p, end-12-1514, 1514, end-12-1514) // ends with the region
	dropped := d.drops(1)
	bad := []driver.Buf{
		{Addr: end - 10, Len: 1514}, {Addr: end - 1, Len: 1514}, {Addr: end, Len: 1514}, {Addr: 1 << 40, Len: 1514},
		{Addr: ^uint64(0) - 99, Len: 1514}, {Addr: ^uint64(0), Len: 1}, {Addr: end - 1514, Len: 0xffffffff}, {Addr: 0, Len: 0xffffffff},
	}
	for _, b := range bad {
		_, err := p.TX.Ring.AddDirect(b)
		must(t, err)
		must(t, p.TX.Flush())
		used(t, p.TX, 0)
	}
	eventually(t, "bad buffers are counted", func() bool { return d.drops(1) == dropped+uint64(len(bad)) })
	for _, b := range bad {
		b.Write = true
		_, err := p.RX.Ring.AddDirect(b)
		must(t, err)
	}
	must(t, p.RX.Flush())
	for range bad {
		want := frameOf(60, 0x5b)
		_, err := p.PostRx(1)
		must(t, err)
		must(t, p.SendTx(virtio.NetHdr{}, want, frontend.Direct))
		must(t, p.DrainTx(patience))
	}
	reclaim(t, p, len(bad))
	flows(t, p)
}

// reclaim takes bad receive chains back, which must have length 0. Between them may be good ones.
func reclaim(t *testing.T, p *frontend.Pair, bad int) {
	t.Helper()
	for bad > 0 {
		must(t, p.RX.WaitUsed(patience))
		_, n, ok := p.RX.Ring.GetUsed()
		if !ok {
			t.Fatalf("no chain: %v", p.RX.Ring.Err())
		}
		if n == 0 {
			bad--
		}
	}
	must(t, emptyRx(p))
}

// emptyRx drops the frames that wait for the driver.
func emptyRx(p *frontend.Pair) error {
	for p.RX.WaitUsed(quiet) == nil {
		if _, _, ok := p.RX.Ring.GetUsed(); !ok {
			return errors.Join(p.RX.Ring.Err(), errors.New("no used chain"))
		}
	}
	return nil
}
