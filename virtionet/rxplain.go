package virtionet

import (
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/virtqueue"
)

// placeRun plans the frames at the start of src that are of the common sort, each one
// fragment for a chain of one segment that holds it with its header, into the chains of
// b from at on, and returns how many those are. It makes no calls within its loop, so
// that what it needs stays in registers: most frames pass through here.
func (p *pair) placeRun(src []packet.Packet, b *virtqueue.Batch, at, end int) (n int) {
	v := &p.copies
	limit := min(len(src), end-at, len(p.headers)-p.nHeaders, len(v.ops)-v.n)
	if limit <= 0 {
		return 0
	}
	src, chains := src[:limit], b.Chains[at:at+limit]
	headers, ops := p.headers[p.nHeaders:p.nHeaders+limit], v.ops[v.n:v.n+limit]
	hdrLen, bytes := p.hdrLen, uint64(0)
	for n < limit {
		pkt, c := &src[n], &chains[n]
		size := pkt.Len
		if c.N != 1 || pkt.NFrag != 1 || c.Len < size+hdrLen || bytes >= maxCopyBytes || int(c.First) >= len(b.Segs) {
			break
		}
		host := b.Segs[c.First].Host
		headers[n].set(host, &pkt.Hdr, 1)
		op := &ops[n]
		op.Dst, op.Src, op.N = host+uintptr(hdrLen), pkt.Frags[0].Addr, uint64(size)
		c.Written = size + hdrLen
		bytes += uint64(size)
		n++
	}
	if n == 0 {
		return 0
	}
	p.nHeaders += n
	v.n += n
	v.bytes += bytes
	p.rx.packets += uint64(n)
	p.rx.bytes += bytes
	p.merge.lastLen = chains[n-1].Len
	return n
}
