package driver_test

import (
	"errors"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// packedDevice is a trivial device that completes by hand.
type packedDevice struct {
	mem []byte
	l   driver.Layout
	r   *driver.PackedRing
}

func newPacked(t testing.TB, size int, features virtio.Features) packedDevice {
	t.Helper()
	l := driver.PackedFormat(size, 0)
	mem, err := unix.Mmap(-1, 0, int(l.End+0x10000), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(mem) })
	base := addr(mem)
	r, err := driver.NewPacked(driver.Config{
		Size: size, Features: features,
		Desc: base + uintptr(l.Desc), Avail: base + uintptr(l.Avail), Used: base + uintptr(l.Used),
	})
	if err != nil {
		t.Fatal(err)
	}
	return packedDevice{mem, l, r}
}

// use writes a used descriptor of the lap with the given wrap counter.
func (d packedDevice) use(i int, id uint16, written uint32, wrap bool) {
	flags := uint16(driver.DescFWrite)
	if wrap {
		flags |= driver.DescFAvail | driver.DescFUsed
	}
	d.r.PokeDesc(i, 0, written, id, flags)
}

func (d packedDevice) requestKick(at, flags uint16) {
	copy(d.mem[d.l.Used:], []byte{byte(at), byte(at >> 8), byte(flags), byte(flags >> 8)})
}

// driverEvent is what the driver's structure says.
func (d packedDevice) driverEvent() (at, flags uint16) {
	b := d.mem[d.l.Avail:]
	return uint16(b[0]) | uint16(b[1])<<8, uint16(b[2]) | uint16(b[3])<<8
}

func TestNewPackedRefuses(t *testing.T) {
	for _, c := range []driver.Config{
		{Size: 0, Desc: 16, Avail: 4, Used: 4},
		{Size: 32769, Desc: 16, Avail: 4, Used: 4},
		{Size: 3, Desc: 8, Avail: 4, Used: 4},
		{Size: 3, Desc: 16, Avail: 2, Used: 4},
		{Size: 3, Desc: 16, Avail: 4, Used: 2},
		{Size: 3, Desc: 16, Avail: 4},
	} {
		if _, err := driver.NewPacked(c); err == nil {
			t.Errorf("%+v was accepted", c)
		}
	}
}

// TestPackedAdd looks at the descriptors: the first one's flags are written by Publish, the id is in the last.
func TestPackedAdd(t *testing.T) {
	d := newPacked(t, 5, virtio.FRingIndirectDesc)
	buf := driver.Buf{Addr: 1, Len: 2, Write: true}
	one, _ := d.r.AddDirect(buf)
	chain, err := d.r.AddChain([]driver.Buf{buf, buf, buf})
	if err != nil || one != 0 || chain != 1 || d.r.Free() != 1 || d.r.Outstanding() != 2 {
		t.Fatalf("ids %d, %d, %v, %d free", one, chain, err, d.r.Free())
	}
	if _, err := d.r.AddChain([]driver.Buf{buf, buf}); !errors.Is(err, driver.ErrFull) {
		t.Errorf("chain of 2 in 1: %v", err)
	}
	if _, err := d.r.AddChain(nil); err == nil {
		t.Error("chain without buffers was added")
	}
	flags := func(i int) (id, f uint16) { _, _, id, f = d.r.PeekDesc(i); return }
	if _, f := flags(0); f != 0 {
		t.Errorf("first descriptor has flags %#x before Publish", f)
	}
	if n := d.r.Publish(); n != 2 || d.r.Publish() != 0 {
		t.Errorf("Publish = %d", n)
	}
	for i, want := range []uint16{0x82, 0x83, 0x83, 0x82, 0} {
		if _, f := flags(i); f != want {
			t.Errorf("descriptor %d has flags %#x, want %#x", i, f, want)
		}
	}
	if id, _ := flags(3); id != 1 {
		t.Errorf("last descriptor has id %d", id)
	}
	if h, err := d.r.AddIndirect(addr(d.mem[d.l.End:]), 77, []driver.Buf{buf, buf}); err != nil || h != 2 {
		t.Errorf("indirect: id %d, %v", h, err)
	}
	if _, err := d.r.AddDirect(buf); !errors.Is(err, driver.ErrFull) {
		t.Errorf("full ring: %v", err)
	}
	if at := d.r.AvailIdx(); at != 0 {
		t.Errorf("after a lap the driver is at %#x", at)
	}
	if _, _, ok := d.r.GetUsed(); ok || d.r.HasUsed() {
		t.Error("used before the device used anything")
	}
	d.use(0, 1, 9, true) // out of order
	if id, n, ok := d.r.GetUsed(); !ok || id != 1 || n != 9 || d.r.Free() != 3 || d.r.LastUsed() != 0x8003 {
		t.Errorf("id %d, %d bytes, %v, %d free, at %#x", id, n, ok, d.r.Free(), d.r.LastUsed())
	}
	d = newPacked(t, 4, 0)
	if _, err := d.r.AddIndirect(addr(d.mem[d.l.End:]), 0, []driver.Buf{{}}); err == nil {
		t.Error("indirect without the feature")
	}
}

