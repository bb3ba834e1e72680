package policy

import (
	"fmt"
	"log/slog"
	"net/netip"
	"sync/atomic"

	"github.com/vhostd/vhostd/internal/ratelog"
)

// Policy holds the rules of one network and counts refusals. All methods are safe for concurrent use.
type Policy struct {
	set     atomic.Pointer[ruleSet]
	refused [reasons]atomic.Uint64
	ended   [reasons]atomic.Uint64
	lookups atomic.Uint64
	limit   *ratelog.Handler
	log     *slog.Logger
}

// ruleSet is immutable, except for the counters.
type ruleSet struct {
	rules      []Rule
	hits       []atomic.Uint64 // one for each rule
	ended      []atomic.Uint64 // likewise
	anyAllow   bool
	allowsAddr bool // one of the allow rules is about addresses
}

// New makes a policy of the rules in their order. Refusals are logged to log (nil is slog.Default) at the rate of package ratelog.
// Close it at the end.
func New(rules []Rule, log *slog.Logger) (*Policy, error) {
	if log == nil {
		log = slog.Default()
	}
	limit := ratelog.New(log.Handler())
	p := &Policy{limit: limit, log: slog.New(limit)}
	p.set.Store(&ruleSet{})
	if err := p.Replace(rules); err != nil {
		limit.Close()
		return nil, err
	}
	return p, nil
}

// Replace puts other rules in place of all present ones, at once for whatever is judged afterwards. Counters of rules that stay are
// kept, and what a guest's names stand for. On an error nothing changes.
func (p *Policy) Replace(rules []Rule) error {
	if len(rules) > MaxRules {
		return fmt.Errorf("policy: %d rules, %d are accepted", len(rules), MaxRules)
	}
	old := p.set.Load()
	s := &ruleSet{rules: append([]Rule(nil), rules...), hits: make([]atomic.Uint64, len(rules)), ended: make([]atomic.Uint64, len(rules))}
	for i := range s.rules {
		r := &s.rules[i]
		if r.name == "" && !r.prefix.IsValid() {
			return fmt.Errorf("policy: rule %d was not made by ParseRule", i+1)
		}
		s.anyAllow = s.anyAllow || r.action == Allow
		s.allowsAddr = s.allowsAddr || r.action == Allow && r.name == ""
		for j := range old.rules {
			if old.rules[j] == *r {
				s.hits[i].Store(old.hits[j].Load())
				s.ended[i].Store(old.ended[j].Load())
				break
			}
		}
	}
	p.set.Store(s)
	return nil
}

// RuleStatus is a rule, how many flows and look-ups it has decided when they began (of a deny rule, refused), and how many flows it has
// ended that had begun before it was put in place.
type RuleStatus struct {
	Rule  string `json:"rule"`
	Hits  uint64 `json:"hits"`
	Ended uint64 `json:"ended,omitempty"`
}

// Rules lists the rules in their order.
func (p *Policy) Rules() []RuleStatus {
	s := p.set.Load()
	list := make([]RuleStatus, len(s.rules))
	for i := range s.rules {
		list[i] = RuleStatus{Rule: s.rules[i].String(), Hits: s.hits[i].Load(), Ended: s.ended[i].Load()}
	}
	return list
}

// Refusals visits the number of flows that were refused for each reason, and of refused look-ups as "lookup". The reasons are
// constant strings fit for a metric label.
func (p *Policy) Refusals(visit func(reason string, n uint64)) {
	for r := range p.refused {
		if Reason(r) != Default {
			visit(Reason(r).String(), p.refused[r].Load())
		}
	}
	visit("lookup", p.lookups.Load())
}

// Close ends the log's timers. Nothing may be judged afterwards.
func (p *Policy) Close() { p.limit.Close() }

// decide judges a destination for a guest whose names stand for the addresses in names, and counts the rule. It allocates nothing.
func (s *ruleSet) decide(dst netip.AddrPort, names *station) Decision {
	d, i := s.judge(dst, names)
	if i >= 0 {
		s.hits[i].Add(1)
	}
	return d
}

// judge is decide without counting; rule is the index of the one that decided, or -1.
func (s *ruleSet) judge(dst netip.AddrPort, names *station) (d Decision, rule int) {
	if b := s.forbidden(dst); b != nil {
		return Decision{Reason: b.reason}, -1
	}
	for i := range s.rules {
		r := &s.rules[i]
		if r.matchesAddr(dst) || names.matches(r) {
			return Decision{Allowed: r.action == Allow, Reason: ByRule, Rule: r}, i
		}
	}
	if s.anyAllow {
		return Decision{Reason: NotListed}, -1
	}
	return Decision{Allowed: true}, -1
}

// query judges a look-up of name.
func (s *ruleSet) query(name string) Decision {
	for i := range s.rules {
		if r := &s.rules[i]; r.matchesName(name) {
			s.hits[i].Add(1)
			return Decision{Allowed: r.action == Allow, Reason: ByRule, Rule: r}
		}
	}
	if s.anyAllow && !s.allowsAddr {
		return Decision{Reason: NotListed}
	}
	return Decision{Allowed: true}
}

// answers says whether a guest that looked up question may have addr. The aliases that led to it count for deny rules only.
func (s *ruleSet) answers(question string, aliases []string, addr netip.Addr) bool {
	for i := range s.rules {
		r := &s.rules[i]
		if r.matchesName(question) {
			return r.action == Allow
		}
		for _, alias := range aliases {
			if r.action == Deny && r.matchesName(alias) {
				return false
			}
		}
	}
	return !s.anyAllow || s.allowsAddr && s.reachable(addr)
}

// reachable says whether some port of addr, which has no name that a rule knows, is allowed.
func (s *ruleSet) reachable(addr netip.Addr) bool {
	for i := range s.rules {
		r := &s.rules[i]
		if r.name != "" || !r.prefix.Contains(addr) {
			continue
		}
		if r.action == Allow {
			return true
		}
		if r.port == 0 {
			return false
		}
	}
	return !s.anyAllow
}
