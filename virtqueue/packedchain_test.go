package virtqueue_test

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

const junk = 0xdead // an id where ids mean nothing

type packedCase struct {
	name     string
	rx       bool
	features virtio.Features
	descs    []desc // desc.next is the id
	table    []desc // written at tableAt
	tableAt  uint64 // default tableGPA
	want     []span
	fault    virtqueue.Fault
}

var packedCases = []packedCase{
	{name: "one buffer", descs: []desc{{bufGPA, 64, 0, 7}}, want: []span{{bufGPA, 64}}},
	{name: "one writable buffer", rx: true, descs: []desc{{bufGPA, 1526, write, 9}}, want: []span{{bufGPA, 1526}}},
	{name: "unknown flags are ignored", descs: []desc{{bufGPA, 64, 0x7f78, 1}}, want: []span{{bufGPA, 64}}},
	{name: "any id", descs: []desc{{bufGPA, 64, 0, 0xffff}}, want: []span{{bufGPA, 64}}},
	{
		name: "three buffers", descs: []desc{{bufGPA, 12, next, junk}, {bufGPA + 100, 14, next, junk}, {bufGPA + 200, 3, 0, 3}},
		want: []span{{bufGPA, 12}, {bufGPA + 100, 14}, {bufGPA + 200, 3}},
	},
	{name: "no bytes", descs: []desc{{bufGPA, 0, 0, 1}}},
	{name: "no bytes need no memory", descs: []desc{{0x999999999, 0, next, junk}, {bufGPA, 5, 0, 1}}, want: []span{{bufGPA, 5}}},

	// The chain is known to its end whatever is wrong in it.
	{name: "readable in a receiveq", rx: true, descs: []desc{{bufGPA, 64, 0, 1}}, fault: virtqueue.FaultDirection},
	{name: "writable in a transmitq", descs: []desc{{bufGPA, 64, write | next, junk}, {bufGPA, 64, 0, 1}}, fault: virtqueue.FaultDirection},
	{name: "writable after readable", descs: []desc{{bufGPA, 64, next, junk}, {bufGPA, 64, write, 1}}, fault: virtqueue.FaultDirection},
	{name: "unmapped", descs: []desc{{0x10000000, 64, next, junk}, {bufGPA, 64, 0, 1}}, fault: virtqueue.FaultAddress},
	{name: "last address", descs: []desc{{^uint64(0), 64, 0, 1}}, fault: virtqueue.FaultAddress},
	{name: "second unmapped", descs: []desc{{bufGPA, 64, next, junk}, {0x10000000, 64, 0, 1}}, fault: virtqueue.FaultAddress},
	{name: "beyond the end", descs: []desc{{bufGPA + bufSize - 10, 1514, 0, 1}}, fault: virtqueue.FaultAddress},
	{name: "huge length", descs: []desc{{bufGPA, 0xffffffff, 0, 1}}, fault: virtqueue.FaultAddress},
	{name: "around the last address", descs: []desc{{^uint64(0) - 9, 11, 0, 1}}, fault: virtqueue.FaultAddress},
	{name: "over the seam", descs: []desc{{seam - 100, 1514, 0, 1}}, want: []span{{seam - 100, 100}, {seam, 1414}}},
	{name: "over the seam and out", descs: []desc{{seam - 100, 0x2000, 0, 1}}, fault: virtqueue.FaultAddress},

	{name: "table", features: ind, descs: []desc{{tableGPA, 32, indirect, 4}}, table: []desc{{bufGPA, 12, 0, junk}, {bufGPA + 100, 60, 0, junk}},
		want: []span{{bufGPA, 12}, {bufGPA + 100, 60}}},
	{name: "table for the device to write", features: ind, rx: true, descs: []desc{{tableGPA, 16, indirect | write, 1}}, table: []desc{{bufGPA, 12, write, 0}},
		want: []span{{bufGPA, 12}}},
	{name: "table over the seam", features: ind, descs: []desc{{seam - 23, 32, indirect, 1}}, tableAt: seam - 23,
		table: []desc{{bufGPA, 12, 0, 0}, {bufGPA + 100, 60, 0, 0}}, want: []span{{bufGPA, 12}, {bufGPA + 100, 60}}},
	{name: "table half out of memory", features: ind, descs: []desc{{highEnd - 24, 32, indirect, 1}}, tableAt: highEnd - 24,
		table: []desc{{bufGPA, 12, 0, 0}}, fault: virtqueue.FaultAddress},
	{name: "table around the last address", features: ind, descs: []desc{{^uint64(0) - 15, 32, indirect, 1}}, fault: virtqueue.FaultAddress},
	{name: "table unmapped", features: ind, descs: []desc{{0x10000000, 32, indirect, 1}}, fault: virtqueue.FaultAddress},
	{name: "table without the feature", descs: []desc{{tableGPA, 16, indirect, 1}}, table: []desc{{bufGPA, 12, 0, 0}}, fault: virtqueue.FaultIndirect},
	{name: "table and next", features: ind, descs: []desc{{tableGPA, 16, indirect | next, junk}, {bufGPA, 1, 0, 1}}, table: []desc{{bufGPA, 12, 0, 0}},
		fault: virtqueue.FaultIndirect},
	{name: "buffer, then table", features: ind, descs: []desc{{bufGPA, 12, next, junk}, {tableGPA, 16, indirect, 1}}, table: []desc{{bufGPA, 12, 0, 0}},
		fault: virtqueue.FaultIndirect},
	{name: "table in a table", features: ind, descs: []desc{{tableGPA, 16, indirect, 1}}, table: []desc{{tableGPA, 16, indirect, 0}}, fault: virtqueue.FaultNested},
	{name: "wrong direction in a table", features: ind, descs: []desc{{tableGPA, 16, indirect, 1}}, table: []desc{{bufGPA, 1, write, 0}}, fault: virtqueue.FaultDirection},
	{name: "bad address in a table", features: ind, descs: []desc{{tableGPA, 16, indirect, 1}}, table: []desc{{0x7fffffff, 1, 0, 0}}, fault: virtqueue.FaultAddress},

	{name: "IND-01 table of 0 bytes", features: ind, descs: []desc{{tableGPA, 0, indirect, 1}}, fault: virtqueue.FaultIndirect},
	{name: "IND-01 table of 8 bytes", features: ind, descs: []desc{{tableGPA, 8, indirect, 1}}, fault: virtqueue.FaultIndirect},
	{name: "IND-01 table of 24 bytes", features: ind, descs: []desc{{tableGPA, 24, indirect, 1}}, fault: virtqueue.FaultIndirect},
	{name: "IND-01 table of 65536 entries", features: ind, descs: []desc{{tableGPA, 16 * 65536, indirect, 1}}, fault: virtqueue.FaultIndirect},
	{name: "IND-01 table of 0xfffffff0 bytes", features: ind, descs: []desc{{tableGPA, 0xfffffff0, indirect, 1}}, fault: virtqueue.FaultIndirect},
	{name: "IND-03 table at an odd address", features: ind, descs: []desc{{tableGPA + 15, 32, indirect, 1}}, tableAt: tableGPA + 15,
		table: []desc{{bufGPA, 12, 0, 0}, {bufGPA + 100, 60, 0, 0}}, want: []span{{bufGPA, 12}, {bufGPA + 100, 60}}},

	{name: "PKD-08 NEXT in the middle and at the end", features: ind, descs: []desc{{tableGPA, 48, indirect, 1}},
		table: []desc{{bufGPA, 1, 0, 77}, {bufGPA, 2, next, 0}, {bufGPA, 3, next, 99}}, want: []span{{bufGPA, 1}, {bufGPA, 2}, {bufGPA, 3}}},
	{name: "PKD-08 no NEXT anywhere, state flags", features: ind, descs: []desc{{tableGPA, 48, indirect, 1}},
		table: []desc{{bufGPA, 1, 0x8080, 2}, {bufGPA, 2, 0x80, 1}, {bufGPA, 3, 0x8000, 0}}, want: []span{{bufGPA, 1}, {bufGPA, 2}, {bufGPA, 3}}},
	{name: "PKD-08 table of 40 bytes", features: ind, descs: []desc{{tableGPA, 40, indirect, 1}}, fault: virtqueue.FaultIndirect},
}

