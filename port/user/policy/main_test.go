package policy

import (
	"bytes"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vhostd/vhostd/internal/testmain"
)

func TestMain(m *testing.M) {
	os.Exit(testmain.Run(m, testmain.Files(), testmain.Goroutines()))
}

// rules parses lines such as allow=10.0.0.0/8.
func rules(t testing.TB, lines ...string) (list []Rule) {
	t.Helper()
	for _, line := range lines {
		key, text, _ := strings.Cut(line, "=")
		action := Deny
		if key == "allow" {
			action = Allow
		}
		r, err := ParseRule(action, text)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, r)
	}
	return list
}

// logbook keeps what was logged.
type logbook struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logbook) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *logbook) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// world is a policy with one guest and a clock that the test moves.
type world struct {
	*Policy
	guest *Guest
	log   *logbook
	clock time.Time
}

func newWorld(t testing.TB, lines ...string) *world {
	t.Helper()
	w := &world{log: &logbook{}, clock: time.Unix(1e9, 0)}
	p, err := New(rules(t, lines...), slog.New(slog.NewTextHandler(w.log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	w.Policy = p
	w.guest = w.view("g1")
	t.Cleanup(p.Close)
	return w
}

func (w *world) view(name string) *Guest {
	g := w.Guest(name)
	g.now = func() time.Time { return w.clock }
	return g
}

func (w *world) check(t testing.TB, dst string, want bool) {
	t.Helper()
	if d := w.guest.Check(netip.MustParseAddrPort(dst)); d.Allowed != want {
		t.Errorf("%s: %v, want allowed=%v", dst, d, want)
	}
}
