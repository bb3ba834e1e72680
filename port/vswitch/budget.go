package vswitch

import (
	"sync/atomic"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/virtio"
)

// budgetShare is the part of the arena that waiting frames may occupy: the rest is for frames on the move.
const budgetShare = 4

// Budget bounds the memory of the frames that wait for their receivers, in all switches that share it. A port may hold as much as is
// free: a single guest that does not read gets half, the next one half of the rest, and there is always room for those that do read.
// (Dynamic thresholds, Choudhury and Hahne 1998.) The zero value is ready; the arena of the first queue sets the limit.
type Budget struct {
	limit atomic.Int64
	held  atomic.Int64
}

func (b *Budget) limitTo(a *pagemem.Arena) {
	b.limit.CompareAndSwap(0, int64(a.Bytes()/budgetShare))
}

// A frame costs, besides its bytes, the memory that it may keep from being used: the compound page that it shares with frames which
// are gone.
const frameCost = pagemem.ChunkSize

// maxCost is that of the largest frame.
const maxCost = virtio.MaxFrame + frameCost

func costOf(p *packet.Packet) int64 { return int64(p.Len) + frameCost }

// account is what one port holds of the budget.
type account struct {
	budget *Budget
	held   atomic.Int64
}

// charge adds to what the port holds, or gives back if cost is negative.
func (a *account) charge(cost int64) {
	a.held.Add(cost)
	a.budget.held.Add(cost)
}

// fit is how many of the packets, the first ones, the port may hold in addition.
func (a *account) fit(pkts []packet.Packet) (n int) {
	room := a.budget.limit.Load() - a.budget.held.Load() - a.held.Load()
	if room >= int64(len(pkts))*maxCost {
		return len(pkts)
	}
	for n < len(pkts) {
		if room -= costOf(&pkts[n]); room < 0 {
			break
		}
		n++
	}
	return n
}
