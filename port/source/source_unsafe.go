package source

import (
	"math/bits"
	"unsafe"

	"github.com/vhostd/vhostd/packet"
)

// pointer makes a pointer of a host address.
func pointer(addr uintptr) unsafe.Pointer {
	// SAFETY: callers pass addresses inside the arena's mapping, which is outside the Go heap.
	return *(*unsafe.Pointer)(unsafe.Pointer(&addr))
}

// writeBytes copies b to addr, which starts inside a page of the queue's own with at least len(b) bytes to its end. Go
// 1.26.8 crashes when it inlines a copy of constant length to a pointer that was made of a number.
//
//go:noinline
func writeBytes(addr uintptr, b []byte) {
	// SAFETY: len(b) bytes from addr on are inside one page, which the pool handed to this queue and nobody else uses.
	copy(unsafe.Slice((*byte)(pointer(addr)), len(b)), b)
}

// markAll writes the next sequence numbers and flows into frames of one fragment.
func (q *queue) markAll(pkts []packet.Packet) {
	if !q.layout.marked {
		return
	}
	if q.flows > 1 {
		for i := range pkts {
			q.mark(pkts[i].Frags[0].Addr)
		}
		return
	}
	at, seq := q.layout.seq, q.seq
	for i := range pkts {
		setSeq(pkts[i].Frags[0].Addr+at, seq)
		seq++
	}
	q.seq = seq
}

// setSeq writes a sequence number and its complement.
func setSeq(addr uintptr, seq uint32) {
	// SAFETY: the frame has at least minUDP bytes in a page of the queue's own, and starts at a multiple of headLen; the
	// offsets of layoutOf are within the first headLen bytes, end before minUDP, and are aligned.
	p := (*[2]uint32)(pointer(addr))
	p[0], p[1] = bits.ReverseBytes32(seq), bits.ReverseBytes32(^seq)
}

// mark writes the next sequence number and flow into the frame at addr.
func (q *queue) mark(addr uintptr) {
	if !q.layout.marked {
		return
	}
	setSeq(addr+q.layout.seq, q.seq)
	q.seq++
	if q.flows == 1 {
		return
	}
	port := uint16(firstPort + q.flow)
	// SAFETY: as in setSeq.
	*(*uint16)(pointer(addr + q.layout.port)) = bits.ReverseBytes16(port)
	// SAFETY: as in setSeq.
	*(*uint16)(pointer(addr + q.layout.portNot)) = bits.ReverseBytes16(^port)
	if q.flow++; q.flow == q.flows {
		q.flow = 0
	}
}
