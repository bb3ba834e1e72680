package virtqueue

import "github.com/vhostd/vhostd/virtqueue/internal/word"

// packedRegion is a packed ring's part of the inflight region: QueueRegionPacked and DescStatePacked of vhost-user.rst.
// Inflight.check has seen to it that the part is InflightBytes(entries) long and 8-aligned; every index used here is
// below entries. The order of the stores is that of splitRegion.
type packedRegion struct {
	host    uintptr
	entries uint16
}

type packedRegionHeader struct {
	version, descs, free, oldFree, used, oldUsed uint16
	wrap, oldWrap                                uint8
}

func (r packedRegion) header() packedRegionHeader {
	// SAFETY: bytes 8 to 23 of the header of 32, 8-aligned.
	// ORDER: none, the ring does not run yet.
	a, b := word.Load64(r.host+8), word.Load64(r.host+16)
	return packedRegionHeader{
		version: uint16(a), descs: uint16(a >> 16), free: uint16(a >> 32), oldFree: uint16(a >> 48),
		used: uint16(b), oldUsed: uint16(b >> 16), wrap: uint8(b >> 32), oldWrap: uint8(b >> 40),
	}
}

func (r packedRegion) at(i uint16) uintptr { return r.host + packedHeader + packedEntry*uintptr(i) }

type packedRegionEntry struct {
	inflight        uint8
	next, last, num uint16
	counter         uint64
}

func (r packedRegion) entry(i uint16) packedRegionEntry {
	// SAFETY: i < entries, the first 16 of 32 bytes, 8-aligned.
	// ORDER: none, the ring does not run yet.
	v := word.Load64(r.at(i))
	return packedRegionEntry{uint8(v), uint16(v >> 16), uint16(v >> 32), uint16(v >> 48), word.Load64(r.at(i) + 8)}
}

// packedCopy is a descriptor in an entry. There id and flags come before len.
type packedCopy struct {
	addr uint64
	meta packedMeta
}

func (r packedRegion) copy(i uint16) packedCopy {
	// SAFETY: i < entries, the last 16 of 32 bytes, 8-aligned.
	// ORDER: none, the ring does not run yet.
	v := word.Load64(r.at(i) + 16)
	return packedCopy{word.Load64(r.at(i) + 24), packedMeta(v>>32 | v<<32)}
}

func (r packedRegion) setCopy(i uint16, c packedCopy) {
	// SAFETY: i < entries, 16 bytes, 8-aligned.
	// ORDER: before take of its chain.
	word.Store64Release(r.at(i)+16, uint64(c.meta)>>32|uint64(c.meta)<<32)
	word.Store64Release(r.at(i)+24, c.addr)
}

// take makes entry i the head of a chain that is inflight.
func (r packedRegion) take(i, last, num uint16, counter uint64) {
	// SAFETY: i < entries, 16 bytes, 8-aligned; next keeps its value.
	// ORDER: after the copies, and before the free entries begin behind the chain.
	word.Store64Release(r.at(i)+8, counter)
	word.Store16Release(r.at(i)+4, last)
	word.Store16Release(r.at(i)+6, num)
	r.setInflight(i, 1)
}

func (r packedRegion) setInflight(i uint16, v uint8) {
	// SAFETY: i < entries, bytes 0 and 1 (padding), 2-aligned.
	// ORDER: after what it says of the entry.
	word.Store16Release(r.at(i), uint16(v))
}

func (r packedRegion) setNext(i, next uint16) {
	// SAFETY: i < entries, 2-aligned.
	// ORDER: before the head that leads to it.
	word.Store16Release(r.at(i)+2, next)
}

func (r packedRegion) setFree(i uint16) {
	// SAFETY: free_head, 2-aligned.
	// ORDER: after the links behind it.
	word.Store16Release(r.host+12, i)
}

func (r packedRegion) setOldFree(i uint16) {
	// SAFETY: old_free_head, 2-aligned.
	// ORDER: ends a change of the free entries.
	word.Store16Release(r.host+14, i)
}

// setPosition writes used_idx and old_used_idx with their wrap counters. Two that differ are a batch that is being shown.
func (r packedRegion) setPosition(used, old place) {
	// SAFETY: bytes 16 to 23, 8-aligned, padding included.
	// ORDER: before the used descriptors of a batch, and with old behind them.
	word.Store64Release(r.host+16, uint64(used.idx)|uint64(old.idx)<<16|uint64(used.wrap)<<32|uint64(old.wrap)<<40)
}

// begin makes all entries free. An end of the process within leaves the position, and no entry inflight.
func (r packedRegion) begin(at place) {
	// SAFETY: the header and all entries, 8-aligned.
	// ORDER: the marks and the position first, the version last.
	for i := range r.entries {
		r.setInflight(i, 0)
	}
	r.setPosition(at, at)
	for i := range r.entries {
		r.setNext(i, i+1)
	}
	word.Store64Release(r.host, 0)
	word.Store64Release(r.host+8, inflightVersion|uint64(r.entries)<<16)
}
