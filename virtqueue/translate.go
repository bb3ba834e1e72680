package virtqueue

import (
	"math"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
)

// maxTable bounds the entries of an indirect table. The specification limits
// what a driver uses of it to the ring size, but Linux drivers use longer
// tables than their ring is (drivers/virtio/virtio_ring.c checks only direct
// chains), so any table up to the largest ring passes and the chain in it is
// bounded by MaxSegs.
const maxTable = MaxSize

// maxLen is where Chain.Len saturates.
const maxLen = 1 << 31

// translator turns descriptors of one ring into segments.
type translator struct {
	table    guestmem.Cursor // region of the last indirect table
	cur      guestmem.Cursor // region of the last buffer
	want     uint16          // descFWrite or 0: what every buffer's WRITE flag must be, or bothWays
	indirect bool
	walked   uint64 // see Walked

	// With bothWays: segments before the chain's first writable buffer, -1 before it came.
	readable int

	via    guestmem.Translator
	missed bool // the last look-up through via was Missing, as miss says
	miss   MissError
}

// bothWays as the wanted flags stands for readable buffers before writable ones. No
// descriptor matches it after masking, so that chains are never taken for plain ones.
const bothWays = 1 << 3

func newTranslator(cfg *Config) translator {
	t := translator{
		table: guestmem.NewCursor(cfg.Mem), cur: guestmem.NewCursor(cfg.Mem),
		indirect: cfg.Features.Has(virtio.FRingIndirectDesc), via: cfg.Via,
	}
	switch {
	case cfg.BothWays:
		t.want = bothWays
	case cfg.DeviceWrites:
		t.want = descFWrite
	}
	return t
}

func (t *translator) setMemory(mem *guestmem.Table) {
	t.table, t.cur = guestmem.NewCursor(mem), guestmem.NewCursor(mem)
}

// Walked is how many descriptors Fill has read since the ring was made, without those of
// chains of one direct descriptor, and how often it has asked Config.Via: what neither
// frames nor bytes tell of the work that a driver causes.
func (t *translator) Walked() uint64 { return t.walked }

// checkTable judges a descriptor that refers to an indirect table (virtio 1.3
// section 2.7.5.3). Its WRITE flag is ignored, as the section demands.
func (t *translator) checkTable(d descriptor, flags uint16) Fault {
	size := d.len()
	switch {
	case !t.indirect, flags&descFNext != 0, size == 0, size%descSize != 0, size > maxTable*descSize:
		return FaultIndirect
	case wraps(d.addr, uint64(size)):
		return FaultAddress
	}
	return FaultNone
}

// wraps reports whether n > 0 bytes at addr go beyond the last address.
func wraps(addr, n uint64) bool { return n-1 > math.MaxUint64-addr }

// appendSegs appends n bytes at guest address addr as one segment per region, or
// per stretch that the translator knows.
func (t *translator) appendSegs(b *Batch, addr, n uint64) Fault {
	if n == 0 {
		return FaultNone
	}
	if wraps(addr, n) {
		return FaultAddress
	}
	for n > 0 {
		host, run := t.lookup(&t.cur, addr, n, t.writes())
		if run == 0 {
			return t.absent()
		}
		if b.NSegs == MaxSegs {
			return FaultTooLong
		}
		b.Segs[b.NSegs] = Seg{Host: host, Len: uint32(run)}
		b.NSegs++
		addr += run
		n -= run
	}
	return FaultNone
}

// tableEntry copies the entry of an indirect table at guest address addr, which may have
// any alignment and may cross from one region into the next. Without ok, absent says why.
func (t *translator) tableEntry(addr uint64) (d descriptor, ok bool) {
	if host, run := t.lookup(&t.table, addr, descSize, false); run == descSize {
		return loadDescriptor(host), true
	}
	t.walked += descSize // a look-up for each byte
	return t.loadSplitDescriptor(addr)
}

// plain reports whether d is a whole chain that one segment can describe.
func (t *translator) plain(d descriptor) bool {
	return d.flags()&(descFNext|descFIndirect|descFWrite) == t.want && d.len()-1 < maxLen
}

// setPlain writes field by field: a composite literal is built on the stack in
// narrow stores and copied in wide loads, which stalls for half the time of
// peekPlain's loop.
func setPlain(c *Chain, s *Seg, head uint16, first int, host uintptr, n uint32) {
	s.Host, s.Len = host, n
	c.Head, c.Fault, c.First = head, FaultNone, uint16(first)
	c.N, c.Descs, c.Len, c.Written = 1, 1, n, 0
}
