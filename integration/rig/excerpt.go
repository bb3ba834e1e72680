package rig

import (
	"slices"
	"strings"
)

const (
	excerptBefore = 5  // lines before the first sign of trouble
	excerptAfter  = 60 // lines behind it
	excerptLater  = 20 // lines further down that are signs themselves
)

// signs of trouble in the output of a program in Go. None of them is ever all right.
var signs = []string{"DATA RACE", "panic:", "fatal error:", "SIGSEGV", "SIGBUS", "SIGSYS"}

// excerpt is the part of an output that tells what went wrong, taken while the output comes: a dump of all goroutines is longer than
// what is kept of an output, and than what a report of tests shows.
type excerpt struct {
	sign  string   // the first one, "" if all is well
	lines []string // at first the last ones before it
	after int      // lines of the output behind the first sign
	later int      // signs among those that are too far behind it
}

// add takes the next line of the output.
func (e *excerpt) add(line string) {
	sign := signOf(line)
	if e.sign == "" {
		e.sign = sign
		if e.lines = append(e.lines, line); e.sign == "" && len(e.lines) > excerptBefore {
			e.lines = slices.Delete(e.lines, 0, 1)
		}
		return
	}
	e.after++
	switch {
	case e.after <= excerptAfter:
		e.lines = append(e.lines, line)
	case sign != "" && e.later < excerptLater:
		e.later++
		e.lines = append(e.lines, "[...]", line)
	}
}

func signOf(line string) string {
	for _, sign := range signs {
		if strings.Contains(line, sign) {
			return sign
		}
	}
	return ""
}

// Trouble is the first sign in the output of a program in Go that it did what it must never do, such as "DATA RACE" or "SIGSYS", or "".
func (p *Process) Trouble() string {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.excerpt.sign
}

// Excerpt is as much of the output as a report of tests shows: what surrounds the first sign of trouble and the signs further down, or
// else the end.
func (p *Process) Excerpt() string {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	lines := p.excerpt.lines
	if p.excerpt.sign == "" {
		lines = p.lines[max(0, len(p.lines)-excerptAfter):]
	}
	return strings.Join(append(slices.Clip(lines), p.partial), "\n")
}
