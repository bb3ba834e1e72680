package offload

import (
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/virtio"
)

// BufSize is the largest buffer that is asked of an [Allocator], in bytes.
const BufSize = pagemem.PageSize

// MaxSegments is the largest number of frames that one frame can become.
const MaxSegments = (virtio.MaxFrame + virtio.MinGSOSize - 1) / virtio.MinGSOSize

// Allocator supplies buffers for what has to be copied. AllocBuf returns size
// bytes of writable arena memory, 1 to [BufSize], that nobody else sees, with
// one reference on its page, or false when there is none.
type Allocator interface {
	AllocBuf(size uint32) (packet.Frag, bool)
}

// Finisher turns frames into what a receiver can take. It is used by one
// goroutine at a time and allocates nothing.
type Finisher struct {
	// Arena is where the packets' pages come from, and where references that
	// are no longer needed go.
	Arena *pagemem.Arena
	// Alloc supplies the buffers for changed bytes.
	Alloc Allocator
	// Owner is the caller's identity for releases.
	Owner pagemem.OwnerID

	head [maxHeader]byte // private copy of the frame's start
	flat packet.Packet   // a frame that is being copied whole
}

// Finish consumes p and fills out with n frames, which the caller then owns,
// that a receiver with the negotiated features rx can take: p itself when
// nothing has to change, else the frame with its checksum finished, or its
// segments. Finished frames carry no marks. On a reason other than [OK] the
// frame is dropped: n is 0 and everything is released.
//
// out must have room for [MaxSegments] frames and must not contain p. It need
// not be initialized: old contents are overwritten without being released. One
// array a worker is enough.
func (f *Finisher) Finish(p *packet.Packet, rx virtio.Features, out []packet.Packet) (n int, r Reason) {
	if len(out) == 0 {
		r = NoRoom
	} else if Needs(p, rx) {
		n, r = f.convert(p, rx, out)
	} else {
		n = 1
		p.MoveTo(&out[0])
	}
	if r != OK {
		p.Release(f.Arena, f.Owner)
	}
	return n, r
}

// convert is Finish for a frame that rx cannot take as it is. On a reason other
// than OK it leaves p to be released.
func (f *Finisher) convert(p *packet.Packet, rx virtio.Features, out []packet.Packet) (int, Reason) {
	h := &p.Hdr
	if h.GSOType != virtio.GSONone {
		l, r := checkGSO(p, f.head[:p.PeekHeader(f.head[:])])
		if r != OK {
			return 0, r
		}
		if !rx.Has(gsoFeatures(h.GSOType)) {
			return f.segment(p, &l, out)
		}
	} else if r := checkCsum(p); r != OK {
		return 0, r
	}
	if h.Flags&virtio.HdrFNeedsCsum != 0 && !rx.Has(virtio.FNetGuestCSum) {
		if r := f.complete(p); r != OK {
			return 0, r
		}
	}
	strip(h, rx)
	p.MoveTo(&out[0])
	return 1, OK
}

// strip leaves in h only the marks that mean something to rx. NEEDS_CSUM
// excludes DATA_VALID (VIRTIO 1.2, 5.1.6.4.1).
func strip(h *virtio.NetHdr, rx virtio.Features) {
	if !rx.Has(virtio.FNetGuestCSum) {
		*h = virtio.NetHdr{}
		return
	}
	switch {
	case h.Flags&virtio.HdrFNeedsCsum != 0:
		h.Flags = virtio.HdrFNeedsCsum
	case h.GSOType != virtio.GSONone:
		h.Flags = virtio.HdrFDataValid
	default:
		*h = virtio.NetHdr{Flags: h.Flags & virtio.HdrFDataValid}
	}
}
