package control

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/internal/daemon"
	"github.com/vhostd/vhostd/internal/unixsock"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is a daemon with fixed answers that remembers which guests it was given.
type fake struct {
	mu       sync.Mutex
	guests   map[string]config.GuestSpec
	problems []string
	addErr   error
}

func (f *fake) Problems() []string { return f.problems }

func (f *fake) Status() daemon.Status {
	return daemon.Status{
		PID: 1, Healthy: len(f.problems) == 0, Problems: f.problems,
		Workers: []daemon.WorkerStatus{{Name: "worker0", Wake: "block", Sleeps: 8}, {Name: "worker1", Error: "dead"}},
		Guests: []daemon.GuestStatus{{
			Name: "vm1", State: "running", Connected: true, NetworkUp: true,
			Rings: []daemon.RingStatus{{Index: 0, Started: true, Enabled: true}, {Index: 1, Started: true, Broken: "why"}},
		}, {Name: "vm2", State: daemon.StateWaiting}},
	}
}

func (f *fake) Stats() daemon.Stats {
	return daemon.Stats{Guests: []daemon.GuestStats{{Name: "vm1", Connected: true, TxAlloc: "fragpool",
		Copy: daemon.CopyStats{Policy: "auto", Cached: 11, PastCache: 12, Fences: 13}, Pool: daemon.PoolStats{Fast: 14, InFlight: 15},
		Rings: []daemon.RingStats{
			{Index: 0, Packets: 5, Bytes: 320, Kicks: 2, Calls: 3, Batches: 4},
			{Index: 3, Packets: 7, Drops: map[string]uint64{"too_short": 9}},
		}}}}
}

func (f *fake) Add(spec config.GuestSpec, _ daemon.Source) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.addErr != nil {
		return f.addErr
	}
	if _, ok := f.guests[spec.Name]; ok {
		return fmt.Errorf("guest %s: %w", spec.Name, daemon.ErrExists)
	}
	f.guests[spec.Name] = spec
	return nil
}

func (f *fake) Remove(name string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.guests[name]; !ok {
		return fmt.Errorf("guest %s: %w", name, daemon.ErrNotFound)
	}
	delete(f.guests, name)
	return nil
}

func (f *fake) Change(name string, spec config.ChangeSpec) (daemon.GuestStats, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	g, ok := f.guests[name]
	if !ok {
		return daemon.GuestStats{}, fmt.Errorf("guest %s: %w", name, daemon.ErrNotFound)
	}
	if spec.TxAlloc != nil {
		g.TxAlloc = *spec.TxAlloc
	}
	if spec.Copy != nil {
		g.Copy = *spec.Copy
	}
	f.guests[name] = g
	return daemon.GuestStats{Name: name, TxAlloc: g.TxAlloc.String(), Copy: daemon.CopyStats{Policy: g.Copy.String()}}, nil
}

func (f *fake) UserNetworks() []*daemon.UserNetwork { return nil }

func (f *fake) UserNetwork(_, name string) (*daemon.UserNetwork, error) {
	return nil, fmt.Errorf("guest %s: %w", name, daemon.ErrNotFound)
}

func newFake() *fake { return &fake{guests: map[string]config.GuestSpec{}} }

func request(t *testing.T, f *fake, method, url, body string) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	Handler(f, "v1", slog.New(slog.DiscardHandler)).ServeHTTP(w, httptest.NewRequest(method, url, strings.NewReader(body)))
	return w.Code, w.Body.String()
}

func TestAddAndRemove(t *testing.T) {
	f := newFake()
	const body = `{"name":"vm1","socket":"/run/vm1.sock","network":"null","mtu":9000}`
	for _, step := range []struct {
		method, url, body string
		code              int
		want              string
	}{
		{"POST", "/v1/guests", body, 201, `"queue-pairs":8`},
		{"POST", "/v1/guests", body, 409, "exists already"},
		{"POST", "/v1/guests/vm2", `{"socket":"/run/vm2.sock","network":"echo"}`, 201, `"name":"vm2"`},
		{"POST", "/v1/guests/vm3", body, 400, `the path says \"vm3\"`},
		{"PATCH", "/v1/guests/vm1", `{"tx-alloc":"fragpool"}`, 200, `{"name":"vm1","tx-alloc":"fragpool","copy":"auto"}`},
		{"PATCH", "/v1/guests/vm1", `{"copy":"never"}`, 200, `{"name":"vm1","tx-alloc":"fragpool","copy":"never"}`},
		{"PATCH", "/v1/guests/vm9", `{"copy":"never"}`, 404, "does not exist"},
		{"DELETE", "/v1/guests/vm1", "", 204, ""},
		{"DELETE", "/v1/guests/vm1", "", 404, "does not exist"},
	} {
		code, got := request(t, f, step.method, step.url, step.body)
		if code != step.code || !strings.Contains(got, step.want) {
			t.Errorf("%s %s = %d %s, want %d with %s", step.method, step.url, code, got, step.code, step.want)
		}
	}
	if spec := f.guests["vm2"]; spec.Socket != "/run/vm2.sock" || spec.QueuePairs != 8 {
		t.Errorf("vm2 = %+v", spec)
	}
}

