package daemon

import (
	"time"

	"github.com/vhostd/vhostd/internal/network"
	"github.com/vhostd/vhostd/internal/sandbox"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtionet"
)

// Status is the condition of the daemon and of every guest, as the control API shows it.
type Status struct {
	PID      int            `json:"pid"`
	Started  time.Time      `json:"started"`
	Healthy  bool           `json:"healthy"`
	Problems []string       `json:"problems,omitempty"`
	Workers  []WorkerStatus `json:"workers"`
	// ArenaPages are the pages of 4 KiB that hold frames or wait in pools to hold some.
	ArenaPages int                    `json:"arena-pages"`
	Guests     []GuestStatus          `json:"guests"`
	Switches   []network.SwitchStatus `json:"switches"`
	Sandbox    sandbox.State          `json:"sandbox"`
}

// WorkerStatus is the condition of a worker thread.
type WorkerStatus struct {
	Name   string `json:"name"`
	Wake   string `json:"wake"`
	Error  string `json:"error,omitempty"` // why it is dead
	Sleeps uint64 `json:"sleeps"`          // times it had nothing to do and slept
	Faults uint64 `json:"faults"`          // accesses to guest memory that had vanished
}

// States of a guest without a session. With one, the state is the session's phase.
const (
	StateStarting   = "starting"
	StateWaiting    = "waiting"    // listening, nobody is connected
	StateConnecting = "connecting" // a client that dials
	StateStopping   = "stopping"
)

// GuestStatus is the condition of a guest. What belongs to a session is empty without one.
type GuestStatus struct {
	Name             string       `json:"name"`
	Socket           string       `json:"socket"`
	Client           bool         `json:"client"`
	State            string       `json:"state"`
	Connected        bool         `json:"connected"`
	Network          string       `json:"network"`
	NetworkUp        bool         `json:"network-up"`
	NetworkDetail    string       `json:"network-detail,omitempty"`
	QueuePairs       int          `json:"queue-pairs"`
	TxAlloc          string       `json:"tx-alloc,omitempty"`
	Copy             string       `json:"copy,omitempty"`
	Peer             string       `json:"peer,omitempty"`
	Features         []string     `json:"features,omitempty"`
	ProtocolFeatures []string     `json:"protocol-features,omitempty"`
	MemoryRegions    int          `json:"memory-regions,omitempty"`
	Rings            []RingStatus `json:"rings,omitempty"`
}

// RingStatus is the condition of a ring. Index 2i is the receiveq and 2i+1 the transmitq of pair i,
// by the driver's view.
type RingStatus struct {
	Index     int    `json:"index"`
	Control   bool   `json:"control,omitempty"` // the control queue
	Size      int    `json:"size"`
	Started   bool   `json:"started"`
	Enabled   bool   `json:"enabled"`
	Broken    string `json:"broken,omitempty"` // why the ring is unusable
	LastAvail uint16 `json:"last-avail"`       // next entry of the available ring to take; packed: descriptor, bit 15 its wrap counter
	AvailIdx  uint16 `json:"avail-index"`      // the driver's index as last seen
}

// Stats are the counters of every guest since it was added.
type Stats struct {
	Time    time.Time     `json:"time"`
	Guests  []GuestStats  `json:"guests"`
	Sandbox sandbox.State `json:"sandbox"`
}

// GuestStats are the counters of a guest.
type GuestStats struct {
	Name      string      `json:"name"`
	Connected bool        `json:"connected"`
	TxAlloc   string      `json:"tx-alloc"`
	Copy      CopyStats   `json:"copy"`
	Pool      PoolStats   `json:"pool"`
	Rings     []RingStats `json:"rings"`
}

// CopyStats tell how the guest's frames were copied out of its memory.
type CopyStats struct {
	Policy    string `json:"policy"`
	Cached    uint64 `json:"cached-bytes"`     // through the cache
	PastCache uint64 `json:"past-cache-bytes"` // by non-temporal stores
	Fences    uint64 `json:"fences"`           // that these needed
}

// PoolStats are the counters of the guest's page pools, with the names of the kernel's page_pool.
type PoolStats struct {
	Fast           uint64 `json:"fast"`
	Slow           uint64 `json:"slow"`
	Empty          uint64 `json:"empty"`
	Refill         uint64 `json:"refill"`
	Borrowed       uint64 `json:"borrowed"`
	Cached         uint64 `json:"cached"`
	CacheFull      uint64 `json:"cache-full"`
	Ring           uint64 `json:"ring"`
	RingFull       uint64 `json:"ring-full"`
	ReleasedShared uint64 `json:"released-shared"`
	Trimmed        uint64 `json:"trimmed"`
	InFlight       int32  `json:"in-flight"` // pages with frames, or at rest in a pool
}

// RingStats are the counters of a ring. Drops holds the packets that disappeared, by reason.
type RingStats struct {
	Index   int               `json:"index"`
	Control bool              `json:"control,omitempty"` // the control queue, whose packets are commands
	Packets uint64            `json:"packets"`
	Bytes   uint64            `json:"bytes"`
	Kicks   uint64            `json:"kicks"`
	Calls   uint64            `json:"calls"`
	Batches uint64            `json:"batches"`
	Drops   map[string]uint64 `json:"drops,omitempty"`
}