// TestPKD08_PackedChains has each chain followed by a good one, at the start of a ring, across its end, and in its second lap.
func TestPKD08_PackedChains(t *testing.T) {
	for _, c := range packedCases {
		for _, start := range []uint16{fresh, fresh | 8, 8, 3} {
			t.Run(fmt.Sprintf("%s/start=%#x", c.name, start), func(t *testing.T) { c.run(t, start) })
		}
	}
}

func (c packedCase) run(t *testing.T, start uint16) {
	if c.tableAt == 0 {
		c.tableAt = tableGPA
	}
	r := newPackedRig(t, rigOptions{size: 9, features: c.features, rx: c.rx, regions: chainRegions, start: start})
	pokeTable(t, r.mem, c.tableAt, c.table)
	for _, d := range c.descs {
		r.drv.PokeChain(d.addr, d.len, d.next, d.flags)
	}
	var flags uint16
	if c.rx {
		flags = write
	}
	r.drv.PokeChain(bufGPA+0x1000, 77, 99, flags)
	r.drv.Publish()
	// The second time the cursors know the regions.
	for range 2 {
		if n := r.fill(t, virtqueue.MaxBatch); n != 2 {
			t.Fatalf("Fill = %d chains, want 2", n)
		}
		last := c.descs[len(c.descs)-1]
		got := r.b.Chains[0]
		if got.Fault != c.fault || int(got.Descs) != len(c.descs) || got.Head != last.next {
			t.Errorf("chain = %+v, want fault %v, %d descriptors, id %d", got, c.fault, len(c.descs), last.next)
		}
		if diff := cmp.Diff(c.want, spans(t, r.mem, r.b, 0), cmp.AllowUnexported(span{})); diff != "" {
			t.Errorf("segments (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff([]span{{bufGPA + 0x1000, 77}}, spans(t, r.mem, r.b, 1), cmp.AllowUnexported(span{})); diff != "" {
			t.Errorf("the chain behind it (-want +got):\n%s", diff)
		}
		r.dev.Unfill(2)
	}
}

// B3, C60: what cannot be in a ring breaks it, after the chains before were delivered. The driver's memory is left alone.
func TestBrokenPacked(t *testing.T) {
	const size = 8
	for _, c := range []struct {
		name   string
		damage func(r *packedRig)
		reason string
		want   string
	}{
		{"C60 chain without end", func(r *packedRig) {
			for i := range size {
				r.drv.PokeChain(bufGPA, 1, uint16(i), next)
			}
			r.drv.Publish()
		}, "chain", "of a ring of 8"},
		{"chain into what the device has", func(r *packedRig) {
			r.add(t, 5)
			if r.fill(t, 5) != 5 {
				t.Fatal("5 chains")
			}
			for range 5 {
				r.drv.PokeChain(bufGPA, 1, 0, next)
			}
			r.drv.PokeChain(bufGPA, 1, 0, 0)
			r.drv.Publish()
		}, "chain", "goes on beyond"},
		{"chain of which the second is not available", func(r *packedRig) {
			r.drv.PokeChain(bufGPA, 1, 0, next)
			r.drv.Publish()
		}, "chain", "begins at descriptor 32772"},
		{"C60 wrap bit of the second flipped", func(r *packedRig) {
			r.drv.PokeDesc(5, bufGPA, 1, 0, driver.DescFUsed)
			r.drv.PokeDesc(4, bufGPA, 1, 0, driver.DescFAvail|next)
		}, "chain", "goes on beyond"},
		{"C60 used although never available", func(r *packedRig) {
			r.drv.PokeDesc(4, bufGPA, 1, 0, driver.DescFAvail|driver.DescFUsed)
		}, "flags", "descriptor 32772"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newPackedRig(t, rigOptions{size: size})
			ids := r.add(t, 4)
			r.serve(t)
			r.takeUsed(t, ids)
			c.damage(r)
			before := string(ringBytes(t, r))
			for range 2 {
				if !r.dev.EnableKicks() {
					t.Error("EnableKicks would let a broken ring sleep unnoticed")
				}
				r.dev.DisableKicks()
				r.b.Reset()
				n, err := r.dev.Fill(r.b, 32)
				var broken *virtqueue.BrokenError
				if n != 0 || !errors.As(err, &broken) || broken.Reason != c.reason || !strings.Contains(err.Error(), c.want) {
					t.Fatalf("Fill = %d, %v, want %q", n, err, c.want)
				}
				if r.b.N != 0 || r.b.NSegs != 0 {
					t.Errorf("batch has %d chains, %d segments", r.b.N, r.b.NSegs)
				}
			}
			if string(ringBytes(t, r)) != before {
				t.Error("the device wrote to a broken ring")
			}
		})
	}
}

