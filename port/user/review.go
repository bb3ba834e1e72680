package user

import (
	"errors"
	"net/netip"

	"github.com/vhostd/vhostd/port/user/policy"
)

// license is what allowed an outbound flow to begin.
type license struct {
	rules   uint64 // services.rules as they were before
	grounds policy.Grounds
}

// ownPolicy returns the services if their policy is the one that judges flows, or nil.
func (p *Port) ownPolicy() *services {
	if s := p.opts.services; s != nil && p.opts.Policy == Policy(s) {
		return s
	}
	return nil
}

// license is asked before the policy, so that rules that are replaced in between count as newer.
func (p *Port) license(guest netip.Addr, dst netip.AddrPort) (l license) {
	if s := p.ownPolicy(); s != nil {
		l.rules = s.rules.Load()
		l.grounds = s.view(guest).Grounds(dst.Addr())
	}
	return l
}

// review ends a flow that the present rules deny, by calling end, which says whether it has. A flow that began under them is left alone.
func (p *Port) review(guest netip.Addr, dst netip.AddrPort, l *license, end func() bool) bool {
	s := p.ownPolicy()
	if s == nil || l.rules == s.rules.Load() {
		return false
	}
	view := s.view(guest)
	d := view.Review(dst, l.grounds)
	if d.Allowed || !end() {
		return false
	}
	view.Ended(dst, d)
	return true
}

// review ends the flow if it is denied now.
func (d *dgram) review() bool {
	return d.via == nil && d.port.review(d.key.guest.Addr(), d.key.dst, &d.license, func() bool { return d.port.flows.end(d) })
}

// end ends a flow, and says whether it was there.
func (s *flows) end(d *dgram) bool {
	s.mu.Lock()
	there := d.place != nil
	s.forget(d)
	s.mu.Unlock()
	if there {
		d.close()
	}
	return there
}

func (c *pending) review() bool {
	return c.side.port.review(c.key.guest.Addr(), c.key.other, &c.license, func() bool { return c.side.drop(c) })
}

func (c *conn) review() bool {
	return !c.inbound && c.side.port.review(c.guest.Addr(), c.other, &c.license, func() bool { return c.abort(true, true) })
}

// SetRules puts other rules in place of the egress policy's. Flows that began before and are denied now are ended, connections by a
// reset of both sides, and counted; ended is their number. Inbound flows are none of the policy's business. On an error nothing changes.
//
// A flow that begins at the same time is judged by the new rules, at the latest when it is put into the table that SetRules looks
// through.
func (p *Port) SetRules(rules []policy.Rule) (ended int, err error) {
	s := p.ownPolicy()
	if s == nil {
		return 0, errors.New("network user: it was made without a policy of its own")
	}
	if err := s.policy.Replace(rules); err != nil {
		return 0, err
	}
	s.rules.Add(1)
	count := func(gone bool) {
		if gone {
			ended++
		}
	}
	p.flows.each(func(d *dgram) { count(d.review()) })
	p.tcp.eachPending(func(c *pending) { count(c.review()) })
	p.tcp.each(func(c *conn) { count(c.review()) })
	return ended, nil
}
