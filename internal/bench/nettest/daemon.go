package nettest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/internal/control"
	"github.com/vhostd/vhostd/internal/daemon"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/worker"
)

// tapName is the interface that the daemon makes, in a namespace of the run.
const tapName = "vhdbench"

// plan is what the daemon is told.
type plan struct {
	process config.Process
	guests  []config.Guest
	wire    string // path of the sock network
}

func (o Options) plan(folder string) plan {
	p := plan{process: config.DefaultProcess(), wire: filepath.Join(folder, "wire")}
	p.process.Wake, p.process.LogLevel = o.Wake, "warn"
	p.process.Control = filepath.Join(folder, "control")
	if len(o.CPUs) > 1 {
		p.process.CPUs = strings.Trim(strings.ReplaceAll(fmt.Sprint(o.CPUs[1:]), " ", ","), "[]")
	}
	network := map[string]string{Pair: "switch,name=bench", Sock: "sock,path=" + p.wire, Tap: "tap,name=" + tapName, Reflect: "echo,swap=off"}[o.Wire]
	names := []string{"a"}
	if o.Wire == Pair {
		names = append(names, "b")
		network += fmt.Sprintf(",backlog=%d", min(max(512, 2*o.Depth), 65536))
	}
	for _, name := range names {
		g := config.DefaultGuest()
		g.Name, g.Socket, g.Network, g.QueuePairs = name, filepath.Join(folder, name), network, 1
		g.Copy, g.TxAlloc = o.Copy, o.TxAlloc
		if o.Wire == Tap && o.longest() > 1514 {
			g.MTU = o.longest() - 14
		}
		p.guests = append(p.guests, g)
	}
	return p
}

// checkDaemon lets the daemon's own rules judge what is passed on to it.
func (o Options) checkDaemon() error {
	p := o.plan("/run")
	var key *config.KeyError
	if _, err := p.process.Parse(); errors.As(err, &key) {
		return usage(key.Key, "%v", key.Err)
	}
	for _, g := range p.guests {
		if _, err := g.Parse(); errors.As(err, &key) {
			return usage(key.Key, "%v", key.Err)
		}
	}
	return nil
}

// backend is a daemon under test.
type backend interface {
	// pid is its process, 0 if it is this one.
	pid() int
	// stats and status are those of the control API.
	stats() (daemon.Stats, error)
	status() (daemon.Status, error)
	stop() error
}

// process is a daemon in a process of its own.
type process struct {
	cmd     *exec.Cmd
	control string
	output  output
	ended   chan struct{} // closed when the process has ended, with err
	err     error
}

// output is what the daemon printed, the last of it.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.b.Len() > 1<<16 {
		o.b.Reset()
	}
	return o.b.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return strings.TrimSpace(o.b.String())
}

func startProcess(ctx context.Context, o Options, folder string) (backend, error) {
	p := o.plan(folder)
	program := o.Program
	if program == "" {
		var err error
		if program, err = os.Executable(); err != nil {
			return nil, err
		}
	}
	// JSON is YAML, and its keys are the configuration file's.
	text, err := json.Marshal(map[string]any{"guests": p.guests})
	if err != nil {
		return nil, err
	}
	file := filepath.Join(folder, "vhostd.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return nil, err
	}
	args := []string{"serve", "--config", file, "--control", p.process.Control, "--wake", p.process.Wake, "--log-level", p.process.LogLevel}
	if p.process.CPUs != "" {
		args = append(args, "--cpus", p.process.CPUs)
	}
	d := &process{cmd: exec.Command(program, args...), control: p.process.Control, ended: make(chan struct{})}
	d.cmd.Stdout, d.cmd.Stderr = &d.output, &d.output
	// Pdeathsig is about the thread that starts the process: the caller is locked to it.
	d.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := d.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		d.err = d.cmd.Wait()
		close(d.ended)
	}()
	for end := time.Now().Add(20 * time.Second); !strings.Contains(d.output.String(), "listening"); {
		select {
		case <-d.ended:
			return nil, fmt.Errorf("%s %s ended: %s", program, strings.Join(args, " "), d.output.String())
		case <-time.After(2 * time.Millisecond):
		}
		if time.Now().After(end) || ctx.Err() != nil {
			return nil, errors.Join(fmt.Errorf("%s does not listen: %s", program, d.output.String()), ctx.Err(), d.stop())
		}
	}
	return d, nil
}

func (d *process) pid() int { return d.cmd.Process.Pid }

func (d *process) get(path string, into any) error {
	ctx, cancel := context.WithTimeout(context.Background(), watchdog)
	defer cancel()
	body, err := control.Get(ctx, d.control, path)
	if err != nil {
		return fmt.Errorf("the daemon does not answer: %w; %s", err, d.output.String())
	}
	return json.Unmarshal(body, into)
}

func (d *process) stats() (s daemon.Stats, err error)   { return s, d.get("/v1/stats", &s) }
func (d *process) status() (s daemon.Status, err error) { return s, d.get("/v1/status", &s) }

func (d *process) stop() error {
	_ = d.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-d.ended:
	case <-time.After(watchdog):
		_ = d.cmd.Process.Kill()
		<-d.ended
	}
	if d.err != nil {
		return fmt.Errorf("end of the daemon: %w: %s", d.err, d.output.String())
	}
	return nil
}

// inside is a daemon in this process, for the race detector.
type inside struct {
	daemon  *daemon.Daemon
	arena   *pagemem.Arena
	workers []*worker.Loop
}

func startInside(o Options, folder string) (b backend, err error) {
	p := o.plan(folder)
	spec, err := p.process.Parse()
	if err != nil {
		return nil, err
	}
	d := &inside{}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.stop())
		}
	}()
	memory := spec.Arena
	memory.Name = "vhostd-bench"
	if d.arena, err = pagemem.NewArena(memory); err != nil {
		return nil, err
	}
	cpus := spec.CPUs
	if len(cpus) == 0 {
		cpus = []int{-1}
	}
	log := slog.New(slog.DiscardHandler)
	for i, cpu := range cpus {
		w, err := worker.New(worker.Options{Name: fmt.Sprint("worker", i), CPU: cpu, Wake: spec.Wake, Spin: spec.Spin, Logger: log})
		if err != nil {
			return nil, err
		}
		d.workers = append(d.workers, w)
	}
	d.daemon = daemon.New(daemon.Options{Arena: d.arena, Workers: d.workers, Logger: log})
	for _, g := range p.guests {
		spec, err := g.Parse()
		if err == nil {
			err = d.daemon.Add(spec, daemon.Source{})
		}
		if err != nil {
			return nil, err
		}
	}
	return d, nil
}

func (*inside) pid() int                         { return 0 }
func (d *inside) stats() (daemon.Stats, error)   { return d.daemon.Stats(), nil }
func (d *inside) status() (daemon.Status, error) { return d.daemon.Status(), nil }

func (d *inside) stop() error {
	var errs []error
	if d.daemon != nil {
		ctx, cancel := context.WithTimeout(context.Background(), watchdog)
		defer cancel()
		errs = append(errs, d.daemon.Close(ctx))
	}
	for _, w := range d.workers {
		errs = append(errs, w.Close())
	}
	if d.arena != nil {
		errs = append(errs, d.arena.Close()) // fails while a page is in use
	}
	return errors.Join(errs...)
}
