package ratelog

import (
	"fmt"
	"io"
	"log/slog"
	"strings"
	"testing"
	"time"
)

// stalled is a reader that takes nothing until it is let go.
type stalled struct {
	gate chan struct{}
	text strings.Builder
}

func (s *stalled) Write(b []byte) (int, error) {
	<-s.gate
	return s.text.Write(b)
}

func TestWriterKeepsOrder(t *testing.T) {
	out := &stalled{gate: make(chan struct{})}
	close(out.gate)
	w := NewWriter(out)
	want := ""
	for i := range 500 {
		line := fmt.Sprintln("line", i)
		want += line
		if n, err := io.WriteString(w, line); n != len(line) || err != nil {
			t.Fatal(n, err)
		}
	}
	w.Close(10 * time.Second)
	if got := out.text.String(); got != want {
		t.Errorf("got %q", got)
	}
	fmt.Fprintln(w, "late")
	w.Close(time.Second)
}

func TestWriterNeverWaits(t *testing.T) {
	out := &stalled{gate: make(chan struct{})}
	w := NewWriter(out)
	log := slog.New(slog.NewTextHandler(w, nil))
	w.OnLoss(func(lost uint64) { log.Warn("lines lost", "n", lost) })
	begin := time.Now()
	for i := range 3 * Backlog {
		log.Info("line", "i", i)
	}
	w2 := NewWriter(&stalled{gate: out.gate})
	fmt.Fprintln(w2, "stuck")
	w2.Close(10 * time.Millisecond)
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("logging took %v", took)
	}
	close(out.gate)
	for end := time.Now().Add(5 * time.Second); len(w.lines) > 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
	}
	time.Sleep(20 * time.Millisecond)
	w.Close(10 * time.Second)
	text := out.text.String()
	if n := strings.Count(text, "msg=line "); n < Backlog || n > Backlog+1 || !strings.Contains(text, fmt.Sprintf("n=%d", 3*Backlog-n)) {
		t.Errorf("%d lines of %d passed; the end is %q", n, 3*Backlog, text[max(0, len(text)-200):])
	}
}
