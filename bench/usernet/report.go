package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// reference is the peer that the others are compared with.
const reference = "vhostd"

// report collects what was measured.
type report struct {
	Time    time.Time `json:"time"`
	Machine string    `json:"machine"`
	Kernel  string    `json:"kernel"`
	CPUs    int       `json:"cpus"`
	Notes   []string  `json:"notes,omitempty"` // what was left out, and why
	Series  []*series `json:"series"`
}

// series are the values of one quantity for one peer, by round; a round that gave none has NaN, which JSON shows as null.
type series struct {
	Cell   string   `json:"cell"`
	What   string   `json:"what"`
	Unit   string   `json:"unit"`
	Peer   string   `json:"peer"`
	Values []number `json:"values"`
}

// number is a float64 that can be absent.
type number float64

// MarshalJSON implements [json.Marshaler].
func (n number) MarshalJSON() ([]byte, error) {
	if math.IsNaN(float64(n)) {
		return []byte("null"), nil
	}
	return json.Marshal(float64(n))
}

func newReport() *report {
	return &report{
		Time: time.Now().UTC().Truncate(time.Second), Machine: processor(), Kernel: readWord("/proc/sys/kernel/osrelease"), CPUs: runtime.NumCPU(),
	}
}

// processor is the model as /proc/cpuinfo has it.
func processor() string {
	file, err := os.Open("/proc/cpuinfo")
	if err != nil {
		return "unknown"
	}
	defer file.Close()
	found := map[string]string{}
	for lines := bufio.NewScanner(file); lines.Scan() && lines.Text() != ""; {
		key, value, _ := strings.Cut(lines.Text(), ":")
		found[strings.TrimSpace(key)] = strings.TrimSpace(value)
	}
	return fmt.Sprintf("%s, family %s", found["model name"], found["cpu family"])
}

func readWord(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(text))
}

// note says what a reader has to know, once.
func (r *report) note(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if !slices.Contains(r.Notes, text) {
		r.Notes = append(r.Notes, text)
		fmt.Fprintln(os.Stderr, "usernet:", text)
	}
}

// add enters a value of a round.
func (r *report) add(cell, what, unit, peer string, round int, value float64) {
	i := slices.IndexFunc(r.Series, func(s *series) bool { return s.Cell == cell && s.What == what && s.Peer == peer })
	if i < 0 {
		i = len(r.Series)
		r.Series = append(r.Series, &series{Cell: cell, What: what, Unit: unit, Peer: peer})
	}
	s := r.Series[i]
	for len(s.Values) <= round {
		s.Values = append(s.Values, number(math.NaN()))
	}
	s.Values[round] = number(value)
	fmt.Fprintf(os.Stderr, "%s  %-30s %-12s round %d  %10.4g %s\n", cell, what, peer, round+1, value, unit)
}

// known are the values that there are, sorted.
func known(values []number) (sorted []float64) {
	for _, v := range values {
		if !math.IsNaN(float64(v)) {
			sorted = append(sorted, float64(v))
		}
	}
	slices.Sort(sorted)
	return sorted
}

func median(sorted []float64) float64 {
	n := len(sorted)
	if n%2 == 1 {
		return sorted[n/2]
	}
	return (sorted[n/2-1] + sorted[n/2]) / 2
}

// ratio is the median of what the reference had over what s had in the same round; ok is false without any.
func (r *report) ratio(s *series) (value float64, ok bool) {
	i := slices.IndexFunc(r.Series, func(o *series) bool { return o.Cell == s.Cell && o.What == s.What && o.Peer == reference })
	if i < 0 || s.Peer == reference {
		return 0, false
	}
	var ratios []number
	for round, v := range r.Series[i].Values {
		if round < len(s.Values) && s.Values[round] > 0 {
			ratios = append(ratios, v/s.Values[round])
		}
	}
	sorted := known(ratios)
	if len(sorted) == 0 {
		return 0, false
	}
	return median(sorted), true
}

func (r *report) writeJSON(w io.Writer) error {
	encoder := json.NewEncoder(w)
	encoder.SetIndent("", "  ")
	return encoder.Encode(r)
}

func (r *report) writeText(w io.Writer) error {
	fmt.Fprintf(w, "%s, %d CPUs, Linux %s, %s\n", r.Machine, r.CPUs, r.Kernel, r.Time.Format(time.RFC3339))
	for _, n := range r.Notes {
		fmt.Fprintln(w, "note:", n)
	}
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	cell, what := "", ""
	for _, s := range r.ordered() {
		if s.Cell != cell {
			cell = s.Cell
			fmt.Fprintf(table, "\n%s\tunit\tpeer\tmedian\trange\t%s to it\n", cell, reference)
		}
		title := s.What
		if title == what {
			title = ""
		}
		what = s.What
		values := known(s.Values)
		if len(values) == 0 {
			continue
		}
		fmt.Fprintf(table, "%s\t%s\t%s\t%.4g\t%.4g..%.4g\t", title, s.Unit, s.Peer, median(values), values[0], values[len(values)-1])
		if ratio, ok := r.ratio(s); ok {
			fmt.Fprintf(table, "%.2f", ratio)
		}
		fmt.Fprintln(table)
	}
	return table.Flush()
}

// ordered has what belongs together side by side, in the order in which it came first.
func (r *report) ordered() (list []*series) {
	taken := map[*series]bool{}
	for _, first := range r.Series {
		for _, s := range r.Series {
			if !taken[s] && s.Cell == first.Cell && s.What == first.What {
				taken[s] = true
				list = append(list, s)
			}
		}
	}
	return list
}
