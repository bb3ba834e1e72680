package driver

import (
	"unsafe"

	"github.com/vhostd/vhostd/virtqueue/internal/word"
)

// Descriptor flags (virtio 1.3 section 2.7.5), for PokeDesc and PokeTable.
const (
	DescFNext     = 1 // VIRTQ_DESC_F_NEXT
	DescFWrite    = 2 // VIRTQ_DESC_F_WRITE
	DescFIndirect = 4 // VIRTQ_DESC_F_INDIRECT
)

const (
	availFNoInterrupt = 1 // VIRTQ_AVAIL_F_NO_INTERRUPT
	usedFNoNotify     = 1 // VIRTQ_USED_F_NO_NOTIFY
)

// memory is the shared memory of the ring: mask+1 descriptors, and rings of as
// many entries. Positions are masked and descriptor numbers below mask+1, so
// every access stays inside the areas that New's caller gave.
type memory struct {
	desc, avail, used uintptr
	mask              uint16
}

func (m *memory) zero() {
	desc, avail, used := areas(int(m.mask) + 1)
	for _, a := range [...]struct {
		addr uintptr
		n    uint64
	}{{m.desc, desc}, {m.avail, avail}, {m.used, used}} {
		// SAFETY: the whole of one area.
		// ORDER: before the release store of the indexes by Reset.
		clear(unsafe.Slice((*byte)(unsafe.Add(nil, a.addr)), a.n))
	}
}

func (m *memory) storeDesc(i uint16, addr uint64, n uint32, flags, next uint16) {
	PokeTable(m.desc, int(i), addr, n, flags, next)
}

func (m *memory) storeAvail(pos, head uint16) {
	// SAFETY: masked, mask+1 entries after 4 bytes, 2-aligned.
	// ORDER: before storeAvailIdx's release store.
	word.Store16(m.avail+4+2*uintptr(pos&m.mask), head)
}

func (m *memory) storeAvailIdx(idx uint16) {
	// SAFETY: bytes 2 and 3 of the available ring, 2-aligned.
	// ORDER: release, after descriptors and entries; pairs with the device's
	// acquire load of the index.
	word.Store16Release(m.avail+2, idx)
}

func (m *memory) storeAvailFlags(flags uint16) {
	// SAFETY: the first two bytes of the available ring, 2-aligned.
	// ORDER: requestCall puts a fence after it.
	word.Store16Release(m.avail, flags)
}

func (m *memory) storeUsedEvent(idx uint16) {
	// SAFETY: two bytes after the available ring's entries, 2-aligned.
	// ORDER: requestCall puts a fence after it.
	word.Store16Release(m.avail+4+2*(uintptr(m.mask)+1), idx)
}

func (m *memory) usedIdx() uint16 {
	// SAFETY: bytes 2 and 3 of the used ring, 4-aligned.
	// ORDER: acquire, before the used entries and buffers; pairs with the
	// device's release store.
	return word.Load16Acquire(m.used + 2)
}

func (m *memory) usedFlags() uint16 {
	// SAFETY: the first two bytes of the used ring, 4-aligned.
	// ORDER: NeedsKick's fence precedes it.
	return word.Load16(m.used)
}

func (m *memory) availEvent() uint16 {
	// SAFETY: two bytes after the used ring's entries, 2-aligned.
	// ORDER: NeedsKick's fence precedes it.
	return word.Load16(m.used + 4 + 8*(uintptr(m.mask)+1))
}

func (m *memory) usedEntry(pos uint16) (id, written uint32) {
	// SAFETY: masked, mask+1 entries of 8 bytes after 4 bytes.
	// ORDER: after the acquire load of the used index.
	v := word.Load64(m.used + 4 + 8*uintptr(pos&m.mask))
	return uint32(v), uint32(v >> 32)
}

func (m *memory) storeUsedIdx(idx uint16) {
	// SAFETY: bytes 2 and 3 of the used ring, 4-aligned.
	// ORDER: Reset happens before the device is told of the ring.
	word.Store16Release(m.used+2, idx)
}

// PokeTable writes entry i of a descriptor table at host address table, of any
// alignment.
func PokeTable(table uintptr, i int, addr uint64, n uint32, flags, next uint16) {
	p := table + 16*uintptr(i)
	// SAFETY: the caller gives a table of more than i entries.
	// ORDER: before the release store of the available index.
	word.Store64(p, addr)
	word.Store64(p+8, uint64(n)|uint64(flags)<<32|uint64(next)<<48)
}
