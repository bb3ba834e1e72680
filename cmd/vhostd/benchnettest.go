package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/internal/bench/nettest"
	"github.com/vhostd/vhostd/internal/config"
)

const netTestHelp = `Drive a back-end with numbered frames and check every byte of what arrives, as the kernel's
vhost_net_test does with vhost_net: first n frames for the guest, then n frames of the guest, with at
most --depth under way. By default the back-end is this program in a process of its own; --socket
drives any vhost-user back-end that returns frames, such as
  dpdk-testpmd … --vdev net_vhost0,iface=PATH -- --forward-mode=macswap

Wires: pair (a second guest on the same switch), sock (a peer of a socket network), tap (a packet
socket at a tap, in a network namespace of the run; root), reflect (the daemon returns the frames: both
directions at once).

Repetitions are shown as perf stat shows them; --vs A,B runs two variants in turns A B B A and shows
the ratio of their times per frame. A variant is KEY=VALUE, several joined by +; keys are the flags'
names, such as --vs tx-alloc=refpage,frag or --vs ring=split+depth=64,ring=packed+depth=64.

A frame that is wrong, late, lost or doubled, a byte written where it must not be, memory that does
not come back, or nothing moving for 10 s ends the run with exit status 1.`

// netTestFlags are the flags of vhostd bench net-test.
type netTestFlags struct {
	nettest.Options
	cpus, vs, plot         string
	noEventIdx, noIndirect bool
	json                   bool
	reps                   int
}

func newNetTest() *cobra.Command {
	n := &netTestFlags{Options: nettest.Defaults()}
	n.N = 1 << 14
	cmd := &cobra.Command{
		Use:     "net-test",
		Short:   "Throughput run: numbered frames through a back-end, every byte checked",
		Long:    netTestHelp,
		Example: "  vhostd bench net-test --n 1048576 --wake poll\n  vhostd bench net-test --wire pair --depth 64 --wake poll --vs ring=split,packed --reps 10",
		Args:    cobra.NoArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return n.run(cmd) },
	}
	cmd.Flags().SortFlags = false
	n.flags(cmd.Flags())
	completeNetTest(cmd)
	return cmd
}

func (n *netTestFlags) flags(f *pflag.FlagSet) {
	f.IntVarP(&n.N, "n", "n", n.N, "frames a direction (`N`); the kernel's test has 1048576")
	f.StringVar(&n.Wire, "wire", n.Wire, "what is at the other end: `pair|sock|tap|reflect`")
	f.StringVar(&n.Frame, "frame", n.Frame, "bytes of a frame (`N`), or imix")
	f.IntVar(&n.Depth, "depth", n.Depth, "frames under way (`N`)")
	f.StringVar(&n.Batch, "batch", "", "frames shown to the back-end together (`N|random`; default: as many as there is room for)")
	f.StringVar(&n.Ring, "ring", n.Ring, "layout of the rings: `split|packed`")
	f.IntVar(&n.RingSize, "ring-size", n.RingSize, "descriptors of a ring (`N`)")
	f.StringVar(&n.Layout, "layout", n.Layout, "descriptors of a frame: `direct|chained|indirect`")
	f.StringVar(&n.Wake, "wake", n.Wake, "how the back-end's workers wait: `block|adaptive|poll`")
	f.StringVar(&n.Guest, "guest-wake", "", "how the guest waits, likewise (`MODE`; default: as the back-end; the kernel's test polls)")
	f.StringVar(&n.cpus, "cpus", "", "processors of the guest's thread and of the back-end's workers (`LIST`; default: any)")
	f.StringVar(&n.TxAlloc, "tx-alloc", n.TxAlloc, "`ALLOCATOR` of the back-end, as in serve")
	f.StringVar(&n.Copy, "copy", n.Copy, "copy `POLICY` of the back-end, as in serve")
	f.BoolVar(&n.Delayed, "delayed", false, "ask for completions' calls after three quarters of them")
	f.BoolVar(&n.noEventIdx, "no-event-idx", false, "without the feature VIRTIO_F_EVENT_IDX")
	f.BoolVar(&n.noIndirect, "no-indirect", false, "without the feature VIRTIO_F_INDIRECT_DESC")
	f.BoolVar(&n.InOrder, "in-order", false, "with VIRTIO_F_IN_ORDER")
	f.BoolVar(&n.Mrg, "mrg", false, "with VIRTIO_NET_F_MRG_RXBUF and receive buffers of 2048 bytes")
	f.IntVar(&n.Reset, "reset", 0, "stop and start the ring after so many frames (`N`; 0: never)")
	f.Uint64Var(&n.Seed, "seed", n.Seed, "`SEED` of contents and random sizes")
	f.IntVar(&n.reps, "reps", 1, "repetitions, of each variant with --vs, which needs 2 (`N`)")
	f.StringVar(&n.vs, "vs", "", "compare two variants (`A,B`)")
	f.StringVar(&n.Socket, "socket", "", "`PATH` of a back-end that runs already and returns frames")
	f.StringVar(&n.Program, "program", "", "another vhostd to measure (`PATH`)")
	f.BoolVar(&n.InProcess, "in-process", false, "the back-end in this process")
	f.BoolVar(&n.json, "json", false, "print JSON")
	f.StringVar(&n.plot, "plot", "", "draw the comparison, on the terminal or into a `FILE` that ends in .svg")
	f.Lookup("plot").NoOptDefVal = "terminal"
}

func completeNetTest(cmd *cobra.Command) {
	for flag, values := range map[string][]string{
		"wire": nettest.Wires(), "ring": {"split", "packed"}, "layout": {"direct", "chained", "indirect"}, "wake": {"block", "adaptive", "poll"},
		"guest-wake": {"block", "adaptive", "poll"}, "frame": {"imix"}, "batch": {"random"},
	} {
		if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
			panic(err)
		}
	}
}

