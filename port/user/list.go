package user

import (
	"cmp"
	"net/netip"
	"slices"
	"time"
)

// Flow describes a flow for people and the control API.
type Flow struct {
	Proto     string         `json:"proto"` // tcp, udp, icmp
	Guest     netip.AddrPort `json:"guest"`
	Remote    netip.AddrPort `json:"remote"` // as the guest sees it
	Inbound   bool           `json:"inbound,omitempty"`
	State     string         `json:"state"` // connecting, open, half-closed
	Age       time.Duration  `json:"age"`
	FromGuest uint64         `json:"bytes-from-guest"`
	ToGuest   uint64         `json:"bytes-to-guest"`
}

// Flows lists the flows, the oldest first.
func (p *Port) Flows() []Flow {
	list := append(p.flows.list(), p.tcp.list()...)
	slices.SortStableFunc(list, func(a, b Flow) int { return cmp.Compare(b.Age, a.Age) })
	return list
}

// FlowCount is the number of flows, at most [Options.MaxFlows].
func (p *Port) FlowCount() int { return int(p.flows.count.Load()) }

func (s *flows) list() []Flow {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]Flow, 0, len(s.byKey))
	for _, d := range s.byKey {
		proto := "udp"
		if d.key.isEcho() {
			proto = "icmp"
		}
		list = append(list, Flow{
			Proto: proto, Guest: d.key.guest, Remote: d.key.dst, Inbound: d.via != nil, State: "open", Age: time.Since(d.started),
			FromGuest: d.up.Load(), ToGuest: d.down.Load(),
		})
	}
	return list
}

func (s *tcpSide) list() []Flow {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]Flow, 0, len(s.pending)+len(s.conns))
	for _, c := range s.pending {
		list = append(list, Flow{Proto: "tcp", Guest: c.key.guest, Remote: c.key.other, State: "connecting", Age: time.Since(c.began)})
	}
	for c := range s.conns {
		list = append(list, Flow{
			Proto: "tcp", Guest: c.guest, Remote: c.other, Inbound: c.inbound, State: c.describe(), Age: time.Since(c.started),
			FromGuest: uint64(c.upBytes.Load()), ToGuest: uint64(c.downBytes.Load()),
		})
	}
	return list
}

func (c *conn) describe() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.upDone || c.downDone {
		return "half-closed"
	}
	return "open"
}
