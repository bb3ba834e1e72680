package main

import (
	"io"
	"strings"
	"testing"
)

func TestRepeat(t *testing.T) {
	const (
		passes = `{"Action":"pass","Package":"p","Test":"TestA"}` + "\n"
		inside = `{"Action":"fail","Package":"p","Test":"TestB/one"}` + "\n"
		fails  = `{"Action":"output","Package":"p","Test":"TestB","Output":"why\n"}` + "\n" + `{"Action":"fail","Package":"p","Test":"TestB"}` + "\n"
		races  = `{"Action":"output","Package":"p","Test":"TestB","Output":"WARNING: DATA RACE\n"}` + "\n" + fails
		end    = `{"Action":"output","Package":"p","Output":"FAIL\n"}` + "\n" + `{"Action":"fail","Package":"p"}` + "\n"
		leak   = `{"Action":"output","Package":"p","Output":"3 descriptors are left\n"}` + "\n" + end
		others = `{"Action":"fail","Package":"p","Test":"TestC"}` + "\n" + `{"Action":"fail","Package":"p","Test":"TestD"}` + "\n"
		again  = `{"Action":"pass","Package":"p","Test":"TestB"}` + "\n" + `{"Action":"pass","Package":"p","Test":"TestB"}` + "\n" + `{"Action":"pass","Package":"p"}` + "\n"
	)
	cases := []struct {
		name, first, second string
		ran                 int
		ok                  bool
		want                string
	}{
		{"passes when repeated", passes + inside + fails + end, again, 1, true, "UNSTEADY"},
		{"fails again", passes + fails + end, fails + end, 1, false, "1 failed"},
		{"leak in the repetition", passes + fails + end, again + leak, 1, false, "1 failed"},
		{"nothing ran", passes + fails + end, "", 1, false, "1 failed"},
		{"data race", passes + races + end, again, 0, false, "DATA RACE"},
		{"the package leaks, too", passes + fails + leak, again, 0, false, "descriptors"},
		{"too many", passes + fails + others + end, again, 0, false, "3 failed"},
		{"build failure", passes + `{"Action":"fail","Package":"q"}`, again, 0, false, "FAIL  q"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			var out strings.Builder
			ran := 0
			r := newReport(&out, false, true)
			if err := r.read(strings.NewReader(c.first)); err != nil {
				t.Fatal(err)
			}
			r.repeat(2, func(pkg, test string, times int) io.Reader {
				ran++
				if pkg != "p" || test != "TestB" || times != 2 {
					t.Errorf("%s %s is run %d times", pkg, test, times)
				}
				return strings.NewReader(c.second)
			})
			if ok := r.finish(); ok != c.ok || ran != c.ran || !strings.Contains(out.String(), c.want) {
				t.Errorf("ok %v, %d repetitions, output:\n%s", ok, ran, out.String())
			}
		})
	}
}
