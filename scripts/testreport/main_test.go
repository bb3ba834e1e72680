package main

import (
	"strings"
	"testing"
)

func TestReport(t *testing.T) {
	const pass = `{"Action":"pass","Package":"p","Test":"TestA"}` + "\n" + `{"Action":"pass","Package":"p"}` + "\n"
	skip := func(reason string) string {
		return `{"Action":"output","Package":"p","Test":"TestB","Output":"` + reason + `\n"}` + "\n" + `{"Action":"skip","Package":"p","Test":"TestB"}` + "\n"
	}
	cases := []struct {
		name, input string
		noSkip      bool
		ok          bool
		want        string
	}{
		{"pass", pass, true, true, "1 passed, 0 failed, 0 skipped"},
		{"nothing ran", "", false, false, "0 passed"},
		{"fail", pass + `{"Action":"output","Package":"p","Test":"TestC","Output":"why\n"}` + "\n" + `{"Action":"fail","Package":"p","Test":"TestC"}`, false, false, "why"},
		{"build failure", pass + `{"Action":"fail","Package":"q"}`, false, false, "FAIL  q"},
		{"skip", pass + skip("no tun"), false, true, "1 passed, 0 failed, 1 skipped"},
		{"skip in CI", pass + skip("no tun"), true, false, "no tun"},
		{"chosen skip in CI", pass + skip("long: later"), true, true, "1 skipped"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var out strings.Builder
			r := newReport(&out, false, c.noSkip)
			if err := r.read(strings.NewReader(c.input)); err != nil {
				t.Fatal(err)
			}
			if ok := r.finish(); ok != c.ok || !strings.Contains(out.String(), c.want) {
				t.Errorf("ok %v, output:\n%s", ok, out.String())
			}
		})
	}
}
