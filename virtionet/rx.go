package virtionet

import (
	"encoding/binary"
	"time"

	"github.com/vhostd/vhostd/offload"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

func le64(b *[8]byte) uint64       { return binary.LittleEndian.Uint64(b[:]) }
func le32(b *[4]byte) uint32       { return binary.LittleEndian.Uint32(b[:]) }
func putLE64(b *[8]byte, v uint64) { binary.LittleEndian.PutUint64(b[:], v) }
func putLE32(b *[4]byte, v uint32) { binary.LittleEndian.PutUint32(b[:], v) }

// receive moves one batch from the port to the receiveq. It returns how many frames
// left the pending list, or how many chains were used up without, and the bytes copied.
func (p *pair) receive() (moved, bytes int) {
	r := &p.rx
	if !r.serviceable() || !r.enabled {
		return 0, 0
	}
	if len(p.finished)+len(p.pend) == 0 {
		if r.q.Empty() {
			return 0, 0 // frames stay at the port while there is nowhere to put them
		}
		n := p.queue.Recv(p.incoming[:])
		if n == 0 {
			return 0, 0
		}
		if p.filter != nil {
			if n = p.screen(n); n == 0 {
				return 1, 0
			}
		}
		p.pend = p.incoming[:n]
	}
	if p.starved {
		if !r.q.MoreAvailable() {
			return p.dropStuck(), 0
		}
		p.starved = false
	}
	src := p.source()
	if len(src) == 0 {
		return 1, 0 // all that was pending had to be dropped
	}
	before := r.bytes
	var done int
	if p.mrg {
		done = p.deliverMerged(src)
	} else {
		done = p.deliverSingle(src)
	}
	used := p.finishBatch()
	p.consume(src[:done])
	if done+used == 0 && r.serviceable() {
		done = p.dropStuck()
	} else {
		p.waitSince = time.Time{}
	}
	if done == 0 {
		return used, 0
	}
	p.txBlocked = false // what the port refused may fit now
	return done, int(r.bytes - before)
}

// finishBatch copies what was planned, writes the headers, and publishes. It returns
// how many chains that completes.
func (p *pair) finishBatch() (used int) {
	p.copies.run(cachedOnly)
	storeHeaders(p.headers[:p.nHeaders], p.hdrLen)
	p.nHeaders = 0
	if p.dirty.rx.On() {
		p.markReceived()
	}
	r := &p.rx
	if r.broken || r.q.Staged() == 0 {
		return 0
	}
	r.batches++
	return r.q.Publish(0)
}

// source returns the frames to deliver next: those that were finished in software
// first, else the pending ones up to the next that this guest cannot take as it is.
func (p *pair) source() []packet.Packet {
	for len(p.finished) == 0 && len(p.pend) > 0 {
		for i := range p.pend {
			if p.needsFinish(&p.pend[i]) {
				if i > 0 {
					return p.pend[:i]
				}
				break
			}
			if i == len(p.pend)-1 {
				return p.pend
			}
		}
		p.finishFirst()
	}
	return p.finished
}

func (p *pair) needsFinish(pkt *packet.Packet) bool {
	return pkt.Hdr.Flags|pkt.Hdr.GSOType != 0 && offload.Needs(pkt, p.features)
}

// finishFirst completes checksums and segments of the first pending frame.
func (p *pair) finishFirst() {
	if p.finishArea == nil {
		p.finishArea = make([]packet.Packet, offload.MaxSegments)
	}
	n, reason := p.finisher.Finish(&p.pend[0], p.features, p.finishArea)
	if reason != 0 {
		p.rx.refused(reason)
	}
	p.finished = p.finishArea[:n]
	p.pend = p.pend[1:]
}

// consume releases frames that were delivered or dropped.
func (p *pair) consume(done []packet.Packet) {
	packet.ReleaseBulk(p.arena, done, p.pages[:], p.owner)
	if len(p.finished) > 0 {
		p.finished = p.finished[len(done):]
		return
	}
	p.pend = p.pend[len(done):]
}

// dropStuck drops a frame that has been waiting too long for more buffers than the
// guest posts, so that the ones behind it get through.
func (p *pair) dropStuck() int {
	if p.rx.q.Empty() {
		p.waitSince = time.Time{} // no buffers at all: not this frame's fault
		return 0
	}
	if p.waitSince.IsZero() {
		p.waitSince = time.Now()
		return 0
	}
	if time.Since(p.waitSince) < stuckFrame {
		return 0
	}
	p.waitSince, p.starved = time.Time{}, false
	p.rx.dropped(dropNoBuffer)
	p.consume(p.source()[:1])
	return 1
}

// deliverSingle gives each frame one chain. It returns the frames used up.
func (p *pair) deliverSingle(src []packet.Packet) (done int) {
	r, b := &p.rx, &p.rxBatch
	b.Reset()
	n, err := r.q.Fill(b, min(len(src), virtqueue.MaxBatch))
	i := 0
	for i < n && done < len(src) {
		if k := p.placeRun(src[done:], b, i, n); k > 0 {
			i, done = i+k, done+k
			continue
		}
		c, pkt := &b.Chains[i], &src[done]
		need := pkt.Len + p.hdrLen
		switch {
		case c.Fault != 0:
			r.faulted(c.Fault)
			i++
		case c.Len <= p.hdrLen:
			r.dropped(dropUnusableBuffer)
			i++
		case c.Len < need:
			r.dropped(dropNoBuffer)
			done++
		default:
			p.plan(pkt, b.Segs[c.First:c.First+c.N], 1)
			c.Written = need
			r.packets++
			r.bytes += uint64(pkt.Len)
			i++
			done++
		}
	}
	r.q.CompleteBatch(b, 0, i)
	r.q.Unfill(n - i)
	if err != nil {
		p.fillFailed(r, err)
	}
	return done
}

// plan collects the copies of a frame into one chain that has room for it.
func (p *pair) plan(pkt *packet.Packet, segs []virtqueue.Seg, buffers uint16) {
	p.planHeader(pkt, segs, buffers)
	if pkt.NFrag == 1 && segs[0].Len >= p.hdrLen+pkt.Len {
		p.copies.add(segs[0].Host+uintptr(p.hdrLen), pkt.Frags[0].Addr, uint64(pkt.Len), cachedOnly)
		return
	}
	w := newFrameWalk(pkt)
	p.copyInto(segs, p.hdrLen, &w, pkt.Len)
}

// planHeader stores the header now or, where it is contiguous, after the payload.
// A driver without any offload sees zeros; VERSION_1 drivers see num_buffers even
// without MRG_RXBUF (virtio 1.2, 5.1.6.4.1).
func (p *pair) planHeader(pkt *packet.Packet, segs []virtqueue.Seg, buffers uint16) {
	if segs[0].Len < p.hdrLen || p.nHeaders == len(p.headers) {
		h := pkt.Hdr
		h.NumBuffers = buffers
		var raw [virtio.NetHdrLen]byte
		h.Encode(raw[:p.hdrLen])
		scatter(segs, raw[:p.hdrLen])
		return
	}
	p.headers[p.nHeaders].set(segs[0].Host, &pkt.Hdr, buffers)
	p.nHeaders++
}

// frameWalk is a read position in a frame.
type frameWalk struct {
	pkt  *packet.Packet
	frag int
	off  uint32
}

func newFrameWalk(pkt *packet.Packet) frameWalk { return frameWalk{pkt: pkt} }

// copyInto plans copies of up to limit bytes of the frame into segs, skip bytes from
// their start, and returns how many it planned.
func (p *pair) copyInto(segs []virtqueue.Seg, skip uint32, w *frameWalk, limit uint32) (planned uint32) {
	for i := 0; i < len(segs) && planned < limit; i++ {
		s := &segs[i]
		if skip >= s.Len {
			skip -= s.Len
			continue
		}
		dst, room := s.Host+uintptr(skip), s.Len-skip
		skip = 0
		for room > 0 && planned < limit {
			f := &w.pkt.Frags[w.frag]
			n := min(room, f.Len-w.off, limit-planned)
			p.copies.add(dst, f.Addr+uintptr(w.off), uint64(n), cachedOnly)
			dst, room, planned = dst+uintptr(n), room-n, planned+n
			if w.off += n; w.off == f.Len {
				w.frag, w.off = w.frag+1, 0
			}
		}
	}
	return planned
}
