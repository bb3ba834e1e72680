package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/internal/bench/experiments"
	"github.com/vhostd/vhostd/internal/config"
)

const benchHelp = `Reproduce published figures, each against its baseline in the same program and the same run: variants
A and B take turns A B B A, and the result is the ratio of their costs over all pairs with a 95 %
interval. A claim holds if the whole interval reaches the target, fails if all of it misses it, and is
unresolved if the target lies inside; then the noise that hides it is named.

Results go to standard output, progress to standard error. Run it on a machine that does nothing else;
with --cpus on processors that nobody else uses.`

// benchFlags are common to all experiments.
type benchFlags struct {
	full, json bool
	plot       string
	pairs      int
	cpus       string
}

const defaultPairs, minPairs, maxPairs = 10, 2, 1000

func (b *benchFlags) add(f *pflag.FlagSet) {
	f.BoolVar(&b.full, "full", false, "the sizes of the source instead of those that finish within two minutes")
	f.BoolVar(&b.json, "json", false, "print an array of results as JSON")
	f.StringVar(&b.plot, "plot", "", "draw the results, on the terminal or into a `FILE` that ends in .svg")
	f.Lookup("plot").NoOptDefVal = "terminal"
	f.IntVar(&b.pairs, "pairs", defaultPairs, "observations of each variant (`N`)")
	f.StringVar(&b.cpus, "cpus", "", "processors for the measuring thread and for those that it needs (`LIST`; default: any)")
}

// parse judges the flags and returns the processors.
func (b *benchFlags) parse() (cpus []int, err error) {
	if b.pairs < minPairs || b.pairs > maxPairs {
		return nil, fmt.Errorf("--pairs: %d: accepted are %d to %d", b.pairs, minPairs, maxPairs)
	}
	if b.plot != "" && b.plot != "terminal" {
		if filepath.Ext(b.plot) != ".svg" {
			return nil, fmt.Errorf("--plot: %q: accepted are --plot alone and --plot=FILE.svg", b.plot)
		}
		if _, err := os.Stat(filepath.Dir(b.plot)); err != nil {
			return nil, fmt.Errorf("--plot: %q: directory %s does not exist", b.plot, filepath.Dir(b.plot))
		}
	}
	return config.ParseCPUs("cpus", b.cpus)
}

func newBench() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "bench NAME",
		Short: "Measure: throughput runs and experiments",
		Long:  benchHelp,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) == 0 {
				return errors.New("bench: give the name of an experiment: vhostd bench --help lists them")
			}
			return fmt.Errorf("bench: unknown experiment %q: vhostd bench --help lists them", args[0])
		},
		RunE: func(*cobra.Command, []string) error { return nil },
	}
	cmd.AddCommand(newNetTest(), newBenchAll())
	names, byName := experiments.Commands()
	for _, name := range names {
		cmd.AddCommand(newExperiment(name, byName[name]))
	}
	return cmd
}

// newExperiment makes the command of some experiments.
func newExperiment(name string, list []bench.Experiment) *cobra.Command {
	var b benchFlags
	var long, short []string
	values := map[string]*string{}
	cmd := &cobra.Command{Use: name, Args: cobra.NoArgs}
	cmd.Flags().SortFlags = false
	for _, e := range list {
		short = append(short, e.Name+" "+e.Title)
		long = append(long, fmt.Sprintf("%s  %s\n  Claim: %s.\n  Source: %s.", e.Name, e.Title, e.Claim, e.Source))
		for _, o := range e.Options {
			if values[o.Name] != nil {
				continue
			}
			text := o.Help
			if o.Full != "" {
				text += "; with --full " + o.Full
			}
			values[o.Name] = cmd.Flags().String(o.Name, o.Default, text)
		}
	}
	b.add(cmd.Flags())
	cmd.Short, cmd.Long = strings.Join(short, "; "), strings.Join(long, "\n\n")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		given := map[string]string{}
		for name, v := range values {
			if cmd.Flags().Changed(name) {
				given[name] = *v
			}
		}
		_, err := runExperiments(cmd, list, b, given)
		return err
	}
	return cmd
}

