package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"reflect"
	"strings"
	"sync"

	sd "github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/internal/control"
	"github.com/vhostd/vhostd/internal/daemon"
)

// reloader reads the configuration file again. Its methods are safe for concurrent use.
type reloader struct {
	file  string         // absolute
	given *pflag.FlagSet // flags that override the file's keys
	level *slog.LevelVar
	log   *slog.Logger

	mu      sync.Mutex // held during a reload
	daemon  *daemon.Daemon
	process config.Process // in force
	names   []string       // of the guests that the file described last
	over    bool           // the daemon is stopping
}

// newReloader remembers what the file said at the start.
func newReloader(file string, given *pflag.FlagSet, process config.Process, guests []config.Guest) (*reloader, error) {
	abs, err := filepath.Abs(file)
	if err != nil {
		return nil, err
	}
	r := &reloader{file: abs, given: given, process: process}
	for _, g := range guests {
		r.names = append(r.names, g.Name)
	}
	return r, nil
}

// stopSignal is stopSignal without SIGHUP, of which one that comes before the daemon is ready is lost.
func (*reloader) stopSignal() <-chan os.Signal {
	signal.Notify(make(chan os.Signal, 1), unix.SIGHUP)
	return firstOf(unix.SIGTERM, unix.SIGINT)
}

// reload makes the daemon what the file says now. A file that is wrong in any place changes nothing; that is the error.
func (r *reloader) reload() (daemon.Reload, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over {
		return daemon.Reload{}, daemon.ErrStopping
	}
	notify(r.log, sd.SdNotifyReloading+"\n"+monotonic())
	defer notify(r.log, sd.SdNotifyReady)
	process, guests, err := r.read()
	if err != nil {
		err = fmt.Errorf("nothing is changed: %w", err)
		r.log.Error("configuration was not reloaded", "err", err)
		return daemon.Reload{}, err
	}
	report := r.daemon.Reload(r.names, guests)
	r.names = nil
	for _, g := range guests {
		r.names = append(r.names, g.Name)
	}
	report.Process = r.follow(process)
	r.tell(&report)
	return report, nil
}

func (r *reloader) read() (process config.Process, guests []config.GuestSpec, err error) {
	f, err := config.ReadFile(r.file)
	if err != nil {
		return process, nil, err
	}
	process = override(f.Process, r.given)
	if _, err := process.Parse(); err != nil {
		return process, nil, err
	}
	for _, g := range f.Guests {
		spec, err := g.Parse()
		if err != nil {
			return process, nil, err
		}
		guests = append(guests, spec)
	}
	return process, guests, nil
}

// follow changes what a running daemon can follow and returns the other keys that differ.
func (r *reloader) follow(to config.Process) (pending []string) {
	if to.LogLevel != r.process.LogLevel {
		_ = r.level.UnmarshalText([]byte(to.LogLevel)) // was judged
		r.process.LogLevel = to.LogLevel
	}
	from, into := reflect.ValueOf(r.process), reflect.ValueOf(to)
	for field := range from.Type().Fields() {
		if from.FieldByIndex(field.Index).Interface() != into.FieldByIndex(field.Index).Interface() {
			key, _, _ := strings.Cut(field.Tag.Get("yaml"), ",")
			pending = append(pending, key)
		}
	}
	return pending
}

func (r *reloader) tell(report *daemon.Reload) {
	for _, f := range report.Failed {
		r.log.Error("a guest does not follow its configuration", "guest", f.Guest, "err", f.Error)
	}
	if len(report.Process) > 0 {
		r.log.Warn("changes count from the next start of the daemon on", "keys", report.Process)
	}
	r.log.Info("configuration reloaded", "added", len(report.Added), "removed", len(report.Removed), "changed", len(report.Changed),
		"pending", len(report.Pending), "failed", len(report.Failed), "ended-flows", report.EndedFlows)
}

