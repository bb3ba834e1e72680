package ratelog

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type buffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) count(part string) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return strings.Count(b.b.String(), part)
}

func newLogger() (*slog.Logger, *Handler, *buffer) {
	out := &buffer{}
	h := New(slog.NewTextHandler(out, nil))
	return slog.New(h), h, out
}

// TestFlood is OPS-02: ten lines a second and one summary, whatever a peer does.
func TestFlood(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, h, out := newLogger()
		defer h.Close()
		for range 3 {
			for i := range 100_000 {
				log.Warn("bad chain", "head", i)
			}
			time.Sleep(Window)
			synctest.Wait()
		}
		if got := out.count("bad chain") - out.count("suppressed"); got > 3*Limit {
			t.Errorf("%d lines in three seconds, want at most %d", got, 3*Limit)
		}
		if out.count("msg=suppressed n=99990 cause=\"bad chain\"") != 1 || out.count("msg=suppressed n=99991") != 2 {
			t.Errorf("summaries are wrong:\n%s", out.b.String())
		}
	})
}

func TestCausesAreSeparate(t *testing.T) {
	log, h, out := newLogger()
	defer h.Close()
	for range 20 {
		log.Info("same", "n", 1)
		log.Warn("same")
		log.With("guest", "a").Info("same")
		log.With("guest", "b").Info("same")
		log.WithGroup("g").Info("same")
		log.Info("other")
	}
	if got := out.count("\n"); got != 6*Limit {
		t.Errorf("%d lines, want %d", got, 6*Limit)
	}
}

func TestQuietCauseIsForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, h, out := newLogger()
		defer h.Close()
		for i := range 2 * maxCauses {
			log.Info(fmt.Sprint("cause ", i))
		}
		if got := causes(h); got != maxCauses+1 {
			t.Errorf("%d causes are kept, want %d", got, maxCauses+1)
		}
		time.Sleep(3 * Window)
		synctest.Wait()
		if got := causes(h); got != 0 {
			t.Errorf("%d causes are kept after silence", got)
		}
		if out.count("suppressed") == 0 {
			t.Error("the shared budget reported nothing")
		}
	})
}

func causes(h *Handler) int {
	h.state.mu.Lock()
	defer h.state.mu.Unlock()
	return len(h.state.causes)
}

func TestCloseReports(t *testing.T) {
	log, h, out := newLogger()
	for range Limit + 5 {
		log.Info("x")
	}
	h.Close()
	if out.count("n=5") != 1 {
		t.Errorf("no summary at Close:\n%s", out.b.String())
	}
	log.Info("after")
	if out.count("after") != 1 {
		t.Error("a record after Close is lost")
	}
}

func TestConcurrentUse(t *testing.T) {
	log, h, _ := newLogger()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 500 {
				log.With("k", 1).Info("y")
			}
		})
	}
	wg.Wait()
	h.Close()
}
