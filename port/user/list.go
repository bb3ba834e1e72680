package user

import (
	"cmp"
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Flow describes a flow for people and the control API.
type Flow struct {
	Proto   string         `json:"proto"`  // tcp, udp, icmp
	Guest   netip.AddrPort `json:"guest"`  // of icmp, the port is the identifier
	Remote  netip.AddrPort `json:"remote"` // as the guest sees it; of a connection to a Unix socket of ours it is invalid
	Inbound bool           `json:"inbound,omitempty"`
	// State is connecting, open or half-closed, the latter also while the guest has not acknowledged the end of both directions.
	State string `json:"state"`
	// Age and Idle are seconds since the flow began and since its last payload, Idle of datagram flows by a clock of whole seconds.
	Age         float64 `json:"age-seconds"`
	Idle        float64 `json:"idle-seconds"`
	FromGuest   uint64  `json:"bytes-from-guest"`
	ToGuest     uint64  `json:"bytes-to-guest"`
	PacketsFrom uint64  `json:"packets-from-guest"`
	PacketsTo   uint64  `json:"packets-to-guest"`
}

// Bounds of [FlowQuery].
const (
	DefaultListed = 100
	MaxListed     = 10000
)

// FlowQuery says which flows to list.
type FlowQuery struct {
	Proto string     // tcp, udp, icmp; empty is all
	Guest netip.Addr // invalid is all
	Sort  string     // age (the oldest first, the default), idle (the quietest first), bytes (the most first)
	Limit int        // 1 to MaxListed; 0 means DefaultListed
}

// FlowOrders are the accepted values of FlowQuery.Sort.
func FlowOrders() []string { return []string{"age", "idle", "bytes"} }

// Validate says which value is not accepted.
func (q *FlowQuery) Validate() error {
	switch {
	case q.Proto != "" && !slices.Contains(kindNames[:], q.Proto):
		return fmt.Errorf("proto=%s: accepted are %s", q.Proto, strings.Join(kindNames[:], ", "))
	case q.Sort != "" && !slices.Contains(FlowOrders(), q.Sort):
		return fmt.Errorf("sort=%s: accepted are %s", q.Sort, strings.Join(FlowOrders(), ", "))
	case q.Limit < 0 || q.Limit > MaxListed:
		return fmt.Errorf("limit=%d: accepted are 1 to %d", q.Limit, MaxListed)
	}
	return nil
}

// FlowList is the answer to a FlowQuery.
type FlowList struct {
	Total     int        `json:"total"` // flows that fit the query, listed or not
	Limit     int        `json:"limit"`
	Protocols []Protocol `json:"protocols"`
	Flows     []Flow     `json:"flows"`
}

// breath is how many flows are looked at before others get at the tables again: the poller, and workers with datagrams, wait for them.
const breath = 128

// Flows lists flows. It takes the tables' locks for a few microseconds at a time, so that a list of very many is no moment's picture:
// one that ended or began meanwhile may be in it or not.
func (p *Port) Flows(query FlowQuery) FlowList {
	limit := query.Limit
	if limit == 0 {
		limit = DefaultListed
	}
	list := FlowList{Limit: limit, Flows: []Flow{}, Protocols: p.Protocols()}
	order := query.order()
	see := func(f Flow) {
		if query.Proto != "" && f.Proto != query.Proto || query.Guest.IsValid() && f.Guest.Addr() != query.Guest {
			return
		}
		list.Total++
		if list.Flows = append(list.Flows, f); len(list.Flows) >= 2*limit {
			slices.SortStableFunc(list.Flows, order)
			list.Flows = list.Flows[:limit]
		}
	}
	p.flows.each(func(d *dgram) { see(d.describe()) })
	p.tcp.eachPending(func(c *pending) {
		age := seconds(time.Since(c.began))
		see(Flow{Proto: "tcp", Guest: c.key.guest, Remote: c.key.other, State: "connecting", Age: age, Idle: age})
	})
	p.tcp.eachCalling(func(c *conn, guest netip.AddrPort) {
		age := seconds(time.Since(c.started))
		see(Flow{Proto: "tcp", Guest: guest, Remote: c.other, Inbound: true, State: "connecting", Age: age, Idle: age})
	})
	p.tcp.each(func(c *conn) { see(c.describe()) })
	slices.SortStableFunc(list.Flows, order)
	list.Flows = list.Flows[:min(limit, len(list.Flows))]
	return list
}

func (q *FlowQuery) order() func(a, b Flow) int {
	switch q.Sort {
	case "idle":
		return func(a, b Flow) int { return cmp.Compare(b.Idle, a.Idle) }
	case "bytes":
		return func(a, b Flow) int { return cmp.Compare(b.FromGuest+b.ToGuest, a.FromGuest+a.ToGuest) }
	}
	return func(a, b Flow) int { return cmp.Compare(b.Age, a.Age) }
}

// FlowCount is the number of flows, those that are being made too.
func (p *Port) FlowCount() int { return int(p.flows.count.Load()) }

// seconds are d's, to the millisecond.
func seconds(d time.Duration) float64 { return math.Round(max(d, 0).Seconds()*1000) / 1000 }

// inPieces visits the keys of a table, which mu guards. Between two pieces others may change the table, as the language allows within a
// loop over a map.
func inPieces[K comparable, V any](mu interface {
	Lock()
	Unlock()
}, table map[K]V, visit func(K, V)) {
	type entry struct {
		key   K
		value V
	}
	var piece [breath]entry
	n := 0
	flush := func() {
		mu.Unlock()
		for i := range piece[:n] {
			visit(piece[i].key, piece[i].value)
		}
		n = 0
		mu.Lock()
	}
	mu.Lock()
	defer mu.Unlock()
	for k, v := range table {
		piece[n] = entry{k, v}
		if n++; n == breath {
			flush()
		}
	}
	flush()
}

// each visits the datagram flows, without the lock.
func (s *flows) each(visit func(*dgram)) {
	inPieces(&s.mu, s.byKey, func(_ flowKey, d *dgram) { visit(d) })
}

// eachPending visits the connections that are being made, without the lock.
func (s *tcpSide) eachPending(visit func(*pending)) {
	inPieces(&s.mu, s.pending, func(_ connKey, c *pending) { visit(c) })
}

// eachCalling visits the inbound connections that are being made, without the lock.
func (s *tcpSide) eachCalling(visit func(c *conn, guest netip.AddrPort)) {
	inPieces(&s.mu, s.calling, visit)
}

// each visits the connections, without the lock.
func (s *tcpSide) each(visit func(*conn)) {
	inPieces(&s.mu, s.conns, func(c *conn, _ struct{}) { visit(c) })
}

func (d *dgram) describe() Flow {
	s := &d.port.flows
	return Flow{
		Proto: kindNames[d.key.kind()], Guest: d.key.guest, Remote: d.key.dst, Inbound: d.via != nil, State: "open",
		Age: seconds(time.Since(d.started)), Idle: float64(max(s.clock()-d.last.Load(), 0)), FromGuest: d.up.Load(), ToGuest: d.down.Load(),
		PacketsFrom: d.sent.Load(), PacketsTo: d.rcvd.Load(),
	}
}

func (c *conn) describe() Flow {
	f := Flow{
		Proto: "tcp", Guest: c.guest, Remote: c.other, Inbound: c.inbound, State: "open", Age: seconds(time.Since(c.started)),
		FromGuest: uint64(c.upBytes.Load()), ToGuest: uint64(c.downBytes.Load()),
	}
	f.Idle = min(f.Age, seconds(time.Since(c.started)-time.Duration(c.last.Load())))
	f.PacketsFrom, f.PacketsTo = c.segments()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.upDone || c.downDone {
		f.State = "half-closed"
	}
	return f
}
