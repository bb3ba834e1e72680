package experiments

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"

	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/pool"
)

// Sizes of bench_page_pool_cross_cpu: the rings between the threads, and the pool's own, clamped as new kernels do.
const (
	crossRing = 1024
	crossPool = pool.MaxRing
)

// crossReturn is E5x: pages that come back from other threads.
func crossReturn() bench.Experiment {
	return bench.Experiment{
		Name: "E5x", Command: "pool", Title: "Page pool: pages that other threads give back",
		Claim:  "giving pages back 16 at a time makes the trip through other threads 1.2 times as fast as one at a time (own target)",
		Source: "bench_page_pool_cross_cpu (one allocator, rings of 1024, a pool of 32000), page_pool_put_page_bulk",
		Options: []bench.Option{
			{Name: "returners", Default: "0,1,2", Help: "threads that give pages back (`LIST`); 0: the allocating one, as a stranger to the pool"},
			{Name: "n", Default: "64K", Full: "10000000", Help: "pages of one observation (`N`)"},
		},
		Build: func(p bench.Params) (list []bench.Comparison, err error) {
			returners, err := p.Sizes("returners", 0, 64)
			if err != nil {
				return nil, err
			}
			n, err := p.Size("n", 1024, 1<<30)
			if err != nil {
				return nil, err
			}
			for _, k := range returners {
				list = append(list, crossComparison(k, n, p))
			}
			return list, nil
		},
	}
}

// crossComparison is judged where every thread has a processor: waiting for one costs more than any way of giving back saves.
func crossComparison(k, n int, p bench.Params) bench.Comparison {
	c := bench.Comparison{
		Variant: fmt.Sprintf("%d threads give back, single against bulk of %d", k, pool.BulkSize), A: "single", B: "bulk", Target: 1.2, Unit: "ns/page",
		Open: func(context.Context) (bench.Runner, error) { return newCrossRunner(k, n, p) },
	}
	switch {
	case k == 0:
		c.Variant = fmt.Sprintf("one thread, single against bulk of %d", pool.BulkSize)
	case k+1 > runtime.NumCPU():
		c.Variant += " (more threads than processors)"
		c.Target = 0
	}
	return c
}

// crossSide is a pool with its returners, for one variant.
type crossSide struct {
	arena     *pagemem.Arena
	pool      *pool.Pool
	put       func(ids []pagemem.PageID)
	returners []*consumer
	given     []uint64 // to each
}

func newCrossSide(k int, bulk bool, p bench.Params) (*crossSide, error) {
	a, err := pagemem.NewArena(pagemem.Config{Bytes: 256 << 20, Name: "vhostd-bench"})
	if err != nil {
		return nil, err
	}
	s := &crossSide{arena: a, given: make([]uint64, k)}
	s.pool, err = pool.New(pool.Config{Arena: a, Owner: pagemem.NewOwnerID(), RingSize: crossPool, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, errors.Join(err, a.Close())
	}
	s.put = func(ids []pagemem.PageID) {
		for _, id := range ids {
			s.pool.Put(id, 1, stranger)
		}
	}
	if bulk {
		s.put = func(ids []pagemem.PageID) { s.pool.PutBulk(ids, stranger) }
	}
	for i := range k {
		c, err := startConsumer(crossRing, pool.BulkSize, p.CPU(1+i), s.put)
		if err != nil {
			return nil, errors.Join(err, s.close())
		}
		s.returners = append(s.returners, c)
	}
	return s, nil
}

func (s *crossSide) close() error {
	for _, c := range s.returners {
		c.stop()
	}
	return closePool(s.pool, s.arena)
}

// crossRunner sends pages to the returners in turn. Only the side that is measured has threads.
type crossRunner struct {
	n, k   int
	params bench.Params
}

func newCrossRunner(k, n int, p bench.Params) (*crossRunner, error) {
	return &crossRunner{n: n, k: k, params: p}, nil
}

func (r *crossRunner) Run(ctx context.Context, variant string) (sample bench.Sample, err error) {
	s, err := newCrossSide(r.k, variant == "bulk", r.params)
	if err != nil {
		return sample, err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	const slices = 15
	n := max(1, r.n/slices)
	if sample.Cost, err = bench.Timed(slices, n, func() error { return s.send(ctx, n) }); err != nil {
		return sample, err
	}
	s.pool.Publish()
	st := s.pool.Stats()
	sample.Counters = map[string]float64{"ring full per page": float64(st.RingFull) / float64(slices*n)}
	return sample, s.exact(st, uint64(slices*n))
}

// send allocates n pages and ends when all are back.
func (s *crossSide) send(ctx context.Context, n int) error {
	if len(s.returners) == 0 {
		return s.turns(n)
	}
	for i := range n {
		id, ok := s.pool.Alloc()
		if !ok {
			return errExhausted
		}
		to := i % len(s.returners)
		if err := s.returners[to].give(ctx, id); err != nil {
			return err
		}
		s.given[to]++
	}
	for i, c := range s.returners {
		if err := c.await(ctx, s.given[i]); err != nil {
			return err
		}
	}
	return nil
}

// turns is send for one thread.
func (s *crossSide) turns(n int) error {
	var ids [pool.BulkSize]pagemem.PageID
	for n > 0 {
		batch := ids[:min(n, len(ids))]
		for i := range batch {
			id, ok := s.pool.Alloc()
			if !ok {
				return errExhausted
			}
			batch[i] = id
		}
		s.put(batch)
		n -= len(batch)
	}
	return nil
}

// exact wants every page to have been allocated and returned once, and all that entered the pool and did not overflow to be in it.
func (s *crossSide) exact(st pool.Stats, pages uint64) error {
	if got := st.Fast + st.Slow + st.Refill; got != pages {
		return fmt.Errorf("%d pages were sent, the pool counts %d allocations", pages, got)
	}
	if got := st.Ring + st.RingFull; got != pages || st.ReleasedShared != 0 {
		return fmt.Errorf("%d pages were sent, %d came back, %d of them did not fit, and %d were shared", pages, got, st.RingFull, st.ReleasedShared)
	}
	if n := s.arena.InUse(); int32(n) != s.pool.InFlight() {
		return fmt.Errorf("the pool counts %d pages, %d are in use", s.pool.InFlight(), n)
	}
	return nil
}

func (*crossRunner) Close() error { return nil }
