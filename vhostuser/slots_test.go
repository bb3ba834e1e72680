package vhostuser_test

import (
	"os"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
)

// regions checks the number of regions in the state.
func (b *bench) regions(want int) {
	b.t.Helper()
	b.must(b.Sync())
	if got := b.session.State().Regions; got != want {
		b.t.Errorf("%d regions, want %d", got, want)
	}
}

// rings checks which rings run, and whether they are parked.
func (b *bench) rings(running, parked bool, rings ...int) {
	b.t.Helper()
	b.must(b.Sync())
	b.dev.peek(func(d *fakeDevice) {
		for _, i := range rings {
			if _, ok := d.running[i]; ok != running || d.parked[i] != parked {
				b.t.Errorf("ring %d runs %v, parked %v, want %v and %v", i, ok, d.parked[i], running, parked)
			}
		}
	})
}

// TestMEM02_Slots uses every slot that is promised, and not one more.
func TestMEM02_Slots(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	b.NeedReply = true
	n, err := b.GetMaxMemSlots()
	b.must(err)
	if n != guestmem.MaxSlots {
		t.Fatalf("%d slots", n)
	}
	mem := newMemory(t, 1<<20, 4096)
	fd := mem.Regions[1].FD
	slot := func(i uint64) guestmem.RegionSpec {
		return guestmem.RegionSpec{GPA: i << 32, Size: 4096, UVA: mem.Regions[0].UVA + i<<36}
	}
	fds, maps := openFDs(), mappings(t)
	b.must(b.AddMemReg(mem.Regions[0].RegionSpec, mem.Regions[0].FD))
	b.startRing(mem, 0, 0)
	for i := uint64(1); i < n; i++ {
		b.must(b.AddMemReg(slot(i), fd))
	}
	b.regions(int(n))
	if err := b.AddMemReg(slot(n), fd); !isRefused(err) {
		t.Errorf("one more region: %v", err)
	}
	b.rings(true, false, 0)
	if got := mappings(t); got != maps+int(n) {
		t.Errorf("%d mappings for %d regions", got-maps, n)
	}
	for i := uint64(1); i < n; i++ {
		b.must(b.RemMemReg(slot(i * 7 % n))) // 509 is prime: another order, each once
	}
	b.regions(1)
	b.rings(true, false, 0)
	if f, m := openFDs(), mappings(t); f > fds+4 || m != maps+1 {
		t.Errorf("%d descriptors and %d mappings, %d and %d before two eventfds at both ends and one region", f, m, fds, maps)
	}
	b.checkDevice()
}

// TestMEM03_C32_SlotsUnderRunningRings takes the rings' region away and brings it back.
func TestMEM03_C32_SlotsUnderRunningRings(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	b.NeedReply = true
	mem := newMemory(t, 1<<20, 1<<20)
	rings, other := mem.Regions[0], mem.Regions[1]
	b.must(b.AddMemReg(rings.RegionSpec, rings.FD))
	b.startRing(mem, 0, 3)
	b.startRing(mem, 1, 4)
	fds := openFDs()
	for range 20 {
		b.must(b.AddMemReg(other.RegionSpec, other.FD))
		b.must(b.RemMemReg(rings.RegionSpec, rings.FD)) // with its file, which the specification allows
		b.rings(true, true, 0, 1)
		b.must(b.RemMemReg(other.RegionSpec))
		b.regions(0)
		b.rings(true, true, 0, 1)
		b.must(b.AddMemReg(rings.RegionSpec, rings.FD))
		b.rings(true, false, 0, 1)
	}
	if n := openFDs(); n > fds {
		t.Errorf("%d descriptors open, %d before", n, fds)
	}
	b.dev.peek(func(d *fakeDevice) {
		if len(d.starts) != 2 {
			t.Errorf("rings were started again: %v", d.starts)
		}
	})
	b.checkDevice()
}

