package virtionet

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"

	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/pool"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/worker"
)

// MaxQueuePairs is the largest number of queue pairs: ring indexes are 8 bits wide
// in the vhost-user protocol.
const MaxQueuePairs = 128

// maxLag keeps --tx-lag useful on small rings; per ring it is cut to a quarter.
const maxLag = 1024

// errGuestMemory is why rings break when the front-end's memory file shrinks.
var errGuestMemory = errors.New("guest memory vanished: the front-end's memory file is shorter than the region it described")

// errDirtyLog is the same of the file of a migration's dirty log.
var errDirtyLog = errors.New("the dirty log vanished: the front-end's log file is shorter than it described")

// Options configure a [Device].
type Options struct {
	Name    string         // of the guest, for logs
	Port    port.Port      // stays the caller's, who closes it after the device
	Arena   *pagemem.Arena // frames in flight live here
	Workers []*worker.Loop // pair i runs on worker i modulo their number
	// QueuePairs offered, 1 to MaxQueuePairs.
	QueuePairs int
	// TxLag is how many of the newest transmit completions are held back while
	// traffic flows.
	TxLag int
	// TxAlloc is the allocator of transmit buffers to begin with; SetTxAlloc changes it.
	TxAlloc TxAlloc
	// Budget bounds what the allocators of TxFragPool keep ready, of all devices that share it. nil: an eighth of the arena.
	Budget *pool.Budget
	// Copy is the policy to begin with; SetCopy changes it.
	Copy CopyPolicy
	// MAC, when set, is shown to front-ends that read the configuration space.
	MAC net.HardwareAddr
	// MTU, when set, is shown to the front-end and given to the port.
	MTU    int
	Logger *slog.Logger
	// OnFatal is called once per connection when the device cannot go on; the caller
	// closes the connection. It runs on a worker's thread, so that it belongs to the
	// present connection, and must not block.
	OnFatal func(error)
}

// Device is one guest's network device; it implements vhostuser.Device. Its methods
// are for the session's goroutine, except Snapshot, which is safe from any.
type Device struct {
	opts   Options
	log    *slog.Logger
	pairs  []*pair // up to twice QueuePairs, made when first started
	pools  []*pool.Pool
	budget *pool.Budget
	// recyclers are the pools by worker.
	recyclers pool.Workers
	owned     owned
	logFD     int         // of the session, or -1
	gone      atomic.Bool // fatal was reported for this connection
	held      atomic.Bool // a front-end held a worker by an eventfd

	// control is held by whoever changes the pairs, which are the session's goroutine
	// and that of the control queue. It guards state and gated; ctrl is the session's.
	control sync.Mutex
	ctrl    *controlQueue // while it is started
	state   driverState
	gated   bool // a control queue was passed: pairs follow state

	mu          sync.Mutex // guards the fields below, and writes to pairs and pools, for Snapshot
	poolsBefore pool.Stats // of former connections
	txAlloc     TxAlloc    // written under control too
	copyPolicy  CopyPolicy // likewise
	mac         [6]byte    // as the configuration space shows it
	mtu         int        // likewise
	ctrlAt      int        // index of the control queue, -1: there was none
	counters    []*ringCounters
	carried     []map[string]uint64 // drops of port queues that are closed, by pair
	peer        string
	features    virtio.Features
	enabled     []bool
	sizes       []int
	status      uint8

	controlCounters ringCounters
}

// New makes a device without a front-end.
func New(opts Options) (*Device, error) {
	switch {
	case opts.QueuePairs < 1 || opts.QueuePairs > MaxQueuePairs:
		return nil, fmt.Errorf("queue pairs %d: accepted are 1 to %d", opts.QueuePairs, MaxQueuePairs)
	case opts.TxLag < 0 || opts.TxLag > maxLag:
		return nil, fmt.Errorf("tx lag %d: accepted are 0 to %d completions", opts.TxLag, maxLag)
	case len(opts.Workers) == 0:
		return nil, errors.New("a device needs at least one worker")
	}
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	if opts.MTU > 0 {
		if err := opts.Port.SetMTU(opts.MTU); err != nil {
			return nil, fmt.Errorf("set MTU %d on network %s: %w", opts.MTU, opts.Port.Kind(), err)
		}
	}
	rings := vhostuser.RingLimit(2 * opts.QueuePairs)
	d := &Device{
		logFD: -1,
		opts:  opts, log: opts.Logger.With("guest", opts.Name),
		pairs: make([]*pair, rings/2), pools: make([]*pool.Pool, len(opts.Workers)),
		counters: make([]*ringCounters, rings), carried: make([]map[string]uint64, rings/2),
		enabled: make([]bool, rings), sizes: make([]int, rings), ctrlAt: -1,
	}
	d.txAlloc, d.copyPolicy, d.budget = opts.TxAlloc, opts.Copy, opts.Budget
	if d.budget == nil && opts.Arena != nil {
		d.budget = NewBudget(opts.Arena)
	}
	d.mac = d.firstMAC()
	d.state = newDriverState(d.mac)
	d.readMTU()
	return d, nil
}

