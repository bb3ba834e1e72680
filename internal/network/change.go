package network

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/vhostd/vhostd/internal/netspec"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/user"
)

// userKeys are the parameters that a running user network follows.
var userKeys = []string{"publish", "allow", "deny", "max-flows", "host", "dns", "lease"}

// uplinkPrefix begins the parameters of a switch's uplink.
const uplinkPrefix = "uplink-"

// KindKey stands for the kind among the keys of a Difference.
const KindKey = "network"

// Difference is what two descriptions differ in.
type Difference struct {
	Live  []string // keys that the running network follows
	Fixed []string // keys that it was made with
}

// None says that there is no difference.
func (d Difference) None() bool { return len(d.Live) == 0 && len(d.Fixed) == 0 }

// Difference compares the network as it runs with another description.
func (n Network) Difference(to Network) (d Difference) {
	if n.text == to.text {
		return d
	}
	from, into := paramsOf(n.text), paramsOf(to.text)
	if from.Kind != into.Kind {
		return Difference{Fixed: []string{KindKey}}
	}
	live := n.liveKeys(to)
	for _, key := range changedKeys(from.Params(), into.Params()) {
		if slices.Contains(live, key) {
			d.Live = append(d.Live, key)
		} else {
			d.Fixed = append(d.Fixed, key)
		}
	}
	// What was written out may be what it was by default.
	if a, ok := n.opener.(*userSpec); ok && reflect.DeepEqual(a.fixed(), to.opener.(*userSpec).fixed()) {
		d.Fixed = slices.DeleteFunc(d.Fixed, func(key string) bool { return !slices.Contains(captureKeys, key) })
	}
	return d
}

// captureKeys belong to the edge and are fixed.
var captureKeys = []string{"capture", "snaplen", "rotate"}

// liveKeys are those that the network n, which runs, can follow.
func (n Network) liveKeys(to Network) (keys []string) {
	if !n.edge.none() {
		keys = append(keys, edgeKeys...)
	}
	a, b := n.user(), to.user()
	prefix := ""
	if _, ok := n.opener.(*switchSpec); ok {
		prefix = uplinkPrefix
		keys = append(keys, "ageing")
	}
	if a == nil || b == nil {
		return keys
	}
	for _, key := range userKeys {
		noNames, noLeases := a.services.NoDNS || b.services.NoDNS, a.services.NoDHCP || b.services.NoDHCP
		if noNames && (key == "dns" || key == "host") || noLeases && key == "lease" {
			continue
		}
		keys = append(keys, prefix+key)
	}
	return keys
}

// paramsOf reads a description that was judged before.
func paramsOf(text string) *netspec.Spec {
	s, err := netspec.Parse(text)
	if err != nil {
		return &netspec.Spec{}
	}
	return s
}

// changedKeys are the keys whose values differ, or, of rules, the order; sorted.
func changedKeys(from, to []netspec.Param) (keys []string) {
	for _, p := range slices.Concat(from, to) {
		if !slices.Contains(keys, p.Key) && !slices.Equal(related(p.Key, from), related(p.Key, to)) {
			keys = append(keys, p.Key)
		}
	}
	slices.Sort(keys)
	return keys
}

// related are the parameters of one key; allow and deny are one list, of which each key is a part.
func related(key string, params []netspec.Param) (list []netspec.Param) {
	group := []string{key}
	switch prefix, bare, found := strings.Cut(key, uplinkPrefix); {
	case key == "allow", key == "deny":
		group = []string{"allow", "deny"}
	case found && prefix == "" && (bare == "allow" || bare == "deny"):
		group = []string{uplinkPrefix + "allow", uplinkPrefix + "deny"}
	}
	for _, p := range params {
		if slices.Contains(group, p.Key) {
			list = append(list, p)
		}
	}
	return list
}

// fixed is the part of a user network that does not change while it runs.
func (u *userSpec) fixed() any {
	o, _ := u.opts.Complete() // was judged
	o.Publish, o.MaxFlows = nil, 0
	return struct {
		opts        user.Options
		dhcp, names bool
	}{o, u.services.NoDHCP, u.services.NoDNS}
}

// Changed is what Follow has done.
type Changed struct {
	Network Network // as it runs now
	Tried   Network // after an error: what may be in force in part
	Ended   int     // flows that new rules deny
}

// Follow makes the port of n follow the live part of another description: nothing is lost but the flows that new rules deny. On an error
// some of it may be in force; Follow can be called again with the same description, and that of Tried takes back what is in force.
func (n Network) Follow(p port.Port, to Network, switches *Switches) (c Changed, err error) {
	c.Network = n
	d := n.Difference(to)
	if len(d.Live) == 0 {
		return c, nil
	}
	next := to
	if len(d.Fixed) > 0 {
		if next, err = n.merge(to, d.Live); err != nil {
			return c, err
		}
	}
	if c.Ended, err = n.apply(p, &next, d.Live, switches); err != nil {
		c.Tried = next
		return c, err
	}
	c.Network = next
	return c, nil
}

