package bench

import (
	"bytes"
	"context"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// fake costs what the test says and remembers the order of its runs.
type fake struct {
	order  []string
	cost   func(variant string, run int) (float64, error)
	closed error
}

func (f *fake) Run(_ context.Context, variant string) (Sample, error) {
	f.order = append(f.order, variant)
	cost, err := f.cost(variant, len(f.order))
	return Sample{Cost: cost, Counters: map[string]float64{"runs": float64(len(f.order))}}, err
}

func (f *fake) Close() error { return f.closed }

func runFake(f *fake, c Comparison, pairs int) (results []Result, err error) {
	c.Open = func(context.Context) (Runner, error) { return f, nil }
	e := Experiment{Name: "E0", Title: "A <test> & more", Claim: "B is faster", Source: "this test"}
	err = Run(context.Background(), e, []Comparison{c}, Settings{Pairs: pairs, CPU: -1}, func(r Result) { results = append(results, r) })
	return results, err
}

func TestRunInterleaves(t *testing.T) {
	f := &fake{cost: func(variant string, run int) (float64, error) {
		return map[string]float64{"a": 3, "b": 2}[variant] * float64(1+run/2), nil
	}}
	results, err := runFake(f, Comparison{Variant: "v", A: "a", B: "b", Target: 1.4, Unit: "ns"}, 4)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"a", "b", "a", "b", "b", "a", "a", "b", "b", "a"} // warm-up, then in turns
	if !slices.Equal(f.order, want) {
		t.Errorf("order %v, want %v", f.order, want)
	}
	r := results[0]
	if r.Pairs != 4 || r.Unit != "x" || r.Low > r.Result || r.High < r.Result || len(r.A) != 4 || r.Counters["a runs"] == 0 {
		t.Errorf("%+v", r)
	}
}

func TestRunVerdicts(t *testing.T) {
	steady := func(a, b float64) *fake {
		return &fake{cost: func(variant string, run int) (float64, error) {
			return map[string]float64{"a": a, "b": b}[variant] * (1 + 0.001*float64(run%3)), nil
		}}
	}
	for _, c := range []struct {
		comparison Comparison
		a, b       float64
		want       Verdict
	}{
		{Comparison{A: "a", B: "b", Target: 1.5}, 2, 1, Holds},
		{Comparison{A: "a", B: "b", Target: 2.5}, 2, 1, Fails},
		{Comparison{A: "a", B: "b", Target: 2}, 2, 1, Unresolved},
		{Comparison{A: "a", B: "b", Target: 2.5, AtMost: true}, 2, 1, Holds},
		{Comparison{A: "a", Target: 3, AtMost: true, Unit: "ns"}, 2, 0, Holds},
		{Comparison{A: "a", Target: 1, AtMost: true, Unit: "ns"}, 2, 0, Fails},
		{Comparison{A: "a", B: "b"}, 2, 1, ""},
	} {
		results, err := runFake(steady(c.a, c.b), c.comparison, 6)
		if err != nil || results[0].Verdict != c.want {
			t.Errorf("%+v: %v %v", c.comparison, results, err)
		}
	}
}

func TestRunErrors(t *testing.T) {
	bad := errors.New("payload differs")
	for name, f := range map[string]*fake{
		"run":   {cost: func(_ string, run int) (float64, error) { return 1, map[bool]error{true: bad}[run == 4] }},
		"close": {cost: func(string, int) (float64, error) { return 1, nil }, closed: bad},
	} {
		if results, err := runFake(f, Comparison{Variant: "v", A: "a", B: "b"}, 3); !errors.Is(err, bad) || len(results) != 0 || !strings.Contains(err.Error(), "E0, v") {
			t.Errorf("%s: %v, %d results", name, err, len(results))
		}
	}
	zero := &fake{cost: func(string, int) (float64, error) { return 0, nil }}
	if _, err := runFake(zero, Comparison{A: "a", B: "b"}, 3); err == nil {
		t.Error("a cost of nothing is accepted")
	}
}

