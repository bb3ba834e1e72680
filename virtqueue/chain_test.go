package virtqueue_test

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

const (
	next     = driver.DescFNext
	write    = driver.DescFWrite
	indirect = driver.DescFIndirect
)

// desc is a raw descriptor.
type desc struct {
	addr        uint64
	len         uint32
	flags, next uint16
}

// span is a segment in guest addresses.
type span struct {
	gpa uint64
	len uint32
}

// Regions of the chain tests besides bufGPA: low and high are neighbors in
// guest addresses, mapped apart; last ends at the top of the address space.
const (
	lowGPA  = 0x2000000
	seam    = lowGPA + 0x1000
	highEnd = seam + 0x1000
	lastGPA = ^uint64(0) - 0xfff
)

var chainRegions = []region{{lowGPA, 0x1000}, {seam, 0x1000}, {lastGPA, 0x1000}}

const tableGPA = bufGPA + 0x80000

type chainCase struct {
	name     string
	rx       bool
	features virtio.Features
	size     int // ring, default 16
	descs    []desc
	table    []desc // written at tableAt
	tableAt  uint64 // default tableGPA
	want     []span
	fault    virtqueue.Fault
	used     uint16 // Chain.Descs
}

const ind = virtio.FRingIndirectDesc

var chainCases = []chainCase{
	{name: "one buffer", descs: []desc{{bufGPA, 64, 0, 0}}, want: []span{{bufGPA, 64}}, used: 1},
	{name: "one writable buffer", rx: true, descs: []desc{{bufGPA, 1526, write, 0}}, want: []span{{bufGPA, 1526}}, used: 1},
	{name: "next is ignored without NEXT", descs: []desc{{bufGPA, 64, 0, 999}}, want: []span{{bufGPA, 64}}, used: 1},
	{name: "unknown flags are ignored", descs: []desc{{bufGPA, 64, 0xfff8, 0}}, want: []span{{bufGPA, 64}}, used: 1},
	{
		name:  "three buffers in another order",
		descs: []desc{{bufGPA, 12, next, 2}, {bufGPA + 200, 3, 0, 0}, {bufGPA + 100, 14, next, 1}},
		want:  []span{{bufGPA, 12}, {bufGPA + 100, 14}, {bufGPA + 200, 3}}, used: 3,
	},
	{name: "no bytes", descs: []desc{{bufGPA, 0, 0, 0}}, used: 1},
	{name: "no bytes need no memory", descs: []desc{{0x999999999, 0, next, 1}, {bufGPA, 5, 0, 0}}, want: []span{{bufGPA, 5}}, used: 2},

	{name: "readable in a receiveq", rx: true, descs: []desc{{bufGPA, 64, 0, 0}}, fault: virtqueue.FaultDirection, used: 1},
	{name: "writable in a transmitq", descs: []desc{{bufGPA, 64, write, 0}}, fault: virtqueue.FaultDirection, used: 1},
	{name: "writable after readable", descs: []desc{{bufGPA, 64, next, 1}, {bufGPA, 64, write, 0}}, fault: virtqueue.FaultDirection, used: 2},
	{name: "readable after writable", rx: true, descs: []desc{{bufGPA, 64, next | write, 1}, {bufGPA, 64, 0, 0}}, fault: virtqueue.FaultDirection, used: 2},

	{name: "unmapped", descs: []desc{{0x10000000, 64, 0, 0}}, fault: virtqueue.FaultAddress, used: 1},
	{name: "last address", descs: []desc{{^uint64(0), 64, 0, 0}}, fault: virtqueue.FaultAddress, used: 1},
	{name: "second unmapped", descs: []desc{{bufGPA, 64, next, 1}, {0x10000000, 64, 0, 0}}, fault: virtqueue.FaultAddress, used: 2},
	{name: "beyond the end", descs: []desc{{bufGPA + bufSize - 10, 1514, 0, 0}}, fault: virtqueue.FaultAddress, used: 1},
	{name: "up to the end", descs: []desc{{bufGPA + bufSize - 10, 10, 0, 0}}, want: []span{{bufGPA + bufSize - 10, 10}}, used: 1},
	{name: "huge length", descs: []desc{{bufGPA, 0xffffffff, 0, 0}}, fault: virtqueue.FaultAddress, used: 1},
	{name: "up to the last address", descs: []desc{{^uint64(0) - 9, 10, 0, 0}}, want: []span{{^uint64(0) - 9, 10}}, used: 1},
	{name: "around the last address", descs: []desc{{^uint64(0) - 9, 11, 0, 0}}, fault: virtqueue.FaultAddress, used: 1},

	{name: "over the seam", descs: []desc{{seam - 100, 1514, 0, 0}}, want: []span{{seam - 100, 100}, {seam, 1414}}, used: 1},
	{name: "over the seam, receive", rx: true, descs: []desc{{seam - 1, 2, write, 0}}, want: []span{{seam - 1, 1}, {seam, 1}}, used: 1},
	{name: "over the seam and out", descs: []desc{{seam - 100, 0x2000, 0, 0}}, fault: virtqueue.FaultAddress, used: 1},
	{name: "into the hole before", descs: []desc{{lowGPA - 1, 2, 0, 0}}, fault: virtqueue.FaultAddress, used: 1},

	{name: "points at itself", descs: []desc{{bufGPA, 64, next, 0}}, fault: virtqueue.FaultLoop, used: 16},
	{name: "two-step loop", descs: []desc{{bufGPA, 64, next, 1}, {bufGPA, 64, next, 0}}, fault: virtqueue.FaultLoop, used: 16},
	{name: "loop without bytes", descs: []desc{{bufGPA, 0, next, 1}, {bufGPA, 0, next, 0}}, fault: virtqueue.FaultLoop, used: 16},
	{name: "next is the size", descs: []desc{{bufGPA, 64, next, 16}}, fault: virtqueue.FaultNext, used: 1},
	{name: "next is far out", descs: []desc{{bufGPA, 64, next, 0xffff}}, fault: virtqueue.FaultNext, used: 1},
	{name: "ring of one", size: 1, descs: []desc{{bufGPA, 64, next, 0}}, fault: virtqueue.FaultLoop, used: 1},

	{name: "table", features: ind, descs: []desc{{tableGPA, 32, indirect, 0}}, table: []desc{{bufGPA, 12, next, 1}, {bufGPA + 100, 60, 0, 0}},
		want: []span{{bufGPA, 12}, {bufGPA + 100, 60}}, used: 1},
	{name: "table for the device to write", features: ind, rx: true, descs: []desc{{tableGPA, 16, indirect | write, 0}}, table: []desc{{bufGPA, 12, write, 0}},
		want: []span{{bufGPA, 12}}, used: 1},
	{name: "buffer, then table", features: ind, descs: []desc{{bufGPA, 12, next, 1}, {tableGPA, 16, indirect, 0}}, table: []desc{{bufGPA + 100, 60, 0, 0}},
		want: []span{{bufGPA, 12}, {bufGPA + 100, 60}}, used: 2},
	{name: "table at an odd address", features: ind, descs: []desc{{tableGPA + 15, 32, indirect, 0}}, tableAt: tableGPA + 15,
		table: []desc{{bufGPA, 12, next, 1}, {bufGPA + 100, 60, 0, 0}}, want: []span{{bufGPA, 12}, {bufGPA + 100, 60}}, used: 1},
	{name: "table over the seam", features: ind, descs: []desc{{seam - 23, 32, indirect, 0}}, tableAt: seam - 23,
		table: []desc{{bufGPA, 12, next, 1}, {bufGPA + 100, 60, 0, 0}}, want: []span{{bufGPA, 12}, {bufGPA + 100, 60}}, used: 1},
	{name: "table longer than used", features: ind, descs: []desc{{highEnd - 16, 64, indirect, 0}}, tableAt: highEnd - 16,
		table: []desc{{bufGPA, 12, 0, 0}}, want: []span{{bufGPA, 12}}, used: 1},
	{name: "table out of memory", features: ind, descs: []desc{{highEnd - 16, 64, indirect, 0}}, tableAt: highEnd - 16,
		table: []desc{{bufGPA, 12, next, 1}}, fault: virtqueue.FaultAddress, used: 1},
	{name: "table half out of memory", features: ind, descs: []desc{{highEnd - 24, 64, indirect, 0}}, tableAt: highEnd - 24,
		table: []desc{{bufGPA, 12, next, 1}}, fault: virtqueue.FaultAddress, used: 1},
	{name: "table around the last address", features: ind, descs: []desc{{^uint64(0) - 15, 32, indirect, 0}}, fault: virtqueue.FaultAddress, used: 1},
	{name: "table unmapped", features: ind, descs: []desc{{0x10000000, 32, indirect, 0}}, fault: virtqueue.FaultAddress, used: 1},
	{name: "table without the feature", descs: []desc{{tableGPA, 16, indirect, 0}}, table: []desc{{bufGPA, 12, 0, 0}}, fault: virtqueue.FaultIndirect, used: 1},
	{name: "table and next", features: ind, descs: []desc{{tableGPA, 16, indirect | next, 1}, {bufGPA, 1, 0, 0}}, table: []desc{{bufGPA, 12, 0, 0}},
		fault: virtqueue.FaultIndirect, used: 1},
	{name: "table in a table", features: ind, descs: []desc{{tableGPA, 16, indirect, 0}}, table: []desc{{tableGPA, 16, indirect, 0}}, fault: virtqueue.FaultNested, used: 1},
	{name: "table of 0 bytes", features: ind, descs: []desc{{tableGPA, 0, indirect, 0}}, fault: virtqueue.FaultIndirect, used: 1},
	{name: "table of 8 bytes", features: ind, descs: []desc{{tableGPA, 8, indirect, 0}}, fault: virtqueue.FaultIndirect, used: 1},
	{name: "table of 24 bytes", features: ind, descs: []desc{{tableGPA, 24, indirect, 0}}, table: []desc{{bufGPA, 12, 0, 0}}, fault: virtqueue.FaultIndirect, used: 1},
	{name: "table of 65536 entries", features: ind, descs: []desc{{tableGPA, 16 * 65536, indirect, 0}}, table: []desc{{bufGPA, 12, 0, 0}}, fault: virtqueue.FaultIndirect, used: 1},
	{name: "table of 0xfffffff0 bytes", features: ind, descs: []desc{{tableGPA, 0xfffffff0, indirect, 0}}, fault: virtqueue.FaultIndirect, used: 1},
	{name: "loop in a table", features: ind, descs: []desc{{tableGPA, 32, indirect, 0}}, table: []desc{{bufGPA, 0, next, 1}, {bufGPA, 0, next, 0}}, fault: virtqueue.FaultLoop, used: 1},
	{name: "next outside the table", features: ind, descs: []desc{{tableGPA, 32, indirect, 0}}, table: []desc{{bufGPA, 1, next, 2}}, fault: virtqueue.FaultNext, used: 1},
	{name: "wrong direction in a table", features: ind, descs: []desc{{tableGPA, 16, indirect, 0}}, table: []desc{{bufGPA, 1, write, 0}}, fault: virtqueue.FaultDirection, used: 1},
	{name: "bad address in a table", features: ind, descs: []desc{{tableGPA, 16, indirect, 0}}, table: []desc{{0, 0x7fffffff, 0, 0}}, fault: virtqueue.FaultAddress, used: 1},
}

