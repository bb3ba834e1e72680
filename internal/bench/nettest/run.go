package nettest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/internal/daemon"
)

// Measurement is what a repetition took. The window begins after a warm-up and ends when all frames have arrived and come back.
type Measurement struct {
	Frames                int           // that arrived, in all directions
	Elapsed               time.Duration // of the window
	Phases                map[string]time.Duration
	Guest                 Usage              // the guest's thread, which plays the wire too
	Daemon                Usage              // all threads of the back-end's process, zero if it is this one or not ours
	Worker                Usage              // the busiest of them
	Own                   bool               // Daemon and Worker are known
	Driver                Counts             // of the rings
	Wire                  Counts             // of the descriptor that stands for the wire
	Kicks, Calls, Batches uint64             // as the daemon counts them
	Sleeps                uint64             // of its workers
	Hardware              map[string]float64 // nil: not to be had
}

// Progress is told how many of a repetition's frames have arrived in a direction.
type Progress func(phase string, received, of int)

// Run makes one repetition: it starts the back-end, moves all frames, checks what it left behind and stops it. The calling goroutine is
// locked to its thread meanwhile. An error means that the run is worth nothing: a frame was wrong, something got stuck or was
// left over, or the options ask for what cannot be had here (ErrUsage).
func Run(ctx context.Context, o Options, tell Progress) (m Measurement, err error) {
	if err := o.Validate(); err != nil {
		return m, err
	}
	cpu := -1
	if len(o.CPUs) > 0 {
		cpu = o.CPUs[0]
	}
	unlock, err := bench.LockThread(-1) // a daemon that is started shall not inherit the affinity
	if err != nil {
		return m, err
	}
	defer unlock()
	r := &run{opts: o, tell: tell}
	defer func() { err = errors.Join(err, r.close()) }()
	if err := r.start(ctx); err != nil {
		return m, err
	}
	unpin, err := bench.LockThread(cpu)
	if err != nil {
		return m, err
	}
	defer unpin()
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	return r.measure(ctx)
}

// run is a repetition under way.
type run struct {
	opts    Options
	tell    Progress
	folder  string
	backend backend // nil: not ours
	guests  []*guest
	wire    *wire
	phases  []*phase
}

func (r *run) start(ctx context.Context) (err error) {
	if r.folder, err = os.MkdirTemp("", "vhostd-bench"); err != nil {
		return err
	}
	p := r.opts.plan(r.folder)
	switch {
	case r.opts.Socket != "":
		return r.connect(r.opts.Socket)
	case r.opts.InProcess:
		r.backend, err = startInside(r.opts, r.folder)
	default:
		r.backend, err = startProcess(ctx, r.opts, r.folder)
	}
	if err != nil {
		return err
	}
	for _, g := range p.guests {
		if err := r.connect(g.Socket); err != nil {
			return err
		}
	}
	switch r.opts.Wire {
	case Sock:
		r.wire, err = dialWire(p.wire, r.opts.longest())
	case Tap:
		r.wire, err = openTap(tapName, r.opts.longest())
	}
	if err != nil {
		return err
	}
	r.plan()
	return r.awaitNetwork(ctx)
}

func (r *run) connect(path string) error {
	g, err := connect(path, r.opts)
	if err != nil {
		return err
	}
	r.guests = append(r.guests, g)
	if r.opts.Socket != "" {
		r.plan()
	}
	return nil
}

// awaitNetwork waits until the network says that it is up, such as when it has noticed its peer.
func (r *run) awaitNetwork(ctx context.Context) error {
	for end := time.Now().Add(watchdog); ; time.Sleep(2 * time.Millisecond) {
		s, err := r.backend.status()
		if err != nil {
			return err
		}
		if len(s.Problems) == 0 {
			return nil
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return errors.Join(fmt.Errorf("the daemon is not healthy: %v", s.Problems), ctx.Err())
		}
	}
}

