package virtqueue_test

import (
	"bytes"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// killRig is a packed ring whose device is killed between any two stores and started again. Chains have one to three descriptors;
// each is to come back once, in order, with the length that the device wrote.
type killRig struct {
	*packedRig
	t     testing.TB
	ring  []byte // descriptors
	rec   *virtqueue.Record
	added []uint16 // ids, oldest first
	taken int
}

func newKillRig(t testing.TB, o rigOptions) *killRig {
	r := &killRig{t: t, packedRig: newPackedRig(t, o), rec: &virtqueue.Record{Words: make([]uint64, virtqueue.RecordWords(o.size))}}
	r.ring = bytesAt(r.cfg.Desc, 16*o.size)
	r.cfg.Record = r.rec
	r.restart(t, uint32(r.dev.Position()))
	return r
}

// life starts the device anew from its record, with a base that is no use.
func (r *killRig) life(t testing.TB) {
	t.Helper()
	r.rec.Resume = true
	r.restart(t, uint32(virtqueue.FreshPacked))
	if !r.rec.Resumed {
		t.Fatal(r.rec.Refused)
	}
}

// killedPublish publishes and is killed after as many stores as cut says: the state, all used descriptors but the first, the first,
// the state. A cut beyond them is a kill after it.
func (r *killRig) killedPublish(lag, cut int) {
	ring, words := bytes.Clone(r.ring), slices.Clone(r.rec.Words)
	from := int(r.dev.Position() & 0x7fff)
	n := r.dev.Publish(lag)
	if n == 0 {
		return
	}
	var order []int // descriptors in the order in which they were written
	for i := range r.cfg.Size {
		idx := (from + int(i)) % int(r.cfg.Size)
		if !bytes.Equal(ring[16*idx:16*idx+16], r.ring[16*idx:16*idx+16]) && idx != from {
			order = append(order, idx)
		}
	}
	order = append(order, from)
	after := bytes.Clone(r.ring)
	last := r.rec.Words[0]
	copy(r.ring, ring)
	r.rec.Words[0] = words[0]
	if cut > 0 {
		r.rec.Words[0] |= uint64(n) << 16
	}
	for i, idx := range order {
		if cut > i+1 {
			copy(r.ring[16*idx:16*idx+16], after[16*idx:])
		}
	}
	if cut > len(order)+1 {
		r.rec.Words[0] = last
	}
}

// A device that is killed at any store goes on with the first chain of which the driver was not told, and finishes a batch that it
// had begun to show.
func TestRecordSurvivesKills(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		o := rigOptions{size: rapid.SampledFrom([]int{1, 2, 3, 7, 16, 50}).Draw(rt, "size"), rx: rapid.Bool().Draw(rt, "rx")}
		if rapid.Bool().Draw(rt, "in_order") {
			o.features |= virtio.FInOrder
		}
		wrap := rapid.IntRange(0, 1).Draw(rt, "wrap")
		o.start = uint16(rapid.IntRange(0, o.size-1).Draw(rt, "start") | wrap<<15)
		r := newKillRig(t, o)
		defer r.mem.Close()
		rt.Repeat(map[string]func(*rapid.T){
			"add": func(rt *rapid.T) {
				for range rapid.IntRange(1, 8).Draw(rt, "chains") {
					r.addChain(rt)
				}
				r.drv.Publish()
			},
			"serve": func(rt *rapid.T) { r.someServe(rt, func(lag int) { r.dev.Publish(lag) }) },
			"kill": func(rt *rapid.T) {
				r.someServe(rt, func(lag int) { r.killedPublish(lag, rapid.IntRange(0, 2+o.size).Draw(rt, "cut")) })
				if rapid.Bool().Draw(rt, "driver goes on") {
					r.take(rt)
					r.addChain(rt)
					r.drv.Publish()
				}
				r.life(t)
			},
			"take": r.take,
		})
		r.someServe(rt, func(int) { r.dev.Publish(0) })
		r.take(rt)
	})
}

