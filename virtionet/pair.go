package virtionet

import (
	"time"

	"github.com/vhostd/vhostd/offload"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/pool"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/worker"
)

// A turn ends after this much in either direction, so that one guest cannot keep
// the worker: VHOST_NET_PKT_WEIGHT and VHOST_NET_WEIGHT of drivers/vhost/net.c.
const (
	turnPackets = 256
	turnBytes   = 512 << 10
	// publishTurns is after how many busy turns in a row the counters are published.
	publishTurns = 16
	// turnWalk bounds the descriptors of a turn: neither frames nor bytes count those
	// without bytes, nor the buffers that turn out to be too few for a frame.
	// largeWalk bounds them for one frame.
	turnWalk  = 2048
	largeWalk = 8192
)

const (
	// lagFlushTurns is how many empty turns of all its pairs together a polling worker
	// lets pass before it publishes the entries that --tx-lag holds back.
	lagFlushTurns = 1000
	// memRetry is the pause after the arena ran dry, blockedRetry after a port
	// refused frames without telling when it takes more.
	// A polling worker offers refused frames again every blockedTurns empty turns.
	blockedTurns = 64
	memRetry     = time.Millisecond
	blockedRetry = 10 * time.Millisecond
	// stuckFrame is how long a frame may wait for more buffers than the guest has
	// posted while smaller frames queue behind it.
	stuckFrame = time.Second
)

const (
	eventTxKick worker.Event = 1 << iota
	eventRxKick
	eventPort
)

// pair is one queue pair: receiveq 2i and transmitq 2i+1, and its share of the
// port. It is a worker.Task; all its state belongs to the worker's thread.
type pair struct {
	// First, because a packet's header and first fragments are one cache line if it starts at one: a pair is large enough
	// for memory of its own, which starts at a page.
	out      [virtqueue.MaxBatch]packet.Packet
	incoming [virtqueue.MaxBatch]packet.Packet

	dev      *Device
	index    int
	loop     *worker.Loop
	arena    *pagemem.Arena
	owner    pagemem.OwnerID
	queue    port.Queue
	features virtio.Features
	off      virtio.Features // offloads that the driver has switched off since
	hdrLen   uint32
	readHdr  bool // the driver may mark frames: look at its headers
	mrg      bool
	pastMin  uint64      // shortest copy past the cache, or cachedOnly
	holder   port.Holder // with CopyAuto, if the port is one
	lag      int

	tx, rx  ring
	armed   bool      // kicks were asked for
	enabled bool      // the port was told that the guest serves this pair
	wanted  bool      // SET_VRING_ENABLE's word about the receiveq
	idle    bool      // the driver does not use the pair (VIRTIO_NET_CTRL_MQ)
	filter  *rxFilter // nil: the driver takes every frame

	pool       *pool.Pool // the worker's, for this device
	alloc      txAllocator
	win        *pagemem.Window // of alloc
	counted    bool            // what is taken from win is still to be counted
	txBatch    virtqueue.Batch
	built      int // packets in out
	builtBytes int // their bytes
	outChain   [virtqueue.MaxBatch]int
	refused    [virtqueue.MaxBatch]refusal
	nRefused   int
	copies     copyVector
	txBlocked  bool
	txNoMem    bool
	emptyTurns int
	// unpublished is how many busy turns the published counters are behind.
	unpublished int

	rxBatch    virtqueue.Batch
	pend       []packet.Packet // received, not delivered yet
	finished   []packet.Packet // software-finished frames that precede pend
	finishArea []packet.Packet
	finisher   offload.Finisher
	headers    [virtqueue.MaxBatch]headerStore
	nHeaders   int
	pages      [virtqueue.MaxBatch]pagemem.PageID // scratch of releases
	waitSince  time.Time
	starved    bool // the first frame does not fit what is posted: look again when more is
	merge      mergeState

	dirty dirtyLog
}

func newPair(d *Device, index int, loop *worker.Loop, pages *pool.Pool) *pair {
	p := &pair{
		dev: d, index: index, pool: pages, loop: loop, arena: d.opts.Arena, owner: loop.Owner(),
		lag: d.opts.TxLag,
	}
	p.setTxAlloc(d.txAllocator())
	p.rx.init(2*index, d)
	p.tx.init(2*index+1, d)
	p.finisher = offload.Finisher{Arena: p.arena, Alloc: p, Owner: p.owner}
	return p
}

// setFeatures takes over what the driver acknowledged; no ring runs.
func (p *pair) setFeatures(f virtio.Features) {
	p.features = f &^ p.off
	p.hdrLen = uint32(f.NetHdrLen())
	p.mrg = f.Has(virtio.FNetMrgRxBuf)
	p.readHdr = f.Any(virtio.FNetCSum | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostUFO | virtio.FNetGSO)
}