// parse judges everything before anything starts.
func (n *netTestFlags) parse() (names [2]string, variants [2]nettest.Options, err error) {
	n.EventIdx, n.Indirect = !n.noEventIdx, !n.noIndirect
	if n.CPUs, err = config.ParseCPUs("cpus", n.cpus); err != nil {
		return names, variants, err
	}
	b := benchFlags{plot: n.plot, pairs: max(n.reps, minPairs)}
	if _, err := b.parse(); err != nil {
		return names, variants, err
	}
	if n.reps < 1 || n.reps > maxPairs {
		return names, variants, fmt.Errorf("--reps: %d: accepted are 1 to %d", n.reps, maxPairs)
	}
	if err := n.Validate(); err != nil {
		return names, variants, err
	}
	if n.vs == "" {
		return names, variants, nil
	}
	if n.reps < minPairs {
		n.reps = minPairs
	}
	return nettest.Variants(n.Options, n.vs)
}

// ownNetwork marks a process that runs in a network namespace made for it.
const ownNetwork = "VHOSTD_BENCH_NETNS"

func (n *netTestFlags) run(cmd *cobra.Command) error {
	names, variants, err := n.parse()
	if err != nil {
		return err
	}
	tap := n.Socket == "" && (n.Wire == nettest.Tap || variants[0].Wire == nettest.Tap || variants[1].Wire == nettest.Tap)
	if tap && os.Getenv(ownNetwork) == "" {
		return inOwnNetwork(cmd)
	}
	ctx, stop := interruptible()
	defer stop()
	bar := newProgress(cmd.ErrOrStderr())
	defer bar.clear()
	if n.vs == "" {
		return n.repeat(ctx, cmd.OutOrStdout(), bar)
	}
	return n.compare(ctx, cmd.OutOrStdout(), bar, names, variants)
}

// inOwnNetwork runs the same command in a network namespace of its own.
func inOwnNetwork(cmd *cobra.Command) error {
	self, err := os.Executable()
	if err != nil {
		return failure{err}
	}
	again := exec.Command(self, os.Args[1:]...)
	again.Env = append(os.Environ(), ownNetwork+"=1")
	again.Stdin, again.Stdout, again.Stderr = os.Stdin, os.Stdout, os.Stderr
	again.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET}
	ctx, stop := interruptible() // a signal reaches the child too: its word counts
	defer stop()
	err = again.Start()
	if err != nil {
		return failure{fmt.Errorf("network namespace: %w", err)}
	}
	go func() {
		<-ctx.Done()
		_ = again.Process.Signal(syscall.SIGINT)
	}()
	err = again.Wait()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		stop()
		os.Exit(max(exit.ExitCode(), exitFailure)) // the child has said why
	}
	return asFailure(err)
}

// netTestError keeps usage errors apart, which Run finds too.
func netTestError(err error) error {
	if err == nil || errors.Is(err, nettest.ErrUsage) {
		return err
	}
	return failure{err}
}

func (n *netTestFlags) repeat(ctx context.Context, w io.Writer, bar *progress) error {
	var all []nettest.Measurement
	for rep := range n.reps {
		m, err := nettest.Run(ctx, n.Options, func(phase string, received, of int) {
			bar.say(fmt.Sprintf("repetition %d of %d, %s: %d of %d frames", rep+1, n.reps, phase, received, of))
		})
		if err != nil {
			bar.clear()
			return netTestError(errors.Join(err, context.Cause(ctx)))
		}
		all = append(all, m)
	}
	bar.clear()
	if n.json {
		return asFailure(n.writeJSON(w, all))
	}
	nettest.Print(w, n.Options.String(), all)
	return nil
}

func (n *netTestFlags) writeJSON(w io.Writer, all []nettest.Measurement) error {
	type repetition struct {
		Frames   int                `json:"frames"`
		Counters map[string]float64 `json:"counters"`
	}
	out := struct {
		Run         string       `json:"run"`
		Repetitions []repetition `json:"repetitions"`
	}{Run: n.Options.String()}
	for _, m := range all {
		out.Repetitions = append(out.Repetitions, repetition{m.Frames, m.Counters()})
	}
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	return e.Encode(out)
}

func (n *netTestFlags) compare(ctx context.Context, w io.Writer, bar *progress, names [2]string, variants [2]nettest.Options) error {
	kept := map[string][]nettest.Measurement{}
	pair := ""
	c := nettest.Compare(names, variants,
		func(variant, phase string, received, of int) {
			bar.say(fmt.Sprintf("%s, %s, %s: %d of %d frames", pair, variant, phase, received, of))
		},
		func(variant string, m nettest.Measurement) { kept[variant] = append(kept[variant], m) })
	settings := bench.Settings{Pairs: n.reps, CPU: -1, Progress: func(_, _ string, at, of int) {
		pair = fmt.Sprintf("pair %d of %d", at, of)
		if at == 0 {
			pair = "warm-up"
		}
	}}
	var results []bench.Result
	err := bench.Run(ctx, nettest.Experiment(), []bench.Comparison{c}, settings, func(r bench.Result) { results = append(results, r) })
	bar.clear()
	if err != nil {
		return netTestError(errors.Join(err, context.Cause(ctx)))
	}
	if !n.json {
		for i, name := range names {
			nettest.Print(w, strings.TrimSpace(name+": "+variants[i].String()), kept[name][1:]) // the first one warms up
		}
		fmt.Fprintln(w)
	}
	b := benchFlags{json: n.json, plot: n.plot}
	return asFailure(b.show(w, results))
}