func TestSizes(t *testing.T) {
	p := Params{Values: map[string]string{"good": "1,2K,3M", "bad": "1,x", "big": "1G", "empty": "", "words": "a,c"}}
	if got, err := p.Sizes("good", 1, 1<<30); err != nil || !slices.Equal(got, []int{1, 2048, 3 << 20}) {
		t.Error(got, err)
	}
	for _, name := range []string{"bad", "big", "empty"} {
		if _, err := p.Sizes(name, 1, 1<<29); err == nil || !strings.HasPrefix(err.Error(), "--"+name+": ") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := p.Size("good", 1, 1<<30); err == nil {
		t.Error("a list is taken for a number")
	}
	if _, err := p.List("words", "a", "b"); err == nil || !strings.Contains(err.Error(), "accepted are a, b") {
		t.Error(err)
	}
	for _, n := range []int{0, 1, 1023, 1024, 1536, 64 << 20, 3 << 30} {
		if got, err := ParseSize(FormatSize(n)); got != n || err != nil {
			t.Error(n, got, err)
		}
	}
}

// some are results of every kind, one of them from a single pair.
func some() []Result {
	a, b := []float64{2, 2.1, 2.2}, []float64{1, 1.1, 1}
	wide := Result{Experiment: "E1", Variant: "a|b <i>", Title: "Title & <b>", Claim: "c", General: "c", Source: "s", NameA: "x", NameB: "y", Unit: "x", Costs: "ns",
		A: a[:1], B: b[:1], Result: 2, Low: 0, High: math.Inf(1), Noise: math.Inf(1), Pairs: 1, Target: 1.5, Verdict: Unresolved, Counters: map[string]float64{"n": math.NaN(), "m": 1}}
	narrow := wide
	narrow.Variant, narrow.A, narrow.B, narrow.Low, narrow.High, narrow.Noise, narrow.Pairs, narrow.Verdict = "second", a, b, 1.9, 2.2, 0.07, 3, Holds
	single := Result{Experiment: "E2", Variant: "alone", Title: "T", Claim: "own", General: "general", Source: "s", NameA: "x", Unit: "ns", Costs: "ns", A: a, Result: 2.1, Low: 2, High: 2.2, Pairs: 3,
		Noise: 0.05, Target: 2, AtMost: true, Verdict: Fails}
	return []Result{wide, narrow, single}
}

func TestJSON(t *testing.T) {
	var b bytes.Buffer
	if err := WriteJSON(&b, some()); err != nil {
		t.Fatal(err)
	}
	var got []map[string]any
	if err := json.Unmarshal(b.Bytes(), &got); err != nil || len(got) != 3 {
		t.Fatal(err)
	}
	for _, key := range []string{"experiment", "variant", "claim", "source", "target", "result", "low", "high", "pairs", "noise", "verdict", "counters"} {
		if _, ok := got[0][key]; !ok {
			t.Errorf("%s is missing", key)
		}
	}
	if len(got[0]) != 12 {
		t.Errorf("%d keys: %v", len(got[0]), got[0])
	}
	b.Reset()
	if err := WriteJSON(&b, nil); err != nil || strings.TrimSpace(b.String()) != "[]" {
		t.Error(b.String(), err)
	}
}

func wellFormed(t *testing.T, text []byte) {
	t.Helper()
	d := xml.NewDecoder(bytes.NewReader(text))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			return
		} else if err != nil {
			t.Fatalf("%v in\n%s", err, text)
		}
	}
}

func TestPlots(t *testing.T) {
	for _, g := range groups(some()) {
		wellFormed(t, SVG(g))
	}
	path := filepath.Join(t.TempDir(), "plot.svg")
	if err := WriteSVG(path, some()); err != nil {
		t.Fatal(err)
	}
	text, _ := os.ReadFile(path)
	wellFormed(t, text)
	var b bytes.Buffer
	Plot(&b, some())
	for _, want := range []string{"[", "*", "|", "second", "holds", "fails"} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("no %q in\n%s", want, b.String())
		}
	}
	if err := WriteText(&b, some()); err != nil || !strings.Contains(b.String(), "claim of alone: own") || !strings.Contains(b.String(), "noise of ? hides it") {
		t.Errorf("%v\n%s", err, b.String())
	}
}

func TestReports(t *testing.T) {
	dir := t.TempDir()
	facts := Facts{Title: "T", Machine: "<m>", Command: "c", Time: "now"}
	for _, name := range []string{"r.html", "r.md"} {
		path := filepath.Join(dir, name)
		if err := WriteReport(path, facts, some()); err != nil {
			t.Fatal(err)
		}
		text, _ := os.ReadFile(path)
		for _, want := range []string{"E1", "E2", "second", "unresolved", "general", "own"} {
			if !strings.Contains(string(text), want) {
				t.Errorf("%s: no %q", name, want)
			}
		}
	}
	html, _ := os.ReadFile(filepath.Join(dir, "r.html"))
	if strings.Contains(string(html), "<i>") && strings.Contains(string(html), "a|b <i>") || strings.Count(string(html), "<svg") != 2 {
		t.Error("the page is not escaped, or lacks plots")
	}
	if plots, _ := filepath.Glob(filepath.Join(dir, "r-E*.svg")); len(plots) != 2 {
		t.Errorf("plots beside the page: %v", plots)
	}
	for _, bad := range []string{"r.txt", filepath.Join(dir, "none", "r.md"), "r"} {
		if WriteReport(bad, facts, some()) == nil {
			t.Errorf("%s is accepted", bad)
		}
	}
}
