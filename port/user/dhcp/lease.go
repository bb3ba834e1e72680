package dhcp

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"
)

const (
	// MaxLeases bounds the leases of a server, of those in use and of those that are remembered for their stations' return.
	MaxLeases = 1024
	// maxDeclined bounds the addresses that are set aside because a station said that somebody else uses them.
	maxDeclined = 16
	// offerTime is how long an offered address is kept for the station to ask for it.
	offerTime = time.Minute
	// declineTime is how long a declined address is set aside.
	declineTime = 10 * time.Minute
)

// MAC is an Ethernet address.
type MAC [6]byte

// String writes it with colons.
func (m MAC) String() string { return net.HardwareAddr(m[:]).String() }

// MarshalText implements encoding.TextMarshaler.
func (m MAC) MarshalText() ([]byte, error) { return []byte(m.String()), nil }

// UnmarshalText implements encoding.TextUnmarshaler.
func (m *MAC) UnmarshalText(text []byte) error {
	addr, err := net.ParseMAC(string(text))
	if err != nil || len(addr) != len(m) {
		return fmt.Errorf("%q is no Ethernet address", text)
	}
	copy(m[:], addr)
	return nil
}

// State is what a lease is at present.
type State string

// The states of a lease.
const (
	Offered  State = "offered"
	Bound    State = "bound"
	Released State = "released" // kept for its station until the address is needed
	Declined State = "declined" // set aside, belongs to no station
)

// Lease is an address and the station that has it.
type Lease struct {
	Addr    netip.Addr `json:"addr"`
	MAC     MAC        `json:"mac"`
	DUID    string     `json:"duid,omitempty"` // IPv6: the client's identifier as it sent it last, hexadecimal (RFC 8415, 11)
	Name    string     `json:"name,omitempty"` // host name as the station sent it, if it was a valid one
	State   State      `json:"state"`
	Expires time.Time  `json:"expires"` // for Released: when it ended
	Pinned  bool       `json:"pinned,omitempty"`
}

// Pin reserves an address for the station with a MAC, or for the one that says it has a name. Exactly one of both is set.
type Pin struct {
	MAC  MAC
	Name string
	Addr netip.Addr
}

// Store keeps leases beyond the life of the process, such as [File]. Its methods are called with the server's lock held, so they must not
// block or call the server.
type Store interface {
	Put(Lease)
	Remove(netip.Addr)
}

// table holds the leases of one address family. Its user serializes.
type table struct {
	first, last netip.Addr
	taken       []netip.Addr // never leased: the gateway, and addresses with a meaning
	pins        []Pin
	byMAC       map[MAC]*Lease
	byAddr      map[netip.Addr]*Lease
	store       Store // may be nil
	max         int
}

func newTable(store Store) *table {
	return &table{byMAC: map[MAC]*Lease{}, byAddr: map[netip.Addr]*Lease{}, store: store, max: MaxLeases}
}

func (l *Lease) active(now time.Time) bool {
	return l.State != Released && now.Before(l.Expires)
}

// pick returns the lease that the station is to have, nil if there is none. The lease is in the table and its state as it was,
// Released if it is new.
func (t *table) pick(mac MAC, name string, want netip.Addr, now time.Time) *Lease {
	have := t.byMAC[mac]
	addr, pinned := t.choose(have, mac, name, want, now)
	if !addr.IsValid() {
		return nil
	}
	if have != nil && have.Addr == addr {
		have.Pinned = pinned
		return have
	}
	if have != nil {
		t.remove(have)
	}
	if other := t.byAddr[addr]; other != nil {
		t.remove(other)
	}
	if len(t.byAddr) >= t.max {
		t.remove(t.stalest(now))
	}
	l := &Lease{Addr: addr, MAC: mac, State: Released, Expires: now, Pinned: pinned}
	t.byMAC[mac], t.byAddr[addr] = l, l
	return l
}

// choose finds the address. What it returns has no other active lease, except that of a station that holds what is pinned to another.
// When the table is full, it returns the address of a lease that can go, or nothing.
func (t *table) choose(have *Lease, mac MAC, name string, want netip.Addr, now time.Time) (addr netip.Addr, pinned bool) {
	room := have != nil || len(t.byAddr) < t.max || t.stalest(now) != nil
	if i := slices.IndexFunc(t.pins, func(p Pin) bool { return p.Name == "" && p.MAC == mac }); i >= 0 {
		if other := t.byAddr[t.pins[i].Addr]; room || other != nil {
			return t.pins[i].Addr, true
		}
		return netip.Addr{}, false
	}
	if i := slices.IndexFunc(t.pins, func(p Pin) bool { return p.Name != "" && p.Name == name }); i >= 0 && room {
		if t.free(t.pins[i].Addr, mac, now) {
			return t.pins[i].Addr, true
		}
	}
	if have != nil && t.dynamic(have.Addr) {
		return have.Addr, false
	}
	if t.dynamic(want) && t.free(want, mac, now) && room {
		return want, false
	}
	if room {
		if addr := t.firstUnused(); addr.IsValid() {
			return addr, false
		}
	}
	if old := t.stalestDynamic(now); old != nil {
		return old.Addr, false
	}
	return netip.Addr{}, false
}

