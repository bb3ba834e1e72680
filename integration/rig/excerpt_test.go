package rig

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// numbered are lines that tell nothing.
func numbered(from, to int) (lines []string) {
	for i := from; i < to; i++ {
		lines = append(lines, fmt.Sprint("line ", i))
	}
	return lines
}

func TestExcerpt(t *testing.T) {
	trap := "SIGSYS: bad system call"
	many := slices.Repeat([]string{"fatal error: x"}, 100)
	for _, test := range []struct {
		name, sign  string
		lines, want []string
	}{
		{"nothing", "", nil, nil},
		{"no sign", "", numbered(0, 200), numbered(140, 200)},
		{"first line", "SIGSYS", []string{trap, "a"}, []string{trap, "a"}},
		{"last line", "panic:", append(numbered(0, 9), "panic: x"), append(numbered(4, 9), "panic: x")},
		{"long dump", "SIGSYS", slices.Concat(numbered(0, 3000), []string{trap}, numbered(3000, 9000)),
			slices.Concat(numbered(2995, 3000), []string{trap}, numbered(3000, 3060))},
		{"two signs", "SIGSYS", slices.Concat([]string{trap, "fatal error: x"}, numbered(0, 90), []string{"WARNING: DATA RACE"}, numbered(90, 99)),
			slices.Concat([]string{trap, "fatal error: x"}, numbered(0, 59), []string{"[...]", "WARNING: DATA RACE"})},
		{"many signs", "fatal error:", many, slices.Concat(many[:61], slices.Repeat([]string{"[...]", "fatal error: x"}, 20))},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := &Process{changed: make(chan struct{})}
			for _, line := range test.lines {
				_, _ = (*output)(p).Write([]byte(line + "\n"))
			}
			if p.Trouble() != test.sign {
				t.Errorf("sign %q, want %q", p.Trouble(), test.sign)
			}
			if got, want := p.Excerpt(), strings.Join(append(test.want, ""), "\n"); got != want {
				t.Errorf("got\n%s\nwant\n%s", got, want)
			}
		})
	}
}

// TestExcerptOfProcess: a line that was not ended counts when the process has.
func TestExcerptOfProcess(t *testing.T) {
	p, err := Start(nil, "sh", "-c", "echo begin; printf 'panic: the end'; exit 2")
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Wait(10 * time.Second); err == nil || p.Trouble() != "panic:" || p.Excerpt() != "begin\npanic: the end\n" {
		t.Errorf("%v, sign %q\n%s", err, p.Trouble(), p.Excerpt())
	}
	select {
	case <-p.Done():
	default:
		t.Error("Done is not closed")
	}
}
