package virtionet

import (
	"unsafe"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

// hostBytes is guest or arena memory as a slice.
func hostBytes(host uintptr, n uint32) []byte {
	// SAFETY: virtqueue translated host for at least n bytes of a mapping outside the
	// Go heap, which stays mapped while the batch is worked; a page that vanished
	// faults and is charged to the guest. Bytes need no alignment.
	return unsafe.Slice((*byte)(*(*unsafe.Pointer)(unsafe.Pointer(&host))), n)
}

// gather copies the first len(dst) bytes of a chain.
func gather(dst []byte, segs []virtqueue.Seg) {
	for i := range segs {
		if len(dst) == 0 {
			return
		}
		dst = dst[copy(dst, hostBytes(segs[i].Host, segs[i].Len)):]
	}
}

// scatter copies src to the start of a chain.
func scatter(segs []virtqueue.Seg, src []byte) {
	for i := range segs {
		if len(src) == 0 {
			return
		}
		src = src[copy(hostBytes(segs[i].Host, segs[i].Len), src):]
	}
}

// headerStore is a rx header to write once the payload is in place.
type headerStore struct {
	host uintptr
	lo   uint64 // the first 8 bytes of virtio_net_hdr
	hi   uint32 // csum_offset and num_buffers
}

// set plans to write h with the given num_buffers.
func (s *headerStore) set(host uintptr, h *virtio.NetHdr, buffers uint16) {
	// SAFETY: a NetHdr is the 12 bytes of virtio_net_hdr with num_buffers at the end, in
	// the byte order of amd64 and arm64 hosts, which is the header's.
	raw := (*[3]uint32)(unsafe.Pointer(h))
	s.host, s.lo, s.hi = host, uint64(raw[0])|uint64(raw[1])<<32, raw[2]&0xffff|uint32(buffers)<<16
}

// storeHeaders writes headers where they differ from what is there: in the common case
// they do not, and the line stays clean in the guest's cache.
func storeHeaders(headers []headerStore, hdrLen uint32) {
	if hdrLen == 10 {
		for i := range headers {
			headers[i].storeShort()
		}
		return
	}
	for i := range headers {
		h := &headers[i]
		// SAFETY: the segment that starts at host has at least 12 bytes of guest memory (checked
		// when the header was planned); amd64 and arm64 allow unaligned plain loads and stores.
		// ORDER: plain accesses; the release store of the used index follows them.
		p := *(*unsafe.Pointer)(unsafe.Pointer(&h.host))
		lo, hi := (*[8]byte)(p), (*[4]byte)(unsafe.Add(p, 8))
		if le64(lo) != h.lo {
			putLE64(lo, h.lo)
		}
		if le32(hi) != h.hi {
			putLE32(hi, h.hi)
		}
	}
}

// storeShort is the same for the 10 bytes of a header without num_buffers.
func (h *headerStore) storeShort() {
	// SAFETY: as in storeHeaders, with 10 bytes.
	// ORDER: as in storeHeaders.
	p := *(*unsafe.Pointer)(unsafe.Pointer(&h.host))
	lo, off := (*[8]byte)(p), (*[2]byte)(unsafe.Add(p, 8))
	if le64(lo) != h.lo {
		putLE64(lo, h.lo)
	}
	if v := uint16(off[0]) | uint16(off[1])<<8; v != uint16(h.hi) {
		off[0], off[1] = byte(h.hi), byte(h.hi>>8)
	}
}
