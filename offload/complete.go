package offload

import (
	"gvisor.dev/gvisor/pkg/tcpip/checksum"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/virtio"
)

// copyBreak is how much of a frame is copied at least when something in it has
// to change: small frames stay in one piece.
const copyBreak = 256

// A frame that is copied whole fits, and leaves a fragment for a header.
const _ = uint((packet.MaxFrags-1)*BufSize - virtio.MaxFrame)

// complete writes the checksum that p's header asks for. The field holds what
// the sender put there, for TCP and UDP the sum over the pseudo header, and
// takes part in the sum.
func (f *Finisher) complete(p *packet.Packet) Reason {
	start, field := int(p.Hdr.CsumStart), csumField(&p.Hdr)
	if !f.detach(p, field+2) {
		return NoMemory
	}
	xsum := ^sumFrom(p, start)
	if p.Hdr.CsumOffset == udpCsumOffset {
		xsum = udpSum(xsum)
	}
	setByte(p, field, byte(xsum>>8))
	setByte(p, field+1, byte(xsum))
	p.Hdr = virtio.NetHdr{}
	return OK
}

// udpSum replaces the sum that would mean "no checksum" (RFC 768) by the other
// representation of zero.
func udpSum(xsum uint16) uint16 {
	if xsum == 0 {
		return 0xffff
	}
	return xsum
}

// sumFrom is the one's complement sum over the frame from offset off on.
func sumFrom(p *packet.Packet, off int) uint16 {
	var c checksum.Checksumer
	for i := range int(p.NFrag) {
		b := p.Bytes(i)
		if off >= len(b) {
			off -= len(b)
			continue
		}
		c.Add(b[off:])
		off = 0
	}
	return c.Checksum()
}

// setByte changes one byte of a part of the frame that detach made private.
func setByte(p *packet.Packet, off int, v byte) {
	for i := range int(p.NFrag) {
		b := p.Bytes(i)
		if off < len(b) {
			b[off] = v
			return
		}
		off -= len(b)
	}
}

// detach makes at least the first n bytes of p private: they move to a buffer
// that nobody else sees, the rest stays where it is. It reports false, and
// leaves p as it was, when there is no memory.
func (f *Finisher) detach(p *packet.Packet, n int) bool {
	n = min(max(n, copyBreak), int(p.Len))
	whole, cut := covered(p, n)
	if n > BufSize || int(p.NFrag)-whole+1 > packet.MaxFrags {
		return f.flatten(p)
	}
	head, ok := f.Alloc.AllocBuf(uint32(n))
	if !ok {
		return false
	}
	p.CopyTo(head.Bytes(), 0)
	for i := range whole {
		f.Arena.Release(p.Frags[i].Page, 1, f.Owner)
	}
	rest := copy(p.Frags[1:], p.Frags[whole:p.NFrag])
	p.Frags[0] = head
	p.NFrag = uint8(rest + 1)
	if cut > 0 {
		p.Frags[1].Addr += uintptr(cut)
		p.Frags[1].Len -= cut
	}
	return true
}

// covered says how many fragments end within the first n bytes of the frame, and
// how many bytes of the next one lie there too.
func covered(p *packet.Packet, n int) (whole int, cut uint32) {
	left := uint32(n)
	for whole < int(p.NFrag) && p.Frags[whole].Len <= left {
		left -= p.Frags[whole].Len
		whole++
	}
	return whole, left
}

// flatten moves the whole of p to private buffers, every one but the last of
// BufSize. It reports false, and leaves p as it was, when there is no memory.
func (f *Finisher) flatten(p *packet.Packet) bool {
	c := &f.flat
	c.Reset()
	for c.Len < p.Len {
		buf, ok := f.Alloc.AllocBuf(min(BufSize, p.Len-c.Len))
		if !ok {
			c.Release(f.Arena, f.Owner)
			return false
		}
		p.CopyTo(buf.Bytes(), int(c.Len))
		c.Append(buf)
	}
	c.Hdr = p.Hdr
	p.Release(f.Arena, f.Owner)
	c.MoveTo(p)
	return true
}
