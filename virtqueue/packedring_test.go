package virtqueue_test

import (
	"bytes"
	"fmt"
	"runtime"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

func TestNewPackedRefuses(t *testing.T) {
	r := newPackedRig(t, rigOptions{size: 16})
	for _, c := range []struct {
		name   string
		change func(*virtqueue.Config)
		want   string
	}{
		{"size 0", func(c *virtqueue.Config) { c.Size = 0 }, "need 1 to 32768"},
		{"size 32769", func(c *virtqueue.Config) { c.Size = 32769 }, "need 1 to 32768"},
		{"descriptors + 8", func(c *virtqueue.Config) { c.Desc += 8 }, "multiple of 16"},
		{"driver's structure + 2", func(c *virtqueue.Config) { c.Avail += 2 }, "multiple of 4"},
		{"device's structure + 1", func(c *virtqueue.Config) { c.Used++ }, "multiple of 4"},
		{"no device's structure", func(c *virtqueue.Config) { c.Used = 0 }, "device event suppression"},
		{"split", func(c *virtqueue.Config) { c.Features = 0 }, "not acked"},
		{"no memory", func(c *virtqueue.Config) { c.Mem = nil }, "memory table"},
		{"base", func(c *virtqueue.Config) { c.Base = 16 }, "ring of 16"},
	} {
		cfg := r.cfg
		c.change(&cfg)
		if _, err := virtqueue.NewPacked(cfg); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want an error with %q", c.name, err, c.want)
		}
	}
	cfg := r.cfg
	cfg.Size = 0
	if q, err := virtqueue.New(cfg); q != nil || err == nil {
		t.Errorf("New returned %v, %v", q, err)
	}
}

// PKD-01: the forms of SET_VRING_BASE.
func TestPKD01_ParsePosition(t *testing.T) {
	for _, c := range []struct {
		base   uint32
		size   uint16
		packed bool
		want   virtqueue.Position
		bad    bool
	}{
		{base: 0, size: 256, want: 0},
		{base: 0xffff, size: 256, want: 0xffff},
		{base: 0x10000, size: 256, bad: true},
		{base: 0x80008000, size: 256, packed: true, want: virtqueue.FreshPacked},
		{base: 0x8000, size: 256, packed: true, want: virtqueue.FreshPacked},
		{base: 0, size: 256, packed: true, want: 0},
		{base: 0x2c, size: 256, packed: true, want: 0x2c002c},
		{base: 0x8028802c, size: 256, packed: true, want: 0x8028802c},
		{base: 0x80008100, size: 256, packed: true, bad: true},
		{base: 0x81008000, size: 256, packed: true, bad: true},
		{base: 0x8100, size: 256, packed: true, bad: true},
		{base: 0x64, size: 100, packed: true, bad: true},
		{base: 0x63, size: 100, packed: true, want: 0x630063},
		{base: 0x7fff7fff, size: 32768, packed: true, want: 0x7fff7fff},
	} {
		got, err := virtqueue.ParsePosition(c.base, c.size, c.packed)
		if got != c.want || (err != nil) != c.bad {
			t.Errorf("%#x, size %d, packed %v: %#x, %v, want %#x", c.base, c.size, c.packed, got, err, c.want)
		}
	}
}

