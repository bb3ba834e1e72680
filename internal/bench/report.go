package bench

import (
	"bytes"
	"encoding/json"
	"fmt"
	"html/template"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
)

// WriteJSON writes the array of results. Infinite bounds, of a single pair, become the largest numbers that JSON has.
func WriteJSON(w io.Writer, results []Result) error {
	all := slices.Clone(results)
	for i := range all {
		for _, v := range []*float64{&all[i].Result, &all[i].Low, &all[i].High, &all[i].Noise} {
			*v = finite(*v)
		}
		counters := map[string]float64{}
		for name, v := range all[i].Counters {
			if !math.IsNaN(v) {
				counters[name] = finite(v)
			}
		}
		all[i].Counters = counters
	}
	if all == nil {
		all = []Result{}
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(all)
}

func finite(v float64) float64 {
	if math.IsNaN(v) {
		return 0
	}
	return max(-math.MaxFloat64, min(math.MaxFloat64, v))
}

// WriteText writes each experiment's claim and source, and its results as a table.
func WriteText(w io.Writer, results []Result) error {
	for i, group := range byExperiment(results) {
		if i > 0 {
			fmt.Fprintln(w)
		}
		r := group[0]
		fmt.Fprintf(w, "%s %s\n", r.Experiment, r.Title)
		if r.General != "" {
			fmt.Fprintf(w, "  claim:  %s\n  source: %s\n", r.General, r.Source)
		}
		for _, r := range group {
			if r.Claim != r.General {
				fmt.Fprintf(w, "  claim of %s: %s\n", r.Variant, r.Claim)
			}
		}
		table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		fmt.Fprintln(table, "  VARIANT\tRESULT\t95 % INTERVAL\tTARGET\tPAIRS\tNOISE\tVERDICT\tCOSTS")
		for _, r := range group {
			fmt.Fprintf(table, "  %s\t%s\t%s to %s\t%s\t%d\t%s\t%s\t%s\n", r.Variant, short(r.Result), short(r.Low), short(r.High),
				r.targetText(), r.Pairs, percent(r.Noise), r.verdictText(), r.costText())
		}
		if err := table.Flush(); err != nil {
			return err
		}
	}
	return nil
}

func percent(v float64) string {
	switch {
	case math.IsInf(v, 0):
		return "?"
	case v > 10:
		return "> 1000 %"
	}
	return fmt.Sprintf("%.2f %%", 100*v)
}

func (r Result) targetText() string {
	switch {
	case r.Target == 0:
		return "-"
	case r.AtMost:
		return "<= " + short(r.Target)
	}
	return ">= " + short(r.Target)
}

// verdictText names the noise that hides an unresolved result.
func (r Result) verdictText() string {
	if r.Verdict == Unresolved {
		return fmt.Sprintf("%s (noise of %s hides it)", r.Verdict, percent(r.Noise))
	}
	if r.Verdict == "" {
		return "-"
	}
	return string(r.Verdict)
}

func (r Result) costText() string {
	a := fmt.Sprintf("%s %s %s", r.NameA, short(MeanOf(r.A).Mean), r.Costs)
	if r.B == nil {
		return a
	}
	return fmt.Sprintf("%s, %s %s %s", a, r.NameB, short(MeanOf(r.B).Mean), r.Costs)
}

func byExperiment(results []Result) (all [][]Result) {
	at := map[string]int{}
	for _, r := range results {
		i, ok := at[r.Experiment]
		if !ok {
			i = len(all)
			at[r.Experiment] = i
			all = append(all, nil)
		}
		all[i] = append(all[i], r)
	}
	return all
}

// Facts are what a report says about the run.
type Facts struct{ Title, Machine, Command, Time string }

// section is one experiment of a page.
type section struct {
	Name, Title, Claim, Source string
	Rows                       []tableRow
	Plots                      []template.HTML
	Counters                   []counterRow
}

type tableRow struct {
	Variant, Result, Interval, Target, Pairs, Noise, Costs string
	Verdict                                                Verdict
	Text, Own                                              string
}

type counterRow struct{ Variant, Text string }

// ownClaim is what a row says of a claim that is not the experiment's.
func (r Result) ownClaim() string {
	if r.Claim == r.General {
		return ""
	}
	return r.Claim
}

func sections(results []Result) (all []section) {
	for _, group := range byExperiment(results) {
		r := group[0]
		s := section{Name: r.Experiment, Title: r.Title, Claim: r.General, Source: r.Source}
		for _, r := range group {
			s.Rows = append(s.Rows, tableRow{
				Variant: r.Variant, Result: short(r.Result), Interval: short(r.Low) + " to " + short(r.High), Target: r.targetText(),
				Pairs: fmt.Sprint(r.Pairs), Noise: percent(r.Noise), Costs: r.costText(), Verdict: r.Verdict, Text: r.verdictText(), Own: r.ownClaim(),
			})
			s.Counters = append(s.Counters, counterRow{r.Variant, counterText(r.Counters)})
		}
		for _, g := range groups(group) {
			s.Plots = append(s.Plots, template.HTML(SVG(g))) // SVG escapes what it shows
		}
		all = append(all, s)
	}
	return all
}

func counterText(counters map[string]float64) string {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(counters)) {
		parts = append(parts, name+" "+short(counters[name]))
	}
	return strings.Join(parts, "; ")
}

