package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/vhostd/vhostd/internal/bench/experiments"
	"github.com/vhostd/vhostd/internal/testmain"
)

func TestBenchUsageErrors(t *testing.T) {
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"bench"}, "bench: give the name of an experiment"},
		{[]string{"bench", "bogus"}, `bench: unknown experiment "bogus"`},
		{[]string{"bench", "copy", "x"}, "unknown command"},
		{[]string{"bench", "copy", "--size", "1"}, `--size: "1": accepted are numbers from 64 to 64K`},
		{[]string{"bench", "copy", "--after", "us"}, `--after: "us": accepted are none, self, other`},
		{[]string{"bench", "pool", "--case", "x"}, `--case: "x": accepted are fast, ring, slow`},
		{[]string{"bench", "pagefrag", "--align", "48"}, "--align: 48: accepted are powers of two"},
		{[]string{"bench", "pfragpool", "--map", "lazy"}, `--map: "lazy": accepted are strict, passthrough`},
		{[]string{"bench", "poolrefill", "--bulk", "1"}, "--bulk: [1]: accepted are two or three different forms"},
		{[]string{"bench", "net-alloc", "--tx-alloc", "frag,frag"}, "--tx-alloc: frag,frag: accepted are two or three different allocators"},
		{[]string{"bench", "ring", "--pairs", "1"}, "--pairs: 1: accepted are 2 to 1000"},
		{[]string{"bench", "ring", "--cpus", "x"}, `--cpus: "x": accepted are numbers`},
		{[]string{"bench", "ring", "--plot=x.png"}, `--plot: "x.png": accepted are`},
		{[]string{"bench", "ring", "--plot=/no/such/x.svg"}, "directory /no/such does not exist"},
		{[]string{"bench", "all", "--report", "x.txt"}, `--report: "x.txt": accepted are names that end in .md or .html`},
		{[]string{"bench", "all", "--report", "/no/such/x.md"}, "directory /no/such does not exist"},
		{[]string{"bench", "net-test", "x"}, "unknown command"},
		{[]string{"bench", "net-test", "--n", "0"}, "--n: 0: accepted are 1 to"},
		{[]string{"bench", "net-test", "--n", "many"}, `--n: "many": accepted are whole numbers`},
		{[]string{"bench", "net-test", "--frame", "59"}, `--frame: "59": accepted are 60 to 65535 bytes, or imix`},
		{[]string{"bench", "net-test", "--depth", "257"}, "--depth: 257: accepted are 1 to 256"},
		{[]string{"bench", "net-test", "--tx-alloc", "none"}, `--tx-alloc: "none"`},
		{[]string{"bench", "net-test", "--layout", "indirect", "--no-indirect"}, "--layout: indirect needs"},
		{[]string{"bench", "net-test", "--reps", "0"}, "--reps: 0: accepted are 1 to 1000"},
		{[]string{"bench", "net-test", "--vs", "ring=split"}, `--vs: "ring=split": accepted are two variants`},
		{[]string{"bench", "net-test", "--vs", "ring=split,round"}, `--ring: "round"`},
		{[]string{"bench", "net-test", "--plot=x"}, `--plot: "x": accepted are`},
	} {
		code, stdout, stderr := run(t, tc.args...)
		t.Run(strings.Join(tc.args, " "), func(t *testing.T) { wantError(t, exitUsage, tc.want, code, stdout, stderr) })
	}
	code, stdout, stderr := run(t, "bench", "net-test", "--socket", filepath.Join(t.TempDir(), "nobody"), "--n", "1")
	if code != exitFailure || stdout != "" || strings.Count(stderr, "\n") != 1 {
		t.Errorf("nobody listens: %d %q %q", code, stdout, stderr)
	}
}

// result is one object of the array that --json prints.
type benchResult struct {
	Experiment, Variant, Claim, Source, Verdict string
	Target, Result, Low, High, Noise            float64
	Pairs                                       int
	Counters                                    map[string]float64
}

func benchJSON(t *testing.T, args ...string) (results []benchResult) {
	t.Helper()
	code, stdout, stderr := run(t, append([]string{"bench"}, args...)...)
	if err := json.Unmarshal([]byte(stdout), &results); err != nil || code != 0 {
		t.Fatalf("%v: %d %v\n%s\n%s", args, code, err, stdout, stderr)
	}
	return results
}

// TestBench runs the throughput run as its users do: with the program itself as the daemon, in its sandbox.
func TestBench(t *testing.T) {
	plot := filepath.Join(t.TempDir(), "p.svg")
	results := benchJSON(t, "net-test", "--n", "2000", "--depth", "16", "--wake", "adaptive", "--vs", "ring=split,packed", "--json", "--plot="+plot)
	if len(results) != 1 || results[0].Experiment != "net-test" || results[0].Pairs != 2 || results[0].Result <= 0 || results[0].Counters["ring=packed kicks sent"] == 0 {
		t.Errorf("%+v", results)
	}
	if text, err := os.ReadFile(plot); err != nil || !strings.Contains(string(text), "<svg") {
		t.Errorf("no plot: %v", err)
	}
	code, stdout, stderr := run(t, "bench", "net-test", "--n", "1000", "--wire", "pair", "--reps", "2", "--depth", "8", "--frame", "imix")
	for _, want := range []string{"(2 repetitions)", "elapsed", "CPUs utilized", "context switches", "minor faults", "kicks sent", "calls received", "spurious wake-ups", "( +-"} {
		if code != 0 || !strings.Contains(stdout, want) {
			t.Fatalf("%d, no %q in\n%s\n%s", code, want, stdout, stderr)
		}
	}
}

func TestBenchTap(t *testing.T) {
	testmain.NeedTun(t)
	code, stdout, stderr := run(t, "bench", "net-test", "--n", "500", "--wire", "tap", "--depth", "4", "--json")
	var got struct {
		Run         string
		Repetitions []struct {
			Frames   int
			Counters map[string]float64
		}
	}
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || code != 0 || len(got.Repetitions) != 1 || got.Repetitions[0].Frames != 1000 {
		t.Errorf("%d %v\n%s\n%s", code, err, stdout, stderr)
	}
}

// TestBenchReport: one experiment's results by the command, and every experiment's name in the help.
func TestBenchReport(t *testing.T) {
	results := benchJSON(t, "pool", "--n", "4K", "--pairs", "2", "--json")
	if len(results) != 8 || results[7].Experiment != "E5x" || results[3].Source == "" || results[3].Claim == "" || results[3].Verdict == "" {
		t.Errorf("%+v", results)
	}
	code, stdout, _ := run(t, "bench", "--help")
	names, _ := experiments.Commands()
	for _, name := range append(names, "net-test", "all") {
		if code != 0 || !strings.Contains(stdout, "\n  "+name+" ") {
			t.Errorf("%s is missing in\n%s", name, stdout)
		}
	}
}