func TestPackedBadDevice(t *testing.T) {
	for _, id := range []uint16{2, 4, 0xffff} {
		d := newPacked(t, 4, 0)
		for range 2 {
			d.r.AddDirect(driver.Buf{})
		}
		d.r.Publish()
		d.use(0, id, 0, true)
		d.r.GetUsed()
		if d.r.Err() == nil || !strings.Contains(d.r.Err().Error(), "not outstanding") || d.r.HasUsed() {
			t.Errorf("id %d: %v", id, d.r.Err())
		}
		d.r.Reset(0x8000)
		if d.r.Err() != nil || d.r.Free() != 4 || d.r.HasUsed() {
			t.Errorf("Reset left %v, %d free", d.r.Err(), d.r.Free())
		}
	}
}

// TestPackedReset: wherever a ring begins, nothing looks available or used.
func TestPackedReset(t *testing.T) {
	d := newPacked(t, 7, 0)
	for _, start := range []uint16{0x8000, 0, 3, 0x8006} {
		d.r.Reset(start)
		if d.r.HasUsed() || d.r.AvailIdx() != start || d.r.LastUsed() != start {
			t.Errorf("start %#x: at %#x and %#x", start, d.r.AvailIdx(), d.r.LastUsed())
		}
		at, wrap := int(start&0x7fff), start>>15 != 0
		for range 7 {
			_, _, _, f := d.r.PeekDesc(at)
			if (f&driver.DescFAvail != 0) == wrap || (f&driver.DescFUsed != 0) == wrap {
				t.Errorf("start %#x: descriptor %d has flags %#x", start, at, f)
			}
			if at++; at == 7 {
				at, wrap = 0, !wrap
			}
		}
	}
}

func TestPackedNeedsKick(t *testing.T) {
	d := newPacked(t, 10, virtio.FRingEventIdx)
	d.r.Reset(0x8008)
	if d.r.NeedsKick() {
		t.Error("kick for nothing")
	}
	for i, c := range []struct {
		add   int
		event uint16
		want  bool
	}{{3, 0x8009, true}, {2, 1, true}, {1, 5, false}, {2, 2, false}, {1, 6, true}} {
		for range c.add {
			d.r.AddDirect(driver.Buf{})
		}
		d.r.Publish()
		d.requestKick(c.event, driver.EventDesc)
		if got := d.r.NeedsKick(); got != c.want {
			t.Errorf("step %d: kick = %v", i, got)
		}
	}
	for _, features := range []virtio.Features{0, virtio.FRingEventIdx} {
		d = newPacked(t, 10, features)
		for _, flags := range []uint16{driver.EventDisable, driver.EventEnable} {
			d.r.AddDirect(driver.Buf{})
			d.r.Publish()
			d.requestKick(0, flags)
			if got := d.r.NeedsKick(); got != (flags == driver.EventEnable) {
				t.Errorf("flags %d: kick = %v", flags, got)
			}
		}
	}
}