// TestTrap9_SlotsRepeated is QEMU before 8.1 with two queue pairs, which says everything twice.
func TestTrap9_SlotsRepeated(t *testing.T) {
	b := newBench(t, newDevice(4)).negotiate()
	b.NeedReply = true
	mem := newMemory(t, 1<<20, 1<<20, 1<<20)
	fds, maps := openFDs(), mappings(t)
	specs, files := mem.Table()
	for range 3 {
		for i := range specs {
			b.must(b.AddMemReg(specs[i], files[i]))
		}
	}
	b.regions(3)
	moved := specs[2]
	moved.MmapOffset = 4096 // is not compared
	for range 2 {
		b.must(b.RemMemReg(specs[1]))
		b.must(b.RemMemReg(moved))
	}
	b.must(b.AddMemReg(specs[2], files[2]))
	b.must(b.RemMemReg(specs[1]))
	b.must(b.RemMemReg(specs[2]))
	b.must(b.RemMemReg(specs[2]))
	b.regions(1)
	if n, m := openFDs(), mappings(t); n > fds || m != maps+1 {
		t.Errorf("%d descriptors and %d mappings, %d and %d before", n, m, fds, maps)
	}
	b.must(b.SetMemTable(specs[:2], files[:2]))
	b.regions(2)
	if err := b.RemMemReg(specs[2]); !isRefused(err) {
		t.Errorf("a region removed before the whole table was replaced: %v", err)
	}
	b.must(b.RemMemReg(specs[0]))
	b.must(b.AddMemReg(specs[2], files[2]))
	b.regions(2)
	b.checkDevice()
}

