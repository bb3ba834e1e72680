package network

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vhostd/vhostd/internal/netspec"
	"github.com/vhostd/vhostd/internal/uplink"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/vswitch"
	"github.com/vhostd/vhostd/worker"
)

// Switches are the switches of one process. A switch exists as long as a guest names it; its uplink, once a guest has described it, as
// long as the switch. Methods are safe for concurrent use.
type Switches struct {
	opts   SwitchOptions
	budget vswitch.Budget

	following sync.Mutex // held while an uplink follows another description, and taken before mu

	mu      sync.Mutex
	byName  map[string]*segment
	uplinks int // that were ever made, to spread them over the workers
}

// SwitchOptions are what switches draw on.
type SwitchOptions struct {
	Arena   *pagemem.Arena
	Workers []*worker.Loop // serve the uplinks
	Logger  *slog.Logger
	// StateDir keeps the leases of uplinks to a user network over a restart; empty: nothing does.
	StateDir string
}

// NewSwitches makes a process's switches: none yet.
func NewSwitches(o SwitchOptions) *Switches {
	return &Switches{opts: o, byName: map[string]*segment{}}
}

// SwitchStatus describes a switch.
type SwitchStatus struct {
	Name     string            `json:"name"`
	Ports    int               `json:"ports"`    // the uplink included
	Stations int               `json:"stations"` // learnt addresses
	Uplink   string            `json:"uplink,omitempty"`
	UplinkUp bool              `json:"uplink-up,omitempty"`
	Drops    map[string]uint64 `json:"drops,omitempty"` // frames lost at the uplink, by reason
}

// Status lists the switches by name.
func (s *Switches) Status() []SwitchStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := []SwitchStatus{}
	for _, g := range s.byName {
		list = append(list, g.status())
	}
	slices.SortFunc(list, func(a, b SwitchStatus) int { return strings.Compare(a.Name, b.Name) })
	return list
}

// switchSpec is one guest's description of a switch. It is the opener of the guest's port.
type switchSpec struct {
	name       string
	ageing     time.Duration // 0: not stated
	port       vswitch.PortOptions
	uplink     string // as written, "" without
	openUplink opener
	pairs      int // of the uplink
}

func (spec *switchSpec) open(with Options) (port.Port, error) {
	if with.Switches == nil {
		return nil, errors.New("network switch: there are no switches here")
	}
	return with.Switches.join(spec)
}

// agree compares what two guests say of one switch.
func (spec *switchSpec) agree(other *switchSpec) error {
	wrong := func(key, mine, others string) error {
		return fmt.Errorf("network switch %s: %s=%s: another guest says %s", spec.name, key, mine, others)
	}
	switch {
	case spec.ageing != 0 && other.ageing != 0 && spec.ageing != other.ageing:
		return wrong("ageing", spec.ageing.String(), other.ageing.String())
	case spec.uplink != "" && other.uplink != "" && spec.uplink != other.uplink:
		return wrong("uplink", spec.uplink, other.uplink)
	case spec.port.MAC != nil && bytes.Equal(spec.port.MAC, other.port.MAC):
		return fmt.Errorf("network switch %s: mac=%v is pinned to another guest", spec.name, spec.port.MAC)
	}
	return nil
}

// segment is a switch in use.
type segment struct {
	*vswitch.Switch
	name   string
	guests int
	said   switchSpec // ageing and uplink as some guest stated them

	outside port.Port     // the uplink's network
	inside  *vswitch.Port // the switch's port that is wired to it
	cable   *uplink.Cable
}

func (g *segment) status() SwitchStatus {
	s := SwitchStatus{Name: g.name, Ports: g.Ports(), Stations: g.Stations(), Uplink: g.said.uplink}
	if g.cable != nil {
		s.UplinkUp, s.Drops = g.outside.Status().Up, map[string]uint64{}
		g.cable.Drops(func(reason string, n uint64) {
			if n > 0 {
				s.Drops[reason] += n
			}
		})
	}
	return s
}

// member is a guest's port, with which the guest leaves the switch.
type member struct {
	*vswitch.Port
	leave func() error
}

func (m member) Close() error { return errors.Join(m.Port.Close(), m.leave()) }

// join makes a port of the switch that is described, and the switch and its uplink if they are not there. On error nothing new is left.
func (s *Switches) join(spec *switchSpec) (port.Port, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.byName[spec.name]
	if g == nil {
		sw, err := vswitch.New(vswitch.Options{Name: spec.name, Budget: &s.budget})
		if err != nil {
			return nil, err
		}
		g = &segment{Switch: sw, name: spec.name}
	}
	if err := spec.agree(&g.said); err != nil {
		return nil, err
	}
	p, err := g.NewPort(spec.port)
	if err != nil {
		return nil, err
	}
	if spec.uplink != "" && g.cable == nil {
		if err := s.attach(g, spec); err != nil {
			return nil, errors.Join(fmt.Errorf("network switch %s: %w", spec.name, err), p.Close())
		}
	}
	if spec.ageing != 0 {
		g.said.ageing = spec.ageing
		_ = g.SetAgeing(spec.ageing) // parseSwitch has judged it
	}
	s.byName[spec.name] = g
	g.guests++
	return member{p, sync.OnceValue(func() error { return s.leave(g) })}, nil
}

