package experiments

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/internal/bench/nettest"
)

const netAllocSource = "page_frag_cache in sockets, vhost_net and tun (10 patches, 2024), vhost_net_test with 2^20 frames each way, 10 runs"

// Bounds of the source for a thread that blocks at depth 1.
const (
	switchesPerFrame = 1.001
	faultsAfterStart = 40
)

// netAllocOptions are those of both experiments: a throughput run with different allocators.
func netAllocOptions(wire, n string) []bench.Option {
	return []bench.Option{
		{Name: "wire", Default: wire, Help: "what is at the other end (`sock|pair|reflect`; default of the polling run reflect, which has no system call)"},
		{Name: "tx-alloc", Default: "refpage,frag,fragpool", Help: "allocators of the back-end, the first one the baseline (`LIST` of refpage, frag, fragpool)"},
		{Name: "ring", Default: "split,packed", Help: "layouts of the rings (`LIST` of split, packed)"},
		{Name: "frame", Default: "256", Help: "bytes of a frame (`N`)"},
		{Name: "n", Default: n, Full: "1M", Help: "frames of one observation in each direction (`N`; default of the polling run 256K)"},
		{Name: "daemon", Default: "own", Help: "process of the back-end: one of its own or this one (`own|inside`)"},
	}
}

// netAlloc is E1: the source's own test, one frame at a time, everybody sleeps.
func netAlloc() bench.Experiment {
	return bench.Experiment{
		Name: "E1", Command: "net-alloc", Title: "Throughput run, one frame at a time and blocking: allocators",
		Claim: "343.376 +- 0.147 s with a counted reference for each fragment, 341.466 +- 0.305 s with page_frag_cache: 1.0056 times; " +
			"1.0003 context switches a frame, 40 page faults",
		Source: netAllocSource, Options: netAllocOptions("sock", "1K"),
		Build: func(p bench.Params) ([]bench.Comparison, error) {
			return buildNetAlloc(p, 1, "block", 1.0056)
		},
	}
}

// netAllocPoll is E1s: the same without the wake-ups that hide it.
func netAllocPoll() bench.Experiment {
	return bench.Experiment{
		Name: "E1s", Command: "net-alloc", Title: "Throughput run, 64 frames at a time and polling: allocators",
		Claim:  "at 100 to 200 ns a frame two atomic operations of 5 ns are 5 to 10 %: 1.05 times (own target)",
		Source: netAllocSource + "; polling, depth 64 and frames that the back-end returns are this project's", Options: netAllocOptions("reflect", "256K"),
		Build: func(p bench.Params) ([]bench.Comparison, error) {
			return buildNetAlloc(p, 64, "poll", 1.05)
		},
	}
}

func buildNetAlloc(p bench.Params, depth int, wake string, target float64) (list []bench.Comparison, err error) {
	o, err := netAllocRun(p)
	if err != nil {
		return nil, err
	}
	o.Depth, o.Wake = depth, wake
	allocs, err := p.List("tx-alloc", "refpage", "frag", "fragpool")
	if err != nil {
		return nil, err
	}
	if len(allocs) < 2 || slices.Contains(allocs[1:], allocs[0]) {
		return nil, fmt.Errorf("--tx-alloc: %s: accepted are two or three different allocators, the first one to compare with", strings.Join(allocs, ","))
	}
	rings, err := p.List("ring", "split", "packed")
	if err != nil {
		return nil, err
	}
	for i, ring := range rings {
		for _, alloc := range allocs[1:] {
			a, b := o, o
			a.Ring, a.TxAlloc, b.Ring, b.TxAlloc = ring, allocs[0], ring, alloc
			c := nettest.Compare([2]string{allocs[0], alloc}, [2]nettest.Options{a, b}, nil, nil)
			c.Open = openElsewhere(c.Open)
			c.Variant = fmt.Sprintf("%s, depth %d, %s, %s, %s bytes: %s against %s", ring, depth, wake, o.Wire, o.Frame, allocs[0], alloc)
			if allocs[0] == "refpage" && alloc == "frag" {
				c.Target = target // the claim is about these two
			}
			list = append(list, c)
		}
		if wake == "block" && i == 0 {
			o := o
			o.Ring, o.TxAlloc = ring, allocs[1]
			list = append(list, thriftComparisons(o)...)
		}
	}
	return list, nil
}

