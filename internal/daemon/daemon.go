// Package daemon runs guests: each is a socket, a network and a device, added and removed while
// the process runs. All guests share the workers and the memory arena.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/internal/network"
	"github.com/vhostd/vhostd/internal/sandbox"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/pool"
	"github.com/vhostd/vhostd/virtionet"
	"github.com/vhostd/vhostd/worker"
)

// Errors that callers tell apart; they are wrapped with the guest's name.
var (
	ErrExists   = errors.New("exists already")
	ErrNotFound = errors.New("does not exist")
	ErrStopping = errors.New("the daemon is stopping")
	ErrSandbox  = errors.New("the sandbox does not allow it")
)

// Options of a Daemon. The arena and the workers stay the caller's and outlive the daemon.
type Options struct {
	Arena   *pagemem.Arena
	Workers []*worker.Loop
	Logger  *slog.Logger
	// Rings is where ring positions are kept; in its directory, if it has one, also the leases of user networks.
	Rings RingState
	// Postcopy offers postcopy migration where it works (vhostuser.Options).
	Postcopy bool
}

// Daemon holds the guests. Its methods are safe for concurrent use.
type Daemon struct {
	opts     Options
	log      *slog.Logger
	switches *network.Switches
	echoes   network.EchoBudget
	budget   *pool.Budget // of what the guests' allocators keep ready
	started  time.Time
	monitor  chan struct{} // closed to end the monitor
	watched  sync.WaitGroup
	confined atomic.Pointer[sandbox.Sandbox] // nil: not at all, or not yet

	mu       sync.Mutex // guards stopping, guests; never held while a guest starts or stops
	stopping bool
	guests   map[string]*guest
}

// New starts a daemon without guests.
func New(o Options) *Daemon {
	d := &Daemon{opts: o, log: o.Logger, started: time.Now(), monitor: make(chan struct{}), guests: map[string]*guest{}}
	d.budget = virtionet.NewBudget(o.Arena)
	d.switches = network.NewSwitches(network.SwitchOptions{Arena: o.Arena, Workers: o.Workers, Logger: o.Logger, StateDir: o.Rings.Dir})
	d.watched.Go(d.watch)
	return d
}

// Confined tells the daemon in which sandbox it is from now on.
func (d *Daemon) Confined(s *sandbox.Sandbox) { d.confined.Store(s) }

// Add makes a guest and starts to serve it. On error nothing of it is left.
func (d *Daemon) Add(spec config.GuestSpec, from Source) error {
	g := newGuest(d, spec, from)
	err := d.allows(spec, from)
	if err == nil {
		err = d.reserve(g)
	}
	if err != nil {
		from.discard()
		return fmt.Errorf("guest %s: %w", spec.Name, err)
	}
	err = g.start()
	close(g.ready)
	if err != nil {
		g.stop()
		d.forget(g)
		return fmt.Errorf("guest %s: %w", spec.Name, err)
	}
	g.log.Info("guest added", "socket", spec.Socket, "network", spec.Network.String())
	return nil
}

// allows judges a guest against the sandbox, in words that the errors of the system calls would not find.
func (d *Daemon) allows(spec config.GuestSpec, from Source) error {
	s := d.confined.Load()
	if s == nil {
		return nil
	}
	var paths []string
	if !spec.Client && from.Listener == nil && from.Conn == nil {
		paths = append(paths, spec.Socket)
	}
	if path, dials := spec.Network.Socket(); path != "" && !dials {
		paths = append(paths, path)
	}
	paths = append(paths, spec.Network.PublishPaths()...)
	for _, path := range paths {
		if err := s.AllowsSocket(path); err != nil {
			return fmt.Errorf("%w: %w", ErrSandbox, err)
		}
	}
	return nil
}

func (d *Daemon) reserve(g *guest) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.stopping {
		return ErrStopping
	}
	if d.guests[g.spec.Name] != nil {
		return ErrExists
	}
	for _, other := range d.guests {
		if other.spec.Socket == g.spec.Socket {
			return fmt.Errorf("socket %s belongs to guest %s, which %w", g.spec.Socket, other.spec.Name, ErrExists)
		}
	}
	d.guests[g.spec.Name] = g
	return nil
}

