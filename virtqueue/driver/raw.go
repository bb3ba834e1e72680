package driver

// PokeDesc writes descriptor i (masked), whoever uses it.
func (r *Ring) PokeDesc(i uint16, addr uint64, n uint32, flags, next uint16) {
	r.mem.storeDesc(i&r.mem.mask, addr, n, flags, next)
}

// PokeAvail writes the available ring's entry for position pos (masked).
func (r *Ring) PokeAvail(pos, head uint16) { r.mem.storeAvail(pos, head) }

// PokeAvailIdx writes the available index.
func (r *Ring) PokeAvailIdx(idx uint16) { r.mem.storeAvailIdx(idx) }

// PokeAvailFlags writes the available ring's flags.
func (r *Ring) PokeAvailFlags(flags uint16) { r.mem.storeAvailFlags(flags) }

// PokeUsedEvent writes used_event, the index after which a call is wanted.
func (r *Ring) PokeUsedEvent(idx uint16) { r.mem.storeUsedEvent(idx) }

// PokeUsedIdx writes the used index, which is the device's.
func (r *Ring) PokeUsedIdx(idx uint16) { r.mem.storeUsedIdx(idx) }

// PokeHead stages head without any bookkeeping: the descriptors are PokeDesc's
// and the chain is not known to GetUsed.
func (r *Ring) PokeHead(head uint16) {
	r.mem.storeAvail(r.avail, head)
	r.avail++
}

// PeekUsedIdx reads the used index.
func (r *Ring) PeekUsedIdx() uint16 { return r.mem.usedIdx() }

// PeekUsed reads the used ring's entry for position pos (masked).
func (r *Ring) PeekUsed(pos uint16) (id, written uint32) { return r.mem.usedEntry(pos) }

// PeekUsedFlags reads the used ring's flags.
func (r *Ring) PeekUsedFlags() uint16 { return r.mem.usedFlags() }

// PeekAvailEvent reads avail_event, the index after which the device wants a kick.
func (r *Ring) PeekAvailEvent() uint16 { return r.mem.availEvent() }
