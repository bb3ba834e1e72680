package driver

// Queue is the driver side of a ring of either format. The methods are
// documented at [Ring]; [PackedRing] says where it differs.
type Queue interface {
	Size() int
	Free() int
	Outstanding() int
	AvailIdx() uint16
	LastUsed() uint16
	AddDirect(b Buf) (head uint16, err error)
	AddChain(bufs []Buf) (head uint16, err error)
	AddIndirect(host uintptr, addr uint64, bufs []Buf) (head uint16, err error)
	Publish() int
	NeedsKick() bool
	HasUsed() bool
	GetUsed() (head uint16, written uint32, ok bool)
	EnableCalls() (more bool)
	DelayCalls() (more bool)
	DisableCalls()
	Reset(start uint16)
	Attach(pos uint16)
	Err() error
}

var (
	_ Queue = (*Ring)(nil)
	_ Queue = (*PackedRing)(nil)
)
