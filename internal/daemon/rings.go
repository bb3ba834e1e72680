package daemon

import (
	"os"
	"path/filepath"

	"github.com/vhostd/vhostd/internal/ringstate"
)

// RingState says where the positions of guests' rings are kept beyond the end of this process.
type RingState struct {
	// Dir holds a file for each guest; empty: memfds.
	Dir string
	// Kept are the memfds of an earlier process by guest. The daemon takes those of its guests over.
	Kept map[string]*os.File
	// Keep is given a new memfd of a guest, and Drop the name of a guest that is removed; both may be nil.
	Keep func(guest string, f *os.File)
	Drop func(guest string)
}

// openRings opens the guest's ring state. A guest without one is served all the same: only a crash needs it.
func (g *guest) openRings() *ringstate.Store {
	r := &g.daemon.opts.Rings
	g.daemon.mu.Lock()
	kept := r.Kept[g.spec.Name]
	delete(r.Kept, g.spec.Name)
	g.daemon.mu.Unlock()
	s, damage, err := r.open(g.spec.Name, kept)
	if damage != nil {
		g.log.Warn("ring state is begun anew", "reason", damage)
	}
	if err != nil {
		g.log.Warn("ring positions are not kept: packed rings do not survive a crash", "err", err)
		return nil
	}
	if s.OnDisk() {
		g.log.Warn("the state directory is on a disk, whose writes can hold up the traffic: use a tmpfs, such as a directory below /run", "dir", r.Dir)
	}
	return s
}

func (r *RingState) open(guest string, kept *os.File) (s *ringstate.Store, damage, err error) {
	switch {
	case r.Dir != "":
		return ringstate.Open(r.Dir, guest)
	case kept == nil:
		s, err = ringstate.InMemory(guest)
	default:
		s, damage, err = ringstate.FromFile(kept, guest)
	}
	if err == nil && r.Keep != nil && (kept == nil || damage != nil) {
		r.Keep(guest, s.File())
	}
	return s, damage, err
}

// leaseFile is where a user network's leases are kept, empty if nowhere.
func (g *guest) leaseFile() string {
	if dir := g.daemon.opts.Rings.Dir; dir != "" {
		return filepath.Join(dir, g.spec.Name+".leases")
	}
	return ""
}

// forgetLeases removes the leases of a guest that does not come back, and those of its switch with the last guest. The network is closed.
func (g *guest) forgetLeases() {
	if file := g.leaseFile(); file != "" {
		_ = os.Remove(file) // most networks have none
	}
	if name := g.net().Switch(); name != "" {
		g.daemon.switches.Forget(name)
	}
}

// closeRings ends the use of the ring state; removed says that the guest does not come back.
func (g *guest) closeRings(s *ringstate.Store, removed bool) error {
	if s == nil {
		return nil
	}
	if !removed {
		return s.Close()
	}
	if drop := g.daemon.opts.Rings.Drop; drop != nil {
		drop(g.spec.Name)
	}
	return s.Remove()
}
