package experiments

import (
	"context"
	"fmt"
	"slices"
	"strconv"

	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/pagemem"
)

// maxBulk bounds what is allocated at once.
const maxBulk = 1024

// arenaBulk is E3u: pages one at a time against pages in bulk.
func arenaBulk() bench.Experiment {
	return bench.Experiment{
		Name: "E3u", Command: "arenabulk", Title: "Pages from the arena, single and in bulk",
		Claim:  "alloc+free of a page costs 55.5 ns single, 30.6 ns in arrays of 64: 1.81 times; falling from step to step up to 16",
		Source: "page_bench04_bulk of the page_pool bulk refill series (2021)",
		Options: []bench.Option{
			{Name: "bulk", Default: "1,2,4,8,16,32,64,128", Help: "pages at once (`LIST`)"},
			{Name: "form", Default: "array,list", Help: "how pages come in bulk (`LIST` of array, list)"},
			{Name: "n", Default: "8K", Full: "1M", Help: "pages of one observation (`N`)"},
		},
		Build: func(p bench.Params) ([]bench.Comparison, error) {
			bulks, err := p.Sizes("bulk", 1, maxBulk)
			if err != nil {
				return nil, err
			}
			n, err := p.Size("n", maxBulk, 1<<30)
			if err != nil {
				return nil, err
			}
			forms, err := p.List("form", "array", "list")
			if err != nil {
				return nil, err
			}
			var list []bench.Comparison
			for _, form := range forms {
				list = append(list, bulkSteps(form, bulks, n)...)
			}
			return list, nil
		},
	}
}

// bulkSteps compares each number of pages with the next one, and 1 with 64.
func bulkSteps(form string, bulks []int, n int) (list []bench.Comparison) {
	name := func(k int) string {
		if k == 1 {
			return "single"
		}
		return fmt.Sprint(form, " ", k)
	}
	compare := func(a, b int, target float64, claim string) {
		variant := name(a) + " against " + name(b)
		if claim != "" {
			variant += " (the series' table)"
		}
		list = append(list, bench.Comparison{
			Variant: variant, A: name(a), B: name(b), Target: target, Claim: claim, Unit: "ns/page",
			Open: func(context.Context) (bench.Runner, error) {
				return newBulkRunner(form == "list", map[string]int{name(a): a, name(b): b}, n)
			},
		})
	}
	for i := 1; i < len(bulks); i++ {
		target := 0.0
		if bulks[i] <= 16 {
			target = 1 // falling
		}
		compare(bulks[i-1], bulks[i], target, "")
	}
	if slices.Contains(bulks, 64) && slices.Contains(bulks, 1) {
		target, claim := 1.81, "alloc+free of a page costs 55.5 ns single, 30.6 ns in arrays of 64: 1.81 times"
		if form == "list" {
			target, claim = 1.48, "alloc+free of a page costs 55.5 ns single, 37.3 ns in lists of 64: 1.48 times"
		}
		compare(1, 64, target, claim)
	}
	return list
}

// bulkRunner allocates and frees pages of an arena.
type bulkRunner struct {
	arena *pagemem.Arena
	list  bool
	bulks map[string]int
	n     int
	ids   [maxBulk]pagemem.PageID
}

func newBulkRunner(list bool, bulks map[string]int, n int) (*bulkRunner, error) {
	a, err := pagemem.NewArena(pagemem.Config{Bytes: 64 << 20, Name: "vhostd-bench"})
	if err != nil {
		return nil, err
	}
	return &bulkRunner{arena: a, list: list, bulks: bulks, n: n}, nil
}

func (r *bulkRunner) Run(_ context.Context, variant string) (bench.Sample, error) {
	bulk := r.bulks[variant]
	ids := r.ids[:bulk]
	rounds := r.n / bulk
	cost, err := bench.Timed(15, rounds*bulk, func() error {
		for range rounds {
			if bulk == 1 {
				id, ok := r.arena.Alloc(0, pagemem.NoReserve)
				if !ok {
					return errExhausted
				}
				r.arena.Unref(id, 1)
				continue
			}
			if r.alloc(ids) != bulk {
				return errExhausted
			}
			for _, id := range ids {
				r.arena.Unref(id, 1)
			}
		}
		return nil
	})
	if err == nil && r.arena.InUse() != 0 {
		err = fmt.Errorf("bulk %s: %d pages are left over", strconv.Itoa(bulk), r.arena.InUse())
	}
	return bench.Sample{Cost: cost}, err
}

// alloc fills ids. A list is walked as the kernel's consumer walked it, page by page.
func (r *bulkRunner) alloc(ids []pagemem.PageID) (n int) {
	if !r.list {
		return r.arena.AllocBulk(ids)
	}
	id, got := r.arena.AllocList(len(ids))
	for ; n < got; n++ {
		ids[n] = id
		id = r.arena.ListNext(id)
	}
	return got
}

func (r *bulkRunner) Close() error { return r.arena.Close() }
