package policy

import (
	"container/list"
	"net/netip"
	"strings"
	"sync"
	"time"
)

const (
	// MinNameLife is how long an answered address stands for its name at least: programs resolve first and connect later.
	MinNameLife = 60 * time.Second
	// MaxNameLife bounds the TTL that an answer can claim: RFC 8767 lets resolvers cap it at a week.
	MaxNameLife = 7 * 24 * time.Hour
	// DefaultNames is how many addresses a guest's names stand for at most. The one that was answered longest ago gives way.
	DefaultNames = 4096
	// namesPerAddr is how many names one address stands for; the one that ends first gives way.
	namesPerAddr = 16
)

// Guest judges for one guest of a network and remembers what names were answered to it. All methods are safe for concurrent use.
type Guest struct {
	policy *Policy
	log    any // the guest's name in the log, or nil
	max    int
	now    func() time.Time

	mu       sync.RWMutex
	stations map[netip.Addr]*station
	oldest   list.List // of *station, the longest unanswered at the front
}

// station is an address that names stand for.
type station struct {
	addr  netip.Addr
	names []binding
	place *list.Element
	now   time.Time // of the decision that is being made with a copy
}

// binding is one name of an address.
type binding struct {
	name  string // as ruleSet.matchesName wants it
	until time.Time
	alias bool // the name was an alias's target, not what was asked for
}

// Guest makes the view of one guest, whose name stands in the log. It needs no Close.
func (p *Policy) Guest(name string) *Guest {
	g := &Guest{policy: p, max: DefaultNames, now: time.Now, stations: map[netip.Addr]*station{}}
	if name != "" {
		g.log = name
	}
	return g
}

// Check judges a flow that begins, by the destination that the guest gave; port 0 says that its protocol has none. It allocates
// nothing unless it refuses.
func (g *Guest) Check(dst netip.AddrPort) Decision {
	dst = netip.AddrPortFrom(canonical(dst.Addr()), dst.Port())
	d := g.decide(dst)
	if !d.Allowed {
		g.policy.refused[d.Reason].Add(1)
		g.policy.log.Warn("connection refused by policy", "guest", g.log, "destination", dst, "decision", d)
	}
	return d
}

func (g *Guest) decide(dst netip.AddrPort) Decision {
	s := g.policy.set.Load()
	if len(s.rules) == 0 {
		return s.decide(dst, &station{})
	}
	g.mu.RLock()
	defer g.mu.RUnlock()
	at := g.stations[dst.Addr()]
	if at == nil {
		return s.decide(dst, &station{})
	}
	return s.decide(dst, &station{names: at.names, now: g.now()})
}

// matches says whether r is about one of the names that are still valid.
func (s *station) matches(r *Rule) bool {
	for i := range s.names {
		b := &s.names[i]
		if (!b.alias || r.action == Deny) && r.matchesName(b.name) && s.now.Before(b.until) {
			return true
		}
	}
	return false
}

// Query judges a look-up of any record of name, which is in presentation format with or without the final dot and in any case.
func (g *Guest) Query(name string) Decision {
	name = canonicalName(name)
	d := g.policy.set.Load().query(name)
	if !d.Allowed {
		g.policy.lookups.Add(1)
		g.policy.log.Warn("look-up refused by policy", "guest", g.log, "name", name, "decision", d)
	}
	return d
}

// Answer judges one address of the answer to a look-up that Query allowed, and remembers, if the guest may have it, that question
// stands for it from now on. aliases are the names that the answer's CNAME records lead to, up to eight. False says that the guest
// must not get the record.
func (g *Guest) Answer(question string, aliases []string, addr netip.Addr, ttl time.Duration) bool {
	question, addr = canonicalName(question), canonical(addr)
	names := make([]string, min(len(aliases), namesPerAddr/2))
	for i := range names {
		names[i] = canonicalName(aliases[i])
	}
	if len(names) < len(aliases) || !g.policy.set.Load().answers(question, names, addr) {
		return false
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	now := g.now()
	until := now.Add(min(max(ttl, MinNameLife), MaxNameLife))
	at := g.touch(addr)
	at.bind(binding{name: question, until: until}, now)
	for _, name := range names {
		at.bind(binding{name: name, until: until, alias: true}, now)
	}
	return true
}

// touch returns the entry of addr as the newest one.
func (g *Guest) touch(addr netip.Addr) *station {
	at := g.stations[addr]
	if at != nil {
		g.oldest.MoveToBack(at.place)
		return at
	}
	if len(g.stations) >= g.max {
		old := g.oldest.Remove(g.oldest.Front()).(*station)
		delete(g.stations, old.addr)
	}
	at = &station{addr: addr}
	at.place = g.oldest.PushBack(at)
	g.stations[addr] = at
	return at
}

// bind adds b, extends the binding that is there, or replaces the one that ends first.
func (s *station) bind(b binding, now time.Time) {
	first := 0
	for i := range s.names {
		old := &s.names[i]
		if old.name == b.name && old.alias == b.alias {
			if old.until.Before(b.until) {
				old.until = b.until
			}
			return
		}
		if old.until.Before(s.names[first].until) {
			first = i
		}
	}
	b.name = strings.Clone(b.name) // it may be part of a whole message
	if len(s.names) == namesPerAddr || len(s.names) > 0 && !now.Before(s.names[first].until) {
		s.names[first] = b
		return
	}
	s.names = append(s.names, b)
}

// Name is one entry of [Guest.Names].
type Name struct {
	Name  string        `json:"name"`
	Addr  netip.Addr    `json:"addr"`
	Left  time.Duration `json:"left"`
	Alias bool          `json:"alias,omitempty"`
}

// Names lists what names stand for at present, in the order in which the addresses were answered.
func (g *Guest) Names() (list []Name) {
	g.mu.RLock()
	defer g.mu.RUnlock()
	now := g.now()
	for e := g.oldest.Front(); e != nil; e = e.Next() {
		at := e.Value.(*station)
		for _, b := range at.names {
			if now.Before(b.until) {
				list = append(list, Name{Name: b.name, Addr: at.addr, Left: b.until.Sub(now), Alias: b.alias})
			}
		}
	}
	return list
}

// canonical takes the IPv6 guise off an IPv4 address, and the zone off any.
func canonical(addr netip.Addr) netip.Addr { return addr.Unmap().WithZone("") }

func canonicalName(name string) string {
	if body, ok := strings.CutSuffix(name, "."); ok && !strings.HasSuffix(body, `\`) {
		name = body
	}
	return strings.ToLower(name)
}
