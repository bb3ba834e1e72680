package policy

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// Action is what a rule does with what it matches.
type Action uint8

// The actions, named after the keys that make them.
const (
	Deny Action = iota
	Allow
)

// String is the rule's key: allow or deny.
func (a Action) String() string {
	if a == Allow {
		return "allow"
	}
	return "deny"
}

// MaxRules bounds the rules of a network: each new flow may walk over all of them.
const MaxRules = 1024

const accept = "CIDR, CIDR:PORT, [CIDR6]:PORT, a DNS name or *.name"

// Rule is one allow or deny. It is made by [ParseRule].
type Rule struct {
	action Action
	text   string
	prefix netip.Prefix // valid in a rule about addresses
	port   uint16       // 0 is any
	name   string       // lower case, without the final dot; not empty in a rule about names
	below  bool         // the names below name instead of name itself
}

// ParseRule reads what follows `allow=` or `deny=`. A single address stands for the network that has only this address. A prefix
// with bits beyond its length is refused, because it may be a slip of the pen in either.
func ParseRule(action Action, text string) (Rule, error) {
	r := Rule{action: action, text: text}
	fail := func(format string, args ...any) (Rule, error) {
		return Rule{}, fmt.Errorf("%v=%s: %s (accepted: %s)", action, text, fmt.Sprintf(format, args...), accept)
	}
	body, port, err := splitPort(text)
	if err != nil {
		return fail("%v", err)
	}
	r.port = port
	prefix, isPrefix, err := parsePrefix(body)
	switch {
	case err != nil:
		return fail("%v", err)
	case isPrefix:
		r.prefix = prefix
		return r, nil
	case port != 0 || body != text:
		return fail("%q is no address prefix, and only those take a port", body)
	}
	r.name, r.below = strings.CutPrefix(text, "*.")
	if !r.below {
		r.name = text
	}
	r.name = strings.ToLower(strings.TrimSuffix(r.name, "."))
	if err := checkName(r.name); err != nil {
		return fail("%v", err)
	}
	return r, nil
}

// splitPort takes a port off the end. An IPv6 prefix with a port stands in brackets; one without may.
func splitPort(text string) (body string, port uint16, err error) {
	if inside, ok := strings.CutPrefix(text, "["); ok {
		body, rest, closed := strings.Cut(inside, "]")
		if !closed {
			return "", 0, fmt.Errorf("the bracket is not closed")
		}
		if !strings.Contains(body, ":") {
			return "", 0, fmt.Errorf("brackets are for IPv6")
		}
		if rest == "" {
			return body, 0, nil
		}
		digits, ok := strings.CutPrefix(rest, ":")
		if !ok {
			return "", 0, fmt.Errorf("%q follows the bracket where :PORT could", rest)
		}
		port, err = parsePort(digits)
		return body, port, err
	}
	if strings.Count(text, ":") != 1 {
		return text, 0, nil // a name, IPv4, or IPv6 without a port
	}
	body, digits, _ := strings.Cut(text, ":")
	port, err = parsePort(digits)
	return body, port, err
}

func parsePort(digits string) (uint16, error) {
	n, err := strconv.ParseUint(digits, 10, 16)
	if err != nil || n == 0 || digits[0] == '+' {
		return 0, fmt.Errorf("port %q is not a number from 1 to 65535", digits)
	}
	return uint16(n), nil
}

// parsePrefix reads a prefix or an address. ok is false, without an error, for what looks like a name.
func parsePrefix(text string) (prefix netip.Prefix, ok bool, err error) {
	if !strings.ContainsAny(text, ":/") && !numeric(text) {
		return netip.Prefix{}, false, nil
	}
	if strings.Contains(text, "/") {
		prefix, err = netip.ParsePrefix(text)
	} else {
		var addr netip.Addr
		if addr, err = netip.ParseAddr(text); err == nil {
			prefix = netip.PrefixFrom(addr, addr.BitLen())
		}
	}
	switch {
	case strings.Contains(text, "%"):
		return netip.Prefix{}, false, fmt.Errorf("an address with a zone means nothing outside its host")
	case err != nil:
		return netip.Prefix{}, false, fmt.Errorf("%q is no address prefix", text)
	case prefix.Addr().Is4In6():
		return netip.Prefix{}, false, fmt.Errorf("write the IPv4 address %v without its IPv6 guise", prefix.Addr().Unmap())
	case prefix.Masked() != prefix:
		return netip.Prefix{}, false, fmt.Errorf("the address has bits beyond its prefix, wanted %v", prefix.Masked())
	}
	return prefix, true, nil
}

// numeric says whether text can only be meant as an IPv4 address: no top-level domain is a number.
func numeric(text string) bool {
	last := text[strings.LastIndexByte(text, '.')+1:]
	return last != "" && strings.Trim(last, "0123456789") == ""
}

// checkName accepts what RFC 1035 allows, with the underscore of service names.
func checkName(name string) error {
	if name == "" {
		return fmt.Errorf("the name is empty")
	}
	if len(name) > 253 {
		return fmt.Errorf("the name has %d bytes, 253 are the most", len(name))
	}
	for label := range strings.SplitSeq(name, ".") {
		if label == "" || len(label) > 63 {
			return fmt.Errorf("the part %q of the name has %d bytes, wanted 1 to 63", label, len(label))
		}
		for _, c := range []byte(label) {
			if c != '-' && c != '_' && (c < '0' || c > '9') && (c < 'a' || c > 'z') {
				return fmt.Errorf("the name has %q, wanted letters, digits, - and _ (names in other scripts as xn--…)", string(c))
			}
		}
	}
	return nil
}

// Action is what the rule does.
func (r *Rule) Action() Action { return r.action }

// String is the rule as the configuration writes it, such as allow=10.0.0.0/8:443.
func (r *Rule) String() string { return r.action.String() + "=" + r.text }

// matchesAddr says whether the rule is about addresses and dst is one of them. Port 0 of dst is traffic without ports.
func (r *Rule) matchesAddr(dst netip.AddrPort) bool {
	return r.name == "" && (r.port == 0 || r.port == dst.Port()) && r.prefix.Contains(dst.Addr())
}

// matchesName says whether the rule is about names and name, in lower case and without its final dot, is one of them. A name comes in
// the presentation format of RFC 1035, in which a backslash takes the meaning away from the dot that follows.
func (r *Rule) matchesName(name string) bool {
	switch {
	case r.name == "":
		return false
	case !r.below:
		return name == r.name
	}
	dot := len(name) - len(r.name) - 1
	if dot < 1 || name[dot] != '.' || name[dot+1:] != r.name {
		return false
	}
	escapes := 0
	for escapes < dot && name[dot-1-escapes] == '\\' {
		escapes++
	}
	return escapes%2 == 0
}
