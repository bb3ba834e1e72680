// Package port is the network side of a vhost-user device: what lies behind the queue pairs.
//
// A Port is one attachment (a tap, a generator, a switch port); a Queue is that port's share of one queue pair. Packets
// cross the boundary in batches of at most [MaxBatch] and always by transfer of ownership: whoever holds a packet holds one
// reference on the page of each of its fragments and must release it exactly once.
package port

import (
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/pool"
	"github.com/vhostd/vhostd/virtio"
)

// MaxBatch is the largest number of packets that one call of Send or Recv may carry.
const MaxBatch = 64

// Port is one attachment to a network. Its methods are called by control (never by a worker) and never concurrently, except
// Status, which is safe from any goroutine.
type Port interface {
	// Kind is the name of the kind as the command line spells it, such as "tap".
	Kind() string

	// Features are the network features (CSUM, HOST_*, GUEST_*) that work from end to end on this port. The device offers
	// the guest no offload beyond them.
	Features() virtio.Features

	// MTU is the largest payload of a frame, in bytes, that the network carries. 0 means that it has no opinion.
	MTU() int

	// SetMTU asks the network to use mtu from now on.
	SetMTU(mtu int) error

	// Configure makes the offloads follow the features that the guest acknowledged, and 0 after it disconnected. It is
	// called while every queue is quiescent, any number of times.
	Configure(acked virtio.Features) error

	// OpenQueue opens the share of queue pair i, counted from 0, before the pair runs for the first time. The queue belongs
	// to the worker whose owner id is r.Owner. Opening a pair that is open is an error; opening it again after its Close is
	// not.
	OpenQueue(i int, r Resources) (Queue, error)

	// Announce tells the network that mac lives here now, by the broadcast of a RARP request.
	Announce(mac [6]byte) error

	// Status says whether the network side carries traffic. It is safe from any goroutine.
	Status() Status

	// Close closes the queues that are still open, whose owners are quiescent, and releases the network side. It returns
	// within a second and is idempotent.
	Close() error
}

// Status is the condition of a port's network side.
type Status struct {
	Up     bool   // traffic passes
	Detail string // why not, or what the port is attached to; may be empty
}

// Resources are what a queue may draw on. Arena and Owner are always set. Pool is the pool that receives frames for this
// pair; a port that needs none (null, source, echo) accepts nil.
type Resources struct {
	Arena *pagemem.Arena
	Owner pagemem.OwnerID
	Pool  *pool.Pool
}

// Queue is a port's share of one queue pair. It is used by the one worker that owns the pair; only Drops is safe from other
// goroutines. No method blocks.
type Queue interface {
	// Send hands over the first n packets of pkts. Ownership passes for those n, also for the ones that the port drops and
	// counts. n < len(pkts) is back-pressure: the rest stays the caller's, to be offered again. The caller may reuse pkts
	// itself at once.
	Send(pkts []packet.Packet) (n int)

	// Recv fills up to len(pkts) packets whose ownership passes to the caller, and says how many. At most [MaxBatch] are
	// filled by one call.
	Recv(pkts []packet.Packet) (n int)

	// ReadyFD is a descriptor that becomes readable when Recv has something, for the worker's epoll set: after Arm
	// returned false, whatever comes is a new edge. Watch it edge-triggered, because a descriptor whose network vanished
	// stays ready for ever. It stays the port's and does not change while the queue is open. -1 says that Arm alone
	// decides: the port never makes a worker wait (source), has frames only as the consequence of a Send (echo), or never
	// has any (null).
	ReadyFD() int

	// Arm prepares for the worker's sleep. True means that Recv may have something now and the worker must not sleep before
	// it called Recv again; false, that ReadyFD tells of whatever comes later.
	Arm() (ready bool)

	// Drops visits the counters of the packets that disappeared here, one per reason. The reasons are constant strings fit
	// for a metric label. It is safe from any goroutine.
	Drops(visit func(reason string, n uint64))

	// Close releases everything that is still queued. The owner is quiescent and the queue is not used afterwards, except
	// for Drops. It is idempotent.
	Close() error
}

// Enabler is implemented by a Queue whose network side spreads frames over the queues by itself and must know which of
// them the guest serves. A queue is enabled when it is opened. SetEnabled is called while the owner is quiescent.
type Enabler interface {
	SetEnabled(on bool) error
}

// Holder is implemented by a Queue whose frames may wait for another processor. Held is how many bytes of what was sent here wait there
// between their copy and their first read, as seen at the last Send: 0 if they are read at once, or by the sender's own worker. It belongs
// to the owner.
type Holder interface {
	Held() int
}

// MTUFollower is implemented by a Port whose network others use as well. FollowMTU takes the MTU that a front-end says its guest
// was told: unlike the operator's word, which SetMTU takes, it must not change anything for others. It is called like SetMTU.
type MTUFollower interface {
	FollowMTU(mtu int) error
}

// AddressKeeper is implemented by a Port that does not let its guest send from every address. MaySend says why mac cannot be the
// guest's, or nil. It is safe from any goroutine.
type AddressKeeper interface {
	MaySend(mac [6]byte) error
}

// ErrClosed is returned by the methods of a port or queue that was closed.
var ErrClosed = errors.New("port is closed")

// OptionError reports an option with a value that the port does not accept.
type OptionError struct {
	Kind   string // kind of the port, such as "tap"
	Option string // name as the command line spells it
	Value  string // the refused value; empty says that the option is missing
	Accept string // what is accepted
}

// Error names the option, the value and what is accepted.
func (e *OptionError) Error() string {
	if e.Value == "" {
		return fmt.Sprintf("network %s: %s is missing (accepted: %s)", e.Kind, e.Option, e.Accept)
	}
	return fmt.Sprintf("network %s: %s=%s is not accepted (accepted: %s)", e.Kind, e.Option, e.Value, e.Accept)
}
