package vhostuser_test

import (
	"errors"
	"io"
	"math"
	"net"
	"os"
	"testing"
	"time"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// iovaOff is what IOVAs exceed front-end addresses by in these tests.
const iovaOff = 1 << 47

// iommuBench is a session behind an IOMMU with memory and the front-end's end of the channel.
type iommuBench struct {
	*bench
	mem  *frontend.Memory
	back *net.UnixConn
}

func newIOMMUBench(t *testing.T) *iommuBench {
	t.Helper()
	dev := newDevice(4)
	dev.features |= virtio.FAccessPlatform | virtio.FRingPacked
	dev.config = make([]byte, 24)
	b := &iommuBench{bench: newBench(t, dev), mem: newMemory(t, 1<<20)}
	p, err := b.GetProtocolFeatures()
	b.must(err)
	b.must(b.SetProtocolFeatures(p))
	b.must(b.SetFeatures(testFeatures | virtio.FAccessPlatform | bit30))
	b.back = b.channel()
	b.shareMemory(b.mem)
	return b
}

// channel hands over a socket for messages of the back-end and returns its other end.
func (b *iommuBench) channel() *net.UnixConn {
	b.t.Helper()
	front, back := socketPair(b.t)
	file, err := back.File()
	b.must(err)
	b.must(b.DoAck(vhostuser.ReqSetBackendReqFD, nil, int(file.Fd())))
	file.Close()
	back.Close()
	b.t.Cleanup(func() { front.Close() })
	return front
}

// configure sends everything of ring i, with IOVAs.
func (b *iommuBench) configure(i int) {
	b.t.Helper()
	a := ringAddr(b.mem, i)
	a.Desc, a.Avail, a.Used = a.Desc+iovaOff, a.Avail+iovaOff, a.Used+iovaOff
	b.must(b.DoAck(vhostuser.ReqSetVringNum, vhostuser.VringState{Index: uint32(i), Num: 256}.Append(nil)))
	b.must(b.DoAck(vhostuser.ReqSetVringAddr, a.Append(nil)))
	b.must(b.DoAck(vhostuser.ReqSetVringKick, payload64(uint64(i)), eventFD(b.t)))
}

// miss reads the next message of the back-end, which must be a miss.
func (b *iommuBench) miss() vhostuser.IOTLBMsg {
	b.t.Helper()
	b.must(b.back.SetReadDeadline(time.Now().Add(10 * time.Second)))
	var raw [44]byte
	_, err := io.ReadFull(b.back, raw[:])
	b.must(err)
	if h := vhostuser.DecodeHeader(raw[:]); h != (vhostuser.Header{Request: vhostuser.BackendIOTLBMsg, Flags: 1, Size: 32}) {
		b.t.Fatalf("back-end message %+v", h)
	}
	m := vhostuser.DecodeIOTLBMsg(raw[12:])
	if m.Type != vhostuser.IOTLBMiss {
		b.t.Fatalf("back-end message %+v is no miss", m)
	}
	return m
}

// silent checks that the back-end sends nothing.
func (b *iommuBench) silent() {
	b.t.Helper()
	b.must(b.back.SetReadDeadline(time.Now().Add(50 * time.Millisecond)))
	if n, err := b.back.Read(make([]byte, 44)); !errors.Is(err, os.ErrDeadlineExceeded) {
		b.t.Errorf("the back-end sent %d bytes, %v", n, err)
	}
}

// tell translates the page of an IOVA.
func (b *iommuBench) tell(iova uint64) {
	b.t.Helper()
	page := iova &^ 0xfff
	b.must(b.IOTLB(vhostuser.IOTLBMsg{IOVA: page, Size: 0x1000, UVA: page - iovaOff, Perm: 3, Type: vhostuser.IOTLBUpdate}))
}

// start configures ring i and answers what it misses.
func (b *iommuBench) start(i int) {
	b.t.Helper()
	b.configure(i)
	for range 3 { // each area is in a page of its own
		b.tell(b.miss().IOVA)
	}
	b.rings(true, false, i)
}

// A ring whose areas are not known is no error: it starts when they are.
func TestIOMMURingStartsWhenTranslated(t *testing.T) {
	b := newIOMMUBench(t)
	b.configure(0)
	b.rings(false, false, 0)
	a := ringAddr(b.mem, 0)
	for i, want := range []vhostuser.IOTLBMsg{{IOVA: a.Desc, Perm: 1}, {IOVA: a.Avail, Perm: 1}, {IOVA: a.Used, Perm: 2}} {
		want.IOVA, want.Type = want.IOVA+iovaOff, vhostuser.IOTLBMiss
		if got := b.miss(); got != want {
			t.Fatalf("miss %d is %+v, want %+v", i, got, want)
		}
		b.silent() // it is not asked twice, and what comes later not before
		b.rings(false, false, 0)
		b.tell(want.IOVA)
	}
	b.rings(true, false, 0)
	b.dev.peek(func(d *fakeDevice) {
		if d.running[0].Via == nil {
			t.Error("the ring has nothing that translates its descriptors")
		}
	})
	if base, err := b.GetVringBase(0); base != 0 || err != nil {
		t.Errorf("base %d, %v", base, err)
	}
}

// Pages that come before they are asked for, as QEMU sends that of the used ring, are not asked for.
func TestIOMMUPushedTranslations(t *testing.T) {
	b := newIOMMUBench(t)
	a := ringAddr(b.mem, 1)
	b.must(b.IOTLB(vhostuser.IOTLBMsg{IOVA: a.Desc + iovaOff, Size: 0x8000, UVA: a.Desc, Perm: 3, Type: vhostuser.IOTLBUpdate}))
	b.configure(1)
	b.rings(true, false, 1)
	b.silent()
}

// A27, C77: a ring that lies in what is invalidated is parked before the front-end gets its answer, others go on.
func TestA27_C77_InvalidatedRing(t *testing.T) {
	b := newIOMMUBench(t)
	b.start(0)
	b.start(1)
	a := ringAddr(b.mem, 0)
	for _, c := range []struct {
		name       string
		iova, size uint64
		parked     []int
		running    []int
	}{
		{"elsewhere", 0x1000, 0x1000, nil, []int{0, 1}},
		{"last byte of the used ring", a.Used + iovaOff + 2053, 1, []int{0}, []int{1}},
		{"one byte behind it", a.Used + iovaOff + 2054, 100, nil, []int{0, 1}},
		{"available ring", a.Avail + iovaOff, 0x1000, []int{0}, []int{1}},
		{"both", a.Desc + iovaOff, 0x10000, []int{0, 1}, nil},
		{"everything", 0, math.MaxUint64, []int{0, 1}, nil},
		{"everything, as 2^64 without its bit", 0, 0, []int{0, 1}, nil},
		{"beyond the end", a.Desc + iovaOff, math.MaxUint64 - 5, []int{0, 1}, nil},
	} {
		b.dev.peek(func(d *fakeDevice) { d.swaps = 0 })
		b.must(b.IOTLB(vhostuser.IOTLBMsg{IOVA: c.iova, Size: c.size, Type: vhostuser.IOTLBInvalidate}))
		b.rings(true, true, c.parked...)
		b.rings(true, false, c.running...)
		b.dev.peek(func(d *fakeDevice) {
			if d.swaps != 1 {
				t.Errorf("%s: the device was made to forget %d times", c.name, d.swaps)
			}
		})
		b.must(b.IOTLB(vhostuser.IOTLBMsg{IOVA: a.Desc + iovaOff, Size: 0x10000, UVA: a.Desc, Perm: 3, Type: vhostuser.IOTLBUpdate}))
		b.rings(true, false, 0, 1)
	}
}

// An update of what is known to another address is an invalidation too, for rings and for what descriptors say.
func TestC75_UpdateThatContradicts(t *testing.T) {
	b := newIOMMUBench(t)
	b.start(0)
	a := ringAddr(b.mem, 0)
	var before uintptr
	b.dev.peek(func(d *fakeDevice) { before, d.swaps = d.running[0].Used, 0 })
	b.must(b.IOTLB(vhostuser.IOTLBMsg{IOVA: a.Used + iovaOff, Size: 0x1000, UVA: a.Used + 0x40000, Perm: 3, Type: vhostuser.IOTLBUpdate}))
	b.dev.peek(func(d *fakeDevice) {
		if d.swaps != 1 || d.moved[0].Used != before+0x40000 {
			t.Errorf("after %d changes the used ring is at %#x, want %#x", d.swaps, d.moved[0].Used, before+0x40000)
		}
	})
	// Without a right that the ring needs it is parked.
	b.must(b.IOTLB(vhostuser.IOTLBMsg{IOVA: a.Used + iovaOff, Size: 0x1000, UVA: a.Used, Perm: 1, Type: vhostuser.IOTLBUpdate}))
	b.rings(true, true, 0)
	for range 3 {
		b.must(b.IOTLB(vhostuser.IOTLBMsg{IOVA: a.Used + iovaOff, Size: 0x1000, UVA: a.Used, Perm: 1, Type: vhostuser.IOTLBUpdate}))
	}
	if m := b.miss(); m.IOVA != a.Used+iovaOff || m.Perm != 2 {
		t.Errorf("miss %+v", m)
	}
	b.silent() // an answer that does not help is no reason to ask again
	b.tell(a.Used + iovaOff)
	b.rings(true, false, 0)
}

// C75: what makes no sense is refused, costs nothing and changes nothing.
func TestC75_IOTLBMessages(t *testing.T) {
	b := newIOMMUBench(t)
	b.start(0)
	a := ringAddr(b.mem, 0)
	good := vhostuser.IOTLBMsg{IOVA: a.Used + iovaOff, Size: 0x1000, UVA: a.Used, Perm: 3, Type: vhostuser.IOTLBUpdate}
	for name, change := range map[string]func(*vhostuser.IOTLBMsg){
		"no bytes":             func(m *vhostuser.IOTLBMsg) { m.Size = 0 },
		"wrap":                 func(m *vhostuser.IOTLBMsg) { m.Size = math.MaxUint64 },
		"outside of the table": func(m *vhostuser.IOTLBMsg) { m.UVA = 0x1000 },
		"no rights":            func(m *vhostuser.IOTLBMsg) { m.Perm = 0 },
		"unknown rights":       func(m *vhostuser.IOTLBMsg) { m.Perm = 0x80 },
		"type 0":               func(m *vhostuser.IOTLBMsg) { m.Type = 0 },
		"a miss":               func(m *vhostuser.IOTLBMsg) { m.Type = 1 },
		"an access failure":    func(m *vhostuser.IOTLBMsg) { m.Type = 4 },
		"type 9":               func(m *vhostuser.IOTLBMsg) { m.Type = 9 },
	} {
		msg := good
		change(&msg)
		var refused *frontend.RefusedError
		if err := b.IOTLB(msg); !errors.As(err, &refused) {
			t.Errorf("%s: %v", name, err)
		}
		b.rings(true, false, 0)
	}
	b.must(b.IOTLB(good))

	for name, features := range map[string]virtio.Features{"without the feature": 0, "without the channel": virtio.FAccessPlatform} {
		dev := newDevice(2)
		dev.features |= virtio.FAccessPlatform
		b := newBench(t, dev)
		b.must(b.SetProtocolFeatures(vhostuser.ProtoReplyAck))
		b.must(b.SetFeatures(testFeatures | features | bit30))
		mem := newMemory(t, 1<<20)
		b.shareMemory(mem)
		var refused *frontend.RefusedError
		if err := b.IOTLB(good); !errors.As(err, &refused) {
			t.Errorf("%s: %v", name, err)
		}
		b.startRing(mem, 0, 0) // addresses are those of the front-end then
		b.rings(true, false, 0)
	}
}

// C76: the front-end never answers: everything else works, and the ring can be stopped.
func TestC76_MissNeverAnswered(t *testing.T) {
	b := newIOMMUBench(t)
	b.configure(0)
	b.miss()
	b.start(1)
	for range 3 {
		base, err := b.GetVringBase(0)
		if base != 0 || err != nil {
			t.Fatalf("base %d, %v", base, err)
		}
		b.configure(0)
		b.rings(false, false, 0)
	}
	b.silent()
	b.must(b.Conn.Close())
	if err := b.wait(); err != nil {
		t.Error(err)
	}
	b.checkDevice()
}

// A new memory table forgets translations into the old one; rings come back with those into the new one.
func TestIOMMUMemoryIsReplaced(t *testing.T) {
	b := newIOMMUBench(t)
	b.start(0)
	b.shareMemory(b.mem)
	b.rings(true, true, 0)
	for range 3 {
		b.tell(b.miss().IOVA)
	}
	b.rings(true, false, 0)
	spec := b.mem.Regions[0].RegionSpec
	b.must(b.DoAck(vhostuser.ReqRemMemReg, vhostuser.AppendMemReg(nil, spec)))
	b.rings(true, true, 0)
	b.must(b.DoAck(vhostuser.ReqAddMemReg, vhostuser.AppendMemReg(nil, spec), b.mem.Regions[0].FD))
	b.miss()
	b.must(b.IOTLB(vhostuser.IOTLBMsg{IOVA: spec.UVA + iovaOff, Size: spec.Size, UVA: spec.UVA, Perm: 3, Type: vhostuser.IOTLBUpdate}))
	b.rings(true, false, 0)
	// A region more costs nothing.
	more, err := b.mem.Add(guestmem.RegionSpec{GPA: 1 << 40, Size: 1 << 20, UVA: 1 << 45})
	b.must(err)
	b.must(b.DoAck(vhostuser.ReqAddMemReg, vhostuser.AppendMemReg(nil, more.RegionSpec), more.FD))
	b.rings(true, false, 0)
	b.silent()
}
