package virtqueue_test

import (
	"testing"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// packedRig is both sides of a packed ring.
type packedRig struct {
	*sides
	drv *driver.PackedRing
	dev *virtqueue.Packed
}

const (
	fresh  = 1 << 15 // the place where a driver starts
	packed = virtio.FRingPacked
)

// newPackedRig starts both sides at rigOptions.start, which 0 makes fresh.
func newPackedRig(t testing.TB, o rigOptions) *packedRig {
	t.Helper()
	if o.start == 0 {
		o.start = fresh
	}
	o.features |= packed
	l := driver.PackedFormat(o.size, ringGPA)
	ringBytes := (l.End + 0xfff) &^ 0xfff
	mem := newTable(t, append([]region{{ringGPA, ringBytes}, {bufGPA, bufSize}}, o.regions...)...)
	base := host(t, mem, ringGPA, ringBytes)
	desc, avail, used := base+uintptr(l.Desc), base+uintptr(l.Avail), base+uintptr(l.Used)
	drv, err := driver.NewPacked(driver.Config{Size: o.size, Desc: desc, Avail: avail, Used: used, Features: o.features})
	if err != nil {
		t.Fatal(err)
	}
	drv.Reset(o.start)
	r := &packedRig{sides: &sides{mem: mem, drv: drv, b: new(virtqueue.Batch), cfg: virtqueue.Config{
		Size: uint16(o.size), Desc: desc, Avail: avail, Used: used,
		Features: o.features, Mem: mem, DeviceWrites: o.rx,
	}}, drv: drv}
	r.restart(t, uint32(o.start))
	return r
}

// restart is a new life of the device side over the same memory, with base as
// SET_VRING_BASE says it.
func (r *packedRig) restart(t testing.TB, base uint32) {
	t.Helper()
	at, err := virtqueue.ParsePosition(base, r.cfg.Size, true)
	if err != nil {
		t.Fatal(err)
	}
	r.sides.restart(t, at)
	r.dev = r.sides.dev.(*virtqueue.Packed)
}

// pokeTable writes entries of an indirect table of a packed ring byte by byte, over seams; desc.next is the id.
func pokeTable(t testing.TB, mem *guestmem.Table, gpa uint64, table []desc) {
	t.Helper()
	scratch := host(t, mem, bufGPA+0xff000, 16)
	for i, d := range table {
		driver.PokePackedTable(scratch, 0, d.addr, d.len, d.next, d.flags)
		scatterBytes(t, mem, gpa+uint64(16*i), bytesAt(scratch, 16))
	}
}
