package cases

import (
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// slotSession is a connection that adds the first n regions of mem one by one.
func (d *vhostd) slotSession(mem *frontend.Memory, n int) *frontend.Conn {
	d.t.Helper()
	c := d.dial()
	err := errors.Join(c.SetOwner(), c.SetProtocolFeatures(vhostuser.ProtoMQ|vhostuser.ProtoReplyAck|vhostuser.ProtoMemSlots))
	c.NeedReply = true
	must(d.t, errors.Join(err, c.SetFeatures(plain|virtio.FVhostUserProtocolFeatures)))
	for _, r := range mem.Regions[:n] {
		must(d.t, c.AddMemReg(r.RegionSpec, r.FD))
	}
	return c
}

// adjacent is memory of 16 MiB for rings and n regions of 1 MiB behind it without gaps, whose front-end addresses descend.
func adjacent(t *testing.T, n int) *frontend.Memory {
	t.Helper()
	mem := memory(t, 16<<20)
	for i := range n {
		_, err := mem.Add(guestmem.RegionSpec{GPA: 16<<20 + uint64(i)<<20, Size: 1 << 20, UVA: 0x7d00_0000_0000 - uint64(i)<<20})
		must(t, err)
	}
	return mem
}

// TestMEM02_SlotsAreUsable: frames pass through buffers in every slot, and over the borders of slots. A buffer in a slot that was
// removed is malformed.
func TestMEM02_SlotsAreUsable(t *testing.T) {
	const n = 32
	d := serve(t, "echo")
	mem := adjacent(t, n)
	c := d.slotSession(mem, 1)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	base := d.use()
	for _, r := range mem.Regions[1:] {
		must(t, c.AddMemReg(r.RegionSpec, r.FD))
		throughMemory(t, mem, p, r.GPA+100, 1514, r.GPA+8192)
		throughMemory(t, mem, p, r.GPA-700, 1514, r.GPA-13)
	}
	if got := d.status().MemoryRegions; got != n+1 {
		t.Errorf("%d regions in the status, want %d", got, n+1)
	}
	dropped := d.drops(1)
	for k, i := range rand.Perm(n) {
		r := mem.Regions[1+i]
		must(t, c.RemMemReg(r.RegionSpec))
		for _, at := range []uint64{r.GPA, r.GPA - 1, r.GPA + r.Size - 1} { // inside, and over its borders
			_, err := p.TX.Ring.AddDirect(driver.Buf{Addr: at, Len: 1514})
			must(t, err)
			must(t, p.TX.Flush())
			used(t, p.TX, 0)
		}
		eventually(t, "bad buffers are counted", func() bool { return d.drops(1) == dropped+3*uint64(k+1) })
	}
	flows(t, p)
	d.flat(base)
}

// TestMEM02_EverySlot takes as many regions as are promised, under traffic.
func TestMEM02_EverySlot(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t, 64<<20, 4096)
	c := d.slotSession(mem, 1)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	traffic := startLoad(t, p)
	n, err := c.GetMaxMemSlots()
	must(t, err)
	slot := func(i uint64) guestmem.RegionSpec {
		return guestmem.RegionSpec{GPA: 1<<40 + i<<20, Size: 4096, UVA: 1<<44 + i<<20}
	}
	var base use
	for round := range 2 {
		for i := uint64(1); i < n; i++ {
			must(t, c.AddMemReg(slot(i), mem.Regions[1].FD))
		}
		mustRefuse(t, "one more region than promised", c.AddMemReg(slot(n), mem.Regions[1].FD))
		for i := uint64(1); i < n; i++ {
			must(t, c.RemMemReg(slot(i)))
		}
		if round == 0 {
			base = d.use()
		}
	}
	t.Logf("%d frames", traffic.end(t))
	d.flat(base)
	flows(t, p)
}

// TestMEM03_SlotsUnderTraffic adds and removes regions of running rings, that of the rings included: nothing is lost.
func TestMEM03_SlotsUnderTraffic(t *testing.T) {
	for name, flags := range map[string][]string{
		"adaptive": nil, "poll": {"--wake", "poll"}, "completions held back": {"--wake", "poll", "--tx-lag", "32"}, "two workers": {"--cpus", twoCPUs(t)},
	} {
		t.Run(name, func(t *testing.T) {
			d := serve(t, "echo", flags...)
			mem := memory(t, 64<<20, 1<<20)
			c := d.slotSession(mem, 1)
			p, other := detached(t, mem, 0, plain), detached(t, mem, 1, plain)
			steps(t, rings(c, p), rings(c, other), on(c, 0, 1, 2, 3))
			own, extra := mem.Regions[0], mem.Regions[1]
			base := d.use()
			traffic, more := startLoad(t, p), startLoad(t, other)
			swaps := rounds(30, 1000)
			for range swaps {
				for range 2 { // QEMU before 8.1 says it for each pair
					must(t, c.AddMemReg(extra.RegionSpec, extra.FD))
				}
				must(t, c.RemMemReg(own.RegionSpec))
				must(t, c.RemMemReg(own.RegionSpec, own.FD))
				time.Sleep(time.Millisecond)
				must(t, c.AddMemReg(own.RegionSpec, own.FD))
				for range 2 {
					must(t, c.RemMemReg(extra.RegionSpec))
				}
			}
			t.Logf("%d and %d frames during %d changes", traffic.end(t), more.end(t), swaps)
			d.flat(base)
			flows(t, p)
			flows(t, other)
		})
	}
}

// TestMEM03_ChangesRefused: what is refused changes nothing, and leaves nothing.
func TestMEM03_ChangesRefused(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	c := d.slotSession(mem, 2)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	flows(t, p)
	base := d.use()
	own, other := mem.Regions[0], mem.Regions[1]
	absent, resized, overlapping := other.RegionSpec, other.RegionSpec, own.RegionSpec
	absent.GPA += 1 << 20
	resized.Size -= 4096
	overlapping.UVA += 1 << 40
	for range rounds(20, 1000) {
		mustRefuse(t, "removal of a region that never was", c.RemMemReg(absent))
		mustRefuse(t, "removal with another size", c.RemMemReg(resized))
		mustRefuse(t, "removal with two files", c.RemMemReg(other.RegionSpec, other.FD, other.FD))
		mustRefuse(t, "the same addresses of another file", c.AddMemReg(own.RegionSpec, other.FD))
		mustRefuse(t, "an overlap", c.AddMemReg(overlapping, other.FD))
		mustRefuse(t, "no file", c.DoAck(vhostuser.ReqAddMemReg, vhostuser.AppendMemReg(nil, absent)))
		mustRefuse(t, "an eventfd", c.AddMemReg(absent, p.TX.CallFD))
	}
	if got := d.status().MemoryRegions; got != 2 {
		t.Errorf("%d regions in the status, want 2", got)
	}
	flows(t, p)
	d.flat(base)
	if n := d.logged("refused"); n > 25 {
		t.Errorf("%d lines in the log about refused messages", n)
	}
}

// TestGPAAddresses: on request, rings are found by guest addresses.
func TestGPAAddresses(t *testing.T) {
	for _, experimental := range []bool{false, true} {
		var flags []string
		if experimental {
			flags = []string{"--experimental", "gpa-addresses"}
		}
		d := serve(t, "echo", flags...)
		c := d.connect(memory(t), ordinary())
		if got := c.Protocol&vhostuser.ProtoGPAAddresses != 0; got != experimental {
			t.Errorf("GPA_ADDRESSES offered: %v, requested: %v", got, experimental)
		}
		flows(t, pair(t, c, 0))
	}
}
