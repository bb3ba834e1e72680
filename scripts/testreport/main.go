// Command testreport reads `go test -json` on its standard input and prints what a person wants to see meanwhile: one line a package,
// the output of failed and skipped tests, with -v every test as it ends. Its last line counts the tests.
//
// It exits with 1 when a test failed, when none ran, or when one was skipped in CI (CI=true or VHOSTD_NO_SKIP=1). A skip whose reason
// starts with "long:" or "not applicable:" is a choice and never counts as a failure. With -repeat N, up to two tests that failed are
// run again N times: where every time passes, the failure is reported as unsteady and does not fail the run.
package main

import (
	"bufio"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"strings"
)

type event struct {
	Action, Package, Test, Output string
	Elapsed                       float64
}

type report struct {
	out                     io.Writer
	verbose, noSkip         bool
	output                  map[string][]string // of running tests and packages
	passed, failed, skipped int
	unsteady                int // failed, and passed when they ran again
	inPackage               map[string]int
	failures                []failure
	badPackages             map[string]bool // that failed; true: by what their tests did alone
	bad                     bool            // a test was skipped that must not be
}

// failure is a failed test that is not part of another.
type failure struct {
	pkg, test string
	output    string
	tests     int // that failed with it, itself included
}

func main() {
	verbose := flag.Bool("v", false, "print a line for each test")
	repeat := flag.Int("repeat", 0, "run up to two failed tests again this often (`N`)")
	flag.Parse()
	noSkip := os.Getenv("CI") == "true" || os.Getenv("VHOSTD_NO_SKIP") == "1"
	r := newReport(os.Stdout, *verbose, noSkip)
	if err := r.read(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, "testreport:", err)
		os.Exit(1)
	}
	if *repeat > 0 {
		r.repeat(*repeat, goTest)
	}
	if !r.finish() {
		os.Exit(1)
	}
}

func newReport(out io.Writer, verbose, noSkip bool) *report {
	return &report{out: out, verbose: verbose, noSkip: noSkip, output: map[string][]string{}, inPackage: map[string]int{},
		badPackages: map[string]bool{}}
}

func (r *report) read(in io.Reader) error {
	scanner := bufio.NewScanner(in)
	scanner.Buffer(nil, 16<<20)
	for scanner.Scan() {
		var e event
		if err := json.Unmarshal(scanner.Bytes(), &e); err != nil {
			fmt.Fprintln(r.out, scanner.Text()) // not of go test
			continue
		}
		r.handle(e)
	}
	return scanner.Err()
}

func (r *report) handle(e event) {
	key := e.Package + " " + e.Test
	switch e.Action {
	case "output", "build-output":
		r.output[key] = append(r.output[key], e.Output)
		return
	case "pass", "fail", "skip", "build-fail":
	default:
		return
	}
	if e.Test == "" {
		r.endPackage(e, key)
	} else {
		r.endTest(e, key)
	}
	delete(r.output, key)
}

func (r *report) endTest(e event, key string) {
	r.inPackage[e.Package]++
	text := strings.Join(r.output[key], "")
	switch {
	case e.Action == "fail":
		r.failed++
		r.note(e, text)
		fmt.Fprintf(r.out, "FAIL  %s %s (%.1f s)\n%s", short(e.Package), e.Test, e.Elapsed, text)
	case e.Action == "skip":
		r.skipped++
		word := "skip "
		if r.noSkip && !chosen(text) {
			word, r.bad = "FAIL  skipped in CI:", true
		}
		fmt.Fprintf(r.out, "%s %s %s: %s\n", word, short(e.Package), e.Test, reason(text))
	default:
		r.passed++
		if r.verbose {
			fmt.Fprintf(r.out, "ok    %s (%.1f s)\n", e.Test, e.Elapsed)
		}
	}
}

// endPackage prints a package's own output only if it failed: a panic, a leak or a build error is there.
func (r *report) endPackage(e event, key string) {
	if e.Action == "fail" || e.Action == "build-fail" {
		r.badPackages[e.Package] = r.inPackage[e.Package] > 0 && nothingElse(r.output[key])
		fmt.Fprintf(r.out, "FAIL  %s (%.1f s)\n", short(e.Package), e.Elapsed)
		for other, lines := range r.output {
			if other == key || strings.HasPrefix(other, e.Package+" ") {
				fmt.Fprint(r.out, strings.Join(lines, ""))
			}
		}
		return
	}
	if n := r.inPackage[e.Package]; n > 0 {
		fmt.Fprintf(r.out, "ok    %s: %d tests (%.1f s)\n", short(e.Package), n, e.Elapsed)
	}
}

// reason is what the test said, without the frame of go test.
func reason(text string) string {
	var said []string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if line != "" && !strings.HasPrefix(line, "=== ") && !strings.HasPrefix(line, "--- ") {
			said = append(said, line)
		}
	}
	return strings.Join(said, " ")
}

// chosen says whether the skip is a choice and not a lack.
func chosen(text string) bool {
	return strings.Contains(text, "long:") || strings.Contains(text, "not applicable:")
}

func (r *report) finish() bool {
	fmt.Fprintf(r.out, "%d passed, %d failed, %d skipped\n", r.passed, r.failed, r.skipped)
	if r.unsteady > 0 {
		fmt.Fprintf(r.out, "%d of the tests failed and passed when repeated: search for UNSTEADY above\n", r.unsteady)
	}
	return r.failed == 0 && !r.bad && len(r.badPackages) == 0 && r.passed > 0
}

func short(pkg string) string { return strings.TrimPrefix(pkg, "github.com/vhostd/vhostd/") }
