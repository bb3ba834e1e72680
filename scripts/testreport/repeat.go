package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
)

// mostRepeated is how many failed tests may be unsteady: where more fail, something is broken.
const mostRepeated = 2

// note keeps a failed test with what failed inside it, which go test reports first.
func (r *report) note(e event, output string) {
	top, _, _ := strings.Cut(e.Test, "/")
	for i := range r.failures {
		if f := &r.failures[i]; f.pkg == e.Package && f.test == top {
			f.tests++
			f.output += output
			return
		}
	}
	r.failures = append(r.failures, failure{pkg: e.Package, test: top, output: output, tests: 1})
}

// repeat runs failed tests again and takes back the failures that do not come again. Data races and panics are findings even if
// they are rare, and so is whatever a package reports by itself.
func (r *report) repeat(times int, run func(pkg, test string, times int) io.Reader) {
	if len(r.failures) == 0 || len(r.failures) > mostRepeated {
		return
	}
	for _, f := range r.failures {
		if strings.Contains(f.output, "DATA RACE") || strings.Contains(f.output, "panic:") || !r.badPackages[f.pkg] {
			continue
		}
		fmt.Fprintf(r.out, "again %s %s, %d times\n", short(f.pkg), f.test, times)
		again := newReport(r.out, r.verbose, r.noSkip)
		if err := again.read(run(f.pkg, f.test, times)); err != nil || !again.finish() {
			continue
		}
		fmt.Fprintf(r.out, "UNSTEADY  %s %s: failed once and passed %d times; the output of the failure is above\n", short(f.pkg), f.test, times)
		r.failed -= f.tests
		r.unsteady++
		r.forgive(f)
	}
}

// forgive takes a package's failure back once none of its tests' failures is left.
func (r *report) forgive(gone failure) {
	left := 0
	for i, f := range r.failures {
		if f == gone {
			r.failures[i].tests = 0
			continue
		}
		if f.pkg == gone.pkg && f.tests > 0 {
			left++
		}
	}
	if left == 0 {
		delete(r.badPackages, gone.pkg)
	}
}

// nothingElse says whether a package's own output is no more than the words with which go test ends it.
func nothingElse(lines []string) bool {
	for line := range strings.Lines(strings.Join(lines, "")) {
		if !strings.HasPrefix(line, "FAIL") && !strings.HasPrefix(line, "exit status ") {
			return false
		}
	}
	return true
}

// goTest runs one test and returns its events.
func goTest(pkg, test string, times int) io.Reader {
	cmd := exec.Command("go", "test", "-vet=off", "-json", "-timeout", "30m", "-count", strconv.Itoa(times), "-run", "^"+test+"$", pkg)
	cmd.Stderr = os.Stderr
	out, _ := cmd.Output() // its status is in the events, too
	return bytes.NewReader(out)
}
