package hostile

import (
	"encoding/binary"
	"sync"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// seamed is evil with two regions that follow one another, mapped apart, and one behind a hole; rings are in the last.
func (a *attack) seamed(f virtio.Features) (*frontend.Client, *frontend.Pair) {
	a.t.Helper()
	mem := &frontend.Memory{}
	for i, gpa := range []uint64{0, seam, 1 << 40} {
		_, err := mem.Add(guestmem.RegionSpec{GPA: gpa, Size: seam, UVA: 0x7d00_0000_0000 - uint64(i)<<36})
		must(a.t, err)
	}
	a.t.Cleanup(func() { must(a.t, mem.Close()) })
	c := a.clientOn(mem, frontend.Options{Features: f, Region: 2})
	return c, a.pair(c, 0)
}

const seam = 64 << 20 // tableAt and bufAt are in front of it

// store writes bytes at a guest address, over seams too.
func store(mem *frontend.Memory, at uint64, b []byte) {
	for i := range b {
		mem.Bytes(at+uint64(i), 1)[0] = b[i]
	}
}

func load(mem *frontend.Memory, at uint64, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = mem.Bytes(at+uint64(i), 1)[0]
	}
	return b
}

// passes sends a frame of n bytes from guest address tx and wants it at rx, both behind a header.
func (a *attack) passes(c *frontend.Client, p *frontend.Pair, n int, tx, rx uint64) {
	a.t.Helper()
	frame := frameOf(n, byte(n))
	store(c.Mem, tx, append(make([]byte, 12), frame...))
	a.offer(p.TX, desc{addr: tx, len: uint32(12 + n)}).returned(0)
	a.offer(p.RX, desc{addr: rx, len: uint32(12 + n), flags: write}).returned(uint32(12 + n))
	if got := load(c.Mem, rx+12, n); string(got) != string(swapped(frame)) {
		a.t.Errorf("from %#x to %#x: % x", tx, rx, got[:min(n, 64)])
	}
}

// faults plays one chain after the other with both formats.
func faults(reason string, chains ...[]desc) func(a *attack) {
	return func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f, RingSize: 256})
			for _, ds := range chains {
				a.fault(c, p, reason, nil, ds...)
			}
		})
	}
}

// splitFaults plays chains whose links exist in split rings only. A table, if there is one, is at tableAt.
func splitFaults(reason string, table []desc, chains ...[]desc) func(a *attack) {
	return func(a *attack) {
		a.in("links", func(a *attack) {
			c, p := a.running(frontend.Options{RingSize: 256})
			for _, ds := range chains {
				a.fault(c, p, reason, table, ds...)
			}
		})
	}
}

// many is a chain of n descriptors of the same length.
func many(n int, length uint32, flags uint16) (ds []desc) {
	for i := range n {
		ds = append(ds, desc{bufAt, length, flags | next, uint16(i + 1)})
	}
	ds[n-1].flags = flags
	return ds
}

