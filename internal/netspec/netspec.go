// Package netspec parses the one-line description of a network, KIND[,key=value…], as the
// command line, the configuration file and the control API write it.
package netspec

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Spec is a parsed description: the kind and its parameters. Taking a parameter with one of the
// typed getters marks it as known; Done reports what nobody asked for.
//
// A Spec is used by one goroutine.
type Spec struct {
	Kind   string
	prefix string // of the keys as they were written
	params []Param
	known  []string
	group  map[string]string // of keys that List took: the first one
	err    error
}

// Param is a parameter as it was written, without quotes.
type Param struct{ Key, Value string }

// Parse splits text. A value that begins with a quote (") ends with the next one and may hold
// commas. Parse refuses an empty kind, a parameter without "=" and an empty key; which keys a
// kind accepts, and which of them more than once, is for the reader of the Spec to say.
func Parse(text string) (*Spec, error) {
	kind, rest, more := strings.Cut(text, ",")
	if kind == "" {
		return nil, fmt.Errorf("network %q: the kind is missing, wanted KIND[,key=value…]", text)
	}
	if strings.Contains(kind, "=") {
		return nil, fmt.Errorf("network %q: starts with a parameter, wanted KIND[,key=value…]", text)
	}
	s := &Spec{Kind: kind, group: map[string]string{}}
	for more {
		key, value, ok := strings.Cut(rest, "=")
		if !ok || key == "" || strings.Contains(key, ",") {
			param, _, _ := strings.Cut(rest, ",")
			return nil, fmt.Errorf("network %q: parameter %q is not key=value", text, param)
		}
		if inner, quoted := strings.CutPrefix(value, `"`); quoted {
			if value, rest, ok = strings.Cut(inner, `"`); !ok {
				return nil, fmt.Errorf("network %q: the quote of parameter %q is not closed", text, key)
			}
			if rest, more = strings.CutPrefix(rest, ","); !more && rest != "" {
				return nil, fmt.Errorf("network %q: after the quoted value of parameter %q a comma is missing", text, key)
			}
		} else {
			value, rest, more = strings.Cut(value, ",")
		}
		s.params = append(s.params, Param{key, value})
	}
	return s, nil
}

// List returns the parameters of all the keys, each given any number of times, in the order in
// which they were written.
func (s *Spec) List(keys ...string) (list []Param) {
	for _, key := range keys {
		s.know(key)
		s.group[key] = keys[0]
	}
	for _, p := range s.params {
		if slices.Contains(keys, p.Key) {
			list = append(list, p)
		}
	}
	return list
}

// String returns the text of key, or def when it is absent.
func (s *Spec) String(key, def string) string {
	if v, ok := s.take(key); ok {
		return v
	}
	return def
}

// Int returns the decimal number of key, or def when it is absent. A value outside [low, high]
// is an error that Done reports.
func (s *Spec) Int(key string, def, low, high int) int {
	v, ok := s.take(key)
	if !ok {
		return def
	}
	n, err := strconv.Atoi(v)
	if err != nil || n < low || n > high {
		s.fail("%s=%s: accepted are whole numbers from %d to %d", key, v, low, high)
		return def
	}
	return n
}

// Float returns the number of key, or def when it is absent. A value outside [low, high] or not
// a number is an error that Done reports.
func (s *Spec) Float(key string, def, low, high float64) float64 {
	v, ok := s.take(key)
	if !ok {
		return def
	}
	n, err := strconv.ParseFloat(v, 64)
	if err != nil || !(n >= low && n <= high) {
		s.fail("%s=%s: accepted are numbers from %g to %g", key, v, low, high)
		return def
	}
	return n
}

// Bool returns the switch of key (on or off), or def when it is absent.
func (s *Spec) Bool(key string, def bool) bool {
	v, ok := s.take(key)
	if !ok {
		return def
	}
	switch v {
	case "on":
		return true
	case "off":
		return false
	}
	s.fail("%s=%s: accepted are on and off", key, v)
	return def
}

// Duration returns the time of key, such as 300s, or def when it is absent. A value outside [low,
// high] is an error that Done reports.
func (s *Spec) Duration(key string, def, low, high time.Duration) time.Duration {
	v, ok := s.take(key)
	if !ok {
		return def
	}
	d, err := time.ParseDuration(v)
	if err != nil || d < low || d > high {
		s.fail("%s=%s: accepted are durations from %v to %v, such as 300s", key, v, low, high)
		return def
	}
	return d
}

// Sub takes key=KIND together with all parameters whose key starts with key and a dash, and
// returns them as the description of a network of its own, without that start. It returns nil
// when key is absent.
func (s *Spec) Sub(key string) *Spec {
	kind, ok := s.take(key)
	if !ok {
		return nil
	}
	sub := &Spec{Kind: kind, prefix: s.prefix + key + "-", group: map[string]string{}}
	s.params = slices.DeleteFunc(s.params, func(p Param) bool {
		rest, ok := strings.CutPrefix(p.Key, key+"-")
		if ok {
			sub.params = append(sub.params, Param{rest, p.Value})
		}
		return ok
	})
	return sub
}

// Text returns the description with its parameters in alphabetical order. Those that List took
// together keep theirs.
func (s *Spec) Text() string {
	params := slices.Clone(s.params)
	slices.SortStableFunc(params, func(a, b Param) int {
		return strings.Compare(cmp.Or(s.group[a.Key], a.Key), cmp.Or(s.group[b.Key], b.Key))
	})
	return Format(s.Kind, params)
}

// Params returns the parameters that are not part of a [Spec.Sub], in the order in which they were written.
func (s *Spec) Params() []Param { return slices.Clone(s.params) }

// Format writes a description that [Parse] reads.
func Format(kind string, params []Param) string {
	text := kind
	for _, p := range params {
		if strings.ContainsAny(p.Value, ",") {
			p.Value = `"` + p.Value + `"`
		}
		text += "," + p.Key + "=" + p.Value
	}
	return text
}

// Err returns the first bad value that a getter has met, or nil. A reader that gives up early asks it, because Done takes the parameters
// that were not read yet for unknown.
func (s *Spec) Err() error { return s.err }

// Done returns the first bad value, or an error that names a parameter which no getter asked
// for together with the ones that exist, or nil.
func (s *Spec) Done() error {
	if s.err != nil {
		return s.err
	}
	for _, p := range s.params {
		key := p.Key
		if !slices.Contains(s.known, key) {
			if len(s.known) == 0 {
				return fmt.Errorf("network %s: unknown parameter %q: it takes none", s.Kind, s.prefix+key)
			}
			return fmt.Errorf("network %s: unknown parameter %q: accepted are %s", s.Kind, s.prefix+key, s.prefix+strings.Join(s.known, ", "+s.prefix))
		}
	}
	return nil
}

func (s *Spec) know(key string) {
	if !slices.Contains(s.known, key) {
		s.known = append(s.known, key)
	}
}

// take returns the value of a key that may be given once.
func (s *Spec) take(key string) (value string, ok bool) {
	s.know(key)
	for _, p := range s.params {
		switch {
		case p.Key != key:
		case ok:
			if s.err == nil {
				s.err = fmt.Errorf("network %s: parameter %q is given twice", s.Kind, s.prefix+key)
			}
		default:
			value, ok = p.Value, true
		}
	}
	return value, ok
}

func (s *Spec) fail(format string, args ...any) {
	if s.err == nil {
		s.err = fmt.Errorf("network %s: %s%s", s.Kind, s.prefix, fmt.Sprintf(format, args...))
	}
}
