// Package control is the daemon's HTTP API on a Unix socket: status, counters, health, Prometheus
// metrics, views of user networks, publishing their ports, adding, changing and removing guests, and
// reloading the configuration.
package control

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/internal/daemon"
)

// Limits of what a client may send and how long it may take.
const (
	MaxBody   = 64 << 10
	maxHeader = 16 << 10
	readTime  = 10 * time.Second
	writeTime = 30 * time.Second
	idleTime  = 60 * time.Second
	grace     = 500 * time.Millisecond
)

// Backend is what the API shows and changes; *daemon.Daemon is one. It is used by many goroutines.
type Backend interface {
	Status() daemon.Status
	Stats() daemon.Stats
	Problems() []string
	Add(spec config.GuestSpec, from daemon.Source) error
	Remove(name string) error
	Change(name string, spec config.ChangeSpec) (daemon.GuestStats, error)
	UserNetworks() []*daemon.UserNetwork
	UserNetwork(owner, name string) (*daemon.UserNetwork, error)
}

// Reloader is a Backend with a configuration file.
type Reloader interface {
	// ReloadConfiguration reads it again. An error says that nothing is changed.
	ReloadConfiguration() (daemon.Reload, error)
}

// Server serves the API on one listener.
type Server struct {
	http *http.Server
	done chan struct{}
}

// Serve starts to serve l, which the server owns from now on.
func Serve(l net.Listener, b Backend, version string, log *slog.Logger) *Server {
	s := &Server{
		http: &http.Server{
			Handler:           Handler(b, version, log),
			ReadHeaderTimeout: readTime, ReadTimeout: readTime, WriteTimeout: writeTime, IdleTimeout: idleTime,
			MaxHeaderBytes: maxHeader,
			ErrorLog:       slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		},
		done: make(chan struct{}),
	}
	go func() {
		defer close(s.done)
		if err := s.http.Serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) {
			log.Error("control socket ended", "err", err)
		}
	}()
	return s
}

// Close gives the requests that run a moment to end and then cuts them off, together with clients
// that never finish their request.
func (s *Server) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), grace)
	defer cancel()
	err := s.http.Shutdown(ctx)
	if errors.Is(err, context.DeadlineExceeded) {
		err = s.http.Close()
	}
	<-s.done
	return err
}

// Handler returns the API without a server.
func Handler(b Backend, version string, log *slog.Logger) http.Handler {
	a := &api{backend: b, version: version, log: log}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/status", a.status)
	mux.HandleFunc("GET /v1/stats", func(w http.ResponseWriter, _ *http.Request) { reply(w, http.StatusOK, b.Stats()) })
	mux.HandleFunc("GET /healthz", a.health)
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry(b, version), promhttp.HandlerOpts{}))
	mux.HandleFunc("POST /v1/guests", a.add)
	mux.HandleFunc("POST /v1/guests/{name}", a.add)
	mux.HandleFunc("PATCH /v1/guests/{name}", a.change)
	mux.HandleFunc("DELETE /v1/guests/{name}", a.remove)
	mux.HandleFunc("POST /v1/reload", a.reload)
	a.userNetworks(mux)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		fail(w, http.StatusNotFound, fmt.Errorf("no %s %s here: there are %s", r.Method, r.URL.Path, paths))
	})
	return mux
}

// paths is what there is, for who asked for something else.
const paths = "GET /v1/status, /v1/stats, /v1/networks, /healthz, /metrics, POST /v1/reload, /v1/guests, " +
	"PATCH and DELETE /v1/guests/NAME, " +
	"and of user networks GET /v1/guests/NAME/VIEW and /v1/networks/SWITCH/VIEW for flows, leases, dns, policy and publish, " +
	"POST and DELETE for publish"

type api struct {
	backend Backend
	version string
	log     *slog.Logger
}

// StatusReply is the answer of GET /v1/status.
type StatusReply struct {
	Version string `json:"version"`
	daemon.Status
}

func (a *api) status(w http.ResponseWriter, _ *http.Request) {
	reply(w, http.StatusOK, StatusReply{Version: a.version, Status: a.backend.Status()})
}

