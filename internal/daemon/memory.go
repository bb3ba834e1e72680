package daemon

import (
	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

const (
	// guestShare is the part of the arena that the frames of one guest may occupy which it has no receive buffers for.
	guestShare = 3
	// frameBytes is the memory of the largest frame.
	frameBytes = (virtio.MaxFrame + pagemem.PageSize - 1) / pagemem.PageSize * pagemem.PageSize
)

// fairBatch is how many frames each queue of a guest may receive at a time, so that what waits in all of them for receive buffers stays within
// the guest's share of an arena of so many bytes, but for one frame each; 0 if it does whatever they receive. A front-end may use twice the
// queue pairs that are offered.
func fairBatch(arena uint64, pairs int) int {
	queues := min(2*pairs, config.MaxQueuePairs)
	if n := arena / guestShare / uint64(queues*frameBytes); n < virtqueue.MaxBatch {
		return max(int(n), 1)
	}
	return 0
}
