package virtqueue

import (
	"fmt"

	"github.com/vhostd/vhostd/virtqueue/internal/word"
)

// Flags of packed rings (virtio 1.3 sections 2.8.1 and 2.8.10).
const (
	packedAvail = 1 << 7  // VIRTQ_DESC_F_AVAIL
	packedUsed  = 1 << 15 // VIRTQ_DESC_F_USED

	eventEnable  = 0 // RING_EVENT_FLAGS_ENABLE
	eventDisable = 1 // RING_EVENT_FLAGS_DISABLE
	eventDesc    = 2 // RING_EVENT_FLAGS_DESC
	eventMask    = 3
)

// packedRing is the shared memory of a packed ring: size descriptors and the two
// event suppression structures of 4 bytes. NewPacked's caller answers for the
// areas; every index used here is below size.
type packedRing struct {
	desc, driver, device uintptr
}

// check refuses addresses that the specification's alignment rules out.
func (r *packedRing) check() error {
	for _, a := range [...]struct {
		name  string
		addr  uintptr
		align uintptr
	}{{"descriptor ring", r.desc, 16}, {"driver event suppression", r.driver, 4}, {"device event suppression", r.device, 4}} {
		if a.addr == 0 || a.addr%a.align != 0 {
			return fmt.Errorf("virtqueue: %s at host address %#x, need a multiple of %d", a.name, a.addr, a.align)
		}
	}
	return nil
}

// packedMeta is the second half of struct pvirtq_desc: len, id, flags from the
// lowest bits up.
type packedMeta uint64

func (m packedMeta) len() uint32   { return uint32(m) }
func (m packedMeta) id() uint16    { return uint16(m >> 32) }
func (m packedMeta) flags() uint16 { return uint16(m >> 48) }

// meta reads length, id and flags of descriptor i at once.
func (r *packedRing) meta(i int) packedMeta {
	// SAFETY: i < size, the ring is 16-aligned, so the half is 8-aligned.
	// ORDER: acquire, before addr; pairs with the driver's store of the flags
	// after everything else of the chain. One load sees either all or nothing of
	// what was stored before the flags that it sees.
	return packedMeta(word.Load64Acquire(r.desc + descSize*uintptr(i) + 8))
}

// addr reads the address of descriptor i.
func (r *packedRing) addr(i int) uint64 {
	// SAFETY: i < size, 16-aligned.
	// ORDER: after meta's acquire load of the flags that made it available.
	return word.Load64(r.desc + descSize*uintptr(i))
}

// setUsed writes a used descriptor at i. Its address, which means nothing in a
// used one, stays.
func (r *packedRing) setUsed(i int, m packedMeta) {
	// SAFETY: i < size, the half is 8-aligned: its parts change together.
	// ORDER: before setUsedRelease of the first descriptor of the batch, without
	// which the driver does not look at this one.
	word.Store64(r.desc+descSize*uintptr(i)+8, uint64(m))
}

// setUsedRelease writes the used descriptor that the driver waits for.
func (r *packedRing) setUsedRelease(i int, m packedMeta) {
	// SAFETY: i < size, the half is 8-aligned: its parts change together.
	// ORDER: release, after the buffers and the batch's other used descriptors;
	// pairs with the driver's load of the flags before it reads those.
	word.Store64Release(r.desc+descSize*uintptr(i)+8, uint64(m))
}

// driverEvent reads what the driver says about calls.
func (r *packedRing) driverEvent() (at, flags uint16) {
	// SAFETY: the 4 bytes of the driver's structure, 4-aligned.
	// ORDER: NeedsCall's fence precedes it.
	v := word.Load32(r.driver)
	return uint16(v), uint16(v>>16) & eventMask
}

// setDeviceEvent says what the device wants of kicks.
func (r *packedRing) setDeviceEvent(at, flags uint16) {
	// SAFETY: the 4 bytes of the device's structure, 4-aligned.
	// ORDER: a hint when it suppresses kicks; armKicks puts a fence after it.
	word.Store32(r.device, uint32(at)|uint32(flags)<<16)
}