var chainRows = []row{
	{"B1", "buffer_that_leaves_a_region_or_crosses_a_hole", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.seamed(f)
			for _, before := range []uint64{1, 6, 12, 13, 70} {
				a.passes(c, p, 60, seam-before, seam+8192)
				a.passes(c, p, 60, seam+8192, seam-before)
			}
			for _, at := range []uint64{2*seam - 71, 2*seam - 1, 2 * seam, 1<<40 - 10, 1<<40 + seam - 1} {
				a.fault(c, p, "address", nil, desc{addr: at, len: 72})
			}
		})
	}},
	{"B2", "table_across_regions", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.seamed(f)
			frame := frameOf(60, 2)
			store(c.Mem, bufAt, append(make([]byte, 12), frame...))
			for _, split := range []uint64{8, 16, 24, 31} {
				at := seam - split
				store(c.Mem, at, encode(p, desc{bufAt, 12, next, 1}, desc{bufAt + 12, 60, 0, 0}))
				a.offer(p.TX, desc{addr: at, len: 32, flags: indirect}).returned(0)
				a.receives(p, frame)
			}
			// The table runs out of memory behind its first entry.
			store(c.Mem, 2*seam-16, encode(p, desc{bufAt, 12, next, 1}))
			a.drops0 = a.allDrops()
			a.offer(p.TX, desc{addr: 2*seam - 16, len: 32, flags: indirect}).returned(0)
			a.dropped(1, "address", 1)
			a.flows(p)
		})
	}},
	{"B3", "bad_descriptors_inside_a_batch", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			_, p := a.running(frontend.Options{Features: f})
			_, err := p.PostRx(32)
			must(a.t, err)
			for i := range 32 { // good, bad address, good, no bytes, …
				if i%2 == 0 {
					must(a.t, p.Stage(virtio.NetHdr{}, frameOf(60, byte(i)), frontend.Direct))
					continue
				}
				bad := driver.Buf{Addr: hole, Len: 72}
				if i%4 == 3 {
					bad = driver.Buf{Addr: bufAt}
				}
				_, err := p.TX.Driver.AddDirect(bad)
				must(a.t, err)
			}
			must(a.t, p.TX.Flush())
			for i := 0; i < 32; i += 2 {
				_, got, err := p.RecvFrame(patience)
				must(a.t, err)
				if string(got) != string(swapped(frameOf(60, byte(i)))) {
					a.t.Fatalf("frame %d: % x", i, got)
				}
			}
			must(a.t, p.DrainTx(patience))
			a.dropped(1, "address", 8)
			a.dropped(1, "too_short", 8)
		})
	}},
	{"B8", "chain_longer_than_the_ring_or_4_gib", func(a *attack) {
		splitFaults("loop", nil, []desc{{bufAt, 1, next, 1}, {bufAt, 1, next, 2}, {bufAt, 1, next, 1}})(a)
		huge := many(66, 63<<20, 0)
		for i := range huge {
			huge[i].addr = 1 << 20
		}
		faults("length", huge)(a)
	}},
	{"B10", "table_changes_between_reads", func(a *attack) { a.flips(flipTable) }},
	{"B13", "bad_descriptor_in_mid_chain", faults("address",
		[]desc{{bufAt, 12, next, 1}, {hole, 60, next, 2}, {bufAt, 60, next, 3}, {bufAt, 60, 0, 0}},
		[]desc{{bufAt, 12, next, 1}, {bufAt, 60, next, 2}, {^uint64(0) - 5, 60, 0, 0}})},
	{"B17", "endless_chain_of_nothing", splitFaults("loop", nil,
		[]desc{{bufAt, 0, next, 0}}, []desc{{bufAt, 0, next, 1}, {bufAt, 0, next, 0}}, []desc{{bufAt, 0, next, 1}, {bufAt, 0, next, 1}})},
	{"B18", "length_0xffffffff", faults("address", []desc{{bufAt, 0xffffffff, 0, 0}}, []desc{{bufAt, 0xffffffff, next, 1}, {bufAt, 12, 0, 0}})},
	{"B25", "table_of_the_largest_size", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f})
			for _, n := range []int{1088, 1089, 32768} {
				a.drops0 = a.allDrops()
				pokeTable(c.Mem, p.TX, many(n, 0, 0)...)
				a.offer(p.TX, desc{addr: tableAt, len: uint32(16 * n), flags: indirect}).returned(0)
				a.dropped(1, map[bool]string{true: "too_short", false: "too_many_segments"}[n == 1088], 1)
			}
			a.fault(c, p, "indirect", nil, desc{tableAt, 16 * 32769, indirect, 0})
		})
	}},
	{"B27", "buffer_over_two_regions", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.seamed(f)
			a.passes(c, p, 1514, seam-700, seam-700)
			a.passes(c, p, 60, seam-12, seam-12)
		})
	}},
	{"B29", "bad_chains_are_returned", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			_, p := a.running(frontend.Options{Features: f, RingSize: 16})
			for range 20 { // with a chain that leaks each time the ring would be full
				for range 16 {
					_, err := p.TX.Driver.AddDirect(driver.Buf{Addr: hole, Len: 72})
					must(a.t, err)
				}
				must(a.t, p.TX.Flush())
				for range 16 {
					must(a.t, p.TX.WaitUsed(patience))
					if _, n, ok := p.TX.Driver.GetUsed(); !ok || n != 0 {
						a.t.Fatalf("returned with %d bytes, %v", n, ok)
					}
				}
			}
			a.dropped(1, "address", 320)
			a.flows(p)
		})
	}},
	{"B30", "buffer_to_the_last_byte", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f})
			a.passes(c, p, 60, regionEnd-72, highAt+regionEnd-72)
			for _, ds := range []desc{{regionEnd - 71, 72, 0, 0}, {^uint64(0) - 71, 72, 0, 0}, {^uint64(0) - 70, 72, 0, 0}, {^uint64(0), 1, 0, 0}} {
				a.fault(c, p, "address", nil, ds)
			}
		})
	}},
	{"C53", "next_outside_the_table", splitFaults("next", nil, []desc{{bufAt, 12, next, 256}}, []desc{{bufAt, 12, next, 0xffff}})},
	{"C54", "loops", splitFaults("loop", nil, []desc{{bufAt, 12, next, 0}}, []desc{{bufAt, 12, next, 1}, {bufAt, 1, next, 0}})},
	{"C55", "indirect_with_next", faults("indirect", []desc{{tableAt, 32, indirect | next, 1}, {bufAt, 72, 0, 0}})},
	{"C56", "indirect_in_indirect", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f})
			a.fault(c, p, "nested", []desc{{tableAt, 32, indirect, 0}}, desc{tableAt, 16, indirect, 0})
			a.fault(c, p, "nested", []desc{{bufAt, 72, next, 1}, {tableAt, 32, indirect, 0}}, desc{tableAt, 32, indirect, 0})
		})
	}},
	{"C57", "tables_of_impossible_length", faults("indirect",
		[]desc{{tableAt, 0, indirect, 0}}, []desc{{tableAt, 15, indirect, 0}}, []desc{{tableAt, 17, indirect, 0}}, []desc{{tableAt, 16 << 16, indirect, 0}})},
	{"C58", "indirect_not_acknowledged", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f &^ virtio.FRingIndirectDesc})
			a.fault(c, p, "indirect", []desc{{bufAt, 72, 0, 0}}, desc{tableAt, 16, indirect, 0})
		})
	}},
	{"C59", "wrong_directions", faults("direction", []desc{{bufAt, 72, write, 0}}, []desc{{bufAt, 72, next, 1}, {bufAt, 72, write, 0}},
		[]desc{{bufAt, 72, write | next, 1}, {bufAt, 72, 0, 0}})},
	{"C64", "guest_reuses_buffers_early", func(a *attack) { a.flips(flipHeader) }},
}