func TestPackedCalls(t *testing.T) {
	d := newPacked(t, 10, virtio.FRingEventIdx)
	d.r.Reset(0x8006)
	for range 8 {
		d.r.AddDirect(driver.Buf{})
	}
	d.r.Publish()
	if at, flags := d.driverEvent(); d.r.EnableCalls() || flags != 0 || at != 0 {
		t.Errorf("before EnableCalls: event %#x, flags %d", at, flags)
	}
	if at, flags := d.driverEvent(); at != 0x8006 || flags != driver.EventDesc {
		t.Errorf("EnableCalls: event %#x, flags %d", at, flags)
	}
	if at, _ := d.driverEvent(); d.r.DelayCalls() || at != 0x8006 {
		t.Errorf("DelayCalls finds work, event %#x", at)
	}
	if at, _ := d.driverEvent(); at != 2 {
		t.Errorf("DelayCalls: event %#x, want three quarters of 8 further", at)
	}
	d.use(6, 0, 0, true)
	if !d.r.EnableCalls() || !d.r.DelayCalls() {
		t.Error("a used chain overlooked")
	}
	d.r.DisableCalls()
	if _, flags := d.driverEvent(); flags != driver.EventDisable {
		t.Errorf("DisableCalls: flags %d", flags)
	}

	d = newPacked(t, 10, 0)
	d.r.DisableCalls()
	if _, flags := d.driverEvent(); d.r.DelayCalls() || flags != driver.EventDisable {
		t.Error("DisableCalls did not tell")
	}
	if _, flags := d.driverEvent(); flags != driver.EventEnable {
		t.Error("DelayCalls did not enable")
	}
}

// TestPackedInOrder: one used descriptor hands back every chain up to the one it names.
func TestPackedInOrder(t *testing.T) {
	d := newPacked(t, 6, virtio.FInOrder)
	for _, n := range []int{1, 2, 1, 2} {
		if _, err := d.r.AddChain(make([]driver.Buf, n)); err != nil {
			t.Fatal(err)
		}
	}
	d.r.Publish()
	d.use(0, 2, 7, true)
	for id := range uint16(3) {
		got, n, ok := d.r.GetUsed()
		if !ok || got != id || (n == 7) != (id == 2) {
			t.Errorf("id %d, %d bytes, %v", got, n, ok)
		}
	}
	if d.r.HasUsed() || d.r.LastUsed() != 0x8004 {
		t.Errorf("at %#x", d.r.LastUsed())
	}
	d.use(4, 3, 1, true)
	if id, _, ok := d.r.GetUsed(); !ok || id != 3 || d.r.LastUsed() != 0 || d.r.Free() != 6 {
		t.Errorf("id %d, %v, at %#x", id, ok, d.r.LastUsed())
	}
}

// TestSplitInOrder is the same of a split ring, and its index must cover the whole batch.
func TestSplitInOrder(t *testing.T) {
	r, mem, l := newRing(t, 8, virtio.FInOrder)
	for range 5 {
		r.AddDirect(driver.Buf{})
	}
	r.Publish()
	dev := device{mem, l, 8}
	dev.put(l.Used+4, 2, 0, 9)
	dev.put(l.Used+2, 3)
	for head := range uint16(3) {
		if got, n, ok := r.GetUsed(); !ok || got != head || (n == 9) != (head == 2) {
			t.Errorf("head %d, %d bytes, %v", got, n, ok)
		}
	}
	dev.put(l.Used+4+8*3, 4, 0, 9)
	dev.put(l.Used+2, 4)
	r.GetUsed()
	if _, _, ok := r.GetUsed(); ok || r.Err() == nil || !strings.Contains(r.Err().Error(), "stands for more chains") {
		t.Errorf("an entry for more than the index covers: %v", r.Err())
	}
}
