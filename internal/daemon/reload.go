package daemon

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/internal/network"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtionet"
)

// Reload says what became of a new configuration.
type Reload struct {
	Added   []string      `json:"added"`
	Removed []string      `json:"removed"`
	Changed []GuestChange `json:"changed"` // under the running guest
	// Pending are differences that a running guest cannot follow: it needs to be removed and added.
	Pending []GuestChange `json:"pending"`
	Failed  []GuestError  `json:"failed"`
	// Process are keys of the daemon itself that count from its next start on.
	Process    []string `json:"process"`
	EndedFlows int      `json:"ended-flows"` // because new rules deny them
}

// Complete says whether everything of the configuration is in force.
func (r *Reload) Complete() bool {
	return len(r.Pending) == 0 && len(r.Failed) == 0 && len(r.Process) == 0
}

// Idle says that nothing was to be done.
func (r *Reload) Idle() bool {
	return r.Complete() && len(r.Added) == 0 && len(r.Removed) == 0 && len(r.Changed) == 0
}

// GuestChange names keys of a guest, as [config.Difference] does.
type GuestChange struct {
	Guest string   `json:"guest"`
	Keys  []string `json:"keys"`
	Needs string   `json:"needs,omitempty"` // for the keys to be in force
}

// needsAnew is what a guest needs that cannot follow.
const needsAnew = "the guest to be removed and added"

// GuestError is what failed about a guest; everything else was done.
type GuestError struct {
	Guest string `json:"guest"`
	Error string `json:"error"`
}

// Reload makes the daemon serve the guests of a configuration, where before are the names of those of the last one: guests that left
// it are removed, new ones added, and those that stay follow what they can while they are served. Guests that were added otherwise are
// left alone, unless the configuration has their name. One failure does not keep the rest from being done.
func (d *Daemon) Reload(before []string, now []config.GuestSpec) Reload {
	r := Reload{
		Added: []string{}, Removed: []string{}, Changed: []GuestChange{}, Pending: []GuestChange{}, Failed: []GuestError{},
		Process: []string{},
	}
	failed := func(name string, err error) { r.Failed = append(r.Failed, GuestError{name, err.Error()}) }
	for _, name := range before {
		if slices.ContainsFunc(now, func(g config.GuestSpec) bool { return g.Name == name }) {
			continue
		}
		switch err := d.Remove(name); {
		case errors.Is(err, ErrNotFound): // somebody was faster
		case err != nil:
			failed(name, err)
		default:
			r.Removed = append(r.Removed, name)
		}
	}
	var again []config.GuestSpec // what another guest has may become free
	for _, spec := range now {
		if d.find(spec.Name) == nil {
			continue
		}
		if err := d.follow(spec, &r); err != nil {
			again = append(again, spec)
		}
	}
	for _, spec := range again {
		if err := d.follow(spec, &r); err != nil {
			failed(spec.Name, err)
		}
	}
	for _, spec := range now {
		if d.find(spec.Name) != nil {
			continue
		}
		if err := d.Add(spec, Source{}); err != nil {
			failed(spec.Name, err)
			continue
		}
		r.Added = append(r.Added, spec.Name)
	}
	return r
}

func (d *Daemon) find(name string) *guest {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.guests[name]
}

// follow makes a guest follow its new description as far as it can. What it says goes into r when there was no error.
func (d *Daemon) follow(spec config.GuestSpec, r *Reload) error {
	g := d.find(spec.Name)
	if g == nil {
		return nil // it will be added
	}
	<-g.ready
	g.changing.Lock()
	defer g.changing.Unlock()
	g.mu.Lock()
	running, p, device := g.spec, g.port, g.device
	running.Network, running.Copy, running.TxAlloc = g.network, g.copy, g.txAlloc
	g.mu.Unlock()
	if device == nil {
		return ErrNotFound // it is being removed
	}
	if err := g.takeBack(spec.Network, running.Network, p, d.switches); err != nil {
		return err
	}
	difference := running.Difference(spec)
	if difference.None() {
		return nil
	}
	if err := d.allowsPublish(running, spec); err != nil {
		return err
	}
	changed, err := running.Network.Follow(p, spec.Network, d.switches)
	r.EndedFlows += changed.Ended
	g.tried = changed.Tried
	if err != nil {
		return err
	}
	if running.Copy != spec.Copy || running.TxAlloc != spec.TxAlloc {
		setDevice(device, running, spec)
	}
	g.mu.Lock()
	g.network, g.copy, g.txAlloc = changed.Network, spec.Copy, spec.TxAlloc
	g.mu.Unlock()
	if len(difference.Live) > 0 {
		r.Changed = append(r.Changed, GuestChange{Guest: spec.Name, Keys: difference.Live})
		g.log.Info("guest changed", "keys", difference.Live, "ended-flows", changed.Ended)
	}
	if len(difference.Fixed) > 0 {
		r.Pending = append(r.Pending, GuestChange{spec.Name, difference.Fixed, needsAnew})
		g.log.Warn("a change is pending", "keys", difference.Fixed, "needs", needsAnew)
	}
	return nil
}

// takeBack undoes what an earlier attempt has left in force, unless the same is wanted again. g.changing is held.
func (g *guest) takeBack(wanted, running network.Network, p port.Port, switches *network.Switches) error {
	if t := g.tried.String(); t == "" || t == wanted.String() {
		return nil
	}
	if _, err := g.tried.Follow(p, running, switches); err != nil {
		return fmt.Errorf("take back what a reload could not finish: %w", err)
	}
	g.tried = network.Network{}
	return nil
}

// setDevice changes what the configuration changed: what the control API has set of the other stays.
func setDevice(device *virtionet.Device, from, to config.GuestSpec) {
	if from.TxAlloc != to.TxAlloc {
		device.SetTxAlloc(to.TxAlloc)
	}
	if from.Copy != to.Copy {
		device.SetCopy(to.Copy)
	}
}

// allowsPublish judges new Unix sockets against the sandbox.
func (d *Daemon) allowsPublish(running, spec config.GuestSpec) error {
	s := d.confined.Load()
	if s == nil {
		return nil
	}
	old := running.Network.PublishPaths()
	for _, path := range spec.Network.PublishPaths() {
		if slices.Contains(old, path) {
			continue
		}
		if err := s.AllowsSocket(path); err != nil {
			return fmt.Errorf("%w: %w", ErrSandbox, err)
		}
	}
	return nil
}

// net is the guest's network as it runs now.
func (g *guest) net() network.Network {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.network
}
