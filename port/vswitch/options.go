package vswitch

import (
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/internal/waiting"
)

const kind = "switch"

// Budget bounds the memory of waiting frames.
type Budget = waiting.Budget

// budgetShare is the part of the arena that waiting frames may occupy: the rest is for frames on the move.
const budgetShare = 4

// Bounds and defaults of [Options] and [PortOptions].
const (
	// DefaultAgeing is the recommended value of IEEE 802.1Q, table 8-4.
	DefaultAgeing  = 300 * time.Second
	MinAgeing      = time.Second
	MaxAgeing      = 1_000_000 * time.Second
	DefaultBacklog = 512
	MinBacklog     = 64
	MaxBacklog     = 16384
	// MaxPorts is the largest number of ports of a switch.
	MaxPorts = maxIndex - firstIndex
)

// Options configure a switch.
type Options struct {
	// Name appears in the status of its ports.
	Name string
	// Ageing is how long a station is known that sends nothing; 0 means DefaultAgeing.
	Ageing time.Duration
	// Budget bounds the memory of waiting frames together with that of other switches; nil means a budget of its own.
	Budget *Budget
}

// Validate returns a [port.OptionError] for the first option with a value that is not accepted.
func (o Options) Validate() error {
	if o.Ageing != 0 && (o.Ageing < MinAgeing || o.Ageing > MaxAgeing) {
		return &port.OptionError{Kind: kind, Option: "ageing", Value: o.Ageing.String(), Accept: fmt.Sprintf("%v to %v", MinAgeing, MaxAgeing)}
	}
	return nil
}

// PortOptions configure a port.
type PortOptions struct {
	// MAC is the only address that the port may send from; nil lets it send from any.
	MAC net.HardwareAddr
	// Backlog is how many frames a queue of the port holds, rounded up to a power of two; 0 means DefaultBacklog.
	Backlog int
	// Uplink, if set, makes this the port that leads out of the switch, of which there is at most one: it may have many stations, and
	// what is meant for stations that left the switch goes there. Uplink is the network that the port is wired to by others; only its
	// MTU, once, and its Status are asked for here.
	Uplink port.Port
}

// Validate returns a [port.OptionError] for the first option with a value that is not accepted.
func (o PortOptions) Validate() error {
	if o.MAC != nil && (len(o.MAC) != 6 || badSource(macOf(o.MAC))) {
		return &port.OptionError{Kind: kind, Option: "mac", Value: o.MAC.String(), Accept: "a unicast address of six bytes"}
	}
	if o.Backlog != 0 && (o.Backlog < MinBacklog || o.Backlog > MaxBacklog) {
		return &port.OptionError{Kind: kind, Option: "backlog", Value: strconv.Itoa(o.Backlog),
			Accept: fmt.Sprintf("%d to %d", MinBacklog, MaxBacklog)}
	}
	return nil
}
