package virtqueue_test

import (
	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// add lets the driver add a chain that is right, or wrong in one way.
func (m *model) add(rt *rapid.T) {
	c := refChain{written: rapid.Uint32().Draw(rt, "written"), place: m.drv.AvailIdx(), descs: 1}
	var bufs []driver.Buf
	for range rapid.IntRange(1, 5).Draw(rt, "buffers") {
		b := driver.Buf{Write: m.cfg.DeviceWrites, Len: rapid.Uint32Range(0, 3000).Draw(rt, "len")}
		b.Addr = rapid.SampledFrom([]uint64{bufGPA + 5, seam - 1000, lowGPA, bufGPA + bufSize - 3000}).Draw(rt, "addr")
		bufs = append(bufs, b)
		c.addSpans(b)
	}
	bad := &bufs[rapid.IntRange(0, len(bufs)-1).Draw(rt, "bad")]
	var err error
	switch kind := rapid.SampledFrom([]string{"good", "good", "unmapped", "around", "direction", "raw"}).Draw(rt, "kind"); kind {
	case "raw":
		m.addRaw(rt, c)
		return
	case "unmapped": // from the last byte of a region on
		bad.Addr, bad.Len, c.fault, c.spans = bufGPA+bufSize-1, 2, virtqueue.FaultAddress, nil
	case "around":
		bad.Addr, bad.Len, c.fault, c.spans = ^uint64(0)-3, 5, virtqueue.FaultAddress, nil
	case "direction":
		bad.Write, c.fault, c.spans = !bad.Write, virtqueue.FaultDirection, nil
	}
	if m.cfg.Features.Has(ind) && rapid.Bool().Draw(rt, "table") {
		gpa := m.table()
		h, _ := m.mem.Lookup(gpa, 1)
		c.head, err = m.drv.AddIndirect(h, gpa, bufs)
	} else {
		c.descs = len(bufs)
		c.head, err = m.drv.AddChain(bufs)
	}
	if err == nil {
		m.added = append(m.added, c)
	}
}

// table is room for an indirect table, at an odd address.
func (m *model) table() (gpa uint64) {
	m.tables++
	return tableGPA + uint64(m.tables%1000)*128 + 3
}

// addSpans cuts the buffer at the seam.
func (c *refChain) addSpans(b driver.Buf) {
	if b.Len == 0 {
		return
	}
	if b.Addr < seam && b.Addr+uint64(b.Len) > seam {
		c.spans = append(c.spans, span{b.Addr, uint32(seam - b.Addr)}, span{seam, b.Len - uint32(seam-b.Addr)})
		return
	}
	c.spans = append(c.spans, span{b.Addr, b.Len})
}

// addRaw publishes a chain of one descriptor such as no driver writes.
func (m *model) addRaw(rt *rapid.T, c refChain) {
	head, err := m.drv.AddDirect(driver.Buf{Addr: bufGPA, Len: 2, Write: m.cfg.DeviceWrites})
	if err != nil {
		return
	}
	c.head, c.spans, c.fault = head, nil, virtqueue.FaultIndirect
	m.added = append(m.added, c)
	m.publish(rt)
	last := &m.available[len(m.available)-1]
	if !m.packed {
		if d, fault, ok := m.badNext(rt, head); ok {
			last.fault = fault
			m.poke(*last, d)
			return
		}
	}
	gpa := m.table()
	size := rapid.SampledFrom([]uint32{0, 8, 17, 16 * 32769, 0xfffffff0, 16}).Draw(rt, "table size")
	if size == 16 && m.cfg.Features.Has(ind) {
		h, _ := m.mem.Lookup(gpa, 16)
		driver.PokeTable(h, 0, gpa, 16, indirect, 0)
		if m.packed {
			driver.PokePackedTable(h, 0, gpa, 16, 0, indirect)
		}
		last.fault = virtqueue.FaultNested
	}
	m.poke(*last, desc{gpa, size, indirect, 0})
}

// badNext is a descriptor of a split ring that leads nowhere: what follows it is known there.
func (m *model) badNext(rt *rapid.T, head uint16) (d desc, fault virtqueue.Fault, ok bool) {
	d = desc{bufGPA, 2, next, head}
	if m.cfg.DeviceWrites {
		d.flags |= write
	}
	switch rapid.SampledFrom([]string{"loop", "next", "table and next", ""}).Draw(rt, "next") {
	case "loop":
		return d, virtqueue.FaultLoop, true
	case "next":
		d.next = rapid.Uint16Range(m.cfg.Size, 0xffff).Draw(rt, "descriptor")
		return d, virtqueue.FaultNext, true
	case "table and next":
		return desc{tableGPA, 16, next | indirect, 0}, virtqueue.FaultIndirect, true
	}
	return d, 0, false
}

// poke overwrites the only descriptor of a published chain and leaves it available; desc.next means nothing in a packed ring.
func (m *model) poke(c refChain, d desc) {
	if r, ok := m.drv.(*driver.PackedRing); ok {
		r.PokeDesc(int(c.place&0x7fff), d.addr, d.len, c.head, d.flags|availableAt(c.place))
		return
	}
	m.drv.(*driver.Ring).PokeDesc(c.head, d.addr, d.len, d.flags, d.next)
}

// availableAt are the flags of a descriptor that is available at a place of a packed ring.
func availableAt(place uint16) uint16 {
	if place>>15 != 0 {
		return driver.DescFAvail
	}
	return driver.DescFUsed
}

// reuse changes a descriptor that the device has (C64): only a later delivery shows it.
func (m *model) reuse(rt *rapid.T) {
	if len(m.peeked) == 0 {
		return
	}
	c := &m.peeked[rapid.IntRange(0, len(m.peeked)-1).Draw(rt, "chain")]
	if c.descs == 1 {
		m.poke(*c, desc{bufGPA + bufSize, 2, 0, 0})
		c.fault, c.spans = virtqueue.FaultAddress, nil
		if m.cfg.DeviceWrites {
			c.fault = virtqueue.FaultDirection
		}
	}
}

// breakRing lets the driver do what no ring survives, and begins anew.
func (m *model) breakRing(rt *rapid.T) {
	m.publish(rt)
	what := ""
	if m.packed {
		what = m.breakPacked(rt)
	} else {
		what = m.breakSplit(rt)
	}
	if what == "" {
		return
	}
	m.broken(rt, what)
	if !m.dev.EnableKicks() {
		rt.Fatalf("%s: EnableKicks would let a broken ring sleep unnoticed", what)
	}
	m.reset(rt)
}

func (m *model) breakSplit(rt *rapid.T) (what string) {
	r := m.drv.(*driver.Ring)
	position := m.word(m.consumed + len(m.completed) + len(m.peeked)) // of the next entry that the device reads
	by := rapid.Uint16Range(1, 20000).Draw(rt, "by")
	switch what = rapid.SampledFrom([]string{"index too far", "index goes back", "head"}).Draw(rt, "break"); what {
	case "index too far":
		r.PokeAvailIdx(m.word(m.consumed) + m.cfg.Size + by)
	case "index goes back":
		r.PokeAvailIdx(position - by)
	case "head":
		r.PokeHead(rapid.Uint16Range(m.cfg.Size, 0xffff).Draw(rt, "head"))
		r.Publish()
	}
	return what
}

func (m *model) breakPacked(rt *rapid.T) (what string) {
	r := m.drv.(*driver.PackedRing)
	if r.Free() == 0 {
		return ""
	}
	at := r.AvailIdx()
	flags := availableAt(at) | next
	what = rapid.SampledFrom([]string{"used without having been available", "chain without end"}).Draw(rt, "break")
	if what != "chain without end" {
		flags = 0
		if at>>15 != 0 {
			flags = driver.DescFAvail | driver.DescFUsed
		}
	}
	if m.cfg.DeviceWrites {
		flags |= write
	}
	r.PokeDesc(int(at&0x7fff), bufGPA, 1, 0, flags)
	return what
}