// plan makes the directions.
func (r *run) plan() {
	a := r.guests[0]
	macA, macB := [6]byte{0x02, 0, 0, 0, 0, 0x0a}, [6]byte{0x02, 0, 0, 0, 0, 0x0b}
	add := func(name string, src, dst [6]byte, from source, to sink, resetsTx bool) {
		f := flow{seed: uint32(r.opts.Seed)<<2 | uint32(len(r.phases)), src: src, dst: dst, sizes: r.opts.sizes(), swapped: r.opts.Socket != ""}
		out, in := f, f
		p := &phase{name: name, out: &out, in: &in, from: from, to: to, guest: a, resetsTx: resetsTx, depth: r.opts.Depth, batch: r.opts.batches(),
			wake: r.opts.guestWake(), resetEvery: r.opts.Reset}
		p.tell = func(int) {}
		r.phases = append(r.phases, p)
	}
	switch {
	case r.opts.Socket != "" || r.opts.Wire == Reflect:
		add("loop", macA, macB, a.tx, a.rx, true)
	case r.opts.Wire == Pair:
		b := r.guests[1]
		add("rx", macB, macA, b.tx, a.rx, false)
		add("tx", macA, macB, a.tx, b.rx, true)
	default:
		add("rx", macB, macA, r.wire, a.rx, false)
		add("tx", macA, macB, a.tx, r.wire, true)
	}
}

// warmUp is how many frames each direction moves before the window: all buffers are used twice, and caches and pools are filled.
func (o Options) warmUp() int { return min(o.N, 2*o.RingSize+1024) }

func (r *run) measure(ctx context.Context) (m Measurement, err error) {
	for _, p := range r.phases {
		if err := p.run(ctx, r.opts.warmUp()); err != nil {
			return m, fmt.Errorf("warm-up: %w", err)
		}
	}
	runtime.GC()
	w, err := r.open()
	if err != nil {
		return m, err
	}
	m.Phases = map[string]time.Duration{}
	begin := time.Now()
	for _, p := range r.phases {
		p.tell = r.teller(p.name)
		start := time.Now()
		if err := p.run(ctx, r.opts.N); err != nil {
			return m, errors.Join(err, w.perf.close())
		}
		m.Phases[p.name] = time.Since(start)
	}
	m.Elapsed = time.Since(begin)
	m.Frames = r.opts.N * len(r.phases)
	if err := w.close(r, &m); err != nil {
		return m, err
	}
	return m, r.verify()
}

// teller passes progress on, not too often.
func (r *run) teller(phase string) func(int) {
	if r.tell == nil {
		return func(int) {}
	}
	next, every := 0, max(r.opts.N/64, 1)
	return func(received int) {
		if received >= next {
			next = received + every
			r.tell(phase, received, r.opts.N)
		}
	}
}

// window is what was read at its beginning.
type window struct {
	guest   Usage
	threads map[int]Usage
	stats   daemon.Stats
	status  daemon.Status
	driver  Counts
	wire    Counts
	perf    *perf
}

func (r *run) open() (w window, err error) {
	w.driver, w.wire = r.counts()
	threads := []int{unix.Gettid()}
	if r.backend != nil {
		if w.stats, err = r.backend.stats(); err != nil {
			return w, err
		}
		if w.status, err = r.backend.status(); err != nil {
			return w, err
		}
		if pid := r.backend.pid(); pid != 0 {
			if w.threads, err = threadUsage(pid); err != nil {
				return w, err
			}
			for tid := range w.threads {
				threads = append(threads, tid)
			}
		}
	}
	w.perf = openPerf(threads)
	w.guest, err = ownUsage()
	return w, err
}

