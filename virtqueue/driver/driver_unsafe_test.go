package driver_test

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/testmain"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Goroutines()))
}

// newRing makes a ring in anonymous memory, with the descriptor table first.
func newRing(t testing.TB, size int, features virtio.Features) (r *driver.Ring, mem []byte, l driver.Layout) {
	t.Helper()
	l = driver.Odd(size, 0)
	mem, err := unix.Mmap(-1, 0, int(l.End+0x10000), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(mem) })
	base := addr(mem)
	r, err = driver.New(driver.Config{
		Size: size, Features: features,
		Desc: base + uintptr(l.Desc), Avail: base + uintptr(l.Avail), Used: base + uintptr(l.Used),
	})
	if err != nil {
		t.Fatal(err)
	}
	return r, mem, l
}

func addr(mem []byte) uintptr {
	// SAFETY: the address of a mapping outside the Go heap, which does not move.
	return uintptr(unsafe.Pointer(unsafe.SliceData(mem)))
}

// device is a trivial device that completes by hand.
type device struct {
	mem  []byte
	l    driver.Layout
	size uint16
}

func (d device) put(off uint64, v ...uint16) {
	for i, x := range v {
		d.mem[off+uint64(2*i)], d.mem[off+uint64(2*i)+1] = byte(x), byte(x>>8)
	}
}

func (d device) use(pos, head, written uint16) {
	d.put(d.l.Used+4+8*uint64(pos%d.size), head, 0, written, 0)
	d.put(d.l.Used+2, pos+1)
}

func (d device) requestKick(event uint16) { d.put(d.l.Used+4+8*uint64(d.size), event) }

func TestLayouts(t *testing.T) {
	for name, layout := range map[string]func(int, uint64) driver.Layout{"packed": driver.Packed, "paged": driver.Paged, "odd": driver.Odd} {
		for size := 1; size <= 32768; size *= 2 {
			for _, at := range []uint64{0, 1, 4095} {
				l := layout(size, at)
				n := uint64(size)
				if l.Desc < at || l.Desc%16 != 0 || l.Avail%2 != 0 || l.Used%4 != 0 ||
					l.Avail < l.Desc+16*n || l.Used < l.Avail+6+2*n || l.End != l.Used+6+8*n {
					t.Errorf("%s, size %d at %d: %+v", name, size, at, l)
				}
				if name == "odd" && (l.Desc%32 == 0 || l.Avail%4 == 0 || l.Used%8 == 0) {
					t.Errorf("odd, size %d: %+v is better aligned than it must be", size, l)
				}
				if name == "paged" && l.Used%4096 != 0 {
					t.Errorf("paged, size %d: %+v", size, l)
				}
			}
		}
	}
}

func TestNewRefuses(t *testing.T) {
	for _, c := range []driver.Config{
		{Size: 0, Desc: 16, Avail: 2, Used: 4},
		{Size: 3, Desc: 16, Avail: 2, Used: 4},
		{Size: 65536, Desc: 16, Avail: 2, Used: 4},
		{Size: 4, Desc: 8, Avail: 2, Used: 4},
		{Size: 4, Desc: 16, Avail: 1, Used: 4},
		{Size: 4, Desc: 16, Avail: 2, Used: 2},
		{Size: 4, Desc: 16, Avail: 2},
	} {
		if _, err := driver.New(c); err == nil {
			t.Errorf("%+v was accepted", c)
		}
	}
}

func TestAddAndFree(t *testing.T) {
	r, mem, l := newRing(t, 4, virtio.FRingIndirectDesc)
	dev := device{mem, l, 4}
	buf := driver.Buf{Addr: 1, Len: 2, Write: true}
	one, _ := r.AddDirect(buf)
	chain, err := r.AddChain([]driver.Buf{buf, buf})
	if err != nil || one != 0 || chain != 1 || r.Free() != 1 || r.Outstanding() != 2 {
		t.Fatalf("heads %d, %d, %v, %d free", one, chain, err, r.Free())
	}
	if _, err := r.AddChain([]driver.Buf{buf, buf}); !errors.Is(err, driver.ErrFull) || r.Free() != 1 {
		t.Errorf("chain of 2 in 1: %v, %d free", err, r.Free())
	}
	if _, err := r.AddChain(nil); err == nil {
		t.Error("chain without buffers was added")
	}
	table := mem[l.End+1:]
	if h, err := r.AddIndirect(addr(table), 77, []driver.Buf{buf, buf, buf}); err != nil || h != 3 {
		t.Errorf("indirect: head %d, %v", h, err)
	}
	if _, err := r.AddDirect(buf); !errors.Is(err, driver.ErrFull) {
		t.Errorf("full ring: %v", err)
	}
	if got := fmt.Sprint(table[:16], table[32:48]); got != "[1 0 0 0 0 0 0 0 2 0 0 0 3 0 1 0] [1 0 0 0 0 0 0 0 2 0 0 0 2 0 0 0]" {
		t.Errorf("table entries %v", got)
	}
	if n := r.Publish(); n != 3 || r.Publish() != 0 || r.AvailIdx() != 3 {
		t.Errorf("Publish = %d, index %d", n, r.AvailIdx())
	}
	if _, _, ok := r.GetUsed(); ok || r.HasUsed() {
		t.Error("used before the device used anything")
	}
	dev.use(0, 1, 9)
	if head, n, ok := r.GetUsed(); !ok || head != 1 || n != 9 || r.Free() != 2 {
		t.Errorf("head %d, %d bytes, %v, %d free", head, n, ok, r.Free())
	}
	// Oldest first: 1 and 2 came back, in that order.
	if h, err := r.AddChain([]driver.Buf{buf, buf}); err != nil || h != 1 || mem[l.Desc+16+14] != 2 {
		t.Errorf("head %d, next %d, %v", h, mem[l.Desc+16+14], err)
	}
}