// attach makes the uplink.
func (s *Switches) attach(g *segment, spec *switchSpec) error {
	with := Options{Name: g.name, QueuePairs: spec.pairs, LeaseFile: s.leaseFile(g.name), Logger: s.opts.Logger.With("switch", g.name)}
	outside, err := spec.openUplink.open(with)
	if err != nil {
		return fmt.Errorf("uplink: %w", err)
	}
	inside, err := g.NewPort(vswitch.PortOptions{Uplink: outside})
	if err != nil {
		return errors.Join(err, outside.Close())
	}
	cable, err := uplink.Connect(inside, outside, uplink.Options{
		Arena: s.opts.Arena, Workers: s.opts.Workers, First: s.uplinks, Pairs: spec.pairs,
	})
	if err != nil {
		return errors.Join(err, inside.Close(), outside.Close())
	}
	s.uplinks++
	g.said.uplink, g.said.openUplink, g.outside, g.inside, g.cable = spec.uplink, spec.openUplink, outside, inside, cable
	return nil
}

// leaseFile is where the leases of a switch's uplink are kept, empty if nowhere.
func (s *Switches) leaseFile(name string) string {
	if s.opts.StateDir == "" {
		return ""
	}
	return filepath.Join(s.opts.StateDir, name+".switch-leases") // a guest may have the switch's name
}

// Forget removes what is kept over a restart of a switch that is gone, because its last guest was removed. One that is there, maybe again,
// is left alone.
func (s *Switches) Forget(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if file := s.leaseFile(name); file != "" && s.byName[name] == nil {
		_ = os.Remove(file) // most switches have none
	}
}

// leave takes one guest off the switch; with the last one the switch goes.
func (s *Switches) leave(g *segment) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g.guests--; g.guests > 0 {
		return nil
	}
	delete(s.byName, g.name)
	if g.cable == nil {
		return nil
	}
	return errors.Join(g.cable.Close(), g.inside.Close(), g.outside.Close())
}

// uplinkKinds are the networks that a switch can have as its uplink.
var uplinkKinds = []kind{{tapKind, parseTap, false}, {userKind, parseUser, false}}

// maxSwitchName bounds a switch's name, which is shown in status and metrics.
const maxSwitchName = 64

func parseSwitch(s *netspec.Spec) (opener, error) {
	spec := &switchSpec{
		name:   s.String("name", ""),
		ageing: s.Duration("ageing", 0, vswitch.MinAgeing, vswitch.MaxAgeing),
		port:   vswitch.PortOptions{Backlog: s.Int("backlog", vswitch.DefaultBacklog, vswitch.MinBacklog, vswitch.MaxBacklog)},
	}
	mac, sub := s.String("mac", ""), s.Sub("uplink")
	if spec.name == "" {
		return nil, &port.OptionError{Kind: "switch", Option: "name", Accept: "a name that its guests have in common, such as lan"}
	}
	if !validSwitchName(spec.name) {
		return nil, fmt.Errorf("network switch: name=%s: accepted are 1 to %d letters, digits, '.', '_' and '-'", spec.name, maxSwitchName)
	}
	if mac != "" {
		var err error
		if spec.port.MAC, err = net.ParseMAC(mac); err != nil {
			return nil, fmt.Errorf("network switch: mac=%s: accepted are six hexadecimal bytes such as 52:54:00:12:34:56", mac)
		}
	}
	if sub != nil {
		if err := spec.parseUplink(sub); err != nil {
			return nil, err
		}
	}
	return spec, spec.port.Validate()
}

// parseUplink reads the description of the uplink: uplink=KIND and uplink-KEY for each key of that kind of network.
func (spec *switchSpec) parseUplink(sub *netspec.Spec) error {
	i := slices.IndexFunc(uplinkKinds, func(k kind) bool { return k.name == sub.Kind })
	if i < 0 {
		return fmt.Errorf("network switch: uplink=%s: accepted are tap and user", sub.Kind)
	}
	spec.pairs = sub.Int("queues", 1, 1, port.MaxQueues)
	open, err := uplinkKinds[i].parse(sub)
	if err := cmp.Or(sub.Err(), err, sub.Done()); err != nil {
		return fmt.Errorf("network switch: uplink: %w", err)
	}
	spec.uplink, spec.openUplink = sub.Text(), open
	return nil
}

func validSwitchName(name string) bool {
	return name != "" && len(name) <= maxSwitchName && !strings.ContainsFunc(name, func(r rune) bool {
		return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._-", r))
	})
}
