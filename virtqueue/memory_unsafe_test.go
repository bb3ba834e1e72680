package virtqueue_test

import (
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// region is a piece of guest memory: the table maps it for the device, and for
// these tests that mapping is the driver's view too.
type region struct {
	gpa, size uint64
}

// newTable maps each region from a memfd of its own.
func newTable(t testing.TB, regions ...region) *guestmem.Table {
	t.Helper()
	var specs []guestmem.RegionSpec
	var fds []int
	for _, r := range regions {
		fd, err := unix.MemfdCreate("virtqueue-test", unix.MFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(fd)
		if err := unix.Ftruncate(fd, int64(r.size)); err != nil {
			t.Fatal(err)
		}
		fds = append(fds, fd)
		specs = append(specs, guestmem.RegionSpec{GPA: r.gpa, Size: r.size, UVA: r.gpa})
	}
	table, err := guestmem.NewTable(specs, fds)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := table.Close(); err != nil {
			t.Error(err)
		}
	})
	return table
}

func host(t testing.TB, table *guestmem.Table, gpa, n uint64) uintptr {
	t.Helper()
	h, run := table.Lookup(gpa, n)
	if run != n {
		t.Fatalf("guest address %#x+%#x is not mapped", gpa, n)
	}
	return h
}

// bytesAt views n bytes of a mapping.
func bytesAt(addr uintptr, n int) []byte {
	// SAFETY: the tests pass ranges that a table look-up returned.
	return unsafe.Slice((*byte)(unsafe.Add(nil, addr)), n)
}

// rig is both sides of a split ring.
type rig struct {
	*sides
	drv *driver.Ring
	dev *virtqueue.Split
}

const (
	ringGPA = 0         // where the ring lies
	bufGPA  = 0x1000000 // where buffers may lie
	bufSize = 0x100000
)

type rigOptions struct {
	size     int
	features virtio.Features
	rx       bool
	layout   func(size int, at uint64) driver.Layout
	start    uint16
	regions  []region // besides the ring's and the buffers'
}

func newRig(t testing.TB, o rigOptions) *rig {
	t.Helper()
	if o.layout == nil {
		o.layout = driver.Packed
	}
	l := o.layout(o.size, ringGPA)
	ringBytes := (l.End + 0xfff) &^ 0xfff
	mem := newTable(t, append([]region{{ringGPA, ringBytes}, {bufGPA, bufSize}}, o.regions...)...)
	base := host(t, mem, ringGPA, ringBytes)
	desc, avail, used := base+uintptr(l.Desc), base+uintptr(l.Avail), base+uintptr(l.Used)
	drv, err := driver.New(driver.Config{Size: o.size, Desc: desc, Avail: avail, Used: used, Features: o.features})
	if err != nil {
		t.Fatal(err)
	}
	drv.Reset(o.start)
	cfg := virtqueue.Config{
		Size: uint16(o.size), Desc: desc, Avail: avail, Used: used,
		Features: o.features, Mem: mem, DeviceWrites: o.rx,
	}
	dev, err := virtqueue.NewSplit(cfg)
	if err != nil {
		t.Fatal(err)
	}
	return &rig{sides: &sides{mem, drv, dev, new(virtqueue.Batch), cfg}, drv: drv, dev: dev}
}

// restart is a new life of the device side over the same memory.
func (r *rig) restart(t testing.TB, base uint16) {
	t.Helper()
	r.sides.restart(t, virtqueue.Position(base))
	r.dev = r.sides.dev.(*virtqueue.Split)
}