// onSignal reloads on SIGHUP until stop is called. stop waits for a reload that is under way, whoever has asked for it; an error says
// that there still is one.
func (r *reloader) onSignal() (stop func(context.Context) error) {
	hangups, end, ended, quiet := make(chan os.Signal, 1), make(chan struct{}), make(chan struct{}), make(chan struct{})
	signal.Notify(hangups, unix.SIGHUP)
	go func() {
		defer close(ended)
		for {
			select {
			case <-hangups:
				_, _ = r.reload() // it is in the log
			case <-end:
				return
			}
		}
	}()
	return func(ctx context.Context) error {
		signal.Stop(hangups)
		close(end)
		go func() {
			<-ended
			r.mu.Lock()
			defer r.mu.Unlock()
			r.over = true
			close(quiet)
		}()
		select {
		case <-quiet:
			return nil
		case <-ctx.Done():
			return errors.New("a reload of the configuration did not end in time")
		}
	}
}

// monotonic is the time that goes with RELOADING=1 (sd_notify(3)).
func monotonic() string {
	var ts unix.Timespec
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // there is this clock
	return fmt.Sprintf("MONOTONIC_USEC=%d", ts.Nano()/1000)
}

// reloadable is a daemon that can be told through the control socket to read its configuration again.
type reloadable struct {
	*daemon.Daemon
	*reloader
}

// ReloadConfiguration implements [control.Reloader].
func (r reloadable) ReloadConfiguration() (daemon.Reload, error) { return r.reload() }

const reloadHelp = `Have a running daemon read its configuration file (serve --config) again, as SIGHUP does, and apply what is different.

Guests are added and removed. Guests that stay follow while they are served: copy, tx-alloc, and of their network rate-in, rate-out and
guard (of a tap, a switch or a sock if it had one of them, or a capture, before), of a user network, also as the uplink of a switch,
publish, allow, deny, max-flows, host, dns and lease, of a switch ageing. Flows that new rules deny are ended. What cannot be changed
under a guest is listed as pending: the guest needs to be removed and added. A file with a mistake changes nothing. What was changed
through the control API stays unless the file changes the same.

Exit status: 0 if everything is in force, 1 if something is pending or failed, or nothing was changed.`

func newReload() *cobra.Command {
	var path string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "reload --control PATH",
		Short: "Have a running daemon read its configuration file again",
		Long:  reloadHelp,
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if path == "" {
				return errControlMissing
			}
			body, err := control.Do(cmd.Context(), path, http.MethodPost, "/v1/reload", nil)
			if err != nil {
				return failure{err}
			}
			var report daemon.Reload
			if err := json.Unmarshal(body, &report); err != nil {
				return failure{fmt.Errorf("control socket %s: answer is not understood: %w", path, err)}
			}
			if asJSON {
				_, err = cmd.OutOrStdout().Write(body)
			} else {
				err = printReload(cmd.OutOrStdout(), report)
			}
			if err == nil && !report.Complete() {
				err = errors.New("not all of the configuration is in force")
			}
			if err != nil {
				return failure{err}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&path, "control", "", "`PATH` of the daemon's control socket")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// printReload prints a line for each thing that was done or is left.
func printReload(w io.Writer, r daemon.Reload) error {
	var out strings.Builder
	line := func(format string, args ...any) { fmt.Fprintf(&out, format+"\n", args...) }
	for _, name := range r.Removed {
		line("removed %s", cell(name))
	}
	for _, name := range r.Added {
		line("added %s", cell(name))
	}
	for _, c := range r.Changed {
		line("changed %s: %s", cell(c.Guest), cell(strings.Join(c.Keys, ", ")))
	}
	if r.EndedFlows > 0 {
		line("ended %d flows that are denied now", r.EndedFlows)
	}
	for _, c := range r.Pending {
		line("pending %s: %s: needs %s", cell(c.Guest), cell(strings.Join(c.Keys, ", ")), cell(c.Needs))
	}
	if len(r.Process) > 0 {
		line("pending: %s: needs the daemon to be started again", cell(strings.Join(r.Process, ", ")))
	}
	for _, f := range r.Failed {
		line("failed %s: %s", cell(f.Guest), cell(f.Error))
	}
	if r.Idle() {
		line("nothing is different")
	}
	_, err := io.WriteString(w, out.String())
	return err
}
