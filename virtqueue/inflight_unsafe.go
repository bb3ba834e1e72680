package virtqueue

import "github.com/vhostd/vhostd/virtqueue/internal/word"

// splitRegion is a split ring's part of the inflight region: QueueRegionSplit and DescStateSplit of vhost-user.rst.
// Inflight.check has seen to it that the part is InflightBytes(entries) long and 8-aligned; every index used here is
// below entries.
type splitRegion struct {
	host    uintptr
	entries uint16
}

// ORDER: the region is read by the process that comes after this one, which sees the stores in the order of the program
// up to the instruction at which this one ended. The release stores keep the compiler to that order.

// header reads version, desc_num, last_batch_head and used_idx at once.
func (r splitRegion) header() (version, descs, last, used uint16) {
	// SAFETY: bytes 8 to 15 of the header, 8-aligned.
	// ORDER: none, the ring does not run yet.
	v := word.Load64(r.host + 8)
	return uint16(v), uint16(v >> 16), uint16(v >> 32), uint16(v >> 48)
}

func (r splitRegion) at(i uint16) uintptr { return r.host + splitHeader + splitEntry*uintptr(i) }

// entry reads inflight, next and counter.
func (r splitRegion) entry(i uint16) (inflight uint8, next uint16, counter uint64) {
	// SAFETY: i < entries, 16 bytes, 8-aligned.
	// ORDER: none, the ring does not run yet.
	v := word.Load64(r.at(i))
	return uint8(v), uint16(v >> 48), word.Load64(r.at(i) + 8)
}

// setState writes inflight and next.
func (r splitRegion) setState(i uint16, inflight uint8, next uint16) {
	// SAFETY: i < entries, 8 bytes, 8-aligned.
	// ORDER: as above; between the store of the used index and setUsed when it ends a batch.
	word.Store64Release(r.at(i), uint64(inflight)|uint64(next)<<48)
}

func (r splitRegion) setCounter(i uint16, counter uint64) {
	// SAFETY: i < entries, 8 bytes, 8-aligned.
	// ORDER: before the setState that makes it count.
	word.Store64Release(r.at(i)+8, counter)
}

func (r splitRegion) setLast(head uint16) {
	// SAFETY: last_batch_head, 2-aligned.
	// ORDER: after the entry's link, before the store of the used index.
	word.Store16Release(r.host+12, head)
}

func (r splitRegion) setUsed(idx uint16) {
	// SAFETY: used_idx, 2-aligned.
	// ORDER: after the marks of the batch.
	word.Store16Release(r.host+14, idx)
}

// end takes the version away, which is in the same place in both layouts.
func (r splitRegion) end() {
	// SAFETY: version, 2-aligned.
	// ORDER: after the ring's last store.
	word.Store16Release(r.host+8, 0)
}

// begin clears the region.
func (r splitRegion) begin(used uint16) {
	// SAFETY: the header and all entries, 8-aligned.
	// ORDER: no version while it is half done, and the version last.
	word.Store64Release(r.host+8, 0)
	word.Store64Release(r.host, 0)
	for i := range r.entries {
		r.setState(i, 0, 0)
	}
	word.Store64Release(r.host+8, inflightVersion|uint64(r.entries)<<16|uint64(used)<<48)
}