func TestChains(t *testing.T) {
	for _, c := range chainCases {
		t.Run(c.name, func(t *testing.T) { c.run(t) })
	}
}

func (c chainCase) run(t *testing.T) {
	if c.size == 0 {
		c.size = 16
	}
	if c.tableAt == 0 {
		c.tableAt = tableGPA
	}
	r := newRig(t, rigOptions{size: c.size, features: c.features, rx: c.rx, regions: chainRegions})
	for i, d := range c.descs {
		r.drv.PokeDesc(uint16(i), d.addr, d.len, d.flags, d.next)
	}
	r.pokeTable(t, c.tableAt, c.table)
	// The second time the cursors know the regions.
	for range 2 {
		c.check(t, r)
	}
}

func (c chainCase) check(t *testing.T, r *rig) {
	r.drv.PokeHead(0)
	// A good chain behind it must not be harmed.
	if c.size > len(c.descs) {
		last := uint16(c.size - 1)
		good := desc{bufGPA + 0x1000, 77, 0, 0}
		if c.rx {
			good.flags = write
		}
		r.drv.PokeDesc(last, good.addr, good.len, good.flags, 0)
		r.drv.PokeHead(last)
	}
	r.drv.Publish()
	n := r.fill(t, virtqueue.MaxBatch)
	if want := min(c.size, 2); n != want {
		t.Fatalf("Fill = %d chains, want %d", n, want)
	}
	got := r.b.Chains[0]
	if got.Fault != c.fault || got.Descs != c.used || got.Head != 0 {
		t.Errorf("chain = %+v, want fault %v, %d descriptors", got, c.fault, c.used)
	}
	if diff := cmp.Diff(c.want, r.spans(t, 0), cmp.AllowUnexported(span{})); diff != "" {
		t.Errorf("segments (-want +got):\n%s", diff)
	}
	if n == 2 {
		if diff := cmp.Diff([]span{{bufGPA + 0x1000, 77}}, r.spans(t, 1), cmp.AllowUnexported(span{})); diff != "" {
			t.Errorf("the chain behind it (-want +got):\n%s", diff)
		}
	}
	r.dev.CompleteBatch(r.b, 0, n)
	r.dev.Publish(0)
}