func newBenchAll() *cobra.Command {
	var b benchFlags
	var report string
	cmd := &cobra.Command{
		Use:   "all",
		Short: "All experiments with their defaults",
		Long:  "All experiments, one after the other, with their defaults, and one page of all results if a report is wanted.",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if report != "" {
				if err := bench.CheckReport(report); err != nil {
					return err
				}
			}
			results, err := runExperiments(cmd, experiments.All(), b, nil)
			if report == "" || len(results) == 0 {
				return err
			}
			// What was measured before an error is not lost.
			return errors.Join(err, asFailure(bench.WriteReport(report, facts(), results)))
		},
	}
	cmd.Flags().SortFlags = false
	cmd.Flags().StringVar(&report, "report", "", "write a page with tables and plots: `FILE.html`, or FILE.md with the plots in files beside it")
	b.add(cmd.Flags())
	return cmd
}

func asFailure(err error) error {
	if err == nil {
		return nil
	}
	return failure{err}
}

// runExperiments judges everything, measures and prints. given are the options that differ from the defaults.
func runExperiments(cmd *cobra.Command, list []bench.Experiment, b benchFlags, given map[string]string) (results []bench.Result, err error) {
	cpus, err := b.parse()
	if err != nil {
		return nil, err
	}
	comparisons := make([][]bench.Comparison, len(list))
	for i, e := range list {
		p := bench.Params{Full: b.full, CPUs: cpus, Values: map[string]string{}}
		for _, o := range e.Options {
			p.Values[o.Name] = o.Default
			if b.full && o.Full != "" {
				p.Values[o.Name] = o.Full
			}
			if v, ok := given[o.Name]; ok {
				p.Values[o.Name] = v
			}
		}
		if comparisons[i], err = e.Build(p); err != nil {
			return nil, err
		}
	}
	ctx, stop := interruptible()
	defer stop()
	bar := newProgress(cmd.ErrOrStderr())
	defer bar.clear()
	settings := bench.Settings{Pairs: b.pairs, CPU: -1, Progress: bar.experiment}
	if len(cpus) > 0 {
		settings.CPU = cpus[0]
	}
	for i, e := range list {
		bar.of(i, len(list), len(comparisons[i]))
		if err = bench.Run(ctx, e, comparisons[i], settings, func(r bench.Result) { results = append(results, r) }); err != nil {
			break
		}
	}
	bar.clear()
	return results, errors.Join(asFailure(err), asFailure(b.show(cmd.OutOrStdout(), results)))
}

// show prints results as the flags say.
func (b *benchFlags) show(w io.Writer, results []bench.Result) error {
	if b.json {
		if err := bench.WriteJSON(w, results); err != nil {
			return err
		}
	} else if err := bench.WriteText(w, results); err != nil {
		return err
	}
	switch {
	case b.plot == "" || len(results) == 0:
		return nil
	case b.plot == "terminal":
		if !b.json {
			bench.Plot(w, results)
		}
		return nil
	}
	return bench.WriteSVG(b.plot, results)
}

// interruptible ends with the first SIGINT or SIGTERM; the second one ends the process.
func interruptible() (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(context.Background())
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM)
	done := make(chan struct{})
	go func() {
		select {
		case s := <-signals:
			signal.Stop(signals)
			cancel(fmt.Errorf("interrupted by %v", s))
		case <-done:
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		close(done)
		cancel(nil)
	}
}

// facts describe the machine and the run for a report.
func facts() bench.Facts {
	var u unix.Utsname
	_ = unix.Uname(&u)
	return bench.Facts{
		Title:   "vhostd bench",
		Machine: fmt.Sprintf("%s, %d CPUs, Linux %s, %s", cpuModel(), runtime.NumCPU(), unix.ByteSliceToString(u.Release[:]), runtime.Version()),
		Command: strings.Join(os.Args, " "), Time: time.Now().Format("2006-01-02 15:04 MST"),
	}
}

func cpuModel() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}