// netAllocRun are the options that all runs share.
func netAllocRun(p bench.Params) (o nettest.Options, err error) {
	o = nettest.Defaults()
	frame, err := p.Size("frame", nettest.MinFrame, nettest.MaxFrame)
	if err != nil {
		return o, err
	}
	if o.N, err = p.Size("n", 16, 1<<30); err != nil {
		return o, err
	}
	where, err := p.List("daemon", "own", "inside")
	if err != nil {
		return o, err
	}
	if len(where) != 1 {
		return o, fmt.Errorf("--daemon: %s: accepted is one of own, inside", strings.Join(where, ","))
	}
	wire, err := p.List("wire", "sock", "pair", "reflect")
	if err != nil {
		return o, err
	}
	if len(wire) != 1 {
		return o, fmt.Errorf("--wire: %s: accepted is one of sock, pair, reflect", strings.Join(wire, ","))
	}
	o.Wire = wire[0]
	o.Frame, o.CPUs, o.InProcess = fmt.Sprint(frame), p.CPUs, where[0] == "inside"
	return o, o.Validate()
}

// thriftComparisons hold what the two threads of a run take of the system to the source's bounds.
func thriftComparisons(o nettest.Options) []bench.Comparison {
	of := func(what, unit string, target float64, claim string, cost func(nettest.Measurement) float64) bench.Comparison {
		return bench.Comparison{
			Variant: fmt.Sprintf("%s, depth 1, %s, %s: %s", o.Ring, o.Wake, o.TxAlloc, what), A: o.TxAlloc, Target: target, AtMost: true, Claim: claim, Unit: unit,
			Open: openElsewhere(func(context.Context) (bench.Runner, error) { return thriftRunner{o, cost}, nil }),
		}
	}
	return []bench.Comparison{
		of("context switches", "switches/frame", switchesPerFrame, "each of the two threads sleeps 1.001 times a frame at most",
			func(m nettest.Measurement) float64 {
				return float64(max(m.Guest.Voluntary, m.Worker.Voluntary)) / float64(m.Frames)
			}),
		of("page faults", "faults", faultsAfterStart, "each of the two threads has 40 page faults at most after the warm-up",
			func(m nettest.Measurement) float64 { return float64(max(m.Guest.Minor, m.Worker.Minor)) }),
	}
}

// thriftRunner runs one variant; what counts is not the time. A back-end inside this process has no figures of its own.
type thriftRunner struct {
	options nettest.Options
	cost    func(nettest.Measurement) float64
}

func (r thriftRunner) Run(ctx context.Context, _ string) (bench.Sample, error) {
	m, err := nettest.Run(ctx, r.options, nil)
	if err != nil {
		return bench.Sample{}, err
	}
	return bench.Sample{Cost: r.cost(m), Counters: m.Counters()}, nil
}

func (thriftRunner) Close() error { return nil }

// elsewhere runs on another thread than the measuring one, whose processor a daemon that is started would inherit.
type elsewhere struct{ bench.Runner }

func openElsewhere(open func(context.Context) (bench.Runner, error)) func(context.Context) (bench.Runner, error) {
	return func(ctx context.Context) (bench.Runner, error) {
		r, err := open(ctx)
		return elsewhere{r}, err
	}
}

func (e elsewhere) Run(ctx context.Context, variant string) (sample bench.Sample, err error) {
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		sample, err = e.Runner.Run(ctx, variant)
	}()
	<-ended
	return sample, err
}
