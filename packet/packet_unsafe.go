package packet

import "unsafe"

// Bytes returns the bytes of fragment i, which must be below NFrag. The slice
// points into arena memory: it is valid until the fragment's reference is
// dropped, and read-only unless the caller is the only holder of those bytes.
func (p *Packet) Bytes(i int) []byte {
	return p.Frags[i].Bytes()
}

// Bytes is the fragment's memory as a slice, under the same rules as
// [Packet.Bytes].
func (f *Frag) Bytes() []byte {
	// SAFETY: Addr lies in the arena's mapping, outside the Go heap, and the
	// allocator that made the fragment put all Len bytes inside one page; the
	// reference on Page keeps that page allocated. Bytes need no alignment.
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&f.Addr))), f.Len)
}