// Status takes a snapshot.
func (d *Daemon) Status() Status {
	problems := d.Problems()
	s := Status{PID: pid, Started: d.started, Healthy: len(problems) == 0, Problems: problems,
		Workers: []WorkerStatus{}, ArenaPages: d.opts.Arena.InUse(), Guests: []GuestStatus{}, Switches: d.switches.Status(), Sandbox: d.sandboxState()}
	for _, w := range d.opts.Workers {
		stats := w.Stats()
		ws := WorkerStatus{Name: w.Name(), Wake: w.Wake().String(), Sleeps: stats.Sleeps, Faults: stats.Faults}
		if err := w.Alive(); err != nil {
			ws.Error = err.Error()
		}
		s.Workers = append(s.Workers, ws)
	}
	for _, g := range d.list() {
		s.Guests = append(s.Guests, g.status())
	}
	return s
}

// sandboxState is what holds the process, by a sandbox of ours or from outside.
func (d *Daemon) sandboxState() sandbox.State {
	if s := d.confined.Load(); s != nil {
		return s.State()
	}
	return sandbox.Observe()
}

// Stats takes a snapshot of the counters.
func (d *Daemon) Stats() Stats {
	s := Stats{Time: time.Now(), Guests: []GuestStats{}, Sandbox: d.sandboxState()}
	for _, g := range d.list() {
		g.mu.Lock()
		device := g.device
		g.mu.Unlock()
		if device != nil {
			s.Guests = append(s.Guests, guestStats(g.spec.Name, device.Snapshot()))
		}
	}
	return s
}

func guestStats(name string, snapshot virtionet.DeviceStats) GuestStats {
	p := snapshot.Pools
	s := GuestStats{
		Name: name, Connected: snapshot.Connected, TxAlloc: snapshot.TxAlloc.String(),
		Copy: CopyStats{Policy: snapshot.Copy.String(), Cached: snapshot.Copied.Cached, PastCache: snapshot.Copied.PastCache, Fences: snapshot.Copied.Fences},
		Pool: PoolStats{
			Fast: p.Fast, Slow: p.Slow, Empty: p.Empty, Refill: p.Refill, Borrowed: p.Borrowed, Cached: p.Cached, CacheFull: p.CacheFull,
			Ring: p.Ring, RingFull: p.RingFull, ReleasedShared: p.ReleasedShared, Trimmed: p.Trimmed, InFlight: p.InFlight,
		},
		Rings: []RingStats{},
	}
	for _, r := range snapshot.Rings {
		s.Rings = append(s.Rings, RingStats{
			Index: r.Index, Control: r.Control, Packets: r.Packets, Bytes: r.Bytes, Kicks: r.Kicks, Calls: r.Calls,
			Batches: r.Batches, Drops: r.Drops,
		})
	}
	return s
}

// view returns the session's state, nil without a session, and the device's snapshot; ok=false
// while there is no device.
func (g *guest) view() (session *vhostuser.State, snapshot virtionet.DeviceStats, ok bool) {
	g.mu.Lock()
	c, device := g.current, g.device
	g.mu.Unlock()
	if device == nil {
		return nil, virtionet.DeviceStats{}, false
	}
	if c != nil {
		state := c.session.State()
		session = &state
	}
	return session, device.Snapshot(), true
}

func (g *guest) status() GuestStatus {
	s := GuestStatus{
		Name: g.spec.Name, Socket: g.spec.Socket, Client: g.spec.Client, QueuePairs: g.spec.QueuePairs,
		Network: g.net().String(),
	}
	if p, ok := g.portStatus(); ok {
		s.NetworkUp, s.NetworkDetail = p.Up, p.Detail
	}
	session, snapshot, ok := g.view()
	if ok {
		s.TxAlloc, s.Copy = snapshot.TxAlloc.String(), snapshot.Copy.String()
	}
	switch {
	case g.ctx.Err() != nil:
		s.State = StateStopping
	case !ok:
		s.State = StateStarting
	case session == nil && g.spec.Client:
		s.State = StateConnecting
	case session == nil:
		s.State = StateWaiting
	default:
		s.State, s.Connected = session.Phase, true
		s.Peer, s.MemoryRegions = session.Peer, session.Regions
		s.Features, s.ProtocolFeatures = session.Features, session.ProtocolFeatures
		s.Rings = ringStatus(session, snapshot)
	}
	return s
}

// ringStatus lists the rings that the front-end has mentioned, with what the device knows of them.
func ringStatus(session *vhostuser.State, snapshot virtionet.DeviceStats) []RingStatus {
	rings := make([]RingStatus, 0, len(session.Rings))
	for _, r := range session.Rings {
		s := RingStatus{Index: r.Index, Control: r.Control, Size: r.Size, Started: r.Started, Enabled: r.Enabled, LastAvail: uint16(r.Base)}
		for _, d := range snapshot.Rings {
			if d.Index == r.Index && d.Control == r.Control && d.Started {
				s.LastAvail, s.AvailIdx, s.Broken = d.LastAvail, d.AvailIdx, d.BrokenReason
			}
		}
		rings = append(rings, s)
	}
	return rings
}
