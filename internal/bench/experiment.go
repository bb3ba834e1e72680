package bench

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
)

// Experiment reproduces one published claim.
type Experiment struct {
	Name    string // such as E6, with a letter where one claim has several sides
	Command string // of vhostd bench; several experiments may share one
	Title   string
	Claim   string // what the source says, in its own figures
	Source  string // where it says so
	Options []Option
	// Build makes the comparisons for the values of the options. An error is one of usage. Nothing is allocated before a
	// comparison's Open.
	Build func(p Params) ([]Comparison, error)
}

// Option is a list or a number that the command line can change.
type Option struct {
	Name, Default, Full, Help string // Full is the default of the long form; "" for the same
}

// Params are the values of an experiment's options.
type Params struct {
	Full   bool
	CPUs   []int // processors for the experiment's threads; empty: any
	Values map[string]string
}

// List splits an option's value at commas. Accepted are the words of allowed, or anything if there are none.
func (p Params) List(name string, allowed ...string) ([]string, error) {
	words := strings.Split(p.Values[name], ",")
	for _, w := range words {
		if len(allowed) > 0 && !contains(allowed, w) {
			return nil, fmt.Errorf("--%s: %q: accepted are %s", name, w, strings.Join(allowed, ", "))
		}
	}
	return words, nil
}

func contains(list []string, word string) bool {
	for _, w := range list {
		if w == word {
			return true
		}
	}
	return false
}

// Sizes reads a list of numbers from low to high, with K, M and G for powers of 1024.
func (p Params) Sizes(name string, low, high int) (sizes []int, err error) {
	for _, text := range strings.Split(p.Values[name], ",") {
		n, err := ParseSize(text)
		if err != nil || n < low || n > high {
			return nil, fmt.Errorf("--%s: %q: accepted are numbers from %s to %s, such as 64K", name, text, FormatSize(low), FormatSize(high))
		}
		sizes = append(sizes, n)
	}
	return sizes, nil
}

// Size is Sizes for one number.
func (p Params) Size(name string, low, high int) (int, error) {
	sizes, err := p.Sizes(name, low, high)
	if err == nil && len(sizes) != 1 {
		err = fmt.Errorf("--%s: %q: accepted is one number", name, p.Values[name])
	}
	if err != nil {
		return 0, err
	}
	return sizes[0], nil
}

// CPU returns processor i of those given, -1 if there are not so many.
func (p Params) CPU(i int) int {
	if i < len(p.CPUs) {
		return p.CPUs[i]
	}
	return -1
}

var units = map[byte]int{'K': 1 << 10, 'M': 1 << 20, 'G': 1 << 30}

// ParseSize reads a number with an optional K, M or G.
func ParseSize(text string) (int, error) {
	unit := 1
	if n := len(text); n > 0 && units[text[n-1]] != 0 {
		unit, text = units[text[n-1]], text[:n-1]
	}
	n, err := strconv.ParseUint(text, 10, 31)
	if err != nil || n > 1<<40/uint64(unit) {
		return 0, errors.New("not a size")
	}
	return int(n) * unit, nil
}

// FormatSize writes what ParseSize reads.
func FormatSize(n int) string {
	for _, unit := range []byte("GMK") {
		if u := units[unit]; n >= u && n%u == 0 {
			return fmt.Sprintf("%d%c", n/u, unit)
		}
	}
	return strconv.Itoa(n)
}

// Comparison is one thing to measure: two variants, or A alone against an absolute target.
type Comparison struct {
	Variant string  // what is compared under which conditions, without line breaks
	Target  float64 // 0: none, the result is shown and not judged
	AtMost  bool    // the target is an upper bound
	Claim   string  // if it differs from the experiment's
	A, B    string  // names of the variants; B "" means that A's cost itself is the result
	Unit    string  // of a cost, such as "ns/frame"
	// Open prepares both variants, outside of the measurement.
	Open func(ctx context.Context) (Runner, error)
}

// Runner measures. The calls come one after another, on one goroutine that is locked to its thread.
type Runner interface {
	// Run measures one variant once. It returns an error if what was done was not right, such as a payload that differs.
	Run(ctx context.Context, variant string) (Sample, error)
	// Close releases everything and returns an error if something is left over that must not be.
	Close() error
}

// Sample is one observation.
type Sample struct {
	Cost     float64 // in the comparison's unit, positive; less is better. Without a B it may be 0
	Counters map[string]float64
}

// Result is what a comparison gave; its JSON is the interface of vhostd bench.
type Result struct {
	Experiment string             `json:"experiment"`
	Variant    string             `json:"variant"`
	Claim      string             `json:"claim"`
	Source     string             `json:"source"`
	Target     float64            `json:"target"` // 0: none
	Result     float64            `json:"result"` // the ratio of A's cost to B's, or A's cost
	Low        float64            `json:"low"`
	High       float64            `json:"high"`
	Pairs      int                `json:"pairs"`
	Noise      float64            `json:"noise"`
	Verdict    Verdict            `json:"verdict"` // "" without a target
	Counters   map[string]float64 `json:"counters"`

	Title   string    `json:"-"`
	General string    `json:"-"` // the experiment's claim
	AtMost  bool      `json:"-"`
	Unit    string    `json:"-"` // of Result: "x" for a ratio
	Costs   string    `json:"-"` // unit of the costs below
	NameA   string    `json:"-"`
	NameB   string    `json:"-"`
	A, B    []float64 `json:"-"` // costs, pair by pair
}