func (d *Daemon) forget(g *guest) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.guests[g.spec.Name] != g {
		return false
	}
	delete(d.guests, g.spec.Name)
	return true
}

// Remove disconnects a guest, removes its socket and network and returns when all of it is gone.
func (d *Daemon) Remove(name string) error {
	d.mu.Lock()
	g := d.guests[name]
	d.mu.Unlock()
	if g == nil {
		return fmt.Errorf("guest %s: %w", name, ErrNotFound)
	}
	<-g.ready
	g.removed.Store(true)
	err := g.stop()
	if !d.forget(g) {
		return fmt.Errorf("guest %s: %w", name, ErrNotFound)
	}
	g.log.Info("guest removed")
	return err
}

// Change changes a guest while it is served and returns its counters, with what holds from now on.
func (d *Daemon) Change(name string, spec config.ChangeSpec) (GuestStats, error) {
	d.mu.Lock()
	g := d.guests[name]
	d.mu.Unlock()
	if g == nil {
		return GuestStats{}, fmt.Errorf("guest %s: %w", name, ErrNotFound)
	}
	<-g.ready
	g.mu.Lock()
	device := g.device
	g.mu.Unlock()
	if device == nil {
		return GuestStats{}, fmt.Errorf("guest %s: %w", name, ErrNotFound) // it is being removed
	}
	if spec.TxAlloc != nil {
		device.SetTxAlloc(*spec.TxAlloc)
	}
	if spec.Copy != nil {
		device.SetCopy(*spec.Copy)
	}
	s := guestStats(name, device.Snapshot())
	g.log.Info("guest changed", "tx-alloc", s.TxAlloc, "copy", s.Copy.Policy)
	return s, nil
}

// Close removes all guests at the same time and refuses new ones. When ctx ends first it names the
// guests that are not gone yet.
func (d *Daemon) Close(ctx context.Context) error {
	d.mu.Lock()
	if !d.stopping {
		d.stopping = true
		close(d.monitor)
	}
	d.mu.Unlock()
	done := make(chan error, 1)
	go func() { done <- d.removeAll() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		var names []string
		for _, g := range d.list() {
			names = append(names, g.spec.Name)
		}
		return fmt.Errorf("guests that did not stop in time: %s", strings.Join(names, ", "))
	}
}

func (d *Daemon) removeAll() error {
	guests := d.list()
	// Sockets first: nobody shall connect to a daemon that is going away, and they must not stay
	// behind even if the rest is cut short.
	for _, g := range guests {
		<-g.ready
		g.unlisten()
	}
	errs := make([]error, len(guests))
	var stopped sync.WaitGroup
	for i, g := range guests {
		stopped.Go(func() {
			if err := g.stop(); err != nil {
				errs[i] = fmt.Errorf("guest %s: %w", g.spec.Name, err)
			}
			d.forget(g)
		})
	}
	stopped.Wait()
	d.watched.Wait()
	return errors.Join(errs...)
}

// list returns the guests sorted by name.
func (d *Daemon) list() []*guest {
	d.mu.Lock()
	defer d.mu.Unlock()
	guests := make([]*guest, 0, len(d.guests))
	for _, g := range d.guests {
		guests = append(guests, g)
	}
	slices.SortFunc(guests, func(a, b *guest) int { return strings.Compare(a.spec.Name, b.spec.Name) })
	return guests
}

// WorkersAlive reports whether all worker threads run.
func (d *Daemon) WorkersAlive() bool {
	return !slices.ContainsFunc(d.opts.Workers, func(w *worker.Loop) bool { return w.Alive() != nil })
}

// Problems says what keeps the daemon from doing its work: dead workers and networks that are
// down. Empty means healthy.
func (d *Daemon) Problems() []string {
	var problems []string
	for _, w := range d.opts.Workers {
		if err := w.Alive(); err != nil {
			problems = append(problems, err.Error())
		}
	}
	for _, g := range d.list() {
		if s, ok := g.portStatus(); ok && !s.Up {
			problems = append(problems, fmt.Sprintf("guest %s: network %s is down: %s", g.spec.Name, g.net(), s.Detail))
		}
	}
	return problems
}

// pid is shown in the status so that a person finds the process behind a control socket.
var pid = os.Getpid()
