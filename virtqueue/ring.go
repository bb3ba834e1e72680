package virtqueue

import (
	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
)

// Ring is the device side of a ring of either format. It has one owner at a
// time. The methods are documented at [Split]; [Packed] says where it differs.
type Ring interface {
	Size() int
	Fill(b *Batch, max int) (n int, err error)
	Unfill(n int)
	Complete(head uint16, written uint32)
	CompleteBatch(b *Batch, from, n int)
	Staged() int
	Publish(lag int) (published int)
	NeedsCall() bool
	EnableKicks() (more bool)
	EnableKicksForMore() (more bool)
	DisableKicks()
	Empty() bool
	MoreAvailable() bool
	Walked() uint64
	SetMemory(t *guestmem.Table, desc, avail, used uintptr)
	Position() Position
	Consumed() Position
	AvailSeen() uint16
}

var (
	_ Ring = (*Split)(nil)
	_ Ring = (*Packed)(nil)
)

// New makes the device side of a ring of the format that was acked.
func New(cfg Config) (Ring, error) {
	var q Ring
	var err error
	if cfg.Features.Has(virtio.FRingPacked) {
		q, err = NewPacked(cfg)
	} else {
		q, err = NewSplit(cfg)
	}
	if err != nil {
		return nil, err
	}
	return q, nil
}
