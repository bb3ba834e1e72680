package bench

import (
	"bytes"
	"fmt"
	"html"
	"io"
	"math"
	"os"
	"strings"
)

// ratios are the pairs' own results.
func (r Result) observations() []float64 {
	if r.B == nil {
		return r.A
	}
	all := make([]float64, len(r.A))
	for i := range all {
		all[i] = r.A[i] / r.B[i]
	}
	return all
}

// axis spans what a group of results shows.
type axis struct{ low, high float64 }

// axisOf covers every pair, result and target, and intervals as far as they are no wider than all of that: one of two pairs may be so
// wide that nothing else could be seen.
func axisOf(results []Result) axis {
	a := axis{math.Inf(1), math.Inf(-1)}
	for _, r := range results {
		for _, v := range append(r.observations(), r.Result) {
			if !math.IsInf(v, 0) && !math.IsNaN(v) {
				a.low, a.high = min(a.low, v), max(a.high, v)
			}
		}
		if r.Target != 0 {
			a.low, a.high = min(a.low, r.Target), max(a.high, r.Target)
		}
		if r.Unit == "x" {
			a.low, a.high = min(a.low, 1), max(a.high, 1)
		}
	}
	span := a
	for _, r := range results {
		if r.Low >= span.low-(span.high-span.low) {
			a.low = min(a.low, r.Low)
		}
		if r.High <= span.high+(span.high-span.low) {
			a.high = max(a.high, r.High)
		}
	}
	margin := max((a.high-a.low)*0.04, 1e-9)
	return axis{a.low - margin, a.high + margin}
}

func (a axis) at(v, width float64) float64 {
	return max(0, min(width, (v-a.low)/(a.high-a.low)*width))
}

// Plot draws results on a terminal, one line each: [==*==] is the interval with the result, dots are single pairs, | is the target.
func Plot(w io.Writer, results []Result) {
	const width = 60
	for _, group := range groups(results) {
		a := axisOf(group)
		fmt.Fprintf(w, "\n%s %s (%s; | target, [*] result with interval, . pairs)\n", group[0].Experiment, group[0].Title, unitText(group[0]))
		for _, r := range group {
			line := []byte(strings.Repeat(" ", width+1))
			for _, v := range r.observations() {
				line[int(a.at(v, width))] = '.'
			}
			low, high := int(a.at(r.Low, width)), int(a.at(r.High, width))
			for i := low; i <= high; i++ {
				line[i] = '='
			}
			if r.Target != 0 {
				line[int(a.at(r.Target, width))] = '|'
			}
			line[low], line[high], line[int(a.at(r.Result, width))] = '[', ']', '*'
			fmt.Fprintf(w, "%s  %-10s %s\n", line, r.Verdict, r.Variant)
		}
		fmt.Fprintf(w, "%-*s%s\n", width-5, short(a.low), short(a.high))
	}
}

// unitText says what the numbers of a result are.
func unitText(r Result) string {
	if r.Unit == "x" {
		return "ratio of costs, A to B: above 1 B is cheaper"
	}
	return r.Unit
}

// short writes a number with four significant digits.
func short(v float64) string {
	switch {
	case math.IsInf(v, 0) || math.IsNaN(v):
		return "?"
	case math.Abs(v) >= 1000:
		return fmt.Sprintf("%.0f", v)
	}
	return fmt.Sprintf("%.4g", v)
}

// groups are runs of results of one experiment and one unit.
func groups(results []Result) (all [][]Result) {
	for _, r := range results {
		if n := len(all); n > 0 && all[n-1][0].Experiment == r.Experiment && all[n-1][0].Unit == r.Unit {
			all[n-1] = append(all[n-1], r)
		} else {
			all = append(all, []Result{r})
		}
	}
	return all
}

var verdictColors = map[Verdict]string{Holds: "#1a7f37", Fails: "#b42318", Unresolved: "#9a6700", "": "#444444"}

// Measures of an SVG in its units, which are pixels.
const (
	row        = 26
	axisHeight = 46
	plotWidth  = 460
	labelWidth = 330
	valueWidth = 210
)

// SVG draws the results of one group: a row each with the pairs as dots, the interval as a bar and the target as a line.
func SVG(results []Result) []byte {
	const plot, label, value = float64(plotWidth), float64(labelWidth), float64(valueWidth)
	a := axisOf(results)
	height := row*len(results) + axisHeight
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %d" width="%.0f" height="%d" font-family="sans-serif" font-size="12" role="img">`+"\n",
		label+plot+value, height, label+plot+value, height)
	fmt.Fprintf(&b, `<title>%s</title><rect width="100%%" height="100%%" fill="white"/>`+"\n", html.EscapeString(results[0].Experiment+" "+results[0].Title))
	x := func(v float64) float64 { return label + a.at(v, plot) }
	for i := range 5 {
		v := a.low + (a.high-a.low)*float64(i)/4
		fmt.Fprintf(&b, `<line x1="%.1f" y1="8" x2="%.1f" y2="%d" stroke="#e5e5e5"/><text x="%.1f" y="%d" text-anchor="middle" fill="#555">%s</text>`+"\n",
			x(v), x(v), height-34, x(v), height-18, short(v))
	}
	fmt.Fprintf(&b, `<text x="%.1f" y="%d" text-anchor="middle" fill="#555">%s</text>`+"\n", label+plot/2, height-4, html.EscapeString(unitText(results[0])))
	for i, r := range results {
		y := float64(8 + row*i + row/2)
		color := verdictColors[r.Verdict]
		fmt.Fprintf(&b, `<text x="%.0f" y="%.1f" text-anchor="end">%s</text>`+"\n", label-8, y+4, html.EscapeString(abbreviated(r.Variant, 52)))
		for _, v := range r.observations() {
			fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="2.2" fill="#888" fill-opacity="0.45"/>`, x(v), y)
		}
		fmt.Fprintf(&b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="%s" stroke-width="5" stroke-opacity="0.45"/>`, x(r.Low), y, x(r.High), y, color)
		fmt.Fprintf(&b, `<circle cx="%.1f" cy="%.1f" r="4" fill="%s"/>`, x(r.Result), y, color)
		if r.Target != 0 {
			fmt.Fprintf(&b, `<line x1="%.1f" y1="%.1f" x2="%.1f" y2="%.1f" stroke="black" stroke-width="2"/>`, x(r.Target), y-10, x(r.Target), y+10)
		}
		fmt.Fprintf(&b, `<text x="%.0f" y="%.1f" fill="%s">%s [%s, %s] %s</text>`+"\n", label+plot+10, y+4, color,
			short(r.Result), short(r.Low), short(r.High), r.Verdict)
	}
	b.WriteString("</svg>\n")
	return b.Bytes()
}

func abbreviated(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}

// WriteSVG writes the plots of all groups into one file, one below the other.
func WriteSVG(path string, results []Result) error {
	var b bytes.Buffer
	total := 0
	var parts bytes.Buffer
	for _, g := range groups(results) {
		height := row*len(g) + axisHeight
		parts.WriteString(strings.Replace(string(SVG(g)), "<svg ", fmt.Sprintf(`<svg y="%d" `, total), 1))
		total += height + 10
	}
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" width="%d" height="%d">`+"\n", labelWidth+plotWidth+valueWidth, total)
	b.Write(parts.Bytes())
	b.WriteString("</svg>\n")
	return os.WriteFile(path, b.Bytes(), 0o644)
}