func TestIndirectNeedsTheFeature(t *testing.T) {
	r, mem, l := newRing(t, 4, 0)
	if _, err := r.AddIndirect(addr(mem[l.End:]), 0, []driver.Buf{{}}); err == nil {
		t.Error("indirect without the feature")
	}
}

func TestBadDevice(t *testing.T) {
	for _, c := range []struct {
		name   string
		damage func(device)
		want   string
	}{
		{"index too far", func(d device) { d.put(d.l.Used+2, 3) }, "used index is 3"},
		{"index back", func(d device) { d.put(d.l.Used+2, 0xffff) }, "used index is 65535"},
		{"head out of range", func(d device) { d.use(0, 4, 0) }, "head 4"},
		{"head of nothing", func(d device) { d.use(0, 3, 0) }, "head 3"},
		{"head above 16 bits", func(d device) { d.put(d.l.Used+4, 0, 1); d.put(d.l.Used+2, 1) }, "head 65536"},
		{"head twice", func(d device) { d.use(0, 0, 0); d.use(1, 0, 0) }, "entry 1 names head 0"},
	} {
		r, mem, l := newRing(t, 4, 0)
		for range 2 {
			r.AddDirect(driver.Buf{})
		}
		r.Publish()
		c.damage(device{mem, l, 4})
		for range 3 {
			r.GetUsed()
		}
		if r.Err() == nil || !strings.Contains(r.Err().Error(), c.want) || r.HasUsed() {
			t.Errorf("%s: %v, want %q", c.name, r.Err(), c.want)
		}
		r.Reset(0)
		if r.Err() != nil || r.Free() != 4 || r.PeekUsedIdx() != 0 {
			t.Errorf("%s: Reset left %v, %d free", c.name, r.Err(), r.Free())
		}
	}
}

func TestNeedsKick(t *testing.T) {
	r, mem, l := newRing(t, 16, virtio.FRingEventIdx)
	dev := device{mem, l, 16}
	r.Reset(0xfffe)
	if r.NeedsKick() {
		t.Error("kick for nothing")
	}
	for i, c := range []struct {
		add   int
		event uint16
		want  bool
	}{{3, 0xffff, true}, {2, 0, false}, {2, 4, true}, {1, 6, false}} {
		for range c.add {
			r.AddDirect(driver.Buf{})
		}
		r.Publish()
		dev.requestKick(c.event)
		if got := r.NeedsKick(); got != c.want {
			t.Errorf("step %d: kick = %v", i, got)
		}
	}
	r, mem, l = newRing(t, 16, 0)
	for _, flags := range []uint16{1, 0} {
		r.AddDirect(driver.Buf{})
		r.Publish()
		device{mem, l, 16}.put(l.Used, flags)
		if got := r.NeedsKick(); got != (flags == 0) {
			t.Errorf("flags %d: kick = %v", flags, got)
		}
	}
}

func TestCalls(t *testing.T) {
	r, mem, l := newRing(t, 16, virtio.FRingEventIdx)
	dev := device{mem, l, 16}
	event := func() uint16 { o := l.Avail + 4 + 2*16; return uint16(mem[o]) | uint16(mem[o+1])<<8 }
	for range 8 {
		r.AddDirect(driver.Buf{})
	}
	r.Publish()
	if r.EnableCalls() || event() != 0 {
		t.Errorf("EnableCalls: event %d", event())
	}
	if r.DelayCalls() || event() != 6 {
		t.Errorf("DelayCalls: event %d", event())
	}
	for i := range uint16(7) {
		dev.use(i, i, 0)
	}
	if !r.DelayCalls() || !r.EnableCalls() {
		t.Error("seven used chains overlooked")
	}
	for range 7 {
		r.GetUsed()
	}
	if r.DisableCalls(); event() != 6 {
		t.Errorf("DisableCalls: event %d", event())
	}

	r, mem, l = newRing(t, 16, 0)
	if r.DisableCalls(); mem[l.Avail] != 1 {
		t.Error("DisableCalls did not set NO_INTERRUPT")
	}
	if r.DelayCalls() || mem[l.Avail] != 0 {
		t.Error("DelayCalls did not clear NO_INTERRUPT")
	}
}

func TestAttach(t *testing.T) {
	r, mem, l := newRing(t, 16, 0)
	r.Reset(40)
	r.AddDirect(driver.Buf{})
	r.Publish()
	r.Attach(41)
	if r.LastUsed() != 41 || r.AvailIdx() != 41 || r.Free() != 16 || mem[l.Avail+2] != 41 {
		t.Errorf("at %d and %d, %d free, index %d", r.LastUsed(), r.AvailIdx(), r.Free(), mem[l.Avail+2])
	}
}