// budgetShare is the part of the arena that allocators may keep ready.
const budgetShare = 8

// NewBudget makes the budget that devices share by Options.Budget.
func NewBudget(a *pagemem.Arena) *pool.Budget {
	return pool.NewBudget(int(a.Bytes() / pagemem.PageSize / budgetShare))
}

// ringFeatures are what the rings can do, whatever the network.
const ringFeatures = virtio.FVersion1 | virtio.FRingIndirectDesc | virtio.FRingEventIdx | virtio.FAnyLayout |
	virtio.FInOrder | virtio.FRingPacked | virtio.FNetMrgRxBuf | virtio.FAccessPlatform

// controlFeatures are what a driver that has a control queue can ask for.
const controlFeatures = virtio.FNetCtrlVQ | virtio.FNetCtrlRX | virtio.FNetCtrlRXExtra | virtio.FNetCtrlVLAN |
	virtio.FNetCtrlMACAddr | virtio.FNetCtrlGuestOffloads

// Features implements vhostuser.Device. What belongs to the control queue is offered
// for front-ends that pass it. Others serve it themselves and take no notice, but for
// CTRL_VQ: cloud-hypervisor shows its guest a control queue, and with it multiqueue,
// only if the back-end has the bit. GUEST_ANNOUNCE is not offered: with it QEMU would
// leave announcing to the guest.
func (d *Device) Features() virtio.Features {
	f := ringFeatures | d.opts.Port.Features() | virtio.FNetMTU | controlFeatures
	if d.opts.QueuePairs > 1 {
		f |= virtio.FNetMQ
	}
	if d.opts.MAC != nil {
		f |= virtio.FNetMAC | virtio.FNetStatus // both are read in the configuration space
	}
	if f.Has(virtio.FNetCSum | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN) {
		f |= virtio.FNetGSO // drivers take it for all of these
	}
	return f
}

// MaxRings implements vhostuser.Device.
func (d *Device) MaxRings() int { return 2 * d.opts.QueuePairs }

// Connected implements vhostuser.Device.
func (d *Device) Connected(peer string) {
	d.gone.Store(false)
	d.readMTU()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.peer = peer
}

// Disconnected implements vhostuser.Device.
func (d *Device) Disconnected() {
	if d.ctrl != nil {
		d.ctrl.stop()
		d.ctrl = nil
	}
	d.Reset()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.peer = ""
	clear(d.enabled)
	clear(d.sizes)
}

// Reset implements vhostuser.Device: every pair is dissolved and what it held goes
// back to the arena.
func (d *Device) Reset() {
	d.control.Lock()
	defer d.control.Unlock()
	for i, p := range d.pairs {
		if p != nil {
			p.dissolve()
			d.forget(i, p)
		}
	}
	for i, pl := range d.pools {
		if pl != nil {
			d.dropPool(i)
		}
	}
	if err := d.opts.Port.Configure(0); err != nil {
		d.log.Warn("network did not reset its offloads", "error", err)
	}
	d.mu.Lock()
	d.features, d.status = 0, 0
	d.mu.Unlock()
	d.forgetDriver()
}

// Close ends the device; no connection is left.
func (d *Device) Close() error {
	d.Disconnected()
	return nil
}

// fatal reports once per connection that the device cannot go on. It runs on a
// worker's thread.
func (d *Device) fatal(err error) {
	if d.gone.CompareAndSwap(false, true) && d.opts.OnFatal != nil {
		d.opts.OnFatal(err)
	}
}

func (d *Device) ringBroken(index int, err error) {
	d.log.Warn("ring broken: it stays out of service until the front-end restarts it", "ring", index, "reason", err)
}
