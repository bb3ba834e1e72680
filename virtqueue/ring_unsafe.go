package virtqueue

import (
	"encoding/binary"
	"fmt"

	"github.com/vhostd/vhostd/virtqueue/internal/word"
)

// Descriptor flags (virtio 1.3 section 2.7.5).
const (
	descFNext     = 1 // VIRTQ_DESC_F_NEXT
	descFWrite    = 2 // VIRTQ_DESC_F_WRITE
	descFIndirect = 4 // VIRTQ_DESC_F_INDIRECT

	availFNoInterrupt = 1 // VIRTQ_AVAIL_F_NO_INTERRUPT
	usedFNoNotify     = 1 // VIRTQ_USED_F_NO_NOTIFY

	descSize = 16
)

// ring is the shared memory of a split ring. The areas are RingBytes(mask+1)
// bytes long, which NewSplit's caller answers for; all positions are masked
// here and heads are checked by Fill, so every access stays inside.
type ring struct {
	desc, avail, used uintptr
	mask              uint16
}

// check refuses addresses that the specification's alignment rules out.
func (r *ring) check() error {
	for _, a := range [...]struct {
		name  string
		addr  uintptr
		align uintptr
	}{{"descriptor table", r.desc, 16}, {"available ring", r.avail, 2}, {"used ring", r.used, 4}} {
		if a.addr == 0 || a.addr%a.align != 0 {
			return fmt.Errorf("virtqueue: %s at host address %#x, need a multiple of %d", a.name, a.addr, a.align)
		}
	}
	return nil
}

// descriptor is a private copy of struct virtq_desc.
type descriptor struct {
	addr uint64
	meta uint64 // len, flags, next from the lowest bits up
}

func (d descriptor) len() uint32   { return uint32(d.meta) }
func (d descriptor) flags() uint16 { return uint16(d.meta >> 32) }
func (d descriptor) next() uint16  { return uint16(d.meta >> 48) }

// descriptor copies entry i of the descriptor table, i <= mask.
func (r *ring) descriptor(i uint16) descriptor {
	p := r.desc + uintptr(i)*descSize
	// SAFETY: i <= mask, the table is mask+1 entries long and 16-aligned.
	// ORDER: after the acquire load of the available index that covers the
	// chain. The driver may still change it: this copy is what is judged.
	return descriptor{word.Load64(p), word.Load64(p + 8)}
}

// head reads the available ring's entry for position pos.
func (r *ring) head(pos uint16) uint16 {
	// SAFETY: masked, the ring has mask+1 entries after 4 bytes; 2-aligned.
	// ORDER: after the acquire load of the available index.
	return word.Load16(r.avail + 4 + 2*uintptr(pos&r.mask))
}

func (r *ring) availIdx() uint16 {
	// SAFETY: bytes 2 and 3 of the available ring, 2-aligned.
	// ORDER: acquire, before the entries and descriptors it covers are read;
	// pairs with the driver's store of the index after it wrote those.
	return word.Load16Acquire(r.avail + 2)
}

func (r *ring) availFlags() uint16 {
	// SAFETY: the first two bytes of the available ring, 2-aligned.
	// ORDER: NeedsCall's fence precedes it.
	return word.Load16(r.avail)
}

func (r *ring) usedEvent() uint16 {
	// SAFETY: two bytes after the available ring's mask+1 entries, 2-aligned.
	// ORDER: NeedsCall's fence precedes it.
	return word.Load16(r.avail + 4 + 2*(uintptr(r.mask)+1))
}

func (r *ring) usedIdx() uint16 {
	// SAFETY: bytes 2 and 3 of the used ring, 4-aligned.
	// ORDER: acquire, so that the available index read next is not older than
	// the reset of the ring that this value may come from.
	return word.Load16Acquire(r.used + 2)
}

// setUsed writes the used entry for position pos.
func (r *ring) setUsed(pos, head uint16, written uint32) {
	// SAFETY: masked, the ring has mask+1 entries of 8 bytes after 4 bytes;
	// 4-aligned, which is enough for a plain 8-byte store.
	// ORDER: before setUsedIdx's release store that covers pos.
	word.Store64(r.used+4+8*uintptr(pos&r.mask), uint64(head)|uint64(written)<<32)
}

func (r *ring) setUsedIdx(idx uint16) {
	// SAFETY: bytes 2 and 3 of the used ring, 4-aligned.
	// ORDER: release, after the used entries and the buffers they hand back;
	// pairs with the driver's load of the index before it reads those.
	word.Store16Release(r.used+2, idx)
}

func (r *ring) setUsedFlags(flags uint16) {
	// SAFETY: the first two bytes of the used ring, 4-aligned.
	// ORDER: a hint when it suppresses kicks; EnableKicks puts a fence after it.
	word.Store16Release(r.used, flags)
}

func (r *ring) setAvailEvent(idx uint16) {
	// SAFETY: two bytes after the used ring's mask+1 entries, 2-aligned.
	// ORDER: EnableKicks puts a fence after it.
	word.Store16Release(r.used+4+8*(uintptr(r.mask)+1), idx)
}

// loadDescriptor copies an entry of an indirect table, of any alignment.
func loadDescriptor(host uintptr) descriptor {
	// SAFETY: the caller looked up descSize contiguous bytes at host.
	// ORDER: after the acquire load of the available index, like descriptor.
	return descriptor{word.Load64(host), word.Load64(host + 8)}
}

// loadSplitDescriptor copies an entry that crosses regions byte by byte.
func (t *translator) loadSplitDescriptor(addr uint64) (d descriptor, ok bool) {
	var b [descSize]byte
	for i := range b {
		host, run := t.lookup(&t.table, addr+uint64(i), 1, false)
		if run == 0 {
			return descriptor{}, false
		}
		// SAFETY: the look-up covers the one byte.
		// ORDER: as in loadDescriptor.
		b[i] = word.Load8(host)
	}
	return descriptor{binary.LittleEndian.Uint64(b[:]), binary.LittleEndian.Uint64(b[8:])}, true
}
