package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/internal/control"
	"github.com/vhostd/vhostd/internal/daemon"
	"github.com/vhostd/vhostd/internal/ratelog"
	"github.com/vhostd/vhostd/internal/unixsock"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/worker"
)

const (
	// stopWithin bounds a clean stop; the promise is five seconds for the process as a whole.
	stopWithin = 4 * time.Second
	// flushWithin bounds the wait for a reader of the log at the end.
	flushWithin = 500 * time.Millisecond
	// sameSignal is how long after the first signal another one is taken for the same.
	sameSignal = time.Second
	// gcPercent lets the tiny heap (control only; frames live outside of it) grow to a few times
	// its size before a collection disturbs the pollers.
	gcPercent = 400
)

// plan is a judged configuration, ready to run.
type plan struct {
	process config.ProcessSpec
	guests  []config.GuestSpec
	sources map[string]daemon.Source
	control *unixsock.Listener // inherited, may be nil
	rings   map[string]*os.File
}

func newPlan(process config.Process, guests []config.Guest, sources map[string]daemon.Source) (*plan, error) {
	p := &plan{sources: sources}
	var err error
	if p.process, err = process.Parse(); err != nil {
		return nil, err
	}
	for _, g := range guests {
		spec, err := g.Parse()
		if err != nil {
			return nil, err
		}
		p.guests = append(p.guests, spec)
	}
	return p, nil
}

// running is what the plan has started, in the order of its teardown.
type running struct {
	log     *slog.Logger
	limit   *ratelog.Handler
	control *control.Server
	daemon  *daemon.Daemon
	workers []*worker.Loop
	arena   *pagemem.Arena
	helpers func()     // ends what postcopy has started, may be nil
	ended   chan error // the session of an inherited connection is over
}

// run serves until a signal and tears everything down again. Errors are failures.
func (p *plan) run(out io.Writer) error {
	stop := stopSignal()
	// Guests shall not lose their network because the reader of the log has gone away.
	signal.Ignore(unix.SIGPIPE)
	r := &running{ended: make(chan error, 1)}
	lines := ratelog.NewWriter(os.Stderr)
	defer lines.Close(flushWithin)
	r.log, r.limit = newLogger(p.process, lines)
	defer r.limit.Close()
	err := p.start(r)
	if err == nil {
		fmt.Fprint(out, readiness(p.guests, p.process.Control))
		notify(r.log, sd.SdNotifyReady)
		err = r.wait(stop)
	}
	notify(r.log, sd.SdNotifyStopping)
	if err := errors.Join(err, r.stop()); err != nil {
		return failure{err}
	}
	return nil
}

func newLogger(p config.ProcessSpec, lines *ratelog.Writer) (*slog.Logger, *ratelog.Handler) {
	options := &slog.HandlerOptions{Level: p.LogLevel}
	var h slog.Handler = slog.NewTextHandler(lines, options)
	if p.LogFormat == "json" {
		h = slog.NewJSONHandler(lines, options)
	}
	limit := ratelog.New(h)
	log := slog.New(limit)
	lines.OnLoss(func(lost uint64) { log.Warn("the reader of the log stalled, lines were lost", "n", lost) })
	return log, limit
}

// start brings everything up. On error what has started is in r, to be stopped.
func (p *plan) start(r *running) (err error) {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	if r.arena, err = pagemem.NewArena(p.process.Arena); err != nil {
		return explain(err)
	}
	if why := r.arena.Stats().NoHugePages; why != nil {
		r.log.Warn("the arena has ordinary pages instead of huge ones", "reason", why)
	}
	if err := p.startWorkers(r); err != nil {
		return explain(err)
	}
	p.checkFiles(r.log)
	rings, err := p.ringState(r.log)
	if err != nil {
		return explain(err)
	}
	if err := p.startPostcopy(r); err != nil {
		return explain(err)
	}
	r.daemon = daemon.New(daemon.Options{Arena: r.arena, Workers: r.workers, Logger: r.log, Rings: rings, Postcopy: p.process.Postcopy})
	for _, g := range p.guests {
		from := p.sources[g.Name]
		from.Ended = func(err error) { r.ended <- err }
		if err := r.daemon.Add(g, from); err != nil {
			return explain(err)
		}
	}
	return explain(p.finish(r))
}

// ringState is a directory, or memfds that the service manager keeps if it does so.
func (p *plan) ringState(log *slog.Logger) (daemon.RingState, error) {
	if dir := p.process.StateDir; dir != "" {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return daemon.RingState{}, fmt.Errorf("state-dir: %w", err)
		}
		return daemon.RingState{Dir: dir}, nil
	}
	return daemon.RingState{
		Kept: p.rings,
		Keep: func(guest string, f *os.File) { keepFD(log, ringsFDName+guest, f) },
		Drop: func(guest string) { dropFD(log, ringsFDName+guest) },
	}, nil
}

