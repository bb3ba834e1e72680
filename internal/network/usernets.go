package network

import (
	"slices"
	"strings"

	"github.com/vhostd/vhostd/port/user"
)

// UserUplink is the user network of a switch.
type UserUplink struct {
	Switch string
	Port   *user.Port
}

// UserUplinks lists the switches that have a user network as their uplink, by name. The ports stay the switches', which close them
// when their last guest leaves; a closed one answers as one without flows.
func (s *Switches) UserUplinks() []UserUplink {
	s.mu.Lock()
	defer s.mu.Unlock()
	var list []UserUplink
	for _, g := range s.byName {
		if g.outside == nil {
			continue
		}
		if u, ok := UserPort(g.outside); ok {
			list = append(list, UserUplink{g.name, u})
		}
	}
	slices.SortFunc(list, func(a, b UserUplink) int { return strings.Compare(a.Switch, b.Switch) })
	return list
}

// Switch is the name of the switch that the network is, or "".
func (n Network) Switch() string {
	if s, ok := n.opener.(*switchSpec); ok {
		return s.name
	}
	return ""
}
