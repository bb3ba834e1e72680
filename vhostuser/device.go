package vhostuser

import (
	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

// Device is the virtio device behind a session. The session calls it from one
// goroutine, never concurrently; each method returns when the device's workers
// are quiescent with respect to the change, so that the session may close the
// file descriptor or unmap the table that was replaced.
//
// Ring indexes are the driver's: 2i is the receiveq and 2i+1 the transmitq of
// queue pair i, and a ring started with RingConfig.Control is the control queue.
// Every index passed is below RingLimit.
type Device interface {
	// Features returns the device and ring feature bits offered. The session
	// asks once per connection, adds VHOST_USER_F_PROTOCOL_FEATURES (bit 30)
	// itself and withholds bits that it does not serve.
	Features() virtio.Features
	// MaxRings returns the number of data rings, twice the number of queue
	// pairs. GET_QUEUE_NUM answers QueueNum of it.
	MaxRings() int
	// Config returns the bytes of virtio_net_config, or nil if the device has
	// none to show: then the protocol feature CONFIG is not offered. Unlike the
	// other methods it may be called from any goroutine at any time.
	Config() []byte
	// SetConfig writes data at offset, a range inside of Config's bytes.
	// migrating says that the bytes come from the device that the guest had
	// before, so that fields which its driver cannot write may differ, too. On
	// error nothing is changed.
	SetConfig(offset int, data []byte, migrating bool) error
	// SetFeatures takes over the acknowledged features, without bit 30. No ring
	// runs. On error the session refuses the message and keeps the old set.
	SetFeatures(acked virtio.Features) error
	// PrepareMemory announces the table of the SetMemory that follows. From now on the
	// Via of running rings may lead into it, and its pages may vanish as those of the
	// table in use. After a SetMemory that failed, nil withdraws it.
	PrepareMemory(t *guestmem.Table)
	// SetMemory replaces the memory table under running rings; live names every
	// started ring. After it returns without error the old table is unused. A
	// nil table withdraws the memory. With the table that is in use, live names the
	// rings that have to find everything anew, because other translations of their
	// Via hold; what they knew is unused afterwards.
	SetMemory(t *guestmem.Table, live []RingAddrs) error
	// StartRing starts a ring. On error the ring stays stopped.
	StartRing(RingConfig) error
	// StopRing drains and stops a ring; afterwards nothing of the ring or its
	// buffers is touched and its descriptors are unused. base is where the ring
	// is to be resumed, and it is valid with an error too.
	StopRing(i int) (base virtqueue.Position, err error)
	// Retry has the rings look again that wait for an answer of their
	// RingConfig.Via. It is safe for concurrent use with every other method.
	Retry()
	// EnableRing sets the enabled state, also of rings that are not started.
	EnableRing(i int, on bool)
	// SetKick, SetCall and SetErr replace an eventfd of a running ring; -1 means
	// none. When they return, the descriptor used before is unused.
	SetKick(i, fd int)
	SetCall(i, fd int)
	SetErr(i, fd int)
	// SetLog replaces the log in which every page of guest memory is marked that the
	// device writes from now on; nil ends it, which is how a connection begins. fd is
	// an eventfd to write after marks, -1 for none. When it returns, the log and the
	// descriptor before are unused. It comes under running rings.
	SetLog(l *guestmem.Log, fd int)
	// SetRingLog changes where writes to a running ring itself are marked.
	SetRingLog(i int, l RingLog)
	// SetMTU takes the MTU (68 to 65535) that the guest was told.
	SetMTU(mtu uint64) error
	// SendRARP announces a unicast MAC address to the network.
	SendRARP(mac [6]byte) error
	// SetStatus tells the virtio device status byte. 0 is no reset of rings.
	SetStatus(status uint8)
	// Reset forgets what the driver and the front-end's SET_FEATURES told the
	// device: features, status, and what came through the control queue. All
	// rings are stopped and disabled; the memory stays.
	Reset()
	// Connected begins and Disconnected ends a connection. Before Disconnected
	// all rings were stopped and the memory withdrawn. The next connection begins
	// with every ring disabled and without features.
	Connected(peer string)
	Disconnected()
}

// RingConfig is what a device needs to run a ring. The addresses are host
// addresses in Mem, aligned and in range for Size entries with event fields; of
// a packed ring they are those of the descriptor ring, the driver's and the
// device's event suppression structure. The descriptors (-1: none) stay the session's property;
// they are valid until StopRing or the SetKick, SetCall or SetErr that replaces
// them has returned.
type RingConfig struct {
	Index             int
	Size              uint16
	Desc, Avail, Used uintptr
	// Base is the value of SET_VRING_BASE, or the position at the last stop.
	Base virtqueue.Position
	// KickFD, CallFD and ErrFD come from the front-end; their flags live in the
	// shared open file description and must not be changed.
	KickFD, CallFD, ErrFD int
	Features              virtio.Features
	Mem                   *guestmem.Table
	// Via, when set, translates what descriptors say instead of Mem.
	Via     guestmem.Translator
	Enabled bool
	Control bool // the control queue, not a ring of a queue pair
	// Record, of a packed ring, is where its position is kept besides; nil: nowhere.
	Record *virtqueue.Record
	// Inflight is the ring's part of the inflight region; nil: none. Its memory stays
	// the session's, which closes it after StopRing.
	Inflight *virtqueue.Inflight
	// Log is where the ring marks what it writes itself.
	Log RingLog
}

// RingLog says at which guest addresses writes to the ring itself are marked while
// there is a log: Used is that of the used ring, in a packed ring of the device's
// event suppression structure, and Desc that of a packed ring's descriptors. Nothing
// is marked unless On.
type RingLog struct {
	On         bool
	Used, Desc uint64
}

// RingAddrs are the host addresses of a started ring in a new memory table.
// OK is false if the new table does not hold the ring: the device parks it
// until a later table does.
type RingAddrs struct {
	Index             int
	Desc, Avail, Used uintptr
	OK                bool
	Log               RingLog
}
