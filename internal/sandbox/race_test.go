//go:build race

package sandbox

import (
	"strings"
	"sync"
	"testing"
)

func init() { roles["racing"] = racing }

// racing has a data race on purpose.
func racing(o Options) {
	enter(o)
	n := 0
	var both sync.WaitGroup
	for range 2 {
		both.Go(func() { n++ })
	}
	both.Wait()
	say("end", nil)
}

// TestRaceReport: Trap does not keep the race detector from saying what it found.
func TestRaceReport(t *testing.T) {
	t.Setenv("GORACE", "atexit_sleep_ms=0")
	r := startRole(t, "racing", Options{Trap: true}, nil)
	var text strings.Builder
	for r.out.Scan() {
		text.WriteString(r.out.Text() + "\n")
	}
	_ = r.cmd.Wait()
	for _, part := range []string{"WARNING: DATA RACE", "sandbox.racing", "Goroutine", "end ok", "Found 1 data race(s)"} {
		if !strings.Contains(text.String(), part) {
			t.Errorf("no %q in\n%.3000s", part, text.String())
		}
	}
}
