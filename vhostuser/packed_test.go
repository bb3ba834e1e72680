package vhostuser_test

import (
	"testing"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

// ackedPacked is acked with packed rings.
func ackedPacked(t *testing.T) (*bench, func(i int) vhostuser.VringAddr) {
	t.Helper()
	dev := newDevice(4)
	dev.features |= virtio.FRingPacked
	b := newBench(t, dev).negotiate()
	b.NeedReply = true
	mem := newMemory(t, 8<<20)
	b.shareMemory(mem)
	t.Cleanup(b.checkDevice)
	return b, func(i int) vhostuser.VringAddr { return ringAddr(mem, i) }
}

// PKD-01: each form of SET_VRING_BASE reaches the device as both halves, and comes back as such.
func TestPKD01_PackedBase(t *testing.T) {
	for _, c := range []struct {
		base uint32
		want virtqueue.Position
	}{
		{0x80008000, 0x80008000}, {0x8000, 0x80008000}, {0, 0}, {0x8028802c, 0x8028802c}, {0x00638063, 0x00638063}, {0x63, 0x00630063},
	} {
		b, addr := ackedPacked(t)
		b.must(b.SetVringNum(0, 100))
		b.must(b.SetVringBase(0, c.base))
		if v, err := b.GetVringBase(0); err != nil || v != uint32(c.want) {
			t.Errorf("base %#x: GET_VRING_BASE before the start answers %#x, %v", c.base, v, err)
		}
		b.must(b.SetVringAddr(addr(0)))
		b.must(b.SetVringKick(0, eventFD(t)))
		b.dev.peek(func(d *fakeDevice) {
			if d.running[0].Base != c.want || d.running[0].Size != 100 {
				t.Errorf("base %#x: started with %+v", c.base, d.running[0])
			}
			d.positions[0] = 0x00058005 // both halves matter
		})
		if v, err := b.GetVringBase(0); err != nil || v != 0x00058005 {
			t.Errorf("base %#x: GET_VRING_BASE answers %#x, %v", c.base, v, err)
		}
	}
}

func TestPKD01_PackedBaseRefused(t *testing.T) {
	b, addr := ackedPacked(t)
	b.must(b.SetVringNum(0, 256))
	for _, base := range []uint32{0x100, 0x8100, 0x81008000, 0x80008100, 0xffffffff} {
		if err := b.SetVringBase(0, base); !isRefused(err) {
			t.Errorf("base %#x of a ring of 256: %v", base, err)
		}
	}
	// The size may come behind the base: then the start is refused.
	b.must(b.SetVringBase(1, 0x81008100))
	b.must(b.SetVringNum(1, 256))
	b.must(b.SetVringAddr(addr(1)))
	if err := b.SetVringKick(1, eventFD(t)); !isRefused(err) {
		t.Errorf("kick: %v", err)
	}
	b.must(b.SetVringBase(1, 0x80ff80ff))
	b.must(b.SetVringKick(1, eventFD(t)))
	if !b.dev.isRunning(1) {
		t.Error("ring 1 does not run")
	}
}

// A packed ring for which no base came starts where a driver does.
func TestPackedWithoutBase(t *testing.T) {
	b, addr := ackedPacked(t)
	b.must(b.SetVringNum(0, 64))
	b.must(b.SetVringAddr(addr(0)))
	b.must(b.SetVringKick(0, eventFD(t)))
	b.dev.peek(func(d *fakeDevice) {
		if d.running[0].Base != virtqueue.FreshPacked {
			t.Errorf("started at %#x", d.running[0].Base)
		}
	})
}

// PKD-03, C34: sizes that are no power of two are for packed rings.
func TestPKD03_C34_RingSizes(t *testing.T) {
	b, _ := ackedPacked(t)
	for _, n := range []uint32{1, 3, 100, 255, 1000, 32767, 32768} {
		b.must(b.SetVringNum(0, n))
	}
	for _, n := range []uint32{0, 32769, 65536 + 3} {
		if err := b.SetVringNum(0, n); !isRefused(err) {
			t.Errorf("size %d: %v", n, err)
		}
	}
	split, _ := acked(t, 2)
	if err := split.SetVringNum(0, 100); !isRefused(err) {
		t.Errorf("split ring of 100: %v", err)
	}
}

// C35: the event suppression structures are 4 bytes at multiples of 4.
func TestC35_PackedAddresses(t *testing.T) {
	b, addr := ackedPacked(t)
	b.must(b.SetVringNum(0, 100))
	good := addr(0)
	end := good.Desc + 8<<20
	for name, edit := range map[string]func(*vhostuser.VringAddr){
		"descriptor ring at 8":            func(a *vhostuser.VringAddr) { a.Desc += 8 },
		"driver's structure at 2":         func(a *vhostuser.VringAddr) { a.Avail += 2 },
		"device's structure at 2":         func(a *vhostuser.VringAddr) { a.Used += 2 },
		"descriptor ring crosses the end": func(a *vhostuser.VringAddr) { a.Desc = end - 99*16 },
		"device's structure at the end":   func(a *vhostuser.VringAddr) { a.Used = end },
	} {
		a := good
		edit(&a)
		if err := b.SetVringAddr(a); !isRefused(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	good.Avail, good.Used = end-8, end-4 // too little for rings, enough for these
	b.must(b.SetVringAddr(good))
	b.must(b.SetVringKick(0, eventFD(t)))
	if !b.dev.isRunning(0) {
		t.Error("ring 0 does not run")
	}
}

// What was said of packed rings does not start a split one.
func TestPackedThenSplit(t *testing.T) {
	b, addr := ackedPacked(t)
	b.must(b.SetVringNum(0, 100))
	b.must(b.SetVringBase(0, 0x80008000))
	b.must(b.SetVringAddr(addr(0)))
	b.must(b.SetFeatures(testFeatures | bit30))
	if err := b.SetVringKick(0, eventFD(t)); !isRefused(err) {
		t.Errorf("kick: %v", err)
	}
	b.must(b.SetVringNum(0, 128))
	b.must(b.SetVringBase(0, 5))
	b.must(b.SetVringKick(0, eventFD(t)))
	if !b.dev.isRunning(0) {
		t.Error("ring 0 does not run")
	}
}
