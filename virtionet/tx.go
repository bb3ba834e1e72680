package virtionet

import (
	"github.com/vhostd/vhostd/fragalloc"
	"github.com/vhostd/vhostd/offload"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

const minFrame = 14 // an Ethernet header

// transmit moves one batch from the transmitq to the port. It returns the chains
// completed and the frame bytes sent.
func (p *pair) transmit() (chains, bytes int) {
	r := &p.tx
	if !r.serviceable() || p.txBlocked && p.emptyTurns%blockedTurns != 0 {
		return 0, 0
	}
	b := &p.txBatch
	b.Reset()
	n, err := r.q.Fill(b, virtqueue.MaxBatch)
	if n > 0 {
		if r.enabled {
			chains, bytes = p.sendBatch(b, n)
		} else {
			chains = p.discardBatch(n)
		}
	}
	if err != nil {
		p.fillFailed(r, err)
	}
	return chains, bytes
}

// discardBatch consumes frames of a ring that is started but disabled, as the
// vhost-user specification asks ("Ring states").
func (p *pair) discardBatch(n int) int {
	p.tx.drops[dropDisabled] += uint64(n)
	p.tx.anyDrop = true
	p.txBlocked, p.txNoMem = false, false
	p.complete(n)
	return n
}

func (p *pair) sendBatch(b *virtqueue.Batch, n int) (chains, bytes int) {
	if p.holder != nil {
		p.chooseCopy()
	}
	n = p.build(b, n)
	p.copies.run(p.pastMin)
	p.tx.copied += uint64(p.builtBytes)
	if p.pastMin != cachedOnly {
		p.tx.pastCache += p.copies.past.PastCache
		p.tx.fences += p.copies.past.Fences
		p.copies.past = fragalloc.Copied{}
	}
	if p.readHdr {
		p.checkOffloads()
	}
	built, sent := p.built, 0
	bytes = p.builtBytes
	if built > 0 {
		sent = p.queue.Send(p.out[:built])
	}
	p.txBlocked = sent < built
	if p.txBlocked {
		for i := range p.out[sent:built] {
			bytes -= int(p.out[sent+i].Len)
		}
		packet.Release(p.arena, p.out[sent:built], p.owner)
		from := p.outChain[sent]
		p.tx.q.Unfill(n - from)
		p.uncount(from)
		n = from
	}
	p.built = 0
	p.tx.packets += uint64(sent)
	p.tx.bytes += uint64(bytes)
	p.complete(n)
	return n, bytes
}

// build turns the first n chains into packets in p.out and collects their copies.
// It returns the chains used up: fewer than n when a turn's bytes are reached or
// memory ran out, the rest having been given back to the ring.
func (p *pair) build(b *virtqueue.Batch, n int) (used int) {
	p.txNoMem, p.built, p.builtBytes, p.nRefused = false, 0, 0, 0
	for i := 0; i < n; i++ {
		if i += p.buildRun(b, i, n); i == n {
			break
		}
		c := &b.Chains[i]
		left := c.Len - p.hdrLen // wraps below the header, which is not acceptable
		pkt := &p.out[p.built]
		switch {
		case p.builtBytes >= turnBytes:
			p.tx.q.Unfill(n - i)
			return i
		case !p.acceptable(c, i):
			continue
		default:
			pkt.Reset()
			if p.readHdr && !p.header(b, c, i, pkt) {
				continue
			}
			if !p.allocate(pkt, left) {
				pkt.Release(p.arena, p.owner)
				return p.outOfMemory(n, i)
			}
			p.keep(i)
			p.payload(b.Segs[c.First:c.First+c.N], pkt)
		}
		p.builtBytes += int(left)
	}
	return n
}

// buildRun builds packets of the chains from at on that are of the common sort, one segment with a
// frame for one fragment and a header that need not be read, and returns how many those
// are. Its loop makes no calls, so that what it needs stays in registers.
func (p *pair) buildRun(b *virtqueue.Batch, at, end int) (n int) {
	v := &p.copies
	limit := min(end-at, len(p.out)-p.built, len(v.ops)-v.n)
	if p.readHdr || limit <= 0 {
		return 0
	}
	chains, ops := b.Chains[at:at+limit], v.ops[v.n:v.n+limit]
	out, kept := p.out[p.built:p.built+limit], p.outChain[p.built:p.built+limit]
	win, hdrLen, bytes := p.win, p.hdrLen, 0
	for n < limit {
		c, pkt, op := &chains[n], &out[n], &ops[n]
		left := c.Len - hdrLen // wraps below the header, which fails the test
		if c.N != 1 || left-minFrame > pagemem.PageSize-minFrame || int(c.First) >= len(b.Segs) {
			break
		}
		addr, page, ok := win.Next(lineAligned(left))
		if !ok {
			break
		}
		pkt.Hdr, pkt.NFrag, pkt.Flags, pkt.Len = virtio.NetHdr{}, 1, 0, left
		f := &pkt.Frags[0]
		f.Addr, f.Len, f.Page = addr, left, page
		op.Dst, op.Src, op.N = addr, b.Segs[c.First].Host+uintptr(hdrLen), uint64(left)
		kept[n] = at + n
		bytes += int(left)
		n++
	}
	if p.counted {
		p.countRefs(out[:n])
	}
	p.built += n
	p.builtBytes += bytes
	v.n += n
	v.bytes += uint64(bytes)
	return n
}

// countRefs takes the reference of each packet's only fragment.
func (p *pair) countRefs(pkts []packet.Packet) {
	for i := range pkts {
		p.arena.Ref(pkts[i].Frags[0].Page)
	}
}

// keep makes the packet built from chain i one of the batch. It comes before its
// copies are planned: that may run earlier ones, and Fault releases only what is kept.
func (p *pair) keep(i int) {
	p.outChain[p.built] = i
	p.built++
}

// outOfMemory gives back the chains from i on; the guest keeps its frames.
func (p *pair) outOfMemory(n, i int) int {
	p.txNoMem = true
	p.tx.q.Unfill(n - i)
	return i
}

// refusal remembers that a chain was counted as refused, in case it is given back.
type refusal struct {
	chain int
	count *uint64
}

func (p *pair) refuse(chain int, count *uint64) {
	*count++
	p.tx.anyDrop = true
	p.refused[p.nRefused] = refusal{chain, count}
	p.nRefused++
}

// uncount takes back what was counted for the chains from the given one on, which the
// ring will deliver again.
func (p *pair) uncount(from int) {
	for _, r := range p.refused[:p.nRefused] {
		if r.chain >= from {
			*r.count--
		}
	}
}

// acceptable judges chain i by its shape and counts why it is refused.
func (p *pair) acceptable(c *virtqueue.Chain, i int) bool {
	t := p.tx.ringCounters
	switch {
	case c.Fault != 0:
		p.refuse(i, &t.faults[c.Fault%maxReasons])
	case c.Len < p.hdrLen+minFrame:
		p.refuse(i, &t.drops[dropTooShort])
	case c.Len-p.hdrLen > virtio.MaxFrame:
		p.refuse(i, &t.drops[dropTooLong])
	default:
		return true
	}
	return false
}

// header makes the private copy of chain i's header and judges that copy.
func (p *pair) header(b *virtqueue.Batch, c *virtqueue.Chain, i int, pkt *packet.Packet) bool {
	var raw [virtio.NetHdrLen]byte
	gather(raw[:p.hdrLen], b.Segs[c.First:c.First+c.N])
	pkt.Hdr.Decode(raw[:p.hdrLen])
	pkt.Hdr.NumBuffers = 0
	if e := pkt.Hdr.CheckTx(int(c.Len-p.hdrLen), p.features); e != 0 {
		p.refuse(i, &p.tx.hdrErrors[e%maxReasons])
		return false
	}
	return true
}

// lineAligned rounds a fragment up to whole cache lines, so that two processors
// never write to one line through neighboring fragments.
func lineAligned(n uint32) uint32 { return (n + fragalloc.Line - 1) &^ (fragalloc.Line - 1) }

// allocate gives the packet fragments for a frame. When it fails the packet holds
// what was allocated.
func (p *pair) allocate(pkt *packet.Packet, left uint32) bool {
	for rest := left; rest > 0; {
		n := min(rest, pagemem.PageSize)
		f, ok := p.alloc.alloc(lineAligned(n))
		if !ok {
			return false
		}
		pkt.Append(packet.Frag{Addr: f.Addr, Len: n, Page: f.Page})
		rest -= n
	}
	return true
}

// payload plans the copies of the frame behind the header into the packet's fragments.
func (p *pair) payload(segs []virtqueue.Seg, pkt *packet.Packet) {
	skip, frag, off := p.hdrLen, 0, uint32(0)
	for i := range segs {
		s := &segs[i]
		if skip >= s.Len {
			skip -= s.Len
			continue
		}
		src, n := s.Host+uintptr(skip), s.Len-skip
		skip = 0
		for n > 0 {
			f := &pkt.Frags[frag]
			m := min(n, f.Len-off)
			p.copies.add(f.Addr+uintptr(off), src, uint64(m), p.pastMin)
			src, n, off = src+uintptr(m), n-m, off+m
			if off == f.Len {
				frag, off = frag+1, 0
			}
		}
	}
}

// checkOffloads drops frames whose marks do not fit what they really are; it keeps
// the others in order.
func (p *pair) checkOffloads() {
	kept := 0
	for i := range p.out[:p.built] {
		pkt := &p.out[i]
		if pkt.Hdr.GSOType|pkt.Hdr.Flags != 0 {
			if reason := offload.Check(pkt); reason != 0 {
				p.refuse(p.outChain[i], &p.tx.reasons[reason%maxReasons])
				p.builtBytes -= int(pkt.Len)
				packet.Release(p.arena, p.out[i:i+1], p.owner)
				continue
			}
		}
		if kept != i {
			pkt.MoveTo(&p.out[kept])
			p.outChain[kept] = p.outChain[i]
		}
		kept++
	}
	p.built = kept
}

// complete stages used entries for the first n chains of the tx batch and publishes
// them but for the lag.
func (p *pair) complete(n int) {
	if n == 0 {
		return
	}
	r := &p.tx
	r.q.CompleteBatch(&p.txBatch, 0, n)
	r.batches++
	r.q.Publish(p.lag)
}
