package vhostuser

import "github.com/vhostd/vhostd/virtio"

// QueueNum is the answer to GET_QUEUE_NUM of a device with the given number of
// data rings: the control queue is one more, unless the protocol has no index for it.
func QueueNum(dataRings int) int { return min(dataRings+1, MaxSessionRings) }

// RingLimit is how many ring indexes a session accepts for a device with the given
// number of data rings: QEMU reads GET_QUEUE_NUM as queue pairs.
func RingLimit(dataRings int) int { return min(2*QueueNum(dataRings), MaxSessionRings) }

// controlIndex is the index of the control queue under the acknowledged features,
// -1 if they have none (virtio 1.2 section 5.1.2).
func controlIndex(dataRings int, acked virtio.Features) int {
	switch {
	case !acked.Has(virtio.FNetCtrlVQ):
		return -1
	case acked.Has(virtio.FNetMQ):
		return dataRings
	}
	return 2
}

// getQueueNum answers virtqueues, not queue pairs; see the package documentation.
func (s *Session) getQueueNum(m *message) error {
	m.replyU64(uint64(QueueNum(s.dev.MaxRings())))
	return nil
}