// ringBytes is the descriptor ring.
func ringBytes(t testing.TB, r *packedRig) []byte {
	t.Helper()
	return bytesAt(r.cfg.Desc, 16*int(r.cfg.Size))
}

// Good chains before the broken place come first.
func TestBrokenPackedDeliversFirst(t *testing.T) {
	r := newPackedRig(t, rigOptions{size: 8})
	r.add(t, 3)
	r.drv.PokeDesc(3, bufGPA, 1, 0, driver.DescFAvail|driver.DescFUsed)
	if n := r.fill(t, 32); n != 3 {
		t.Fatalf("Fill = %d", n)
	}
	if _, err := r.dev.Fill(r.b, 32); err == nil {
		t.Error("the broken place went unnoticed")
	}
}

// C60: descriptors that are not the driver's to offer wait until they are: the other wrap counter is the lap before, and
// what is outstanding belongs to the device.
func TestPackedNotAvailable(t *testing.T) {
	r := newPackedRig(t, rigOptions{size: 4})
	r.drv.PokeDesc(0, bufGPA, 1, 0, driver.DescFUsed) // wrap counter 0
	if n := r.fill(t, 32); n != 0 || !r.dev.Empty() || r.dev.EnableKicks() {
		t.Error("a descriptor of the lap before was taken")
	}
	ids := r.add(t, 4)
	r.fill(t, 32)
	r.drv.PokeDesc(0, bufGPA, 1, 0, driver.DescFUsed) // wrap counter 0: available in the next lap
	if n := r.fill(t, 32); n != 0 || !r.dev.Empty() || r.dev.MoreAvailable() || r.dev.EnableKicks() {
		t.Error("an outstanding descriptor was taken again")
	}
	for _, id := range ids {
		r.dev.Complete(id, 0)
	}
	if n := r.fill(t, 32); n != 0 || !r.dev.Empty() {
		t.Error("a descriptor that the driver was not told of was taken")
	}
	r.dev.Publish(0)
	r.takeUsed(t, ids)
}
