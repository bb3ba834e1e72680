package bench

import (
	"context"
	"fmt"
	"maps"
	"runtime"
	"runtime/debug"
	"slices"

	"golang.org/x/sys/unix"
)

// Settings of a run.
type Settings struct {
	Pairs int // of each comparison; at least 2
	CPU   int // processor of the measuring thread, -1 for any
	// Progress, if set, is told what is about to run.
	Progress func(experiment, variant string, pair, pairs int)
}

// Run measures all comparisons and calls done after each. It ends with the first error, or when ctx ends. The garbage collector is
// off while something is measured, and runs in between.
func Run(ctx context.Context, e Experiment, comparisons []Comparison, s Settings, done func(Result)) error {
	unlock, err := LockThread(s.CPU)
	if err != nil {
		return err
	}
	defer unlock()
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	for _, c := range comparisons {
		r, err := measure(ctx, e, c, s)
		if err != nil {
			return fmt.Errorf("%s, %s: %w", e.Name, c.Variant, err)
		}
		done(r)
	}
	return nil
}

// LockThread keeps the goroutine on its thread until unlock, on one processor unless cpu is -1.
func LockThread(cpu int) (unlock func(), err error) {
	runtime.LockOSThread()
	if cpu < 0 {
		return runtime.UnlockOSThread, nil
	}
	var before, set unix.CPUSet
	set.Set(cpu)
	err = unix.SchedGetaffinity(0, &before)
	if err == nil {
		err = unix.SchedSetaffinity(0, &set)
	}
	if err != nil {
		runtime.UnlockOSThread()
		return nil, fmt.Errorf("pin to CPU %d: %w (is the CPU online and allowed for this process?)", cpu, err)
	}
	return func() {
		_ = unix.SchedSetaffinity(0, &before)
		runtime.UnlockOSThread()
	}, nil
}

func measure(ctx context.Context, e Experiment, c Comparison, s Settings) (r Result, err error) {
	runner, err := c.Open(ctx)
	if err != nil {
		return r, err
	}
	defer func() {
		if closing := runner.Close(); err == nil {
			err = closing
		}
	}()
	r = Result{
		Experiment: e.Name, Variant: c.Variant, Claim: c.Claim, Source: e.Source, Target: c.Target, AtMost: c.AtMost, Title: e.Title, General: e.Claim,
		NameA: c.A, NameB: c.B, Unit: c.Unit, Costs: c.Unit, Counters: map[string]float64{},
	}
	if r.Claim == "" {
		r.Claim = e.Claim
	}
	counters := map[string][]float64{}
	observe := func(variant string) (float64, error) {
		runtime.GC()
		sample, err := runner.Run(ctx, variant)
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		for name, value := range sample.Counters {
			counters[variant+" "+name] = append(counters[variant+" "+name], value)
		}
		return sample.Cost, err
	}
	err = pairs(c, s, func(pair int) { s.tell(e, c, pair) }, observe, &r)
	if err != nil {
		return r, err
	}
	r.finish(c, counters)
	return r, nil
}

func (s Settings) tell(e Experiment, c Comparison, pair int) {
	if s.Progress != nil {
		s.Progress(e.Name, c.Variant, pair, s.Pairs)
	}
}

// pairs runs each variant once to warm up and then s.Pairs times, in turns A B B A. What the warm-up counts is in the counters too.
func pairs(c Comparison, s Settings, tell func(pair int), observe func(string) (float64, error), r *Result) error {
	variants := []string{c.A}
	if c.B != "" {
		variants = append(variants, c.B)
	}
	for _, v := range variants {
		tell(0)
		if _, err := observe(v); err != nil {
			return err
		}
	}
	for pair := range s.Pairs {
		tell(pair + 1)
		costs := map[string]float64{}
		order := slices.Clone(variants)
		if pair%2 == 1 {
			slices.Reverse(order)
		}
		for _, v := range order {
			cost, err := observe(v)
			if err != nil {
				return err
			}
			if cost < 0 || cost == 0 && c.B != "" { // a ratio has no zero
				return fmt.Errorf("variant %s: cost %v is not positive", v, cost)
			}
			costs[v] = cost
		}
		r.A = append(r.A, costs[c.A])
		if c.B != "" {
			r.B = append(r.B, costs[c.B])
		}
	}
	return nil
}

// finish turns the observations into the result.
func (r *Result) finish(c Comparison, counters map[string][]float64) {
	estimate := MeanOf(r.A)
	r.Counters[c.A+" "+c.Unit] = estimate.Mean
	r.Counters[c.A+" "+c.Unit+" least"] = slices.Min(r.A)
	if c.B != "" {
		r.Counters[c.B+" "+c.Unit] = MeanOf(r.B).Mean
		r.Counters[c.B+" "+c.Unit+" least"] = slices.Min(r.B)
		estimate = RatioOf(r.A, r.B)
		r.Unit = "x"
	}
	for name, values := range maps.All(counters) {
		r.Counters[name] = MeanOf(values).Mean
	}
	r.Result, r.Low, r.High, r.Pairs, r.Noise = estimate.Mean, estimate.Low, estimate.High, estimate.N, estimate.Noise()
	if c.Target != 0 {
		r.Verdict = Judge(estimate, c.Target, c.AtMost)
	}
}
