package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// progress shows what runs: one line that is written over on a terminal, else a line every few seconds.
type progress struct {
	w        io.Writer
	terminal bool
	shown    int // characters on the line
	last     time.Time
	begin    time.Time

	index, total, comparisons int
	seen                      map[string]int
}

const lineEvery = 5 * time.Second

func newProgress(w io.Writer) *progress {
	p := &progress{w: w, begin: time.Now(), last: time.Now()}
	if f, ok := w.(*os.File); ok {
		_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
		p.terminal = err == nil
	}
	return p
}

// of says which experiment of how many begins, and how many comparisons it has.
func (p *progress) of(index, total, comparisons int) {
	p.index, p.total, p.comparisons, p.seen = index, total, comparisons, map[string]int{}
}

func (p *progress) experiment(name, variant string, pair, pairs int) {
	if p.seen[variant] == 0 {
		p.seen[variant] = len(p.seen) + 1
	}
	what := fmt.Sprintf("pair %d of %d", pair, pairs)
	if pair == 0 {
		what = "warm-up"
	}
	p.say(fmt.Sprintf("%s (%d of %d), comparison %d of %d, %s: %s", name, p.index+1, p.total, p.seen[variant], p.comparisons, what, variant))
}

func (p *progress) say(text string) {
	elapsed := time.Since(p.begin).Round(time.Second)
	text = fmt.Sprintf("%v %s", elapsed, text)
	if !p.terminal {
		if time.Since(p.last) >= lineEvery {
			p.last = time.Now()
			fmt.Fprintln(p.w, text)
		}
		return
	}
	if time.Since(p.last) < 100*time.Millisecond {
		return
	}
	p.last = time.Now()
	if r := []rune(text); len(r) > 118 {
		text = string(r[:117]) + "…"
	}
	n := len([]rune(text))
	fmt.Fprintf(p.w, "\r%s%s", text, strings.Repeat(" ", max(0, p.shown-n)))
	p.shown = n
}

// clear empties the line.
func (p *progress) clear() {
	if p.terminal && p.shown > 0 {
		fmt.Fprintf(p.w, "\r%s\r", strings.Repeat(" ", p.shown))
		p.shown = 0
	}
}