func (a *api) health(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	if problems := a.backend.Problems(); len(problems) > 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
		fmt.Fprintln(w, strings.Join(problems, "\n"))
		return
	}
	fmt.Fprintln(w, "ok")
}

func (a *api) add(w http.ResponseWriter, r *http.Request) {
	guest := config.DefaultGuest()
	if !decode(w, r, "a guest", &guest) {
		return
	}
	if name := r.PathValue("name"); name != "" {
		if guest.Name != "" && guest.Name != name {
			fail(w, http.StatusBadRequest, fmt.Errorf("name: the path says %q, the body %q", name, guest.Name))
			return
		}
		guest.Name = name
	}
	spec, err := guest.Parse()
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	if err := a.backend.Add(spec, daemon.Source{}); err != nil {
		a.log.Warn("guest was not added", "err", err)
		fail(w, statusOf(err), err)
		return
	}
	reply(w, http.StatusCreated, guest)
}

func (a *api) remove(w http.ResponseWriter, r *http.Request) {
	if err := a.backend.Remove(r.PathValue("name")); err != nil {
		fail(w, statusOf(err), err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (a *api) reload(w http.ResponseWriter, _ *http.Request) {
	r, ok := a.backend.(Reloader)
	if !ok {
		fail(w, http.StatusConflict, errors.New("the daemon has no configuration file: it was started without --config"))
		return
	}
	report, err := r.ReloadConfiguration()
	switch {
	case errors.Is(err, daemon.ErrStopping):
		fail(w, statusOf(err), err)
		return
	case err != nil:
		fail(w, http.StatusBadRequest, err)
		return
	}
	reply(w, http.StatusOK, report)
}

func (a *api) change(w http.ResponseWriter, r *http.Request) {
	var change config.Change
	if !decode(w, r, "a change", &change) {
		return
	}
	spec, err := change.Parse()
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	stats, err := a.backend.Change(r.PathValue("name"), spec)
	if err != nil {
		fail(w, statusOf(err), err)
		return
	}
	reply(w, http.StatusOK, ChangeReply{Name: stats.Name, TxAlloc: stats.TxAlloc, Copy: stats.Copy.Policy})
}

// ChangeReply is the answer of PATCH /v1/guests/NAME: what holds from now on.
type ChangeReply struct {
	Name    string `json:"name"`
	TxAlloc string `json:"tx-alloc"`
	Copy    string `json:"copy"`
}

// decode reads the body into v, or answers why it cannot.
func decode(w http.ResponseWriter, r *http.Request, what string, v any) bool {
	err := decodeObject(http.MaxBytesReader(w, r.Body, MaxBody), what, v)
	if err == nil {
		return true
	}
	status := http.StatusBadRequest
	var tooLong *http.MaxBytesError
	if errors.As(err, &tooLong) {
		status, err = http.StatusRequestEntityTooLarge, fmt.Errorf("body is longer than %d bytes", MaxBody)
	}
	fail(w, status, err)
	return false
}

// decodeObject reads one JSON object with the keys of v and nothing else.
func decodeObject(body io.Reader, what string, v any) error {
	d := json.NewDecoder(body)
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return fmt.Errorf("body is not %s: %w", what, err)
	}
	if _, err := d.Token(); err != io.EOF {
		return fmt.Errorf("body is not %s: something follows the object", what)
	}
	return nil
}

func statusOf(err error) int {
	switch {
	case errors.Is(err, daemon.ErrNotFound), errors.Is(err, daemon.ErrNoUserNetwork):
		return http.StatusNotFound
	case errors.Is(err, daemon.ErrExists):
		return http.StatusConflict
	case errors.Is(err, daemon.ErrSandbox):
		return http.StatusForbidden
	case errors.Is(err, daemon.ErrStopping):
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// The client may be gone; nobody else could be told.
	_ = json.NewEncoder(w).Encode(v)
}

// ErrorReply is the body of every answer that is not a success.
type ErrorReply struct {
	Error string `json:"error"`
}

func fail(w http.ResponseWriter, status int, err error) {
	reply(w, status, ErrorReply{Error: err.Error()})
}