// pokeTable writes raw descriptors at a guest address byte by byte, over seams.
func (r *rig) pokeTable(t *testing.T, gpa uint64, table []desc) {
	t.Helper()
	scratch := host(t, r.mem, bufGPA+0xff000, 16)
	for i, d := range table {
		driver.PokeTable(scratch, 0, d.addr, d.len, d.flags, d.next)
		scatterBytes(t, r.mem, gpa+uint64(16*i), bytesAt(scratch, 16))
	}
}

// scatterBytes writes bytes one by one, over seams.
func scatterBytes(t testing.TB, mem *guestmem.Table, gpa uint64, b []byte) {
	t.Helper()
	for i, v := range b {
		bytesAt(host(t, mem, gpa+uint64(i), 1), 1)[0] = v
	}
}

// spans translates chain i's segments back to guest addresses.
func (r *rig) spans(t *testing.T, i int) []span {
	t.Helper()
	return spans(t, r.mem, r.b, i)
}

func spans(t testing.TB, mem *guestmem.Table, b *virtqueue.Batch, i int) (spans []span) {
	t.Helper()
	sum := uint32(0)
	for _, s := range b.ChainSegs(i) {
		found := false
		for _, reg := range mem.Regions() {
			base := host(t, mem, reg.GPA, 1)
			if off := uint64(s.Host - base); off < reg.Size && uint64(s.Len) <= reg.Size-off {
				spans, found = append(spans, span{reg.GPA + off, s.Len}), true
			}
		}
		if !found {
			t.Fatalf("segment %+v lies outside of guest memory", s)
		}
		sum += s.Len
	}
	if c := b.Chains[i]; c.Len != sum {
		t.Errorf("chain %d: Len = %d, segments have %d bytes", i, c.Len, sum)
	}
	return spans
}

