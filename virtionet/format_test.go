package virtionet

import (
	"fmt"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// formats are the ring formats in which the same things must happen, with used entries for each chain or for each batch.
func formats(f virtio.Features) []virtio.Features {
	return []virtio.Features{f, f | virtio.FInOrder, f | virtio.FRingPacked, f | virtio.FRingPacked | virtio.FInOrder}
}

func (r *rig) packed() bool { return r.o.features.Has(virtio.FRingPacked) }

// split is the driver's side of a split ring, for tests that look into its memory.
func split(q driver.Queue) *driver.Ring { return q.(*driver.Ring) }

// done is how many chains of one descriptor the device has published and the driver not taken.
func (r *rig) done(i int) (n int) {
	if !r.packed() {
		return int(split(r.rings[i]).PeekUsedIdx() - r.rings[i].LastUsed())
	}
	q := r.rings[i].(*driver.PackedRing)
	at := q.LastUsed()
	for idx, wrap := int(at&0x7fff), at>>15 != 0; n < q.Outstanding(); n++ {
		used := uint16(0)
		if wrap {
			used = driver.DescFAvail | driver.DescFUsed
		}
		if _, _, _, flags := q.PeekDesc(idx); flags&(driver.DescFAvail|driver.DescFUsed) != used {
			break
		}
		if idx++; idx == q.Size() {
			idx, wrap = 0, !wrap
		}
	}
	return n
}

// nextWritten is the length of the used entry that GetUsed will take.
func (r *rig) nextWritten(i int) uint32 {
	at := r.rings[i].LastUsed()
	if r.packed() {
		_, n, _, flags := r.rings[i].(*driver.PackedRing).PeekDesc(int(at & 0x7fff))
		if flags&driver.DescFWrite == 0 {
			return 0
		}
		return n
	}
	_, n := split(r.rings[i]).PeekUsed(at)
	return n
}

// callAt asks for a call when the chain is used that is added after n others of one descriptor.
func (r *rig) callAt(i, n int) {
	q, ok := r.rings[i].(*driver.PackedRing)
	switch {
	case !ok:
		split(r.rings[i]).PokeUsedEvent(r.rings[i].AvailIdx() + uint16(n))
		split(r.rings[i]).PokeAvailFlags(0)
	case r.o.features.Has(virtio.FRingEventIdx):
		at := int(q.AvailIdx()&0x7fff) + n
		wrap := q.AvailIdx() & 0x8000
		if at < 0 {
			at, wrap = at+q.Size(), wrap^0x8000
		} else if at >= q.Size() {
			at, wrap = at-q.Size(), wrap^0x8000
		}
		q.PokeDriverEvent(uint16(at)|wrap, driver.EventDesc)
	default:
		q.PokeDriverEvent(0, driver.EventEnable)
	}
}

// breakRing makes ring i impossible behind what is available: in a packed ring by a chain whose second descriptor is not
// available. It reports false for a full packed ring, which the device does not look at.
func (r *rig) breakRing(i int) bool {
	q, ok := r.rings[i].(*driver.PackedRing)
	if !ok {
		split(r.rings[i]).PokeAvailIdx(r.rings[i].AvailIdx() + 1000)
		return true
	}
	if q.Free() == 0 {
		return false
	}
	flags := uint16(driver.DescFUsed)
	if q.AvailIdx()>>15 != 0 {
		flags = driver.DescFAvail
	}
	q.PokeDesc(int(q.AvailIdx()&0x7fff), 0, 0, 0, flags|driver.DescFNext)
	return true
}

// reset begins ring i anew.
func (r *rig) reset(i int) {
	r.bases[i] = 0
	if r.packed() {
		r.bases[i] = virtqueue.FreshPacked
	}
	r.rings[i].Reset(uint16(r.bases[i]))
}

// ringState is for messages about a ring that hangs.
func (r *rig) ringState(i int) string {
	s := fmt.Sprintf("ring %d: available %#x, taken %#x, %d published", i, r.rings[i].AvailIdx(), r.rings[i].LastUsed(), r.done(i))
	if q, ok := r.rings[i].(*driver.PackedRing); ok {
		at, flags := q.PeekDeviceEvent()
		return fmt.Sprintf("%s, event %#x, flags %d", s, at, flags)
	}
	return fmt.Sprintf("%s, event %d, flags %d", s, split(r.rings[i]).PeekAvailEvent(), split(r.rings[i]).PeekUsedFlags())
}