// apply makes the port follow a description that differs in live keys alone.
func (n Network) apply(p port.Port, next *Network, keys []string, switches *Switches) (ended int, err error) {
	if e, ok := p.(*edged); ok {
		next.edge.changes = true // it stays in the path, whatever it has to do
		if err := e.follow(&next.edge); err != nil {
			return 0, err
		}
	}
	switch into := next.opener.(type) {
	case *userSpec:
		u, ok := UserPort(p)
		if !ok {
			return 0, errors.New("network user: the running one is none")
		}
		return n.opener.(*userSpec).follow(u, into)
	case *switchSpec:
		return switches.follow(into, keys)
	}
	return 0, nil
}

// merge is n with the given keys of another description.
func (n Network) merge(to Network, keys []string) (Network, error) {
	from := paramsOf(n.text)
	other := func(p netspec.Param) bool { return !slices.Contains(keys, p.Key) }
	mine := slices.DeleteFunc(from.Params(), func(p netspec.Param) bool { return !other(p) })
	theirs := slices.DeleteFunc(paramsOf(to.text).Params(), other)
	return Parse(netspec.Format(from.Kind, append(mine, theirs...)))
}

// follow makes a running network, of which u is the description, follow another one.
func (u *userSpec) follow(p *user.Port, to *userSpec) (ended int, err error) {
	var errs []error
	if o, _ := to.opts.Complete(); o.MaxFlows != 0 {
		p.SetMaxFlows(o.MaxFlows)
	}
	if !reflect.DeepEqual(u.services.Upstreams, to.services.Upstreams) || !reflect.DeepEqual(u.services.Hosts, to.services.Hosts) {
		errs = append(errs, p.SetNames(to.services.Upstreams, to.services.Hosts))
	}
	if !reflect.DeepEqual(u.services.Pins, to.services.Pins) {
		errs = append(errs, p.SetPins(to.services.Pins))
	}
	if !reflect.DeepEqual(u.services.Rules, to.services.Rules) {
		ended, err = p.SetRules(to.services.Rules)
		errs = append(errs, err)
	}
	errs = append(errs, republish(p, u.opts.Publish, to.opts.Publish))
	return ended, errors.Join(errs...)
}

// republish takes back what is not published any more and publishes what is new. What was published or taken back meanwhile, by the
// control API, is as it should be.
func republish(p *user.Port, from, to []user.Publication) error {
	var errs []error
	in := func(list []user.Publication, what user.Publication) bool {
		return slices.ContainsFunc(list, func(other user.Publication) bool { return other.String() == what.String() })
	}
	for _, what := range from {
		if !in(to, what) {
			if err := p.Unpublish(what); !errors.Is(err, user.ErrNotPublished) {
				errs = append(errs, err)
			}
		}
	}
	for _, what := range to {
		if !in(from, what) && !in(p.Published(), what) {
			errs = append(errs, p.Publish(what))
		}
	}
	return errors.Join(errs...)
}

// follow makes a switch follow what one guest says of it now. An uplink that cannot follow stays as it was.
func (s *Switches) follow(to *switchSpec, keys []string) (ended int, err error) {
	s.following.Lock() // mu is free while an uplink looks through its flows
	defer s.following.Unlock()
	g, u, from, err := s.followed(to, keys)
	if u == nil || err != nil {
		return 0, err
	}
	into := to.openUplink.(*userSpec)
	if ended, err = from.follow(u, into); err != nil {
		_, back := into.follow(u, from)
		return ended, errors.Join(err, back)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.byName[to.name] == g {
		g.said.uplink, g.said.openUplink = to.uplink, to.openUplink
	}
	return ended, nil
}

// followed does what needs no time and returns the uplink that has to follow, and its description; nil if none has to.
func (s *Switches) followed(to *switchSpec, keys []string) (*segment, *user.Port, *userSpec, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	g := s.byName[to.name]
	if g == nil {
		return nil, nil, nil, fmt.Errorf("network switch %s: it does not exist", to.name)
	}
	if to.ageing != 0 && slices.Contains(keys, "ageing") {
		if err := g.SetAgeing(to.ageing); err != nil {
			return nil, nil, nil, err
		}
		g.said.ageing = to.ageing
	}
	if _, ok := to.openUplink.(*userSpec); !ok || g.outside == nil || to.uplink == g.said.uplink {
		return nil, nil, nil, nil
	}
	from, ok := g.said.openUplink.(*userSpec)
	u, too := UserPort(g.outside)
	if !ok || !too {
		return nil, nil, nil, fmt.Errorf("network switch %s: its uplink is %s", to.name, g.said.uplink)
	}
	return g, u, from, nil
}
