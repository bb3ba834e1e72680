package experiments

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/pool"
)

// refills are the forms of bulk refill by the names that the option has.
var refills = map[string]pool.Refill{"1": pool.RefillSingle, "list64": pool.RefillList, "array64": pool.RefillArray}

// poolRefill is E3: a receiver whose pages never come back, by how the pool gets new ones.
func poolRefill() bench.Experiment {
	return bench.Experiment{
		Name: "E3", Command: "poolrefill", Title: "Page pool without recycling: refilled one by one, by list and by array",
		Claim: "redirected frames whose pages never come back: 3.771 Mpps with single pages, 3.940 (+4.49 %) with a list of 64, " +
			"4.249 (+12.68 %) with an array of 64",
		Source: "page_pool: use alloc_pages_bulk in refill code path (be5dba25b4b2), mlx5 XDP_REDIRECT into veth",
		Options: []bench.Option{
			{Name: "bulk", Default: "1,list64,array64", Help: "refills, the first one the baseline (`LIST` of 1, list64, array64)"},
			{Name: "recycle", Default: "off", Help: "pages come back (`LIST` of off, on); on shows that refills then do not matter"},
			{Name: "frames", Default: "64", Help: "frames taken at once (`LIST`)"},
			{Name: "n", Default: "16K", Full: "4M", Help: "frames of one observation (`N`)"},
		},
		Build: buildPoolRefill,
	}
}

func buildPoolRefill(p bench.Params) (list []bench.Comparison, err error) {
	forms, err := p.List("bulk", "1", "list64", "array64")
	if err != nil {
		return nil, err
	}
	recycle, err := p.List("recycle", "off", "on")
	if err != nil {
		return nil, err
	}
	frames, err := p.Sizes("frames", 1, pool.CacheRefill)
	if err != nil {
		return nil, err
	}
	n, err := p.Size("n", 1024, 1<<30)
	if err != nil {
		return nil, err
	}
	if len(forms) < 2 || slices.Contains(forms[1:], forms[0]) {
		return nil, fmt.Errorf("--bulk: %v: accepted are two or three different forms, the first one to compare with", forms)
	}
	targets := map[string]float64{"list64": 1.0449, "array64": 1.1268}
	for _, r := range recycle {
		for _, at := range frames {
			for _, form := range forms[1:] {
				target := targets[form]
				if forms[0] != "1" || r == "on" {
					target = 0
				}
				list = append(list, bench.Comparison{
					Variant: fmt.Sprintf("%s against %s, %d frames at once, recycling %s", forms[0], form, at, r), A: forms[0], B: form, Target: target,
					Unit: "ns/frame", Open: func(context.Context) (bench.Runner, error) { return newRefillRunner(forms[0], form, at, n, r == "on") },
				})
			}
		}
	}
	return list, nil
}

// refillRunner is a receiver for each form.
type refillRunner struct {
	sides   map[string]*dropRunner
	recycle bool
}

func newRefillRunner(a, b string, at, n int, recycle bool) (*refillRunner, error) {
	r := &refillRunner{sides: map[string]*dropRunner{}, recycle: recycle}
	for _, form := range []string{a, b} {
		d, err := newDropRunner(pool.Config{Refill: refills[form]}, 64, n)
		if err != nil {
			return nil, errors.Join(err, r.Close())
		}
		d.at = at
		r.sides[form] = d
	}
	return r, nil
}

func (r *refillRunner) Run(ctx context.Context, variant string) (bench.Sample, error) {
	d := r.sides[variant]
	before := d.published()
	sample, err := d.Run(ctx, map[bool]string{true: "on", false: "off"}[r.recycle])
	if err != nil {
		return sample, err
	}
	after := d.published()
	// Pages that entered the pool and left it, and pages that rest in it: the arena has no others, but for the source.
	if in, used := int(d.pool.InFlight()), d.arena.InUse(); in != used-1 || in > pool.CacheSize {
		return sample, fmt.Errorf("the pool counts %d pages, %d are in use besides the source", in, used-1)
	}
	gone := after.ReleasedShared - before.ReleasedShared
	calls := after.Slow - before.Slow
	entered := gone + uint64(int64(after.InFlight)-int64(before.InFlight))
	each := map[string]uint64{"1": 1}[variant]
	if each == 0 {
		each = pool.CacheRefill
	}
	if calls*each != entered {
		return sample, fmt.Errorf("%d calls of %d pages each for %d pages that entered the pool", calls, each, entered)
	}
	return sample, nil
}

// published are the pool's counters as they are now.
func (r *poolRunner) published() pool.Stats {
	r.pool.Publish()
	return r.pool.Stats()
}

func (r *refillRunner) Close() error {
	var errs []error
	for _, d := range r.sides {
		errs = append(errs, d.Close())
	}
	return errors.Join(errs...)
}
