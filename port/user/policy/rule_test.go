package policy

import (
	"strings"
	"testing"
)

func TestParseRule(t *testing.T) {
	for _, tc := range []struct{ text, wrong string }{
		{"10.0.0.0/8", ""},
		{"10.0.0.0/8:443", ""},
		{"10.1.2.3", ""},
		{"10.1.2.3:65535", ""},
		{"fd00::/8", ""},
		{"fd00::1", ""},
		{"[fd00::/8]:53", ""},
		{"[fd00::1]:53", ""},
		{"[fd00::1]", ""},
		{"0.0.0.0/0", ""},
		{"example.com", ""},
		{"Example.COM.", ""},
		{"*.example.com", ""},
		{"_sip._tcp.example.com", ""},
		{"xn--bcher-kva.example", ""},
		{"localhost", ""},
		{"", "name is empty"},
		{"*", `name has "*"`},
		{"*.", "name is empty"},
		{"a..b", "0 bytes"},
		{"www.*.com", `name has "*"`},
		{"bücher.example", "xn--"},
		{`a\.b.example`, "letters, digits"},
		{strings.Repeat("a", 64) + ".b", "64 bytes"},
		{strings.Repeat("a.", 130) + "b", "261 bytes"},
		{"example.com:443", "only those take a port"},
		{"10.0.0.1/8", "wanted 10.0.0.0/8"},
		{"10.0.0.0/33", "no address prefix"},
		{"10.0.0.256", "no address prefix"},
		{"10.0.0", "no address prefix"},
		{"1", "no address prefix"},
		{"10.0.0.0/8:0", "from 1 to 65535"},
		{"10.0.0.0/8:65536", "from 1 to 65535"},
		{"10.0.0.0/8:+5", "from 1 to 65535"},
		{"10.0.0.0/8:", "from 1 to 65535"},
		{"[10.0.0.0/8]:5", "brackets are for IPv6"},
		{"[fd00::/8", "not closed"},
		{"[fd00::/8]53", "where :PORT could"},
		{"[fd00::/8]:", "from 1 to 65535"},
		{"fe80::1%eth0", "zone"},
		{"::ffff:10.0.0.1", "10.0.0.1"},
		{"fd00::/8:53", "no address prefix"},
	} {
		_, err := ParseRule(Deny, tc.text)
		if tc.wrong == "" && err != nil {
			t.Errorf("%q: %v", tc.text, err)
		}
		if tc.wrong != "" && (err == nil || !strings.Contains(err.Error(), tc.wrong) || !strings.HasPrefix(err.Error(), "deny="+tc.text+": ") ||
			!strings.Contains(err.Error(), "(accepted: ")) {
			t.Errorf("%q: error %v, want one with %q", tc.text, err, tc.wrong)
		}
	}
}

func TestMatchesName(t *testing.T) {
	for _, tc := range []struct {
		rule, name string
		want       bool
	}{
		{"example.com", "example.com", true},
		{"example.com", "www.example.com", false},
		{"EXAMPLE.com.", "example.com", true},
		{"*.example.com", "example.com", false},
		{"*.example.com", "www.example.com", true},
		{"*.example.com", "a.b.example.com", true},
		{"*.example.com", "notexample.com", false},
		{"*.example.com", ".example.com", false},
		{"*.example.com", `x\.example.com`, false},
		{"*.example.com", `x\\.example.com`, true},
		{"*.example.com", `\.example.com`, false},
		{"example.com", "", false},
		{"10.0.0.0/8", "10.0.0.1", false},
	} {
		if got := rules(t, "deny="+tc.rule)[0].matchesName(tc.name); got != tc.want {
			t.Errorf("%s and %s: %v, want %v", tc.rule, tc.name, got, tc.want)
		}
	}
}

// FuzzParseRule wants that what is accepted means the same when it is written again.
func FuzzParseRule(f *testing.F) {
	for _, text := range []string{"10.0.0.0/8:443", "[fd00::/8]:53", "*.example.com", "fd00::1", "[", "a:b:c", "1.2.3.4/", "::/0"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		r, err := ParseRule(Allow, text)
		if err != nil {
			return
		}
		again, err := ParseRule(Allow, strings.TrimPrefix(r.String(), "allow="))
		if err != nil || again != r {
			t.Errorf("%q became %+v, and that %+v (%v)", text, r, again, err)
		}
		if (r.name == "") != r.prefix.IsValid() {
			t.Errorf("%q is about names and addresses, or neither: %+v", text, r)
		}
	})
}