func (r *killRig) addChain(rt *rapid.T) {
	var bufs []driver.Buf
	for range rapid.IntRange(1, 3).Draw(rt, "descs") {
		bufs = append(bufs, driver.Buf{Addr: bufGPA, Len: 100, Write: r.cfg.DeviceWrites})
	}
	if id, err := r.drv.AddChain(bufs); err == nil {
		r.added = append(r.added, id)
	}
}

// someServe fills, completes a part of it and lets publish show it.
func (r *killRig) someServe(rt *rapid.T, publish func(lag int)) {
	n := r.fill(r.t, rapid.IntRange(1, 32).Draw(rt, "fill"))
	keep := rapid.IntRange(0, n).Draw(rt, "complete")
	for i := range keep {
		r.b.Chains[i].Written = lengthOf(r.b.Chains[i].Head)
	}
	r.dev.Unfill(n - keep)
	r.dev.CompleteBatch(r.b, 0, keep)
	publish(rapid.IntRange(0, 2).Draw(rt, "lag"))
}

func (r *killRig) take(rt *rapid.T) {
	for {
		id, written, ok := r.drv.GetUsed()
		if !ok {
			if err := r.drv.Err(); err != nil {
				rt.Fatal(err)
			}
			return
		}
		if r.taken == len(r.added) || id != r.added[r.taken] {
			rt.Fatalf("chain %d: id %d came back, want %v", r.taken, id, r.added[r.taken:])
		}
		if one := r.cfg.Features.Has(virtio.FInOrder) && !r.cfg.DeviceWrites; !one && written != lengthOf(id) {
			rt.Fatalf("chain %d with id %d: %d bytes written, want %d", r.taken, id, written, lengthOf(id))
		}
		r.taken++
	}
}

// lengthOf is what the device says to have written to the chain with an id.
func lengthOf(id uint16) uint32 { return uint32(id)*3 + 1 }

// A driver that begins the ring anew while no device is there is not served from the old position.
func TestRecordOfARingBegunAnew(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		o := rigOptions{size: rapid.SampledFrom([]int{8, 16, 50}).Draw(rt, "size"), rx: rapid.Bool().Draw(rt, "rx")}
		r := newKillRig(t, o)
		defer r.mem.Close()
		for range rapid.IntRange(1, 150).Draw(rt, "chains") {
			r.add(t, 1)
			r.serve(t)
			_, _, _ = r.drv.GetUsed()
		}
		at := r.dev.Position()
		clear(r.ring)
		r.drv.Attach(fresh)
		r.add(t, rapid.SampledFrom([]int{1, 3, o.size}).Draw(rt, "new"))
		r.rec.Resume = true
		r.restart(t, uint32(virtqueue.FreshPacked))
		if r.rec.Resumed && at != virtqueue.FreshPacked {
			rt.Fatalf("resumed at %#x", at)
		}
		if r.fill(t, 1) != 1 {
			rt.Fatal("the new ring is not served")
		}
	})
}

// Whatever a damaged record says, the ring is served from the record or from the base, and nothing panics.
func FuzzRecord(f *testing.F) {
	f.Add(uint64(1<<63|0x8000), uint64(1)<<48, true)
	f.Add(uint64(1<<63|1<<48|0x8003<<32|2<<16|0x8005), uint64(3)<<48|7, false)
	f.Add(^uint64(0), ^uint64(0), true)
	f.Fuzz(func(t *testing.T, state, slot uint64, rx bool) {
		r := newKillRig(t, rigOptions{size: 7, rx: rx})
		defer r.mem.Close()
		r.add(t, 5)
		r.serve(t)
		for i := range r.rec.Words {
			r.rec.Words[i] = slot + uint64(i)
		}
		r.rec.Words[0], r.rec.Resume = state, true
		r.restart(t, uint32(virtqueue.FreshPacked))
		r.b.Reset()
		n, err := r.dev.Fill(r.b, virtqueue.MaxBatch)
		if err == nil {
			r.dev.CompleteBatch(r.b, 0, n)
			r.dev.Publish(0)
		}
	})
}