// A table may have more entries than the ring, as IND-01 has to be documented.
func TestLongTables(t *testing.T) {
	for _, c := range []struct {
		entries int
		fault   virtqueue.Fault
	}{
		{256, virtqueue.FaultNone},
		{257, virtqueue.FaultNone},
		{virtqueue.MaxSegs, virtqueue.FaultNone},
		{virtqueue.MaxSegs + 1, virtqueue.FaultTooLong},
		{32768, virtqueue.FaultTooLong},
	} {
		t.Run(fmt.Sprintf("entries=%d", c.entries), func(t *testing.T) {
			r := newRig(t, rigOptions{size: 256, features: ind})
			bufs := make([]driver.Buf, c.entries)
			for i := range bufs {
				bufs[i] = driver.Buf{Addr: bufGPA, Len: 1}
			}
			if _, err := r.drv.AddIndirect(host(t, r.mem, tableGPA, uint64(16*c.entries)), tableGPA, bufs); err != nil {
				t.Fatal(err)
			}
			r.drv.Publish()
			if n := r.fill(t, 1); n != 1 || r.b.Chains[0].Fault != c.fault {
				t.Fatalf("Fill = %d chains, %+v, want fault %v", n, r.b.Chains[0], c.fault)
			}
			if c.fault == virtqueue.FaultNone && int(r.b.Chains[0].N) != c.entries {
				t.Errorf("%d segments, want %d", r.b.Chains[0].N, c.entries)
			}
		})
	}
}

// Chains whose buffers overlap can be longer than memory.
func TestChainLength(t *testing.T) {
	const big = 0x40000000 // sparse
	for _, c := range []struct {
		n     int
		last  uint32
		want  uint32
		fault virtqueue.Fault
	}{
		{1, 0, big, virtqueue.FaultNone},
		{2, 0, 1 << 31, virtqueue.FaultNone},
		{2, 1, 1 << 31, virtqueue.FaultNone},
		{3, big - 1, 1 << 31, virtqueue.FaultNone},
		{4, 0, 0, virtqueue.FaultLength},
		{3, big, 0, virtqueue.FaultLength},
	} {
		r := newRig(t, rigOptions{size: 16, regions: []region{{0x100000000, big}}})
		bufs := make([]driver.Buf, c.n, c.n+1)
		for i := range bufs {
			bufs[i] = driver.Buf{Addr: 0x100000000, Len: big}
		}
		bufs = append(bufs, driver.Buf{Addr: 0x100000000, Len: c.last})
		if _, err := r.drv.AddChain(bufs); err != nil {
			t.Fatal(err)
		}
		r.drv.Publish()
		if r.fill(t, 1); r.b.Chains[0].Fault != c.fault || r.b.Chains[0].Len != c.want {
			t.Errorf("%d GiB + %#x: chain %+v, want length %#x, fault %v", c.n, c.last, r.b.Chains[0], c.want, c.fault)
		}
	}
}
