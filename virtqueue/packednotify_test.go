package virtqueue_test

import (
	"bytes"
	"testing"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// NTF-03 for packed rings: places are descriptors with the wrap counter in bit 15, the ring has 100.
func TestPackedNeedsCallByEvent(t *testing.T) {
	const w = fresh
	for _, c := range []struct {
		old   uint16
		n     int
		event uint16
		want  bool
	}{
		{w | 3, 6, w | 5, true}, {w | 3, 6, w | 3, true}, {w | 3, 6, w | 8, true}, {w | 3, 6, w | 9, false}, {w | 3, 6, w | 2, false},
		{w | 3, 6, 5, false}, // the lap before
		{w | 97, 6, w | 98, true}, {w | 97, 6, w | 97, true}, {w | 97, 6, 1, true}, {w | 97, 6, 2, true}, {w | 97, 6, 3, false},
		{w | 97, 6, w | 96, false}, {w | 97, 6, w | 1, false}, {w | 97, 6, 98, false},
		{w | 97, 3, w | 99, true}, {w | 97, 3, 0, false}, {98, 5, w | 1, true}, {98, 5, w | 3, false}, {98, 5, 99, true},
		{w | 3, 0, w | 3, false},
	} {
		before := (c.old&0x7fff+99)%100 | c.old&w
		r := newPackedRig(t, rigOptions{size: 100, features: eventIdx, start: before})
		ids := r.add(t, 1)
		r.serve(t)
		r.takeUsed(t, ids)
		r.drv.PokeDriverEvent(0, driver.EventDesc)
		if !r.dev.NeedsCall() {
			t.Error("the first completion of a life must call")
		}
		r.add(t, c.n)
		r.serve(t)
		r.drv.PokeDriverEvent(c.event, driver.EventDesc)
		if got := r.dev.NeedsCall(); got != c.want {
			t.Errorf("%#x + %d, event %#x: call = %v, want %v", c.old, c.n, c.event, got, c.want)
		}
		if r.dev.NeedsCall() {
			t.Error("called twice for the same completions")
		}
	}
}

// C61: a driver's structure that makes no sense costs calls at most.
func TestPackedNeedsCallByFlags(t *testing.T) {
	for _, features := range []virtio.Features{0, eventIdx} {
		r := newPackedRig(t, rigOptions{size: 10, features: features})
		if r.dev.NeedsCall() {
			t.Error("call for nothing")
		}
		for _, c := range []struct {
			flags uint16
			want  bool
		}{
			{driver.EventEnable, true}, {driver.EventDisable, false}, {3, true}, {driver.EventDisable | 0xfffc, false},
			{0xfffc, true}, {driver.EventDesc, true},
		} {
			ids := r.add(t, 3)
			r.drv.PokeDriverEvent(0x7fff, c.flags)
			r.serve(t)
			if got := r.dev.NeedsCall(); got != c.want {
				t.Errorf("%v, flags %#x: call = %v, want %v", features, c.flags, got, c.want)
			}
			r.takeUsed(t, ids)
		}
		for place := range 1 << 16 {
			if place%1013 != 0 {
				continue
			}
			r.drv.PokeDriverEvent(uint16(place), driver.EventDesc)
			ids := r.add(t, 10)
			r.serve(t)
			if !r.dev.NeedsCall() {
				t.Errorf("%v, event %#x: a whole lap went by without a call", features, place)
			}
			r.takeUsed(t, ids)
		}
	}
}

func TestPackedKicks(t *testing.T) {
	for _, features := range []virtio.Features{0, eventIdx} {
		r := newPackedRig(t, rigOptions{size: 14, features: features, start: fresh | 5})
		if r.dev.EnableKicks() {
			t.Error("work on an empty ring")
		}
		r.add(t, 1)
		if !r.drv.NeedsKick() {
			t.Errorf("%v: no kick although enabled", features)
		}
		if !r.dev.EnableKicks() {
			t.Errorf("%v: EnableKicks overlooks a chain", features)
		}
		r.dev.DisableKicks()
		for range 12 {
			r.add(t, 1)
			if r.drv.NeedsKick() {
				t.Errorf("%v: kick although disabled", features)
			}
		}
		if n := r.serve(t); n != 13 {
			t.Fatalf("%d served", n)
		}
		if r.dev.EnableKicks() {
			t.Errorf("%v: work on a drained ring", features)
		}
		for r.drv.HasUsed() {
			r.drv.GetUsed()
		}
		r.add(t, 1)
		if !r.drv.NeedsKick() {
			t.Errorf("%v: no kick after EnableKicks", features)
		}
	}
}

// DisableKicks leaves the ring alone when it said so before; a structure that an earlier owner left behind is replaced.
func TestPackedKicksAreWrittenOnce(t *testing.T) {
	r := newPackedRig(t, rigOptions{size: 16, features: eventIdx})
	r.dev.DisableKicks()
	if _, flags := r.drv.PeekDeviceEvent(); flags != driver.EventDisable {
		t.Errorf("flags %d after DisableKicks", flags)
	}
	ring := bytesAt(host(t, r.mem, 0, 0x1000), 0x1000)
	ring[r.cfg.Used-host(t, r.mem, 0, 1)+2] = 3
	before := bytes.Clone(ring)
	r.dev.DisableKicks()
	if !bytes.Equal(before, ring) {
		t.Error("DisableKicks wrote twice")
	}
	for _, features := range []virtio.Features{packed, packed | eventIdx} {
		r.cfg.Features = features
		r.restart(t, fresh)
		r.dev.EnableKicks()
		if _, flags := r.drv.PeekDeviceEvent(); flags == driver.EventDisable || flags == 3 {
			t.Errorf("%v: flags %d of the last life are still set", features, flags)
		}
		r.dev.DisableKicks()
	}
}