func (w *window) close(r *run, m *Measurement) error {
	guest, err := ownUsage()
	if err != nil {
		return err
	}
	m.Guest = guest.minus(w.guest)
	m.Hardware = w.perf.read()
	if err := w.perf.close(); err != nil {
		return err
	}
	driver, wire := r.counts()
	m.Driver, m.Wire = driver.minus(w.driver), wire.minus(w.wire)
	if r.backend == nil {
		return nil
	}
	if pid := r.backend.pid(); pid != 0 {
		threads, err := threadUsage(pid)
		if err != nil {
			return err
		}
		m.Daemon, m.Worker = difference(w.threads, threads)
		m.Own = true
	}
	stats, err := r.backend.stats()
	if err != nil {
		return err
	}
	status, err := r.backend.status()
	if err != nil {
		return err
	}
	kicks, calls, batches := ringSums(stats)
	kicks0, calls0, batches0 := ringSums(w.stats)
	m.Kicks, m.Calls, m.Batches = kicks-kicks0, calls-calls0, batches-batches0
	for i := range status.Workers {
		m.Sleeps += status.Workers[i].Sleeps - w.status.Workers[i].Sleeps
	}
	return nil
}

func ringSums(s daemon.Stats) (kicks, calls, batches uint64) {
	for _, g := range s.Guests {
		for _, r := range g.Rings {
			kicks, calls, batches = kicks+r.Kicks, calls+r.Calls, batches+r.Batches
		}
	}
	return kicks, calls, batches
}

func (r *run) counts() (driver, wire Counts) {
	for _, g := range r.guests {
		g.rx.called()
		g.tx.called()
		driver.add(g.rx.counts)
		driver.add(g.tx.counts)
	}
	if r.wire != nil {
		wire = r.wire.counts
	}
	return driver, wire
}

// verify looks at what the run left behind: rings that are at rest where they must be, canaries, the daemon's own books.
func (r *run) verify() error {
	for i, g := range r.guests {
		if err := g.finish(); err != nil {
			return fmt.Errorf("guest %c: %w", 'a'+i, err)
		}
	}
	if r.backend == nil {
		return nil
	}
	stats, err := r.backend.stats()
	if err != nil {
		return err
	}
	for i, s := range stats.Guests {
		if i >= len(r.guests) {
			break
		}
		for _, ring := range s.Rings {
			if err := r.books(r.guests[i], ring); err != nil {
				return fmt.Errorf("guest %s: %w", s.Name, err)
			}
		}
	}
	return nil
}

// books compares the daemon's counters of a ring with the driver's.
func (r *run) books(g *guest, ring daemon.RingStats) error {
	for reason, n := range ring.Drops {
		if n > 0 && r.opts.Wire != Tap {
			return fmt.Errorf("ring %d: the daemon dropped %d frames: %s", ring.Index, n, reason)
		}
	}
	var want uint64
	switch ring.Index {
	case 0:
		want = g.rx.counts.Frames + g.rx.counts.Foreign
	case 1:
		want = g.tx.counts.Frames - g.tx.counts.Again
	default:
		return nil
	}
	if ring.Packets != want && r.opts.Wire != Tap {
		return fmt.Errorf("ring %d: the daemon counts %d frames, the driver %d", ring.Index, ring.Packets, want)
	}
	return nil
}

// close ends everything; the daemon must have all its memory back once its guests are gone.
func (r *run) close() error {
	var errs []error
	for _, g := range r.guests {
		errs = append(errs, g.close())
	}
	if r.wire != nil {
		errs = append(errs, r.wire.close())
	}
	if r.backend != nil {
		errs = append(errs, r.returned(), r.backend.stop())
	}
	if r.folder != "" {
		errs = append(errs, os.RemoveAll(r.folder))
	}
	return errors.Join(errs...)
}

// returned waits until no page of the daemon's arena is in use.
func (r *run) returned() error {
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		s, err := r.backend.status()
		if err != nil {
			return err
		}
		if s.ArenaPages == 0 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%d pages of the daemon did not come back after its guests were gone", s.ArenaPages)
		}
	}
}
