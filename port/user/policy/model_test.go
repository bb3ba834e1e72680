package policy

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// model judges by the documentation, without sharing anything with the package but ParseRule's fields.
type model struct {
	rules   []Rule
	answers []answered
}

type answered struct {
	name  string
	alias bool
	addr  netip.Addr
	until time.Time
}

var metadata = netip.MustParseAddr("169.254.169.254")

func (m *model) allowed(dst netip.AddrPort, now time.Time) bool {
	anyAllow, lifted := false, false
	for _, r := range m.rules {
		anyAllow = anyAllow || r.action == Allow
		lifted = lifted || r.action == Allow && r.prefix == netip.PrefixFrom(metadata, 32) && (r.port == 0 || r.port == dst.Port())
	}
	if dst.Addr() == metadata && !lifted {
		return false
	}
	for _, r := range m.rules {
		if r.prefix.IsValid() {
			if r.prefix.Contains(dst.Addr()) && (r.port == 0 || r.port == dst.Port()) {
				return r.action == Allow
			}
			continue
		}
		for _, a := range m.answers {
			if a.addr == dst.Addr() && now.Before(a.until) && (r.action == Deny || !a.alias) && m.is(r, a.name) {
				return r.action == Allow
			}
		}
	}
	return !anyAllow
}

func (*model) is(r Rule, name string) bool {
	if r.below {
		return len(name) > len(r.name)+1 && name[len(name)-len(r.name)-1:] == "."+r.name
	}
	return name == r.name
}

func TestModel(t *testing.T) {
	texts := []string{"192.0.2.0/24", "192.0.2.0/25:80", "192.0.2.1", "192.0.2.2:443", "0.0.0.0/0", "a.example", "*.example",
		"b.a.example", "*.a.example", "169.254.169.254", "169.254.169.254:80", "169.254.0.0/16"}
	names := []string{"a.example", "b.a.example", "example", "c.test"}
	rapid.Check(t, func(rt *rapid.T) {
		w := newWorld(t)
		m := &model{}
		addr := rapid.Custom(func(rt *rapid.T) netip.Addr {
			if rapid.IntRange(0, 5).Draw(rt, "meta") == 0 {
				return metadata
			}
			return netip.AddrFrom4([4]byte{192, 0, 2, byte(rapid.IntRange(0, 4).Draw(rt, "host") * 63)})
		})
		rt.Repeat(map[string]func(*rapid.T){
			"replace": func(rt *rapid.T) {
				m.rules = nil
				for range rapid.IntRange(0, 4).Draw(rt, "rules") {
					r, err := ParseRule(Action(rapid.IntRange(0, 1).Draw(rt, "action")), rapid.SampledFrom(texts).Draw(rt, "text"))
					if err != nil {
						rt.Fatal(err)
					}
					m.rules = append(m.rules, r)
				}
				if err := w.Replace(m.rules); err != nil {
					rt.Fatal(err)
				}
			},
			"answer": func(rt *rapid.T) {
				a, ttl := addr.Draw(rt, "addr"), time.Duration(rapid.IntRange(0, 300).Draw(rt, "ttl"))*time.Second
				chain := rapid.SliceOfNDistinct(rapid.SampledFrom(names), 1, 3, rapid.ID).Draw(rt, "chain")
				if !w.guest.Answer(chain[0], chain[1:], a, ttl) {
					return
				}
				for i, name := range chain {
					m.answers = append(m.answers, answered{name, i > 0, a, w.clock.Add(max(ttl, MinNameLife))})
				}
			},
			"time": func(rt *rapid.T) {
				w.clock = w.clock.Add(time.Duration(rapid.IntRange(1, 100).Draw(rt, "seconds")) * time.Second)
			},
			"check": func(rt *rapid.T) {
				dst := netip.AddrPortFrom(addr.Draw(rt, "addr"), rapid.SampledFrom([]uint16{0, 80, 443}).Draw(rt, "port"))
				if got, want := w.guest.Check(dst), m.allowed(dst, w.clock); got.Allowed != want {
					rt.Fatalf("%v: %v, want %v (rules %v, answers %v)", dst, got, want, fmt.Sprint(w.Rules()), m.answers)
				}
			},
		})
	})
}
