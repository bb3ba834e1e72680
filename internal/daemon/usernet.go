package daemon

import (
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/internal/network"
	"github.com/vhostd/vhostd/port/user"
)

// ErrNoUserNetwork says that something exists and is no user network; it is wrapped with what it is.
var ErrNoUserNetwork = errors.New("there is no user network")

// Owners of a user network.
const (
	OwnerGuest  = "guest"
	OwnerSwitch = "switch"
)

// UserNetwork is the user network of a guest, or of a switch as its uplink. It may be closed at any time with its owner; its views are
// those of a network without flows then. Its methods are safe for concurrent use.
type UserNetwork struct {
	*user.Port
	Owner, Name string
	daemon      *Daemon
}

// Publish opens a port of the host, or makes a Unix socket where the sandbox lets it.
func (n *UserNetwork) Publish(what user.Publication) error {
	if s := n.daemon.confined.Load(); s != nil && what.Path != "" {
		if err := s.AllowsSocket(what.Path); err != nil {
			return fmt.Errorf("publish=%v: %w: %w", what, ErrSandbox, err)
		}
	}
	if err := n.Port.Publish(what); err != nil {
		return err
	}
	n.log("port published", what)
	return nil
}

// Unpublish takes a port back.
func (n *UserNetwork) Unpublish(what user.Publication) error {
	if err := n.Port.Unpublish(what); err != nil {
		return err
	}
	n.log("port not published any more", what)
	return nil
}

func (n *UserNetwork) log(text string, what user.Publication) {
	n.daemon.log.Info(text, n.Owner, n.Name, "publish", what.String())
}

// UserNetworks lists all user networks: those of guests by name, then those of switches.
func (d *Daemon) UserNetworks() []*UserNetwork {
	list := []*UserNetwork{}
	for _, g := range d.list() {
		if u := g.userPort(); u != nil {
			list = append(list, &UserNetwork{Port: u, Owner: OwnerGuest, Name: g.spec.Name, daemon: d})
		}
	}
	for _, u := range d.switches.UserUplinks() {
		list = append(list, &UserNetwork{Port: u.Port, Owner: OwnerSwitch, Name: u.Switch, daemon: d})
	}
	return list
}

// UserNetwork finds the user network of a guest or a switch. The error says what there is instead.
func (d *Daemon) UserNetwork(owner, name string) (*UserNetwork, error) {
	if owner == OwnerSwitch {
		return d.uplinkOf(name)
	}
	d.mu.Lock()
	g := d.guests[name]
	d.mu.Unlock()
	if g == nil {
		return nil, fmt.Errorf("guest %s: %w", name, ErrNotFound)
	}
	if u := g.userPort(); u != nil {
		return &UserNetwork{Port: u, Owner: OwnerGuest, Name: name, daemon: d}, nil
	}
	if lan := g.net().Switch(); lan != "" {
		if _, err := d.uplinkOf(lan); err == nil {
			return nil, fmt.Errorf("guest %s: %w of its own, it is on switch %s: see /v1/networks/%s", name, ErrNoUserNetwork, lan, lan)
		}
	}
	return nil, fmt.Errorf("guest %s: %w, its network is %v", name, ErrNoUserNetwork, g.net())
}

func (d *Daemon) uplinkOf(name string) (*UserNetwork, error) {
	for _, u := range d.switches.UserUplinks() {
		if u.Switch == name {
			return &UserNetwork{Port: u.Port, Owner: OwnerSwitch, Name: name, daemon: d}, nil
		}
	}
	for _, s := range d.switches.Status() {
		if s.Name == name {
			return nil, fmt.Errorf("switch %s: %w, its uplink is %q", name, ErrNoUserNetwork, s.Uplink)
		}
	}
	return nil, fmt.Errorf("network %s: %w: no switch has this name; a guest's own network is at /v1/guests/NAME", name, ErrNotFound)
}

// userPort is the guest's user network, or nil.
func (g *guest) userPort() *user.Port {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.port == nil {
		return nil
	}
	u, _ := network.UserPort(g.port)
	return u
}
