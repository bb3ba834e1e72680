package experiments

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/pool"
)

var errExhausted = errors.New("the arena is exhausted")

// poolCases are the ways on which a page returns.
var poolCases = []string{"fast", "ring", "slow"}

// poolPaths is E5: what a page costs by the way on which it returns.
func poolPaths() bench.Experiment {
	return bench.Experiment{
		Name: "E5", Command: "pool", Title: "Page pool: three ways back",
		Claim:  "a page costs 5.4 ns when its owner recycles it, 15.1 ns through the ring (2.8 times), 66.1 ns through the allocator (12 times)",
		Source: "bench_page_pool_simple, E5-1650 v4 (kernel tools; other machines: 4.2 to 21.3, 16.9 to 196, 62.5 to 205 ns)",
		Options: []bench.Option{
			{Name: "case", Default: "fast,ring,slow", Help: "ways back (`LIST` of fast, ring, slow)"},
			{Name: "n", Default: "64K", Full: "10000000", Help: "pages of one observation (`N`)"},
		},
		Build: func(p bench.Params) ([]bench.Comparison, error) {
			cases, err := p.List("case", poolCases...)
			if err != nil {
				return nil, err
			}
			n, err := p.Size("n", 1024, 1<<30)
			if err != nil {
				return nil, err
			}
			has := map[string]bool{}
			for _, c := range cases {
				has[c] = true
			}
			var list []bench.Comparison
			add := func(c bench.Comparison) {
				if has[c.A] && (c.B == "" || has[c.B]) {
					c.Unit = "ns/page"
					c.Open = func(context.Context) (bench.Runner, error) { return newPoolRunner(n) }
					list = append(list, c)
				}
			}
			add(bench.Comparison{Variant: "fast", A: "fast", Target: 6, AtMost: true, Claim: "the owner's own way costs 6 ns at most"})
			add(bench.Comparison{Variant: "ring", A: "ring", Target: 25, AtMost: true, Claim: "the way through the ring costs 25 ns at most"})
			add(bench.Comparison{Variant: "slow", A: "slow"})
			add(bench.Comparison{Variant: "ring in units of fast", A: "ring", B: "fast", Target: 2.8, AtMost: true})
			add(bench.Comparison{Variant: "slow in units of fast", A: "slow", B: "fast", Target: 3})
			return list, nil
		},
	}
}

// poolRunner allocates and returns pages of a pool in batches of 64, and compares its counters with its own.
type poolRunner struct {
	arena *pagemem.Arena
	pool  *pool.Pool
	owner pagemem.OwnerID
	n     int
	ids   [64]pagemem.PageID
}

func newPoolRunner(n int) (*poolRunner, error) { return newPoolRunnerOf(pool.Config{}, n) }

// newPoolRunnerOf makes a runner whose pool has a configuration, with an arena and an owner of its own.
func newPoolRunnerOf(cfg pool.Config, n int) (*poolRunner, error) {
	a, err := pagemem.NewArena(pagemem.Config{Bytes: 64 << 20, Name: "vhostd-bench"})
	if err != nil {
		return nil, err
	}
	r := &poolRunner{arena: a, owner: pagemem.NewOwnerID(), n: n}
	cfg.Arena, cfg.Owner, cfg.Logger = a, r.owner, slog.New(slog.DiscardHandler)
	if r.pool, err = pool.New(cfg); err != nil {
		return nil, errors.Join(err, a.Close())
	}
	return r, nil
}

// stranger is somebody who does not own the pool.
const stranger = 0

func (r *poolRunner) Run(_ context.Context, variant string) (bench.Sample, error) {
	// All pages of a batch in one call: a call for each would be a quarter of the fast way.
	put := map[string]func(){
		"fast": func() {
			for _, id := range r.ids {
				r.pool.Put(id, 1, r.owner)
			}
		},
		"ring": func() {
			for _, id := range r.ids {
				r.pool.Put(id, 1, stranger)
			}
		},
		// A page that somebody else holds is given up by the pool and goes back to the arena with its last holder.
		"slow": func() {
			for _, id := range r.ids {
				r.arena.Ref(id)
				r.pool.Put(id, 1, r.owner)
				r.arena.Unref(id, 1)
			}
		},
	}[variant]
	r.pool.Publish()
	before := r.pool.Stats()
	const slices = 15
	rounds := max(1, r.n/slices/len(r.ids))
	cost, err := bench.Timed(slices, rounds*len(r.ids), func() error {
		for range rounds {
			for i := range r.ids {
				id, ok := r.pool.Alloc()
				if !ok {
					return errExhausted
				}
				r.ids[i] = id
			}
			put()
		}
		return nil
	})
	if err == nil {
		r.pool.Publish()
		err = exact(variant, before, r.pool.Stats(), uint64(slices*rounds*len(r.ids)))
	}
	return bench.Sample{Cost: cost}, err
}

// exact wants the pool to have counted what was done.
func exact(variant string, before, after pool.Stats, pages uint64) error {
	allocations := after.Fast + after.Slow + after.Refill - before.Fast - before.Slow - before.Refill
	returns := map[string]uint64{
		"fast": after.Cached - before.Cached, "ring": after.Ring - before.Ring, "slow": after.ReleasedShared - before.ReleasedShared,
	}[variant]
	if allocations != pages || returns != pages {
		return fmt.Errorf("%s: %d pages went round, the pool counts %d allocations and %d returns", variant, pages, allocations, returns)
	}
	return nil
}

func (r *poolRunner) Close() error { return closePool(r.pool, r.arena) }

// closePool wants all pages back: those that the pool still counts as under way must rest in it.
func closePool(p *pool.Pool, a *pagemem.Arena) error {
	p.Destroy()
	for end := time.Now().Add(3 * time.Second); a.InUse() != 0 && time.Now().Before(end); time.Sleep(time.Millisecond) {
	}
	if n := p.InFlight(); n != 0 {
		return fmt.Errorf("%d pages of the pool are under way at the end", n)
	}
	return a.Close() // fails while a page is in use
}