// PKD-01: a ring starts where the base says, in the right lap; chains between the used and the available half are replayed.
func TestPKD01_StartValues(t *testing.T) {
	for _, c := range []struct {
		base  uint32
		noSet bool
		start uint16 // the driver's place
		chain int    // chains that the driver had made available
	}{
		{base: 0x80008000, start: fresh}, {base: 0x8000, start: fresh}, {base: 0, start: 0}, {base: 0, noSet: true, start: fresh},
		{base: 0x8028802c, start: fresh | 40, chain: 4}, {base: 0x280028, start: 40}, {base: 0x00ff8001, start: 255, chain: 2},
	} {
		r := newPackedRig(t, rigOptions{size: 256})
		r.drv.Reset(c.start)
		ids := r.add(t, c.chain)
		r.cfg.NoBase = c.noSet
		r.restart(t, c.base)
		if n := r.serve(t); n != c.chain {
			t.Errorf("base %#x: %d chains at the start, want %d", c.base, n, c.chain)
		}
		if r.dev.Rebased() != (c.chain > 0) {
			t.Errorf("base %#x: Rebased = %v", c.base, r.dev.Rebased())
		}
		r.takeUsed(t, ids)
		for range 5 {
			ids := r.add(t, 100)
			r.serve(t)
			r.takeUsed(t, ids)
		}
		if at, want := r.dev.Position(), r.drv.AvailIdx(); at != virtqueue.Position(want)|virtqueue.Position(want)<<16 || at != r.dev.Consumed() {
			t.Errorf("base %#x: position %#x, the driver is at %#x", c.base, at, want)
		}
	}
}

// PKD-03: any size, with chains of one to three descriptors, over many laps.
func TestPKD03_Sizes(t *testing.T) {
	for _, size := range []int{1, 2, 3, 5, 100, 255, 256, 1000, 32767, 32768} {
		for _, start := range []uint16{fresh, uint16(size / 2)} {
			t.Run(fmt.Sprintf("size=%d/start=%#x", size, start), func(t *testing.T) {
				r := newPackedRig(t, rigOptions{size: size, start: start})
				frames := min(10*size, 40000)
				for sent := 0; sent < frames; {
					var ids []uint16
					for len(ids) < 77 {
						id, err := r.drv.AddChain(bufs(1+sent%3, uint32(sent)))
						if err != nil {
							break
						}
						ids = append(ids, id)
						sent++
					}
					if len(ids) == 0 { // a chain of more descriptors than the ring
						sent++
						continue
					}
					r.drv.Publish()
					if n := r.serve(t); n != len(ids) {
						t.Fatalf("frame %d: %d chains served of %d", sent, n, len(ids))
					}
					r.takeUsed(t, ids)
				}
			})
		}
	}
}

// bufs is a chain of n buffers whose length tells k.
func bufs(n int, k uint32) []driver.Buf {
	all := make([]driver.Buf, n)
	for i := range all {
		all[i] = driver.Buf{Addr: bufGPA + uint64(i), Len: k % 1000}
	}
	return all
}

// PKD-05: one used descriptor for a chain, with the id of its last descriptor, where the chain began; nothing else is touched.
func TestPKD05_OneUsedDescriptorForAChain(t *testing.T) {
	for _, rx := range []bool{false, true} {
		for _, start := range []uint16{fresh, fresh | 30, 31} {
			r := newPackedRig(t, rigOptions{size: 32, rx: rx, start: start})
			var flags uint16
			if rx {
				flags = write
			}
			lengths, ids := []int{1, 3, 17, 1}, []uint16{31, 5, 0xbeef, 7}
			for i, n := range lengths {
				for range n - 1 {
					r.drv.PokeChain(bufGPA, 10, junk, flags|next)
				}
				r.drv.PokeChain(bufGPA, 10, ids[i], flags)
			}
			r.drv.Publish()
			want := bytes.Clone(ringBytes(t, r))
			if n := r.fill(t, 32); n != 4 {
				t.Fatalf("Fill = %d", n)
			}
			at := start
			for i, n := range lengths {
				slot := want[16*int(at&0x7fff):][8:16]
				used := uint64(ids[i]) << 32
				if rx {
					used |= uint64(100+i) | uint64(write)<<48
					r.b.Chains[i].Written = uint32(100 + i)
				}
				if at&fresh != 0 {
					used |= (driver.DescFAvail | driver.DescFUsed) << 48
				}
				for j := range slot {
					slot[j] = byte(used >> (8 * j))
				}
				if at += uint16(n); at&0x7fff >= 32 {
					at = at - 32 ^ fresh
				}
			}
			r.dev.CompleteBatch(r.b, 0, 4)
			if diff := r.dev.Staged(); diff != 4 {
				t.Errorf("Staged = %d", diff)
			}
			r.dev.Publish(0)
			if diff := cmp.Diff(want, ringBytes(t, r)); diff != "" {
				t.Errorf("rx %v, start %#x: ring (-want +got):\n%s", rx, start, diff)
			}
			if got := r.dev.Position(); got != virtqueue.Position(at)|virtqueue.Position(at)<<16 {
				t.Errorf("position %#x, want %#x", got, at)
			}
		}
	}
}

