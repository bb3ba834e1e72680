package virtionet

import (
	"maps"

	"github.com/vhostd/vhostd/pool"
	"github.com/vhostd/vhostd/virtio"
)

// DeviceStats is a snapshot of a device.
type DeviceStats struct {
	Connected bool
	Peer      string
	Features  virtio.Features // acknowledged in the present connection
	Status    uint8           // virtio device status as last told
	TxAlloc   TxAlloc         // of transmit buffers
	Copy      CopyPolicy
	Copied    CopyStats
	Pools     pool.Stats  // of all workers
	Rings     []RingStats // every ring that was ever started, by index
}

// CopyStats counts the bytes of frames that were copied out of the guest's memory.
type CopyStats struct {
	Cached    uint64 // by ordinary stores
	PastCache uint64 // by non-temporal stores
	Fences    uint64 // that these needed
}

// RingStats is a snapshot of one ring as of the last turn of its worker. The counters
// run as long as the device lives; the state is that of the present connection.
type RingStats struct {
	Index                    int
	Control                  bool // the control queue: Packets and Bytes are commands
	Started, Enabled, Broken bool
	BrokenReason             string
	Size                     int // entries, 0 while the ring is not set up
	// Packets and Bytes count frames handed to the network (transmitq) or to the guest
	// (receiveq), virtio-net headers excluded.
	Packets, Bytes, Batches uint64
	Kicks, Calls            uint64 // notifications received and sent
	// Drops counts frames and chains that disappeared, by reason; those of the port
	// appear at the transmitq with the prefix "port_".
	Drops map[string]uint64
	// LastAvail is the next available entry to take, AvailIdx the driver's index as
	// last seen. In a packed ring they are descriptors with the wrap counter in bit
	// 15: the next one to mark as used, and the one behind the last chain seen.
	LastAvail, AvailIdx uint16
}

// Snapshot returns the device's state. It is safe from any goroutine.
func (d *Device) Snapshot() DeviceStats {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := DeviceStats{Connected: d.peer != "", Peer: d.peer, Features: d.features, Status: d.status}
	s.TxAlloc, s.Copy, s.Pools = d.txAlloc, d.copyPolicy, d.poolStats()
	for i, c := range d.counters {
		if c != nil {
			s.Copied.add(&c.published)
			s.Rings = append(s.Rings, d.ringStats(i, c))
		}
	}
	if d.ctrlAt >= 0 {
		r := ringState(d.ctrlAt, &d.controlCounters)
		r.Control, r.Enabled, r.Size = true, d.enabled[d.ctrlAt], d.sizes[d.ctrlAt]
		d.controlCounters.published.visitDrops(func(reason string, n uint64) { r.Drops[reason] += n })
		s.Rings = append(s.Rings, r)
	}
	return s
}

func (s *CopyStats) add(p *published) {
	past := p.pastCache.Load()
	// The other is stored first: what is not past the cache yet may be counted as cached, never the reverse.
	s.Cached += p.copied.Load() - past
	s.PastCache += past
	s.Fences += p.fences.Load()
}

// ringState is what the counters of ring i say, without drops.
func ringState(i int, c *ringCounters) RingStats {
	p := &c.published
	r := RingStats{
		Index: i, Started: p.started.Load(), Broken: p.broken.Load(),
		Packets: p.packets.Load(), Bytes: p.bytes.Load(), Batches: p.batches.Load(),
		Kicks: p.kicks.Load(), Calls: p.calls.Load(), Drops: map[string]uint64{},
		LastAvail: uint16(p.position.Load()), AvailIdx: uint16(p.available.Load()),
	}
	if err := p.reason.Load(); err != nil {
		r.BrokenReason = (*err).Error()
	}
	return r
}

func (d *Device) ringStats(i int, c *ringCounters) RingStats {
	r := ringState(i, c)
	r.Enabled, r.Size = d.enabled[i], d.sizes[i]
	add := func(reason string, n uint64) { r.Drops[reason] += n }
	c.published.visitDrops(add)
	if i%2 == 1 {
		for reason, n := range d.carried[i/2] {
			add(reason, n)
		}
		if pair := d.pairs[i/2]; pair != nil {
			visitPort(pair, add)
		}
	}
	return r
}

// visitPort lists the drops of a pair's port queue.
func visitPort(p *pair, visit func(reason string, n uint64)) {
	p.queue.Drops(func(reason string, n uint64) {
		if n > 0 {
			visit("port_"+reason, n)
		}
	})
}

// ringCounters returns the counters of ring i, which survive connections.
func (d *Device) ringCounters(i int) *ringCounters {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.counters[i] == nil {
		d.counters[i] = &ringCounters{}
	}
	return d.counters[i]
}

// forget lets go of a dissolved pair but keeps what its port queue counted.
func (d *Device) forget(i int, p *pair) {
	d.mu.Lock()
	defer d.mu.Unlock()
	kept := map[string]uint64{}
	maps.Copy(kept, d.carried[i])
	visitPort(p, func(reason string, n uint64) { kept[reason] += n })
	d.carried[i] = kept
	d.pairs[i] = nil
}
