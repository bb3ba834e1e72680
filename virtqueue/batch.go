package virtqueue

// MaxBatch is how many chains a Batch holds.
const MaxBatch = 32

// MaxSegs is how many segments a Batch, and so one chain, holds. The number is
// vhost's UIO_MAXIOV plus room for one frame more (drivers/vhost/net.c).
const MaxSegs = 1024 + 64

// MaxSize is the largest ring (virtio 1.3 section 2.7).
const MaxSize = 32768

// Seg is a piece of guest memory that is contiguous in this process. A buffer
// that crosses from one region into the next becomes several. It is valid
// until the table it was translated with is closed.
type Seg struct {
	Host uintptr
	Len  uint32
}

// Chain is one descriptor chain of a Batch.
type Chain struct {
	Head     uint16 // id to return in the used ring
	Fault    Fault  // 0: usable; else N is 0 and the chain is completed with length 0
	First, N uint16 // Segs[First:First+N] of the batch
	Descs    uint16 // entries of the ring's descriptor table used; an indirect table is one
	Readable uint16 // with Config.BothWays: the device reads so many of the N segments, the rest it writes
	Len      uint32 // sum of the segment lengths in bytes; saturates at 1<<31
	Written  uint32 // for CompleteBatch: bytes written to the chain; Fill sets 0
}

// Batch is the scratch space that Fill appends to. It is large: allocate it
// once for each queue pair.
type Batch struct {
	Chains [MaxBatch]Chain
	N      int // chains in use
	Segs   [MaxSegs]Seg
	NSegs  int // segments in use
}

// Reset empties the batch.
func (b *Batch) Reset() { b.N, b.NSegs = 0, 0 }

// ChainSegs returns chain i's segments, valid until the batch changes.
func (b *Batch) ChainSegs(i int) []Seg {
	c := &b.Chains[i]
	return b.Segs[c.First : int(c.First)+int(c.N)]
}

// Fault says what is wrong with a chain; 0 is a good one.
type Fault uint8

// Faults of a chain.
const (
	FaultNone      Fault = iota
	FaultAddress         // a buffer or table is not entirely in guest memory
	FaultLength          // the buffers add up to 4 GiB or more
	FaultDirection       // device-writable where readable was due, or the reverse
	FaultLoop            // more descriptors than the table holds: a loop
	FaultNext            // next is outside the descriptor table
	FaultNested          // an indirect table inside an indirect table
	FaultIndirect        // indirect without the feature, together with NEXT, or of an impossible length
	FaultTooLong         // more than MaxSegs descriptors or segments
	numFaults

	faultMissing = numFaults // not the chain's: it stays on the ring
)

var faultNames = [numFaults]string{
	"none", "address", "length", "direction", "loop", "next", "nested", "indirect", "too_many_segments",
}

// String is the fault as a metric label.
func (f Fault) String() string {
	if f < numFaults {
		return faultNames[f]
	}
	return "unknown"
}

// Faults lists every fault but FaultNone, for tables of counters.
func Faults() []Fault {
	all := make([]Fault, 0, numFaults-1)
	for f := FaultNone + 1; f < numFaults; f++ {
		all = append(all, f)
	}
	return all
}