func TestHostileC16toC26_BadSlots(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	b.NeedReply = true
	mem := newMemory(t, 1<<20, 1<<20)
	b.must(b.AddMemReg(mem.Regions[0].RegionSpec, mem.Regions[0].FD))
	fds, maps := openFDs(), mappings(t)
	null, err := os.Open(os.DevNull)
	b.must(err)
	defer null.Close()
	for name, edit := range map[string]func(r *frontend.Region){
		"size 0":              func(r *frontend.Region) { r.Size = 0 },
		"guest address wraps": func(r *frontend.Region) { r.GPA = ^uint64(0xfff) },
		"front-end wraps":     func(r *frontend.Region) { r.UVA = ^uint64(0xfff) },
		"guest overlap":       func(r *frontend.Region) { r.GPA = 0x1000 },
		"front-end overlap":   func(r *frontend.Region) { r.UVA = mem.Regions[0].UVA + 0x1000 },
		"beyond the file":     func(r *frontend.Region) { r.MmapOffset = 0x1000 },
		"offset wraps":        func(r *frontend.Region) { r.MmapOffset = ^uint64(0xfff) },
		"another file":        func(r *frontend.Region) { r.RegionSpec = mem.Regions[0].RegionSpec },
		"no memory":           func(r *frontend.Region) { r.FD = int(null.Fd()) },
	} {
		r := *mem.Regions[1]
		edit(&r)
		if err := b.AddMemReg(r.RegionSpec, r.FD); !isRefused(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	r := mem.Regions[1]
	payload := vhostuser.AppendMemReg(nil, r.RegionSpec)
	for name, err := range map[string]error{
		"add without a file":     b.DoAck(vhostuser.ReqAddMemReg, payload),
		"add with two files":     b.DoAck(vhostuser.ReqAddMemReg, payload, r.FD, r.FD),
		"add, short":             b.DoAck(vhostuser.ReqAddMemReg, payload[:32], r.FD),
		"remove, never added":    b.RemMemReg(r.RegionSpec),
		"remove with two files":  b.RemMemReg(mem.Regions[0].RegionSpec, r.FD, r.FD),
		"remove, other size":     b.RemMemReg(guestmem.RegionSpec{GPA: 0, UVA: mem.Regions[0].UVA, Size: 4096}),
		"remove, other address":  b.RemMemReg(guestmem.RegionSpec{GPA: 4096, UVA: mem.Regions[0].UVA, Size: 1 << 20}),
		"remove, front-end only": b.RemMemReg(guestmem.RegionSpec{GPA: 0, UVA: 4096, Size: 1 << 20}),
	} {
		if !isRefused(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	b.dev.peek(func(d *fakeDevice) { d.refuseMemory = os.ErrInvalid })
	if err := b.AddMemReg(r.RegionSpec, r.FD); !isRefused(err) {
		t.Errorf("region that the device refuses: %v", err)
	}
	if err := b.RemMemReg(mem.Regions[0].RegionSpec); !isRefused(err) {
		t.Errorf("removal that the device refuses: %v", err)
	}
	b.dev.peek(func(d *fakeDevice) { d.refuseMemory = nil })
	if n, m := openFDs(), mappings(t); n > fds+1 || m != maps {
		t.Errorf("%d descriptors and %d mappings, %d and %d before", n, m, fds, maps)
	}
	b.regions(1)
	b.checkDevice()
}

// TestSlotsInAnyOrder: rings wait for their region, also after the last one has gone.
func TestSlotsInAnyOrder(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	b.NeedReply = true
	mem := newMemory(t, 1<<20)
	r := mem.Regions[0]
	b.startRing(mem, 0, 0)
	b.rings(false, false, 0)
	b.must(b.AddMemReg(r.RegionSpec, r.FD))
	b.rings(true, false, 0)
	b.must(b.RemMemReg(r.RegionSpec))
	_, err := b.GetVringBase(0)
	b.must(err)
	b.must(b.SetVringKick(0, eventFD(t)))
	b.rings(false, false, 0)
	b.must(b.AddMemReg(r.RegionSpec, r.FD))
	b.rings(true, false, 0)
	b.checkDevice()
}

func TestSlotsNeedTheFeature(t *testing.T) {
	b := newBench(t, newDevice(2))
	b.must(b.SetProtocolFeatures(vhostuser.ProtoReplyAck))
	mem := newMemory(t, 4096)
	for _, req := range []vhostuser.Request{vhostuser.ReqAddMemReg, vhostuser.ReqRemMemReg} {
		if err := b.DoAck(req, vhostuser.AppendMemReg(nil, mem.Regions[0].RegionSpec), mem.Regions[0].FD); !isRefused(err) {
			t.Errorf("%v: %v", req, err)
		}
	}
	b.checkDevice()
}

// TestSlotsModel changes the memory at random and compares what is accepted, and where the rings are, with plain lists.
func TestSlotsModel(t *testing.T) {
	mem := newMemory(t, 1<<16, 1<<16, 1<<16, 1<<16)
	specs, fds := mem.Table()
	overlapping := specs[0]
	overlapping.MmapOffset, overlapping.Size = 4096, 1<<16-4096 // in the place of region 0
	specs, fds = append(specs, overlapping), append(fds, fds[0])
	kick := eventFD(t)
	rapid.Check(t, func(rt *rapid.T) {
		b := newBench(t, newDevice(2))
		defer func() { b.Conn.Close(); b.must(b.wait()) }()
		b.negotiate()
		b.NeedReply = true
		maps := mappings(t)
		for i := range 2 {
			a := ringAddr(mem, 0)
			shift := uint64(i) << 36 // ring i lies in region i
			a.Index, a.Desc, a.Avail, a.Used = uint32(i), a.Desc+shift, a.Avail+shift, a.Used+shift
			b.must(b.SetVringNum(i, 64))
			b.must(b.SetVringAddr(a))
			b.must(b.SetVringKick(i, kick))
		}
		var has, gone []int
		var started [2]bool
		for range rapid.IntRange(1, 40).Draw(rt, "messages") {
			i := rapid.IntRange(0, len(specs)-1).Draw(rt, "region")
			conflict := i == 0 && slices.Contains(has, 4) || i == 4 && slices.Contains(has, 0)
			var err error
			want := true
			switch op := rapid.SampledFrom([]string{"add", "add", "add", "remove", "remove", "table"}).Draw(rt, "op"); op {
			case "add":
				if want = !conflict; want && !slices.Contains(has, i) {
					has = append(has, i)
					gone = slices.DeleteFunc(gone, func(o int) bool { return o == i })
				}
				err = b.AddMemReg(specs[i], fds[i])
			case "remove":
				if want = slices.Contains(has, i) || slices.Contains(gone, i); slices.Contains(has, i) {
					has = slices.DeleteFunc(has, func(o int) bool { return o == i })
					gone = append(gone, i)
				}
				err = b.RemMemReg(specs[i])
			case "table":
				has, gone = []int{i}, nil
				err = b.SetMemTable(specs[i:i+1], fds[i:i+1])
			}
			if isRefused(err) == want || err != nil && !isRefused(err) {
				rt.Fatalf("region %d: %v, model accepts: %v", i, err, want)
			}
			if got := b.session.State().Regions; got != len(has) || mappings(t) != maps+len(has) {
				rt.Fatalf("%d regions and %d mappings, want %d", got, mappings(t)-maps, len(has))
			}
			b.dev.peek(func(d *fakeDevice) {
				for ring := range started {
					there := slices.Contains(has, ring) || ring == 0 && slices.Contains(has, 4)
					started[ring] = started[ring] || there
					if _, running := d.running[ring]; running != started[ring] || running && d.parked[ring] == there {
						rt.Fatalf("ring %d runs %v, parked %v; regions %v", ring, running, d.parked[ring], has)
					}
				}
			})
		}
		if f := b.dev.faults.Load(); f != nil {
			rt.Fatal(*f)
		}
	})
}

func TestGPAAddresses(t *testing.T) {
	b := newBench(t, newDevice(2))
	p, err := b.GetProtocolFeatures()
	b.must(err)
	if p&vhostuser.ProtoGPAAddresses != 0 {
		t.Error("GPA_ADDRESSES is offered unasked")
	}
	if err := b.SetProtocolFeatures(p | vhostuser.ProtoGPAAddresses); err == nil {
		b.must(b.SetProtocolFeatures(vhostuser.ProtoReplyAck))
	}
	b = newBench(t, newDevice(2), func(o *vhostuser.Options) { o.Protocol = vhostuser.ProtoGPAAddresses | vhostuser.ProtoInband }).negotiate()
	p, err = b.GetProtocolFeatures()
	b.must(err)
	if p&vhostuser.ProtoGPAAddresses == 0 || p&vhostuser.ProtoInband != 0 {
		t.Errorf("offers %v", p)
	}
	b.NeedReply = true
	mem := newMemory(t, 1<<20, 1<<20)
	mem.Regions[1].UVA = 0x1000 // guest addresses of region 0, were they front-end ones
	b.shareMemory(mem)
	b.must(b.SetVringNum(0, 256))
	if err := b.SetVringAddr(ringAddr(mem, 0)); !isRefused(err) || !strings.Contains(b.logs.String(), "guest address") {
		t.Errorf("front-end addresses: %v, log %s", err, b.logs)
	}
	for name, desc := range map[string]uint64{"ends outside": 1<<20 - 4096 + 16, "in no region": 1 << 30, "wraps": ^uint64(0xf)} {
		if err := b.SetVringAddr(vhostuser.VringAddr{Desc: desc, Avail: 0x4000, Used: 0x5000}); !isRefused(err) {
			t.Errorf("descriptor table that %s: %v", name, err)
		}
	}
	b.must(b.SetVringAddr(vhostuser.VringAddr{Desc: 0x3000, Avail: 0x4000, Used: 0x5000}))
	b.must(b.SetVringKick(0, eventFD(t)))
	b.rings(true, false, 0)
	b.dev.peek(func(d *fakeDevice) {
		if host, _ := d.mem.Lookup(0x3000, 1); d.running[0].Desc != host {
			t.Errorf("descriptor table at %#x, want %#x", d.running[0].Desc, host)
		}
	})
	b.must(b.RemMemReg(mem.Regions[0].RegionSpec))
	b.rings(true, true, 0)
	b.must(b.AddMemReg(mem.Regions[0].RegionSpec, mem.Regions[0].FD))
	b.rings(true, false, 0)
	b.checkDevice()
}

func TestVringEndian(t *testing.T) {
	b := newBench(t, newDevice(2)).negotiate()
	b.NeedReply = true
	b.must(b.SetVringEndian(0, 0))
	for _, order := range []uint32{1, 2, 1 << 31} {
		if err := b.SetVringEndian(0, order); !isRefused(err) {
			t.Errorf("byte order %d: %v", order, err)
		}
	}
	if !strings.Contains(b.logs.String(), "byte order") && !strings.Contains(b.logs.String(), "big-endian") {
		t.Errorf("the log does not say why: %s", b.logs)
	}
	if err := b.SetVringEndian(1000, 0); !isRefused(err) {
		t.Errorf("ring 1000: %v", err)
	}
	if b.session.State().ProtocolFeatures == nil || slices.Contains(b.session.State().ProtocolFeatures, "CROSS_ENDIAN") {
		t.Errorf("protocol features %v", b.session.State().ProtocolFeatures)
	}
	b.checkDevice()
}
