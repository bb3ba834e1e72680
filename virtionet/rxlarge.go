package virtionet

import (
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

// deliverLarge places a frame that needs more chains than a batch holds. The chains are
// walked twice: first to see whether they have room, because a buffer that is given back
// must not have been written to, then to copy. It returns the frames used up.
func (p *pair) deliverLarge(pkt *packet.Packet) (done int) {
	r, b, m := &p.rx, &p.rxBatch, &p.merge
	chains, done := p.measure(pkt.Len + p.hdrLen)
	if chains == 0 {
		return done
	}
	w, left, skip := newFrameWalk(pkt), pkt.Len, p.hdrLen
	m.count, m.nHeader = 0, 0
	for walked := r.q.Walked(); m.count < chains && r.q.Walked()-walked < largeWalk; {
		b.Reset()
		n, err := r.q.Fill(b, min(virtqueue.MaxBatch, chains-m.count))
		if miss, ok := err.(*virtqueue.MissError); ok {
			r.q.Unfill(m.count) // what was copied is copied again, to buffers that are the device's until then
			p.await(r, miss)
			return 0
		}
		if n == 0 {
			break // the driver broke the ring meanwhile, which the next batch notices
		}
		for i := range n {
			c := &b.Chains[i]
			if p.unusable(c, m.count == 0) {
				r.q.Unfill(n - i - 1)
				m.add(c.Head, 0)
				p.abandonLarge()
				return 0
			}
			segs := b.Segs[c.First : c.First+c.N]
			if m.count == 0 {
				m.keepHeader(segs, p.hdrLen)
			}
			planned := p.copyInto(segs, skip, &w, left)
			c.Written = planned + skip
			m.add(c.Head, c.Written)
			left, skip = left-planned, 0
		}
		p.copies.run(cachedOnly)
		if p.dirty.rx.On() {
			p.markReceived()
		}
	}
	if left > 0 {
		p.abandonLarge() // the driver made chains shorter meanwhile
		return 0
	}
	p.completeLarge(pkt)
	return 1
}

// measure walks chains until they have room for need bytes, gives them back and returns
// how many they are. 0 means that the frame is not to be placed now; done is then 1 if it
// was dropped, which also happens to one that needs more descriptors than a turn may have.
func (p *pair) measure(need uint32) (chains, done int) {
	r, b, m := &p.rx, &p.rxBatch, &p.merge
	m.count = 0
	walked := r.q.Walked()
	for room := uint32(0); room < need; {
		if r.q.Walked()-walked >= largeWalk {
			r.q.Unfill(m.count)
			r.dropped(dropNoBuffer)
			return 0, 1
		}
		b.Reset()
		n, err := r.q.Fill(b, min(virtqueue.MaxBatch, maxMerged-m.count))
		if n == 0 {
			r.q.Unfill(m.count)
			if err != nil {
				p.fillFailed(r, err)
				return 0, 0
			}
			return 0, p.neverFits(m.count)
		}
		for i := range n {
			c := &b.Chains[i]
			if room >= need {
				r.q.Unfill(n - i)
				break
			}
			bad := p.unusable(c, m.count == 0)
			m.add(c.Head, 0)
			if bad {
				r.q.Unfill(n - i - 1)
				p.abandonLarge()
				return 0, 0
			}
			room += c.Len
		}
	}
	r.q.Unfill(m.count)
	return m.count, 0
}

func (m *mergeState) add(head uint16, written uint32) {
	m.heads[m.count] = usedChain{head: head, written: written}
	m.count++
}

// abandonLarge completes the chains taken so far empty.
func (p *pair) abandonLarge() {
	p.copies.run(cachedOnly)
	for i := range p.merge.heads[:p.merge.count] {
		p.rx.q.Complete(p.merge.heads[i].head, 0)
	}
}

func (p *pair) completeLarge(pkt *packet.Packet) {
	m := &p.merge
	h := pkt.Hdr
	h.NumBuffers = uint16(m.count)
	var raw [virtio.NetHdrLen]byte
	h.Encode(raw[:p.hdrLen])
	scatter(m.header[:m.nHeader], raw[:p.hdrLen])
	p.markSegs(m.header[:m.nHeader], p.hdrLen)
	for i := range m.heads[:m.count] {
		p.rx.q.Complete(m.heads[i].head, m.heads[i].written)
	}
	p.rx.packets++
	p.rx.bytes += uint64(pkt.Len)
}

// keepHeader remembers where the header goes: num_buffers is known only at the end.
func (m *mergeState) keepHeader(segs []virtqueue.Seg, hdrLen uint32) {
	for i := range segs {
		if hdrLen == 0 {
			return
		}
		n := min(hdrLen, segs[i].Len)
		if n > 0 {
			m.header[m.nHeader] = virtqueue.Seg{Host: segs[i].Host, Len: n}
			m.nHeader++
			hdrLen -= n
		}
	}
}
