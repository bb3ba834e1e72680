package config

import (
	"maps"
	"slices"
	"strings"

	"github.com/vhostd/vhostd/vhostuser"
)

// experiments are the protocol features that a guest's key experimental adds to the offer. They
// are not offered otherwise, because some front-ends take their bits for something else.
var experiments = map[string]vhostuser.ProtocolFeatures{
	"gpa-addresses": vhostuser.ProtoGPAAddresses,
	"skip-drain":    vhostuser.ProtoBaseInflight | vhostuser.ProtoSkipDrain,
}

// Experiments are the accepted values of experimental.
func Experiments() []string { return slices.Sorted(maps.Keys(experiments)) }

func parseExperimental(g Guest, spec *GuestSpec) error {
	for _, name := range g.Experimental {
		feature, ok := experiments[name]
		if !ok {
			return keyErrorf("experimental", "%q: accepted are %s", name, strings.Join(Experiments(), ", "))
		}
		spec.Protocol |= feature
	}
	return nil
}