// PKD-07: a driver that polls the first used descriptor of a batch finds the others when it sees it.
func TestPKD07_BatchesBecomeVisibleWhole(t *testing.T) {
	const n, rounds = 7, 3000
	r := newPackedRig(t, rigOptions{size: 10, rx: true})
	done := make(chan struct{})
	go func() {
		defer close(done)
		for round := range uint32(rounds) {
			ids := make([]uint16, n)
			for i := range ids {
				ids[i], _ = r.drv.AddDirect(driver.Buf{Addr: bufGPA, Len: 64, Write: true})
			}
			r.drv.Publish()
			for !r.drv.HasUsed() {
				runtime.Gosched()
			}
			for i, want := range ids {
				if id, written, ok := r.drv.GetUsed(); !ok || id != want || written != n*round+uint32(i)+1 {
					t.Errorf("round %d: used %d: id %d, %d bytes, %v, %v", round, i, id, written, ok, r.drv.Err())
					return
				}
			}
		}
	}()
	written := uint32(1)
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		if got := r.fill(t, 32); got > 0 {
			for got < n { // the rest of the batch is on its way
				more, err := r.dev.Fill(r.b, 32)
				if err != nil {
					t.Fatal(err)
				}
				got += more
			}
			for i := range n {
				r.b.Chains[i].Written = written
				written++
			}
			r.dev.CompleteBatch(r.b, 0, n)
			r.dev.Publish(0)
		}
		runtime.Gosched()
	}
}

// A batch without room for the next chain's segments ends before it.
func TestPackedBatchRoom(t *testing.T) {
	r := newPackedRig(t, rigOptions{size: 2300, features: ind})
	for i, n := range []int{1000, 80, 8, 1, 1088, 1089, 2} {
		gpa := tableGPA + uint64(i)*0x8000
		var err error
		if n > 80 && i%2 == 0 {
			_, err = r.drv.AddChain(bufs(n, 1))
		} else {
			_, err = r.drv.AddIndirect(host(t, r.mem, gpa, uint64(16*n)), gpa, bufs(n, 1))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	r.drv.Publish()
	if n := r.fill(t, 32); n != 3 || r.b.NSegs != virtqueue.MaxSegs {
		t.Fatalf("first batch: %d chains, %d segments", n, r.b.NSegs)
	}
	if n, err := r.dev.Fill(r.b, 32); n != 0 || err != nil {
		t.Fatalf("full batch: %d, %v", n, err)
	}
	if n := r.fill(t, 32); n != 1 || r.b.NSegs != 1 {
		t.Fatalf("second batch: %d chains, %d segments", n, r.b.NSegs)
	}
	if n := r.fill(t, 32); n != 1 || r.b.Chains[0].Fault != 0 || r.b.NSegs != virtqueue.MaxSegs {
		t.Fatalf("third batch: %d chains, %+v", n, r.b.Chains[0])
	}
	if n := r.fill(t, 32); n != 2 || r.b.Chains[0].Fault != virtqueue.FaultTooLong || r.b.Chains[1].Fault != 0 {
		t.Fatalf("fourth batch: %d chains, %+v", n, r.b.Chains[:2])
	}
	if n, err := r.dev.Fill(r.b, 0); n != 0 || err != nil {
		t.Errorf("Fill of 0 = %d, %v", n, err)
	}
}
