package policy

import "net/netip"

// Grounds are the names that stood for a flow's destination when it began. They belong to the flow for its life: a name that runs out
// meanwhile, or an address that is answered for another name, does not change what the flow is about. The zero value has none.
type Grounds struct{ names []binding }

// Grounds returns what names stand for an address at present. Without any it allocates nothing.
func (g *Guest) Grounds(addr netip.Addr) Grounds {
	addr = canonical(addr)
	g.mu.RLock()
	defer g.mu.RUnlock()
	at := g.stations[addr]
	if at == nil {
		return Grounds{}
	}
	now := g.now()
	var list []binding
	for _, b := range at.names {
		if now.Before(b.until) {
			list = append(list, b)
		}
	}
	return Grounds{list}
}

// Review judges a flow that has begun on the given grounds by the present rules. Unlike Check it neither counts nor logs.
func (g *Guest) Review(dst netip.AddrPort, grounds Grounds) Decision {
	dst = netip.AddrPortFrom(canonical(dst.Addr()), dst.Port())
	d, _ := g.policy.set.Load().judge(dst, &station{names: grounds.names}) // at the zero time every name is valid
	return d
}

// Ended counts a flow that was ended because Review decided so, and logs it.
func (g *Guest) Ended(dst netip.AddrPort, d Decision) {
	g.policy.ended[d.Reason].Add(1)
	s := g.policy.set.Load()
	for i := range s.rules {
		if d.Rule != nil && s.rules[i] == *d.Rule {
			s.ended[i].Add(1)
			break
		}
	}
	g.policy.log.Warn("connection ended by policy", "guest", g.log, "destination", dst, "decision", d)
}

// EndedFlows visits the number of flows that were ended for each reason, with the names of [Policy.Refusals].
func (p *Policy) EndedFlows(visit func(reason string, n uint64)) {
	for r := range p.ended {
		if Reason(r) != Default {
			visit(Reason(r).String(), p.ended[r].Load())
		}
	}
}

// DeniesRest says whether what no rule matches is denied.
func (p *Policy) DeniesRest() bool { return p.set.Load().anyAllow }
