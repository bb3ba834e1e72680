package virtionet

import (
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

// maxMerged bounds the buffers of one merged frame (UIO_MAXIOV of vhost_net's rx
// quota, drivers/vhost/net.c).
const maxMerged = 1024

// mergeState is the scratch of mergeable receive buffers (VIRTIO_NET_F_MRG_RXBUF).
type mergeState struct {
	lastLen uint32 // capacity of the chain seen last: a hint for how many to fetch
	heads   [maxMerged]usedChain
	count   int // heads in use
	header  [virtio.NetHdrLen]virtqueue.Seg
	nHeader int // segments that hold the header
}

type usedChain struct {
	head    uint16
	written uint32
}

// deliverMerged spreads each frame over as many chains as it needs. A frame that the
// posted buffers do not cover is left alone with all its chains given back: nothing
// of it is published. It returns the frames used up.
func (p *pair) deliverMerged(src []packet.Packet) (done int) {
	r, b := &p.rx, &p.rxBatch
	b.Reset()
	want := p.chainsFor(src)
	n, err := r.q.Fill(b, want)
	dry := n < want && r.q.Empty()
	taken := 0 // chains to complete
	for done < len(src) && taken < n {
		if k := p.placeRun(src[done:], b, taken, n); k > 0 {
			taken, done = taken+k, done+k
			continue
		}
		used, fits := p.mergeOne(&src[done], b, taken, n)
		taken += used
		if fits {
			done++
		} else if used == 0 {
			break
		}
	}
	r.q.CompleteBatch(b, 0, taken)
	r.q.Unfill(n - taken)
	if err != nil {
		p.fillFailed(r, err)
		return done
	}
	switch {
	case done > 0 || taken > 0 || n == 0:
		return done
	case dry:
		return p.neverFits(n)
	}
	return p.deliverLarge(&src[0])
}

// neverFits drops a frame for which all the buffers that the ring can hold are not
// enough; with fewer posted it waits for more.
func (p *pair) neverFits(chains int) (done int) {
	if chains < min(maxMerged, p.rx.q.Size()) {
		p.starved = true
		return 0
	}
	p.rx.dropped(dropNoBuffer)
	return 1
}

// chainsFor estimates how many chains the frames need.
func (p *pair) chainsFor(src []packet.Packet) int {
	if p.merge.lastLen == 0 {
		return virtqueue.MaxBatch
	}
	want := 0
	for i := range src {
		need := src[i].Len + p.hdrLen
		if need <= p.merge.lastLen {
			want++ // and no division, for the common frame
		} else {
			want += int((need + p.merge.lastLen - 1) / p.merge.lastLen)
		}
		if want >= virtqueue.MaxBatch {
			return virtqueue.MaxBatch
		}
	}
	return want
}

// mergeOne tries to place a frame in the chains [at, n) of the batch. It returns how
// many chains that uses up and whether the frame was placed. Chains that can hold
// nothing are completed empty; so are good ones in front of a bad one, because used
// entries of one frame must be neighbors.
func (p *pair) mergeOne(pkt *packet.Packet, b *virtqueue.Batch, at, n int) (used int, fits bool) {
	need, room, end := pkt.Len+p.hdrLen, uint32(0), at
	for room < need {
		if end == n {
			return 0, false
		}
		c := &b.Chains[end]
		end++
		if p.unusable(c, end-1 == at) {
			return end - at, false
		}
		room += c.Len
	}
	p.merge.lastLen = b.Chains[at].Len
	count := uint16(end - at)
	if count == 1 {
		c := &b.Chains[at]
		p.plan(pkt, b.Segs[c.First:c.First+c.N], 1)
		c.Written = need
	} else {
		p.spread(pkt, b, at, end, count)
	}
	p.rx.packets++
	p.rx.bytes += uint64(pkt.Len)
	return end - at, true
}

// unusable reports, and counts, a chain that cannot carry frame bytes. The first
// chain of a frame must hold the whole header.
func (p *pair) unusable(c *virtqueue.Chain, first bool) bool {
	switch {
	case c.Fault != 0:
		p.rx.faulted(c.Fault)
	case c.Len == 0 || first && c.Len < p.hdrLen:
		p.rx.dropped(dropUnusableBuffer)
	default:
		return false
	}
	return true
}

// spread plans a frame over the chains [at, end), which have room for it.
func (p *pair) spread(pkt *packet.Packet, b *virtqueue.Batch, at, end int, count uint16) {
	w, left, skip := newFrameWalk(pkt), pkt.Len, p.hdrLen
	for i := at; i < end; i++ {
		c := &b.Chains[i]
		segs := b.Segs[c.First : c.First+c.N]
		if i == at {
			p.planHeader(pkt, segs, count)
		}
		n := p.copyInto(segs, skip, &w, left)
		c.Written = n + skip
		left, skip = left-n, 0
	}
}
