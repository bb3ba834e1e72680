package config

import (
	"bytes"
	"slices"

	"github.com/vhostd/vhostd/internal/network"
)

// Difference is what two descriptions of one guest differ in, by key. Parameters of the network stand behind a colon, as in
// network:publish.
type Difference struct {
	Live  []string // what a guest that is served follows
	Fixed []string // what it was made with
}

// networkKey is the key under which a guest's network is described.
const networkKey = "network"

// Difference compares the guest as it runs with another description.
func (g GuestSpec) Difference(to GuestSpec) (d Difference) {
	for _, key := range []struct {
		name string
		same bool
		live bool
	}{
		{"socket", g.Socket == to.Socket, false}, {"client", g.Client == to.Client, false},
		{"queue-pairs", g.QueuePairs == to.QueuePairs, false}, {"mac", bytes.Equal(g.MAC, to.MAC), false}, {"mtu", g.MTU == to.MTU, false},
		{"copy", g.Copy == to.Copy, true}, {"tx-alloc", g.TxAlloc == to.TxAlloc, true}, {"tx-lag", g.TxLag == to.TxLag, false},
		{"socket-mode", g.Listen.Mode == to.Listen.Mode, false},
		{"socket-owner", g.Listen.UID == to.Listen.UID && g.Listen.GID == to.Listen.GID, false},
		{"experimental", g.Protocol == to.Protocol, false},
	} {
		switch {
		case key.same:
		case key.live:
			d.Live = append(d.Live, key.name)
		default:
			d.Fixed = append(d.Fixed, key.name)
		}
	}
	n := g.Network.Difference(to.Network)
	d.Live = append(d.Live, paths(n.Live)...)
	d.Fixed = append(d.Fixed, paths(n.Fixed)...)
	return d
}

func paths(keys []string) []string {
	list := slices.Clone(keys)
	for i, key := range list {
		if key != network.KindKey {
			list[i] = networkKey + ":" + key
		}
	}
	return list
}

// None says that there is no difference.
func (d Difference) None() bool { return len(d.Live) == 0 && len(d.Fixed) == 0 }
