// Package waiting bounds the memory of frames that wait in networks for guests that do not read.
package waiting

import (
	"sync/atomic"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/virtio"
)

// Budget bounds the memory of the frames that wait for their receivers, in all networks that share it. A port may hold as much as is
// free: a single guest that does not read gets half, the next one half of the rest, and there is always room for those that do read.
// (Dynamic thresholds, Choudhury and Hahne 1998.) The zero value is ready; the first queue sets the limit. It is safe for concurrent use.
type Budget struct {
	limit atomic.Int64
	held  atomic.Int64
}

// LimitTo sets the limit in bytes, unless there is one.
func (b *Budget) LimitTo(n uint64) { b.limit.CompareAndSwap(0, int64(n)) }

// SetLimit sets the limit in bytes.
func (b *Budget) SetLimit(n int64) { b.limit.Store(n) }

// Limit is the limit in bytes, 0 before there is one.
func (b *Budget) Limit() int64 { return b.limit.Load() }

// Held is what waits in all networks, in bytes.
func (b *Budget) Held() int64 { return b.held.Load() }

// FrameCost is what a frame costs besides its bytes: the memory that it may keep from being used, the compound page that it shares with
// frames which are gone.
const FrameCost = pagemem.ChunkSize

// maxCost is that of the largest frame.
const maxCost = virtio.MaxFrame + FrameCost

// CostOf is what a frame costs.
func CostOf(p *packet.Packet) int64 { return int64(p.Len) + FrameCost }

// Account is what one port holds of the budget. It is safe for concurrent use; Budget is set before.
type Account struct {
	Budget *Budget
	held   atomic.Int64
}

// Held is what the port holds, in bytes.
func (a *Account) Held() int64 { return a.held.Load() }

// Charge adds to what the port holds, or gives back if cost is negative.
func (a *Account) Charge(cost int64) {
	a.held.Add(cost)
	a.Budget.held.Add(cost)
}

// Room is what the port may hold in addition, in bytes; it may be negative.
func (a *Account) Room() int64 { return a.Budget.limit.Load() - a.Budget.held.Load() - a.held.Load() }

// Fit is how many of the packets, the first ones, the port may hold in addition.
func (a *Account) Fit(pkts []packet.Packet) (n int) {
	room := a.Room()
	if room >= int64(len(pkts))*maxCost {
		return len(pkts)
	}
	for n < len(pkts) {
		if room -= CostOf(&pkts[n]); room < 0 {
			break
		}
		n++
	}
	return n
}
