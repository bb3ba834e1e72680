package virtqueue

import "fmt"

// Position is where a ring is to be resumed, in the form that
// VHOST_USER_GET_VRING_BASE answers (vhost-user.rst). For a split ring it is the
// available index. For a packed ring bits 0 to 14 are the next available
// descriptor, bit 15 is its wrap counter, and the upper half says the same of
// the next used descriptor.
type Position uint32

// FreshPacked is the position of a packed ring that nobody has used.
const FreshPacked Position = 1<<15 | 1<<31

// ParsePosition judges the value of VHOST_USER_SET_VRING_BASE for a ring of size
// descriptors. DPDK's virtio-user leaves the upper half of a packed position
// zero; then the used half is taken to equal the available one.
func ParsePosition(base uint32, size uint16, packed bool) (Position, error) {
	if !packed {
		if base > 0xffff {
			return 0, fmt.Errorf("virtqueue: base %#x, a split ring has 16 bits", base)
		}
		return Position(base), nil
	}
	if base>>16 == 0 {
		base |= base << 16
	}
	p := Position(base)
	if a, u := p.avail(), p.used(); a.idx >= size || u.idx >= size {
		return 0, fmt.Errorf("virtqueue: base %#x names descriptors %d and %d of a ring of %d", base, a.idx, u.idx, size)
	}
	return p, nil
}

func (p Position) avail() place { return place{uint16(p) & 0x7fff, uint16(p>>15) & 1} }
func (p Position) used() place  { return place{uint16(p>>16) & 0x7fff, uint16(p >> 31)} }

// place is a descriptor of a packed ring and the wrap counter, 0 or 1, of the
// lap in which it is meant (virtio 1.3 section 2.8.1).
type place struct{ idx, wrap uint16 }

// word is the place in the form of event suppression structures and of one half
// of a Position.
func (p place) word() uint16 { return p.idx | p.wrap<<15 }

// position is a Position with both halves at p.
func (p place) position() Position { return Position(p.word()) | Position(p.word())<<16 }

// availFlags are the AVAIL and USED flags of a descriptor that is available at p.
func (p place) availFlags() uint16 { return packedUsed >> (8 * p.wrap) }

// usedFlags are the AVAIL and USED flags of a descriptor that is used at p.
func (p place) usedFlags() uint16 { return p.wrap * (packedAvail | packedUsed) }

// add is the place n <= size descriptors further. No sum leaves 16 bits.
func (p place) add(n, size uint16) place {
	p.idx += n
	if p.idx >= size {
		p.idx -= size
		p.wrap ^= 1
	}
	return p
}

// sub is the place n <= size descriptors before p.
func (p place) sub(n, size uint16) place {
	if p.idx < n {
		p.idx += size
		p.wrap ^= 1
	}
	p.idx -= n
	return p
}

// to is the place of descriptor idx at least one and at most a lap further.
func (p place) to(idx int) place {
	if idx <= int(p.idx) {
		p.wrap ^= 1
	}
	p.idx = uint16(idx)
	return p
}

// since is how many descriptors lie from old to p, at most one lap of them.
func (p place) since(old place, size uint16) int {
	n := int(p.idx) - int(old.idx)
	if p.wrap != old.wrap {
		n += int(size)
	}
	return n
}