// encode is a table as it lies in memory.
func encode(p *frontend.Pair, ds ...desc) (b []byte) {
	for _, d := range ds {
		b = binary.LittleEndian.AppendUint64(b, d.addr)
		b = binary.LittleEndian.AppendUint32(b, d.len)
		if p.TX.Ring != nil {
			b = binary.LittleEndian.AppendUint16(binary.LittleEndian.AppendUint16(b, d.flags), d.next)
		} else {
			b = binary.LittleEndian.AppendUint16(append(b, 0, 0), d.flags)
		}
	}
	return b
}

// What flips changes while the device looks.
const (
	flipTable  = iota // length of the table, links and lengths in it
	flipHeader        // the header's marks and the frame
)

// flips offers the same chain over and over while another thread changes it between right and wrong: each is returned once, as a frame or
// as a fault, and whatever comes back is whole.
func (a *attack) flips(what int) {
	a.formats(func(a *attack, f virtio.Features) {
		c, p := a.running(frontend.Options{Features: f | virtio.FNetCSum | virtio.FNetGuestCSum})
		store(c.Mem, bufAt, append(make([]byte, 12), frameOf(60, 7)...))
		good := []desc{{bufAt, 12, next, 1}, {bufAt + 12, 60, 0, 0}}
		pokeTable(c.Mem, p.TX, good...)
		stop := make(chan struct{})
		var flipping sync.WaitGroup
		flipping.Go(func() {
			header := c.Mem.Bytes(bufAt, 12)
			for n := uint16(0); !closed(stop); n++ {
				if what == flipTable {
					pokeTable(c.Mem, p.TX, good[0], desc{bufAt + 12 + uint64(n%2)*hole, 60, n % 3 / 2 * next, 1 + n%2*999})
					if p.TX.Ring != nil {
						p.TX.Ring.PokeDesc(0, tableAt, 16+uint32(n%2)*16, indirect, 0)
					}
					continue
				}
				header[0] = byte(n % 2) // NEEDS_CSUM of what lies at 34 or nowhere
				binary.LittleEndian.PutUint16(header[6:], 34+n%2*0xff00)
				binary.LittleEndian.PutUint16(header[8:], 16)
			}
		})
		for range 150 {
			offered := a.offer(p.TX, desc{tableAt, 32, indirect, 0})
			offered.returned(0)
			_, err := p.PostRx(1 - p.RX.Driver.Outstanding())
			must(a.t, err)
			if _, got, ok, err := p.TryRecv(); err != nil || ok && len(got) != 60 && len(got) != 0 {
				a.t.Fatalf("received %d bytes, %v", len(got), err)
			}
		}
		close(stop)
		flipping.Wait()
		a.restart(c, p)
		a.drainRx(p)
		a.flows(p)
	})
}
