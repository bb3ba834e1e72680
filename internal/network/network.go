// Package network turns the description of a network, such as "tap,name=tap0", into a port. It is
// the only place that knows which kinds of port this build has.
package network

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"
	"strings"

	"github.com/vhostd/vhostd/internal/netspec"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/echo"
)

// Network is a description that was judged; opening it makes the port.
type Network struct {
	text   string
	opener opener
	edge   edgeSpec
}

// opener makes the port of a description that was judged.
type opener interface {
	open(Options) (port.Port, error)
}

// openFunc is an opener that has nothing to tell but its port.
type openFunc func(Options) (port.Port, error)

func (f openFunc) open(o Options) (port.Port, error) { return f(o) }

// EchoBudget bounds the memory of frames that wait in echo networks.
type EchoBudget = echo.Budget

// Options are what the guest adds to the description.
type Options struct {
	Name       string // the guest's, or the switch's if the network is its uplink
	QueuePairs int
	Switches   *Switches   // of the process; needed by switches only
	Echoes     *EchoBudget // of the process's echo networks; nil: each has its own
	LeaseFile  string      // keeps the leases of a user network over a restart; empty: nothing does
	Batch      int         // largest number of frames that a queue receives at a time; 0: no matter
	Logger     *slog.Logger
}

// kind reads its parameters from the Spec and returns how to open it; the Spec itself keeps the
// errors of its getters.
type kind struct {
	name  string
	parse func(*netspec.Spec) (opener, error)
	edge  bool // there are others behind it, so that rates and captures make sense
}

// Kinds names the kinds of network that this build has, sorted.
func Kinds() []string {
	names := make([]string, len(kinds))
	for i, k := range kinds {
		names[i] = k.name
	}
	slices.Sort(names)
	return names
}

// Parse judges KIND[,key=value…] without opening anything.
func Parse(text string) (Network, error) {
	spec, err := netspec.Parse(text)
	if err != nil {
		return Network{}, err
	}
	for _, k := range kinds {
		if k.name == spec.Kind {
			open, err := k.parse(spec)
			n := Network{text: text, opener: open}
			if k.edge && err == nil {
				n.edge, err = parseEdge(spec)
				n.edge.changes = k.name == userKind
			}
			if err := cmp.Or(spec.Err(), err, spec.Done()); err != nil {
				return Network{}, err
			}
			return n, nil
		}
	}
	return Network{}, fmt.Errorf("network %q is not available in this build: accepted are %s", spec.Kind, strings.Join(Kinds(), ", "))
}

// String returns the description as it was written.
func (n Network) String() string { return n.text }

// Open makes the port. Errors say what failed, on which object, and what to do.
func (n Network) Open(o Options) (port.Port, error) {
	p, err := n.opener.open(o)
	if err != nil {
		return nil, err
	}
	return n.edge.wrap(p, o)
}

// ManagesInterfaces says whether the network makes or changes interfaces of the host, when it is opened and later.
func (n Network) ManagesInterfaces() bool {
	kind, _, _ := strings.Cut(n.text, ",")
	spec, ok := n.opener.(*switchSpec)
	return kind == tapKind || ok && spec.openUplink != nil && n.user() == nil
}

// Socket is the path of the Unix socket that the network makes when it is opened, and removes, or that it dials; "" for
// networks without one.
func (n Network) Socket() (path string, dials bool) {
	if s, ok := n.opener.(sockSpec); ok {
		return s.opts.Path, s.opts.Connect
	}
	return "", false
}

// Agree says why another guest of the same process cannot have the network other, or nil.
func (n Network) Agree(other Network) error {
	a, ok := n.opener.(*switchSpec)
	b, too := other.opener.(*switchSpec)
	if !ok || !too || a.name != b.name {
		return nil
	}
	return a.agree(b)
}
