package packet

import (
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/virtio"
)

// MaxFrags is the number of fragments that carry the largest frame
// (virtio.MaxFrame, 65,553 bytes) in 4 KiB pages with a header of its own: the
// counterpart of Linux' MAX_SKB_FRAGS (include/linux/skbuff.h) plus the linear
// part.
const MaxFrags = 18

// Frag is a run of frame bytes inside one page, or inside one compound page.
type Frag struct {
	// Addr is the host address of the first byte, in arena memory.
	Addr uintptr
	// Len is the number of bytes, at least 1.
	Len uint32
	// Page holds the fragment's reference: the page itself, or the head of
	// the compound page that contains it.
	Page pagemem.PageID
}

// Packet is one frame, from the Ethernet header to the last payload byte. The
// header, the counts and the first two fragments share the first cache line.
type Packet struct {
	// Hdr is the private copy of the frame's virtio-net header. NumBuffers is
	// not used.
	Hdr virtio.NetHdr
	// Len is the frame's length in bytes: the sum of the fragments' lengths.
	Len uint32
	// NFrag is how many of Frags are in use. Zero means that the packet holds
	// nothing.
	NFrag uint8
	// Flags belongs to the current holder, who clears it before the packet is
	// handed over.
	Flags uint8
	_     [14]byte
	// Frags[:NFrag] are the fragments in frame order, one reference each.
	Frags [MaxFrags]Frag
}

// Reset empties the packet without dropping references.
func (p *Packet) Reset() {
	p.Hdr = virtio.NetHdr{}
	p.Len = 0
	p.NFrag = 0
	p.Flags = 0
}

// Append adds f, and with it f's page reference, to the end of the frame. It
// reports false, and takes nothing, when all MaxFrags fragments are in use.
func (p *Packet) Append(f Frag) bool {
	if p.NFrag >= MaxFrags {
		return false
	}
	p.Frags[p.NFrag] = f
	p.NFrag++
	p.Len += f.Len
	return true
}

// MoveTo hands p's contents and references over to dst, whose old contents are
// overwritten, and leaves p without length and fragments. It copies only the
// fragments in use.
func (p *Packet) MoveTo(dst *Packet) {
	dst.Hdr = p.Hdr
	dst.Len = p.Len
	dst.NFrag = p.NFrag
	dst.Flags = p.Flags
	if p.NFrag == 1 {
		from, to := &p.Frags[0], &dst.Frags[0]
		to.Addr, to.Len, to.Page = from.Addr, from.Len, from.Page
	} else {
		copy(dst.Frags[:p.NFrag], p.Frags[:p.NFrag])
	}
	p.Len, p.NFrag = 0, 0
}

// LenCheck reports whether the packet is well formed: at most MaxFrags
// fragments, none of them empty, whose lengths add up to Len.
func (p *Packet) LenCheck() bool {
	if p.NFrag > MaxFrags {
		return false
	}
	var sum uint64
	for i := range p.Frags[:p.NFrag] {
		n := p.Frags[i].Len
		if n == 0 {
			return false
		}
		sum += uint64(n)
	}
	return sum == uint64(p.Len)
}

// CopyTo gathers frame bytes from offset off on into dst and returns how many it
// copied: fewer than len(dst) at the end of the frame, zero when off lies
// outside the frame.
func (p *Packet) CopyTo(dst []byte, off int) int {
	if off < 0 {
		return 0
	}
	done := 0
	for i := 0; i < int(p.NFrag) && done < len(dst); i++ {
		b := p.Bytes(i)
		if off >= len(b) {
			off -= len(b)
			continue
		}
		done += copy(dst[done:], b[off:])
		off = 0
	}
	return done
}

// PeekHeader copies the start of the frame into dst and returns how many bytes
// that were: len(dst), or the whole frame when it is shorter. A parser works on
// this copy, which nobody else can change.
func (p *Packet) PeekHeader(dst []byte) int {
	return p.CopyTo(dst, 0)
}