// dynamic says whether addr is one that any station may get.
func (t *table) dynamic(addr netip.Addr) bool {
	return addr.IsValid() && t.first.Compare(addr) <= 0 && addr.Compare(t.last) <= 0 && !slices.Contains(t.taken, addr) &&
		!slices.ContainsFunc(t.pins, func(p Pin) bool { return p.Addr == addr })
}

// free says whether no other station has an active lease on addr.
func (t *table) free(addr netip.Addr, mac MAC, now time.Time) bool {
	l := t.byAddr[addr]
	return l == nil || l.State != Declined && l.MAC == mac || !l.active(now)
}

// firstUnused looks at no more addresses than are in use or reserved, and one.
func (t *table) firstUnused() netip.Addr {
	for addr := t.first; addr.IsValid() && addr.Compare(t.last) <= 0; addr = addr.Next() {
		if t.byAddr[addr] == nil && t.dynamic(addr) {
			return addr
		}
	}
	return netip.Addr{}
}

// stalest is the lease that ended first, nil if all are active.
func (t *table) stalest(now time.Time) *Lease {
	return t.oldest(now, func(*Lease) bool { return true })
}

func (t *table) stalestDynamic(now time.Time) *Lease {
	return t.oldest(now, func(l *Lease) bool { return t.dynamic(l.Addr) })
}

func (t *table) oldest(now time.Time, fits func(*Lease) bool) (found *Lease) {
	for _, l := range t.byAddr {
		if !l.active(now) && fits(l) && (found == nil || l.Expires.Before(found.Expires) ||
			l.Expires.Equal(found.Expires) && l.Addr.Less(found.Addr)) {
			found = l
		}
	}
	return found
}

// set changes the state of a lease that pick returned. An offer does not shorten what the station has.
func (t *table) set(l *Lease, state State, name string, until time.Time) {
	if state == Offered && l.State == Bound && l.Expires.After(until) {
		return
	}
	l.State, l.Expires = state, until
	if name != "" {
		l.Name = name
	}
	if t.store != nil && state != Offered {
		t.store.Put(*l)
	}
}

// decline sets the station's address aside. When too many are, the one whose time ends first is given free.
func (t *table) decline(l *Lease, now time.Time) {
	t.remove(l)
	var first *Lease
	n := 0
	for _, other := range t.byAddr {
		if other.State == Declined {
			n++
			if first == nil || other.Expires.Before(first.Expires) {
				first = other
			}
		}
	}
	if n >= maxDeclined {
		t.remove(first)
	}
	t.byAddr[l.Addr] = &Lease{Addr: l.Addr, State: Declined, Expires: now.Add(declineTime)}
}

func (t *table) remove(l *Lease) {
	if t.byMAC[l.MAC] == l {
		delete(t.byMAC, l.MAC)
	}
	delete(t.byAddr, l.Addr)
	if t.store != nil {
		t.store.Remove(l.Addr)
	}
}

// restore takes leases over from a store. What contradicts the configuration or another lease is left out, and leaves the store.
func (t *table) restore(leases []Lease) {
	for _, l := range leases {
		own := slices.ContainsFunc(t.pins, func(p Pin) bool {
			return p.Addr == l.Addr && (p.Name == "" && p.MAC == l.MAC || p.Name != "" && p.Name == l.Name)
		})
		if l.State != Bound && l.State != Released || len(t.byAddr) >= t.max || t.byMAC[l.MAC] != nil || t.byAddr[l.Addr] != nil ||
			!own && !t.dynamic(l.Addr) {
			if t.store != nil && t.byAddr[l.Addr] == nil {
				t.store.Remove(l.Addr)
			}
			continue
		}
		l.Name, l.Pinned = hostName(l.Name), own
		kept := l
		t.byMAC[l.MAC], t.byAddr[l.Addr] = &kept, &kept
	}
}

// list is a copy, in any order.
func (t *table) list(now time.Time) []Lease {
	leases := make([]Lease, 0, len(t.byAddr))
	for _, l := range t.byAddr {
		entry := *l
		if !l.active(now) {
			entry.State = Released
		}
		leases = append(leases, entry)
	}
	return leases
}

// byAddr puts leases into the order of their addresses. It is not done under a server's lock, for which workers wait.
func byAddr(leases []Lease) []Lease {
	slices.SortFunc(leases, func(a, b Lease) int { return a.Addr.Compare(b.Addr) })
	return leases
}

// hostName is the first label of what a station says it is called, or nothing if that is no host name: it is shown and logged.
func hostName(name string) string {
	name, _, _ = strings.Cut(strings.ToLower(name), ".")
	if len(name) > 63 || strings.Trim(name, "-") != name {
		return ""
	}
	for _, c := range []byte(name) {
		if c != '-' && (c < '0' || c > '9') && (c < 'a' || c > 'z') {
			return ""
		}
	}
	return name
}
