package user

import (
	"sync"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/vhostd/vhostd/virtio"
)

const (
	// ringFrames is how many frames wait for the guest in one queue at most; the windows of a few fast connections fit.
	ringFrames = 4096
	// ringBytes is what waits in all queues of a port together. TCP's share of it is memory that the stack holds anyway.
	ringBytes = 32 << 20
	firstRing = 64
)

// outFrame is a frame for the guest that is not in its pages yet: the Ethernet header, and behind it a packet of the stack or one of ours.
type outFrame struct {
	hdr  virtio.NetHdr
	eth  [virtio.EthernetHdrLen]byte
	pkt  *stack.PacketBuffer // one reference, or nil
	view *buffer.View        // owned, if pkt is nil
	size uint32              // with the Ethernet header
}

func (f *outFrame) release() {
	if f.pkt != nil {
		f.pkt.DecRef()
	} else if f.view != nil {
		f.view.Release()
	}
	f.pkt, f.view = nil, nil
}

// copyTo writes the frame into the pieces that next returns, which together hold exactly its size.
func (f *outFrame) copyTo(next func() []byte) {
	dst := next()
	put := func(src []byte) {
		for len(src) > 0 {
			if len(dst) == 0 {
				dst = next()
			}
			n := copy(dst, src)
			src, dst = src[n:], dst[n:]
		}
	}
	put(f.eth[:])
	if f.pkt == nil {
		put(f.view.AsSlice())
		return
	}
	views, skip := f.pkt.AsViewList()
	for v := views.Front(); v != nil; v = v.Next() {
		b := v.AsSlice()
		if skip >= len(b) {
			skip -= len(b)
			continue
		}
		put(b[skip:])
		skip = 0
	}
}

// ring is a bounded queue that any goroutine fills and one worker empties. It grows with what waits, for most guests never send
// nor receive much.
type ring struct {
	held *atomic.Int64 // bytes in all rings of the port

	mu     sync.Mutex
	frames []outFrame // a power of two
	head   int
	count  int
	closed bool

	waiting atomic.Int32 // count, for those that only look
}

// push takes f over, or says why not and leaves it.
func (r *ring) push(f *outFrame) reason {
	if r.held.Add(int64(f.size)) > ringBytes {
		r.held.Add(-int64(f.size))
		return ringFull
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.closed:
		r.held.Add(-int64(f.size))
		return noQueue
	case r.count == ringFrames:
		r.held.Add(-int64(f.size))
		return ringFull
	case r.count == len(r.frames):
		r.grow()
	}
	r.frames[(r.head+r.count)&(len(r.frames)-1)] = *f
	r.count++
	r.waiting.Store(int32(r.count))
	return accepted
}

func (r *ring) grow() {
	bigger := make([]outFrame, max(firstRing, 2*len(r.frames)))
	for i := range r.count {
		bigger[i] = r.frames[(r.head+i)&(len(r.frames)-1)]
	}
	r.frames, r.head = bigger, 0
}

// pop moves up to len(dst) frames out.
func (r *ring) pop(dst []outFrame) (n int) {
	if r.waiting.Load() == 0 {
		return 0
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	bytes := int64(0)
	for n < len(dst) && r.count > 0 {
		f := &r.frames[r.head]
		dst[n] = *f
		f.pkt, f.view = nil, nil
		bytes += int64(f.size)
		n++
		r.head = (r.head + 1) & (len(r.frames) - 1)
		r.count--
	}
	r.held.Add(-bytes)
	r.waiting.Store(int32(r.count))
	return n
}

func (r *ring) empty() bool { return r.waiting.Load() == 0 }

// close releases what waits; nothing enters any more.
func (r *ring) close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.closed = true
	for ; r.count > 0; r.count-- {
		f := &r.frames[r.head]
		r.held.Add(-int64(f.size))
		f.release()
		r.head = (r.head + 1) & (len(r.frames) - 1)
	}
	r.frames = nil
	r.waiting.Store(0)
}