func TestBadRequests(t *testing.T) {
	for _, tc := range []struct {
		method, url, body string
		code              int
		want              string
	}{
		{"POST", "/v1/guests", "", 400, "body is not a guest"},
		{"POST", "/v1/guests", "[]", 400, "body is not a guest"},
		{"POST", "/v1/guests", `{"name":"a","socket":"/a","network":"null","bogus":1}`, 400, `unknown field \"bogus\"`},
		{"POST", "/v1/guests", `{"name":"a","socket":"/a","network":"null"}{}`, 400, "something follows"},
		{"POST", "/v1/guests", `{"name":"a","socket":"/a","network":"null","mtu":"9000"}`, 400, "mtu"},
		{"POST", "/v1/guests", `{"name":"a","socket":"/a","network":"nul"}`, 400, "accepted are echo"},
		{"POST", "/v1/guests", `{"name":"` + strings.Repeat("a", MaxBody) + `"}`, 413, "longer than 65536"},
		{"POST", "/v1/guests/a%2Fb", `{"socket":"/a","network":"null"}`, 400, "letters, digits"},
		{"PATCH", "/v1/guests/a", "", 400, "body is not a change"},
		{"PATCH", "/v1/guests/a", "{}", 400, "accepted are tx-alloc and copy"},
		{"PATCH", "/v1/guests/a", `{"tx-alloc":"slab"}`, 400, `accepted are frag, fragpool, refpage`},
		{"PATCH", "/v1/guests/a", `{"mtu":9000}`, 400, `unknown field \"mtu\"`},
		{"GET", "/", "", 404, "GET /v1/status"},
		{"PUT", "/v1/guests/a", "", 404, "PUT /v1/guests/a"},
	} {
		code, got := request(t, newFake(), tc.method, tc.url, tc.body)
		var e ErrorReply
		if err := json.Unmarshal([]byte(got), &e); err != nil || e.Error == "" {
			t.Errorf("%s %s: body %q is not an error object", tc.method, tc.url, got)
		}
		if code != tc.code || !strings.Contains(got, tc.want) {
			t.Errorf("%s %s %.40s = %d %s, want %d with %s", tc.method, tc.url, tc.body, code, got, tc.code, tc.want)
		}
	}
}

func TestAddFailure(t *testing.T) {
	f := newFake()
	f.addErr = errors.New("guest a: no such bridge")
	code, got := request(t, f, "POST", "/v1/guests", `{"name":"a","socket":"/a","network":"null"}`)
	if code != 500 || !strings.Contains(got, "no such bridge") {
		t.Errorf("%d %s", code, got)
	}
	f.addErr = daemon.ErrStopping
	if code, _ := request(t, f, "POST", "/v1/guests", `{"name":"a","socket":"/a","network":"null"}`); code != 503 {
		t.Errorf("while stopping: %d, want 503", code)
	}
}

// TestHealth is OPS-06's view from outside: what is wrong is named.
func TestHealth(t *testing.T) {
	f := newFake()
	if code, got := request(t, f, "GET", "/healthz", ""); code != 200 || got != "ok\n" {
		t.Errorf("healthy: %d %q", code, got)
	}
	f.problems = []string{"worker0: dead", "guest vm1: network is down"}
	if code, got := request(t, f, "GET", "/healthz", ""); code != 503 || got != "worker0: dead\nguest vm1: network is down\n" {
		t.Errorf("unhealthy: %d %q", code, got)
	}
}

func TestStatusAndStats(t *testing.T) {
	_, got := request(t, newFake(), "GET", "/v1/status", "")
	var status StatusReply
	if err := json.Unmarshal([]byte(got), &status); err != nil || status.Version != "v1" || len(status.Guests) != 2 {
		t.Errorf("status = %s (%v)", got, err)
	}
	_, got = request(t, newFake(), "GET", "/v1/stats", "")
	var stats daemon.Stats
	if err := json.Unmarshal([]byte(got), &stats); err != nil || stats.Guests[0].Rings[1].Drops["too_short"] != 9 {
		t.Errorf("stats = %s (%v)", got, err)
	}
}

