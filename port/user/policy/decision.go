package policy

import "fmt"

// Reason says what decided.
type Reason uint8

// The reasons. Those that refuse are the metric labels of [Policy.Refusals].
const (
	Default   Reason = iota // nothing was against it
	ByRule                  // a rule matched, see Decision.Rule
	NotListed               // there are allow rules, and none matched
	Metadata                // built in: a cloud's metadata service
	Loopback                // built in: the host's loopback
	LinkLocal               // built in: a link-local network
	reasons
)

var reasonNames = [reasons]string{"default", "rule", "not_listed", "metadata", "loopback", "link_local"}

// String is fit for a metric label.
func (r Reason) String() string { return reasonNames[r] }

// Decision is the answer about one flow or look-up. It holds no memory of its own.
type Decision struct {
	Allowed bool
	Reason  Reason
	Rule    *Rule // the rule that decided, for ByRule
}

// String says it for a log.
func (d Decision) String() string {
	verb := "refused"
	if d.Allowed {
		verb = "allowed"
	}
	switch d.Reason {
	case ByRule:
		return fmt.Sprintf("%s by %v", verb, d.Rule)
	case NotListed:
		return verb + ": there are allow rules and none matches"
	case Default:
		return verb
	}
	return fmt.Sprintf("%s: %v is denied unless an allow rule names the address", verb, d.Reason)
}
