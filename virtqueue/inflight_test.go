package virtqueue_test

import (
	"encoding/binary"
	"math/rand/v2"
	"testing"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

const regionGPA = 0x7000_0000

// region makes memory for a ring's part of an inflight region.
func inflightRegion(t testing.TB, size int, packed bool) (*virtqueue.Inflight, []byte) {
	t.Helper()
	n := virtqueue.InflightBytes(size, packed)
	mem := newTable(t, region{regionGPA, (n + 4095) &^ 4095})
	t.Cleanup(func() { closeTable(t, mem) })
	at := host(t, mem, regionGPA, n)
	return &virtqueue.Inflight{Host: at, Entries: uint16(size), Mem: mem}, bytesAt(at, int(n))
}

func closeTable(t testing.TB, mem *guestmem.Table) {
	if err := mem.Close(); err != nil {
		t.Error(err)
	}
}

// marked lists the entries of a split region that are inflight.
func marked(b []byte) (heads []uint16) {
	for i := 16; i+16 <= len(b); i += 16 {
		if b[i] == 1 {
			heads = append(heads, uint16(i/16-1))
		}
	}
	return heads
}

// The region names what was taken, and no more once it is published or given back.
func TestInflightSplitMarks(t *testing.T) {
	r := newRig(t, rigOptions{size: 8})
	in, b := inflightRegion(t, 8, false)
	r.cfg.Inflight = in
	r.restart(t, 0)
	if v := binary.LittleEndian.Uint64(b[8:]); v != 1|8<<16 {
		t.Errorf("header %#x", v)
	}
	r.add(t, 6)
	want := func(what string, n int) {
		t.Helper()
		if got := marked(b); len(got) != n {
			t.Errorf("%s: entries %v are inflight, want %d", what, got, n)
		}
	}
	r.fill(t, 5)
	want("filled", 5)
	r.dev.Unfill(2)
	want("given back", 3)
	r.dev.CompleteBatch(r.b, 0, 3)
	want("completed", 3)
	r.dev.Publish(1)
	want("published but one", 1)
	r.dev.Publish(0)
	want("published", 0)
	if used := binary.LittleEndian.Uint16(b[14:]); used != 3 {
		t.Errorf("used_idx %d", used)
	}
	in.End()
	if v := binary.LittleEndian.Uint16(b[8:]); v != 0 {
		t.Errorf("version %d after the end", v)
	}
}

// A back-end that completes out of order leaves others than those behind the used index: they are taken first, oldest first.
func TestInflightSplitOutOfOrder(t *testing.T) {
	r := newRig(t, rigOptions{size: 8})
	in, b := inflightRegion(t, 8, false)
	r.cfg.Inflight = in
	r.restart(t, 0)
	heads := r.add(t, 6)
	// It took five, completed the first and the third, and was killed before it could clear the third's mark.
	for i, counter := range []uint64{0, 1, 2, 3, 4} {
		at := b[16+16*int(heads[i]):]
		at[0] = 1
		binary.LittleEndian.PutUint64(at[8:], counter)
	}
	b[16+16*int(heads[0])] = 0
	binary.LittleEndian.PutUint16(b[12:], heads[2])
	binary.LittleEndian.PutUint16(b[14:], 1)
	used := bytesAt(r.cfg.Used, 4+2*8)
	binary.LittleEndian.PutUint64(used[4:], uint64(heads[0]))
	binary.LittleEndian.PutUint64(used[12:], uint64(heads[2]))
	r.drv.PokeUsedIdx(2)
	r.restart(t, 0)
	if in.Resubmitted != 3 || in.Refused != nil {
		t.Fatalf("%+v", in)
	}
	var got []uint16
	for n := r.fill(t, 2); n > 0; n = r.fill(t, 2) {
		for i := range n {
			got = append(got, r.b.Chains[i].Head)
		}
		if len(got) == 2 {
			r.dev.Unfill(1) // is taken again, in its place
			got = got[:1]
			r.dev.CompleteBatch(r.b, 0, 1)
			continue
		}
		r.dev.CompleteBatch(r.b, 0, n)
	}
	r.dev.Publish(0)
	for i, want := range []uint16{heads[1], heads[3], heads[4], heads[5]} {
		if i >= len(got) || got[i] != want {
			t.Fatalf("taken %v, heads were %v", got, heads)
		}
	}
	for range 6 {
		if _, _, ok := r.drv.GetUsed(); !ok {
			t.Fatalf("the driver does not get all back: %v", r.drv.Err())
		}
	}
}

// A region in which a packed ring's chains were taken and half used gives them back as they were.
func TestInflightPackedRestore(t *testing.T) {
	for _, inOrder := range []virtio.Features{0, virtio.FInOrder} {
		r := newPackedRig(t, rigOptions{size: 8, features: inOrder})
		in, _ := inflightRegion(t, 8, true)
		r.cfg.Inflight = in
		r.restart(t, fresh)
		for range 5 { // the positions and the free entries get around
			r.add(t, 3)
			r.serve(t)
			for range 3 {
				_, _, _ = r.drv.GetUsed()
			}
		}
		ids := r.add(t, 6)
		if n := r.fill(t, 4); n != 4 {
			t.Fatal(n)
		}
		r.dev.CompleteBatch(r.b, 0, 2)
		// Killed: two completed and not published, two more taken. Its successor knows nothing but the region.
		r.restart(t, fresh)
		if in.Resubmitted != 4 || in.Refused != nil {
			t.Fatalf("%+v", in)
		}
		if n := r.serve(t); n != 6 {
			t.Errorf("%d chains are served", n)
		}
		r.takeUsed(t, ids)
		closeTable(t, r.mem)
	}
}

// A11: whatever a region says, the ring is served, and nothing outside of ring and region is touched.
func FuzzInflight(f *testing.F) {
	f.Add(uint64(1), uint64(0), false)
	f.Add(uint64(2), uint64(1)<<16|1, true)
	f.Fuzz(func(t *testing.T, seed, header uint64, packed bool) {
		const size = 8
		in, b := inflightRegion(t, size, packed)
		random := rand.New(rand.NewPCG(seed, header))
		for i := range b {
			if random.IntN(3) == 0 {
				b[i] = byte(random.IntN(10))
			}
		}
		binary.LittleEndian.PutUint64(b[8:], header)
		if seed%4 != 0 { // most of the time a header that passes
			binary.LittleEndian.PutUint32(b[8:], 1|size<<16)
		}
		if packed {
			r := newPackedRig(t, rigOptions{size: size})
			defer closeTable(t, r.mem)
			r.cfg.Inflight = in
			r.add(t, 5)
			r.restart(t, fresh)
			for range 3 {
				r.turn(t, byte(seed))
			}
			return
		}
		r := newRig(t, rigOptions{size: size})
		r.cfg.Inflight = in
		r.add(t, 5)
		r.restart(t, 0)
		for n := r.fill(t, 3); n > 0; n = r.fill(t, 3) {
			r.dev.CompleteBatch(r.b, 0, n)
			r.dev.Publish(0)
		}
		if got := r.drv.PeekUsedIdx(); got != 5 {
			t.Errorf("%d of 5 chains are used", got)
		}
	})
}

// A region for fewer descriptors than the ring has is refused.
func TestA7_InflightTooSmall(t *testing.T) {
	r := newRig(t, rigOptions{size: 8})
	in, _ := inflightRegion(t, 4, false)
	r.cfg.Inflight = in
	if _, err := virtqueue.New(r.cfg); err == nil {
		t.Error("accepted")
	}
}
