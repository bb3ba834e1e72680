package driver

import (
	"fmt"

	"github.com/vhostd/vhostd/virtqueue/internal/word"
)

// GetUsed takes back the next used chain: the id that Add returned and how many
// bytes the device says it wrote. ok is false when there is none, or when the
// device broke the ring, which Err tells. With VIRTIO_F_IN_ORDER one used
// descriptor may stand for several chains; the length of all but the last of
// those is unknown and 0.
func (r *PackedRing) GetUsed() (id uint16, written uint32, ok bool) {
	if r.err != nil || !r.batch && !r.nextBatch() {
		return 0, 0, false
	}
	id = r.last
	if r.inOrder {
		id = r.oldest
		if r.oldest++; int(r.oldest) == len(r.descs) {
			r.oldest = 0
		}
	}
	if id == r.last {
		r.batch, written = false, r.lastUsed
	}
	descs := int(r.descs[id])
	r.descs[id] = 0
	r.free.push(id)
	r.chains--
	r.numFree += descs
	r.used = r.used.add(descs, r.mem.size)
	return id, written, true
}

// nextBatch reads the used descriptor that comes next.
func (r *PackedRing) nextBatch() bool {
	meta := r.mem.loadMeta(r.used.idx)
	id, flags := uint16(meta>>32), uint16(meta>>48)
	if flags&(DescFAvail|DescFUsed) != r.used.usedFlags() {
		return false
	}
	if int(id) >= len(r.descs) || r.descs[id] == 0 {
		r.err = fmt.Errorf("driver: used descriptor %d names id %d, which is not outstanding", r.used.idx, id)
		return false
	}
	r.batch, r.last, r.lastUsed = true, id, 0
	if flags&DescFWrite != 0 {
		r.lastUsed = uint32(meta)
	}
	return true
}

// HasUsed reports whether GetUsed would find something.
func (r *PackedRing) HasUsed() bool { return r.err == nil && (r.batch || r.isUsed(r.used)) }

func (r *PackedRing) isUsed(at place) bool {
	return uint16(r.mem.loadMeta(at.idx)>>48)&(DescFAvail|DescFUsed) == at.usedFlags()
}

// NeedsKick reports whether the device wants a kick for what was published since
// it was last asked.
func (r *PackedRing) NeedsKick() bool {
	n := r.unkicked
	r.unkicked = 0
	if n == 0 {
		return false
	}
	// ORDER: the available descriptors against the device's structure; pairs with
	// the device's barrier between writing that and looking at the descriptors.
	word.Fence()
	event, flags := r.mem.deviceEvent()
	if flags != EventDesc || !r.eventIdx {
		return flags != EventDisable
	}
	to := r.avail
	if r.pending > 0 {
		to = r.begin
	}
	at := placeOf(event)
	distance := to.idx - at.idx
	if to.wrap != at.wrap {
		distance += r.mem.size
	}
	return n >= r.mem.size || 0 < distance && distance <= n
}

// EnableCalls asks for a call for the next used chain. It returns true if
// chains are waiting already, for which no call may come.
func (r *PackedRing) EnableCalls() (more bool) { return r.requestCall(0) }

// DelayCalls asks for a call after about three quarters of the outstanding
// descriptors are used. Without event suppression by descriptor it is
// EnableCalls. It returns true if any chain is waiting: a descriptor within a
// chain does not show that it was passed.
func (r *PackedRing) DelayCalls() (more bool) {
	return r.requestCall((r.mem.size - r.numFree) * 3 / 4)
}

func (r *PackedRing) requestCall(after int) (more bool) {
	at := r.used
	if r.eventIdx {
		at = at.add(after, r.mem.size)
		r.mem.storeDriverEvent(at.word(), EventDesc)
	} else {
		r.mem.storeDriverEvent(0, EventEnable)
	}
	// ORDER: the request against the used descriptors; pairs with the device's
	// barrier between its descriptors and its look at the request.
	word.Fence()
	return r.HasUsed()
}

// DisableCalls tells the device that calls are not needed.
func (r *PackedRing) DisableCalls() { r.mem.storeDriverEvent(0, EventDisable) }
