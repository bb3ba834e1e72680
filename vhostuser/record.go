package vhostuser

import (
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

// RingStore keeps words about rings where the end of a session or of the process does not reach them. A session calls
// it from one goroutine.
type RingStore interface {
	// Start returns the n words of ring i, which stay valid and in the ring's hands until Stop or the next Start of that
	// ring. same reports that they are those of the last Start with the same identity, and that Stop was not called since.
	Start(i int, identity [16]uint64, n int) (words []uint64, same bool, err error)
	// Stop ends what Start began: the front-end knows where the ring stopped.
	Stop(i int)
}

// virtioUserBase is what DPDK's virtio-user says of every packed ring. Before it attaches its rings again it begins them
// anew (virtio_user_reset_queues_packed in drivers/net/virtio/virtio_user/vhost_user.c and virtio_user_dev.c), with the same base.
const virtioUserBase = 1 << 15

// record returns the record of a ring that is about to start at a, nil for one that needs none: the used index of a split
// ring in the guest's memory says what a record would.
//
// The front-end's base counts unless everything says that this is the set-up that it was when the ring ran last, and that
// nobody was told since where it stopped: then the front-end repeats a base that is out of date.
func (s *Session) record(r *ring, a RingAddrs) *virtqueue.Record {
	if s.opts.Rings == nil || !s.packed() {
		return nil
	}
	dev, ino, region, ok := s.mem.Origin(a.Desc)
	if !ok {
		return nil
	}
	hasBase := uint64(0)
	if r.hasBase {
		hasBase = 1
	}
	features := s.acked &^ (virtio.FVhostLogAll | virtio.FVhostUserProtocolFeatures) // these say nothing of the ring
	id := [16]uint64{
		dev, ino, region.GPA, region.UVA, region.Size, region.MmapOffset,
		r.addr.Desc, r.addr.Avail, r.addr.Used, uint64(r.size), uint64(features), uint64(r.base), hasBase,
	}
	words, same, err := s.opts.Rings.Start(r.index, id, virtqueue.RecordWords(int(r.size)))
	if err != nil {
		s.once.log("ring record", "a ring's position is not kept: after a crash it will not resume", "ring", r.index, "err", err)
		return nil
	}
	return &virtqueue.Record{Words: words, Resume: same && r.base != virtioUserBase}
}

// resumed tells what became of a ring's record when the ring started.
func (s *Session) resumed(r *ring, rec *virtqueue.Record) {
	switch {
	case rec == nil || !rec.Resume:
	case rec.Resumed:
		s.logger.Info("ring resumed where it was", "ring", r.index)
	default:
		s.logger.Warn("ring starts where the front-end says", "ring", r.index, "reason", rec.Refused)
	}
}

// dropRecord ends the record of a ring that the front-end sets up anew, or of which it knows where it stopped.
func (s *Session) dropRecord(r *ring) {
	if s.opts.Rings != nil && s.packed() {
		s.opts.Rings.Stop(r.index)
	}
}
