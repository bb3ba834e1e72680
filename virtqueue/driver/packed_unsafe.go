package driver

import (
	"unsafe"

	"github.com/vhostd/vhostd/virtqueue/internal/word"
)

// Flags of packed rings (virtio 1.3 sections 2.8.1 and 2.8.10), for PokeDesc
// and PokeDriverEvent.
const (
	DescFAvail = 1 << 7  // VIRTQ_DESC_F_AVAIL
	DescFUsed  = 1 << 15 // VIRTQ_DESC_F_USED

	EventEnable  = 0 // RING_EVENT_FLAGS_ENABLE
	EventDisable = 1 // RING_EVENT_FLAGS_DISABLE
	EventDesc    = 2 // RING_EVENT_FLAGS_DESC
)

// packedMemory is the shared memory of a packed ring of size descriptors.
// Descriptor numbers below size stay inside the areas that NewPacked's caller
// gave.
type packedMemory struct {
	desc, driver, device uintptr
	size                 int
}

func (m *packedMemory) zero() {
	for _, a := range [...]struct {
		addr uintptr
		n    int
	}{{m.desc, 16 * m.size}, {m.driver, 4}, {m.device, 4}} {
		// SAFETY: the whole of one area.
		// ORDER: before the device is told of the ring.
		clear(unsafe.Slice((*byte)(unsafe.Add(nil, a.addr)), a.n))
	}
}

// packMeta is the second half of struct pvirtq_desc.
func packMeta(n uint32, id, flags uint16) uint64 {
	return uint64(n) | uint64(id)<<32 | uint64(flags)<<48
}

func (m *packedMemory) storeAddr(i int, addr uint64) {
	// SAFETY: i < size, 16-aligned.
	// ORDER: before storeMeta of the same descriptor.
	word.Store64(m.desc+16*uintptr(i), addr)
}

func (m *packedMemory) storeMeta(i int, meta uint64) {
	// SAFETY: i < size, the half is 8-aligned.
	// ORDER: release, after the address, the buffers and the descriptors that
	// follow it; pairs with the device's acquire load of the flags.
	word.Store64Release(m.desc+16*uintptr(i)+8, meta)
}

func (m *packedMemory) stageMeta(i int, meta uint64) {
	// SAFETY: i < size, the half is 8-aligned.
	// ORDER: none of its own: storeMeta of the first descriptor that is staged follows, and the device does not look at this
	// one before it has seen that.
	word.Store64(m.desc+16*uintptr(i)+8, meta)
}

func (m *packedMemory) loadMeta(i int) uint64 {
	// SAFETY: i < size, the half is 8-aligned.
	// ORDER: acquire, before the address and the buffers; pairs with the device's
	// release store of a used descriptor.
	return word.Load64Acquire(m.desc + 16*uintptr(i) + 8)
}

func (m *packedMemory) load(i int) (addr, meta uint64) {
	meta = m.loadMeta(i)
	// SAFETY: i < size, 16-aligned.
	// ORDER: after the flags.
	return word.Load64(m.desc + 16*uintptr(i)), meta
}

func (m *packedMemory) storeDriverEvent(at, flags uint16) {
	// SAFETY: the 4 bytes of the driver's structure, 4-aligned.
	// ORDER: requestCall puts a fence after it.
	word.Store32(m.driver, uint32(at)|uint32(flags)<<16)
}

func (m *packedMemory) deviceEvent() (at, flags uint16) {
	// SAFETY: the 4 bytes of the device's structure, 4-aligned.
	// ORDER: NeedsKick's fence precedes it.
	v := word.Load32(m.device)
	return uint16(v), uint16(v >> 16)
}

// PokePackedTable writes entry i of an indirect table of a packed ring at host
// address table, of any alignment.
func PokePackedTable(table uintptr, i int, addr uint64, n uint32, id, flags uint16) {
	p := table + 16*uintptr(i)
	// SAFETY: the caller gives a table of more than i entries.
	// ORDER: before the release store of the descriptor that refers to it.
	word.Store64(p, addr)
	word.Store64(p+8, packMeta(n, id, flags))
}