var page = template.Must(template.New("page").Parse(`<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{{.Facts.Title}}</title>
<style>
body { font: 15px/1.5 sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; font-size: 13px } th, td { border-bottom: 1px solid #ddd; padding: .25rem .6rem; text-align: left }
.holds { color: #1a7f37 } .fails { color: #b42318 } .unresolved { color: #9a6700 } svg { max-width: 100%; height: auto }
details { font-size: 12px; color: #555 }
</style></head><body>
<h1>{{.Facts.Title}}</h1>
<p>{{.Facts.Time}} · {{.Facts.Machine}}<br><code>{{.Facts.Command}}</code></p>
<p>A result is the ratio of A's cost to B's over interleaved pairs (above 1: B is cheaper), or A's cost itself; the bar is its 95 % interval (Student's t),
dots are single pairs. A claim holds when the whole interval reaches the target, fails when all of it misses it, and is unresolved when the
target lies inside: noise is half of the interval's width.</p>
<table><tr><th>experiment</th><th>variant</th><th>result</th><th>target</th><th>verdict</th></tr>
{{range .Sections}}{{$name := .Name}}{{range .Rows}}<tr><td><a href="#{{$name}}">{{$name}}</a></td><td>{{.Variant}}</td><td>{{.Result}}</td><td>{{.Target}}</td><td class="{{.Verdict}}">{{.Text}}</td></tr>
{{end}}{{end}}</table>
{{range .Sections}}<h2 id="{{.Name}}">{{.Name}}: {{.Title}}</h2>
<p><b>Claim:</b> {{.Claim}}<br><b>Source:</b> {{.Source}}</p>
{{range .Plots}}{{.}}{{end}}
<table><tr><th>variant</th><th>result</th><th>95 % interval</th><th>target</th><th>pairs</th><th>noise</th><th>verdict</th><th>mean costs</th></tr>
{{range .Rows}}<tr><td>{{.Variant}}{{if .Own}}<br><i>{{.Own}}</i>{{end}}</td><td>{{.Result}}</td><td>{{.Interval}}</td><td>{{.Target}}</td><td>{{.Pairs}}</td><td>{{.Noise}}</td><td class="{{.Verdict}}">{{.Text}}</td><td>{{.Costs}}</td></tr>
{{end}}</table>
<details><summary>counters (means of a run)</summary>{{range .Counters}}<p><b>{{.Variant}}</b>: {{.Text}}</p>{{end}}</details>
{{end}}</body></html>
`))

// CheckReport says why a report cannot be written to path, as far as its name tells.
func CheckReport(path string) error {
	if ext := filepath.Ext(path); ext != ".md" && ext != ".html" {
		return fmt.Errorf("--report: %q: accepted are names that end in .md or .html", path)
	}
	if dir := filepath.Dir(path); !isDir(dir) {
		return fmt.Errorf("--report: %q: directory %s does not exist", path, dir)
	}
	return nil
}

func isDir(path string) bool {
	fi, err := os.Stat(path)
	return err == nil && fi.IsDir()
}

// WriteReport writes one page: HTML with the plots in it, or Markdown with the plots in files beside it, named after it.
func WriteReport(path string, facts Facts, results []Result) error {
	if err := CheckReport(path); err != nil {
		return err
	}
	var b bytes.Buffer
	if filepath.Ext(path) == ".html" {
		if err := page.Execute(&b, map[string]any{"Facts": facts, "Sections": sections(results)}); err != nil {
			return err
		}
		return os.WriteFile(path, b.Bytes(), 0o644)
	}
	fmt.Fprintf(&b, "# %s\n\n%s · %s\n\n    %s\n\n", facts.Title, facts.Time, facts.Machine, facts.Command)
	b.WriteString("A result is the ratio of A's cost to B's over interleaved pairs (above 1: B is cheaper), or A's cost itself. A claim holds\n" +
		"when its whole 95 % interval (Student's t) reaches the target, fails when all of it misses it, and is unresolved when the\n" +
		"target lies inside. Noise is half of the interval's width.\n")
	for _, group := range byExperiment(results) {
		if err := writeMarkdown(&b, path, group); err != nil {
			return err
		}
	}
	return os.WriteFile(path, b.Bytes(), 0o644)
}

func writeMarkdown(b *bytes.Buffer, path string, group []Result) error {
	r := group[0]
	fmt.Fprintf(b, "\n## %s: %s\n\nClaim: %s\n\nSource: %s\n\n", r.Experiment, r.Title, r.General, r.Source)
	for i, g := range groups(group) {
		name := fmt.Sprintf("%s-%s-%d.svg", strings.TrimSuffix(filepath.Base(path), ".md"), r.Experiment, i+1)
		if err := os.WriteFile(filepath.Join(filepath.Dir(path), name), SVG(g), 0o644); err != nil {
			return err
		}
		fmt.Fprintf(b, "![%s](%s)\n\n", r.Experiment, name)
	}
	b.WriteString("| variant | result | 95 % interval | target | pairs | noise | verdict | mean costs |\n|---|---|---|---|---|---|---|---|\n")
	cell := func(s string) string { return strings.ReplaceAll(s, "|", "\\|") }
	for _, r := range group {
		variant := cell(r.Variant)
		if own := r.ownClaim(); own != "" {
			variant += "<br>*" + cell(own) + "*"
		}
		fmt.Fprintf(b, "| %s | %s | %s to %s | %s | %d | %s | %s | %s |\n", variant, short(r.Result), short(r.Low), short(r.High), cell(r.targetText()),
			r.Pairs, percent(r.Noise), r.verdictText(), cell(r.costText()))
	}
	return nil
}