// startPostcopy prepares for guests that arrive before their memory, and tells why that is not possible.
func (p *plan) startPostcopy(r *running) (err error) {
	if !p.process.Postcopy {
		return nil
	}
	if p.process.Sandbox {
		if r.helpers, err = vhostuser.PreparePostcopy(); err != nil {
			return err
		}
	}
	if err := vhostuser.ProbePostcopy(); err != nil {
		r.log.Warn("postcopy migration is not offered", "reason", err)
	}
	return nil
}

func (p *plan) startWorkers(r *running) error {
	cpus := p.process.CPUs
	if len(cpus) == 0 {
		cpus = []int{-1}
	}
	// Every worker keeps a thread; two more run control and the collector. An affinity mask or a
	// single-CPU machine must not make them wait for a poller.
	runtime.GOMAXPROCS(len(cpus) + 2)
	for i, cpu := range cpus {
		name := fmt.Sprint("worker", i)
		w, err := worker.New(worker.Options{Name: name, CPU: cpu, Wake: p.process.Wake, Spin: p.process.Spin, Logger: r.log.With("worker", name)})
		if err != nil {
			return err
		}
		r.workers = append(r.workers, w)
	}
	return nil
}

// finish confines the process between the last socket that is made and the first request that is served.
func (p *plan) finish(r *running) (err error) {
	l := p.control
	if l == nil && p.process.Control != "" {
		if l, err = unixsock.Listen(p.process.Control, p.process.ControlListen); err != nil {
			return err
		}
	}
	if err := p.confine(r, l); err != nil {
		if l != nil {
			l.Close()
		}
		return err
	}
	if l != nil {
		r.control = control.Serve(l, r.daemon, currentVersion().Version, r.log)
	}
	return nil
}

// wait returns nil after a signal or when the only connection that the process was given is over.
func (r *running) wait(stop <-chan os.Signal) error {
	interval, err := sd.SdWatchdogEnabled(false)
	if err != nil {
		r.log.Warn("watchdog of the service manager", "err", err)
	}
	var ticks <-chan time.Time
	if interval > 0 {
		ticker := time.NewTicker(interval / 2)
		defer ticker.Stop()
		ticks = ticker.C
	}
	for {
		select {
		case s := <-stop:
			r.log.Info("stopping", "signal", s.String())
			return nil
		case err := <-r.ended:
			return err
		case <-ticks:
			// A dead worker never comes back by itself, so the service manager shall restart us.
			if r.daemon.WorkersAlive() {
				notify(r.log, sd.SdNotifyWatchdog)
			}
		}
	}
}

// stop tears down in the order of dependence. Guests that do not stop in time keep the workers and
// the arena, which they may still use; the end of the process takes all of it.
func (r *running) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), stopWithin)
	defer cancel()
	var errs []error
	if r.control != nil {
		errs = append(errs, r.control.Close())
	}
	if r.daemon != nil {
		if err := r.daemon.Close(ctx); err != nil {
			return errors.Join(append(errs, err)...)
		}
	}
	for _, w := range r.workers {
		errs = append(errs, w.Close())
	}
	if r.helpers != nil {
		r.helpers()
	}
	if r.arena != nil {
		errs = append(errs, r.arena.Close())
	}
	return errors.Join(errs...)
}

// stopSignal returns a channel that gets the first signal to stop. A later one ends the process at
// once, because start or stop must hang. Signals that follow the first one closely belong to it:
// timeout(1) and shells signal the process and its group.
func stopSignal() <-chan os.Signal {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, unix.SIGTERM, unix.SIGINT)
	// A terminal that closes shall not leave sockets behind; nohup(1) has the signal ignored.
	if !signal.Ignored(unix.SIGHUP) {
		signal.Notify(signals, unix.SIGHUP)
	}
	stop := make(chan os.Signal, 1)
	go func() {
		stop <- <-signals
		begin := time.Now()
		for s := range signals {
			if time.Since(begin) >= sameSignal {
				fmt.Fprintf(os.Stderr, "vhostd: %v again: ended at once\n", s)
				os.Exit(exitFailure)
			}
		}
	}()
	return stop
}

func notify(log *slog.Logger, state string) {
	if _, err := sd.SdNotify(false, state); err != nil {
		log.Warn("service manager cannot be told", "state", state, "err", err)
	}
}