func TestMetrics(t *testing.T) {
	code, got := request(t, newFake(), "GET", "/metrics", "")
	if code != 200 {
		t.Fatalf("%d %s", code, got)
	}
	for _, line := range []string{
		`vhostd_build_info{version="v1"} 1`,
		`vhostd_healthy 1`,
		`vhostd_worker_up{worker="worker0"} 1`,
		`vhostd_worker_up{worker="worker1"} 0`,
		`vhostd_worker_sleeps_total{worker="worker0"} 8`,
		`vhostd_arena_pages 0`,
		`vhostd_network_up{guest="vm1"} 1`,
		`vhostd_guest_connected{guest="vm2"} 0`,
		`vhostd_ring_started{guest="vm1",pair="0",queue="receiveq"} 1`,
		`vhostd_ring_enabled{guest="vm1",pair="0",queue="transmitq"} 0`,
		`vhostd_ring_broken{guest="vm1",pair="0",queue="transmitq"} 1`,
		`# TYPE vhostd_packets_total counter`,
		`vhostd_packets_total{guest="vm1",pair="0",queue="receiveq"} 5`,
		`vhostd_bytes_total{guest="vm1",pair="0",queue="receiveq"} 320`,
		`vhostd_kicks_total{guest="vm1",pair="0",queue="receiveq"} 2`,
		`vhostd_calls_total{guest="vm1",pair="0",queue="receiveq"} 3`,
		`vhostd_batches_total{guest="vm1",pair="0",queue="receiveq"} 4`,
		`vhostd_drops_total{guest="vm1",pair="1",queue="transmitq",reason="too_short"} 9`,
		`vhostd_copied_bytes_total{guest="vm1",how="cached"} 11`,
		`vhostd_copied_bytes_total{guest="vm1",how="past_cache"} 12`,
		`vhostd_copy_fences_total{guest="vm1"} 13`,
		`vhostd_pool_total{event="fast",guest="vm1"} 14`,
		`vhostd_pool_in_flight{guest="vm1"} 15`,
		`vhostd_tx_allocator{allocator="fragpool",guest="vm1"} 1`,
		`# TYPE go_goroutines gauge`,
		`# TYPE process_open_fds gauge`,
	} {
		if !strings.Contains(got, "\n"+line+"\n") {
			t.Errorf("no line %q in\n%s", line, got)
		}
	}
}

func TestServeOverSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "control.sock")
	l, err := unixsock.Listen(path, unixsock.Options{Mode: 0o600, UID: -1, GID: -1})
	if err != nil {
		t.Fatal(err)
	}
	s := Serve(l, newFake(), "v1", slog.New(slog.DiscardHandler))
	body, err := Get(t.Context(), path, "/v1/stats")
	if err != nil || !strings.Contains(string(body), "too_short") {
		t.Errorf("Get = %s, %v", body, err)
	}
	if _, err := Get(t.Context(), path, "/nowhere"); err == nil || !strings.Contains(err.Error(), "no GET /nowhere here") {
		t.Errorf("unknown path: %v", err)
	}
	half, err := net.Dial("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer half.Close()
	if _, err := half.Write([]byte("GET /v1")); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if _, err := Get(t.Context(), path, "/v1/stats"); err == nil || !strings.Contains(err.Error(), "is vhostd serve --control running") {
		t.Errorf("after Close: %v", err)
	}
}

// FuzzDecodeGuest: a body is either a guest or an error, whatever it holds.
func FuzzDecodeGuest(f *testing.F) {
	for _, body := range []string{`{}`, `{"name":"a","socket":"/a","network":"null"}`, `[]`, `{"mtu":1e99}`, `{"tx-alloc":"frag","copy":null}`, `{"name":null}`, `{}{}`} {
		f.Add(body)
	}
	f.Fuzz(func(t *testing.T, body string) {
		g := config.DefaultGuest()
		if err := decodeObject(io.LimitReader(strings.NewReader(body), MaxBody), "a guest", &g); err == nil {
			_, _ = g.Parse()
		}
		var c config.Change
		if err := decodeObject(io.LimitReader(strings.NewReader(body), MaxBody), "a change", &c); err == nil {
			_, _ = c.Parse()
		}
	})
}
