package driver

// PokeDesc writes descriptor i modulo the size, whoever uses it.
func (r *PackedRing) PokeDesc(i int, addr uint64, n uint32, id, flags uint16) {
	i %= r.mem.size
	r.mem.storeAddr(i, addr)
	r.mem.storeMeta(i, packMeta(n, id, flags))
}

// PokeChain stages one descriptor of a chain without any bookkeeping, with the
// flags that make it available besides the given ones. GetUsed does not know it.
func (r *PackedRing) PokeChain(addr uint64, n uint32, id, flags uint16) {
	r.put(addr, n, id, flags)
	r.staged = 1
}

// PeekDesc reads descriptor i modulo the size.
func (r *PackedRing) PeekDesc(i int) (addr uint64, n uint32, id, flags uint16) {
	addr, meta := r.mem.load(i % r.mem.size)
	return addr, uint32(meta), uint16(meta >> 32), uint16(meta >> 48)
}

// PokeDriverEvent writes the driver's event suppression structure: a descriptor
// with the wrap counter in bit 15, and flags.
func (r *PackedRing) PokeDriverEvent(at, flags uint16) { r.mem.storeDriverEvent(at, flags) }

// PeekDeviceEvent reads the device's event suppression structure.
func (r *PackedRing) PeekDeviceEvent() (at, flags uint16) { return r.mem.deviceEvent() }