// Run implements worker.Task. Directions alternate batch by batch, which keeps a
// frame that comes straight back in the cache.
func (p *pair) Run() bool {
	if p.armed {
		p.disarm()
	}
	total, bytes := 0, 0
	for walked := p.walked(); total < turnPackets && bytes < turnBytes && p.walked()-walked < turnWalk; {
		n, b := p.transmit()
		m, c := p.receive()
		if n+m == 0 {
			break
		}
		total, bytes = total+max(n, m), bytes+max(b, c)
	}
	if total == 0 {
		p.idleTurn()
		return false
	}
	p.emptyTurns = 0
	p.tx.call(p.loop)
	p.rx.call(p.loop)
	if p.unpublished++; p.unpublished == publishTurns {
		p.publishCounters()
	}
	p.pokeLog()
	return true
}

// publishCounters shows what was counted to other goroutines. Its locked stores wait until everything
// before them, the guest's frames included, has reached the cache.
func (p *pair) publishCounters() {
	p.unpublished = 0
	p.tx.publish()
	p.rx.publish()
	p.pool.Publish()
	p.alloc.publish()
}

// walked is the work on descriptors in both rings.
func (p *pair) walked() uint64 { return p.tx.walked() + p.rx.walked() }

// idleTurn flushes lagging completions once a polling worker has seen nothing for a while.
func (p *pair) idleTurn() {
	p.emptyTurns++
	if p.unpublished > 0 {
		p.publishCounters()
	}
	if p.loop.Wake() != worker.Poll || p.emptyTurns*p.loop.Tasks() >= lagFlushTurns {
		p.flush()
	}
}

// flush publishes what is completed and signals it.
func (p *pair) flush() {
	for _, r := range [...]*ring{&p.tx, &p.rx} {
		if r.usable() && r.q.Staged() > 0 && r.q.Publish(0) > 0 {
			r.call(p.loop)
			r.publish()
		}
	}
}

// Arm implements worker.Task.
func (p *pair) Arm() worker.Readiness {
	p.flush()
	p.armed = true
	var r worker.Readiness
	if p.tx.serviceable() {
		switch {
		case p.txNoMem:
			r.Retry = memRetry
		case p.txBlocked:
			r.Retry, p.emptyTurns = blockedRetry, 0
		default:
			r.Ready = p.tx.q.EnableKicks()
		}
	}
	if p.rx.serviceable() && p.rx.enabled {
		r = p.armReceive(r)
	}
	if r.Ready {
		p.disarm()
	}
	if again := p.alloc.idle(); again > 0 && (r.Retry == 0 || r.Retry > again) {
		r.Retry = again
	}
	p.pokeLog()
	p.publishCounters()
	return r
}

// armReceive asks for whatever the receive side lacks: buffers, or frames.
func (p *pair) armReceive(r worker.Readiness) worker.Readiness {
	waiting := len(p.pend)+len(p.finished) > 0
	if !waiting && !p.rx.q.Empty() {
		r.Ready = r.Ready || p.queue.Arm()
		return r
	}
	if waiting {
		r.Ready = p.rx.q.EnableKicksForMore() || r.Ready
	} else {
		r.Ready = p.rx.q.EnableKicks() || r.Ready
	}
	if waiting && !p.waitSince.IsZero() && (r.Retry == 0 || r.Retry > stuckFrame) {
		r.Retry = stuckFrame
	}
	return r
}

func (p *pair) disarm() {
	p.armed = false
	if p.tx.usable() {
		p.tx.q.DisableKicks()
	}
	if p.rx.usable() {
		p.rx.q.DisableKicks()
	}
}

// Notify implements worker.Task.
func (p *pair) Notify(e worker.Event) {
	if e&eventTxKick != 0 {
		p.tx.kicks++
	}
	if e&eventRxKick != 0 {
		p.rx.kicks++
	}
}

// Fault implements worker.Task: guest memory vanished under the pair.
func (p *pair) Fault(addr uintptr) bool {
	err := p.dev.owned.vanished(addr)
	if err == nil {
		return false
	}
	packet.Release(p.arena, p.out[:p.built], p.owner)
	p.built, p.nHeaders, p.copies.n, p.copies.bytes = 0, 0, 0, 0
	p.dropPending(dropStopped)
	p.breakRing(&p.tx, err)
	p.breakRing(&p.rx, err)
	p.dev.fatal(err)
	return true
}

// retireRing breaks a ring whose memory is still there: what was completed before
// reaches the driver, so that the ring can resume at its used index.
func (p *pair) retireRing(r *ring, err error) {
	r.q.Publish(0)
	r.call(p.loop)
	p.breakRing(r, err)
}

// breakRing takes an unusable ring out of service until GET_VRING_BASE and a new
// kick descriptor bring it back; the front-end learns it from the err eventfd.
func (p *pair) breakRing(r *ring, err error) {
	if !r.started || r.broken {
		return
	}
	r.broken = true
	r.published.reason.Store(&err)
	if r.errFD >= 0 {
		r.write(p.loop, r.errFD)
	}
	r.publishState()
	p.dev.ringBroken(r.index, err)
}

// dropPending releases frames that were received and will not be delivered.
func (p *pair) dropPending(d drop) {
	if n := uint64(len(p.finished) + len(p.pend)); n > 0 {
		p.rx.drops[d] += n
		p.rx.anyDrop = true
	}
	packet.Release(p.arena, p.finished, p.owner)
	packet.Release(p.arena, p.pend, p.owner)
	p.finished, p.pend = nil, nil
	p.waitSince, p.starved = time.Time{}, false
}
