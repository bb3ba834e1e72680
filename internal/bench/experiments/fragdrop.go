package experiments

import (
	"context"
	"fmt"

	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/pagemem"
)

// fragDrop is E1d: packets of one allocator that are dropped together.
func fragDrop() bench.Experiment {
	return bench.Experiment{
		Name: "E1d", Command: "pagefrag", Title: "Dropped packets: a reference at a time or a page at a time",
		Claim:  "dropping the references of a batch with one operation for each page is 5 % faster where all packets are dropped (own target)",
		Source: "tun_page of tun_xdp_one and vhost_net's batches (drivers/net/tun.c)",
		Options: []bench.Option{
			{Name: "drop", Default: "each,batched", Help: "ways to drop (`LIST` of each, batched)"},
			{Name: "frame", Default: "64,256,1536", Help: "bytes of a packet (`LIST`)"},
			{Name: "n", Default: "1M", Full: "512000000", Help: "packets of one observation (`N`)"},
		},
		Build: func(p bench.Params) (list []bench.Comparison, err error) {
			ways, err := p.List("drop", "each", "batched")
			if err != nil {
				return nil, err
			}
			frames, err := p.Sizes("frame", 60, pagemem.MaxFrag)
			if err != nil {
				return nil, err
			}
			n, err := p.Size("n", 1024, 1<<30)
			if err != nil {
				return nil, err
			}
			for _, size := range frames {
				c := bench.Comparison{
					Variant: fmt.Sprintf("%d bytes, batches of 64", size), A: "each", B: "batched", Target: 1.05, Unit: "ns/packet",
					Open: func(context.Context) (bench.Runner, error) {
						r, err := newFragRunner(fragSetting{size: uint32(size), align: pagemem.Line, n: n})
						return dropEach{r}, err
					},
				}
				if len(ways) == 1 {
					c.A, c.B, c.Target = ways[0], "", 0
				}
				list = append(list, c)
			}
			return list, nil
		},
	}
}

// dropEach allocates a batch and drops it.
type dropEach struct{ *fragRunner }

func (r dropEach) Run(_ context.Context, variant string) (bench.Sample, error) {
	drop := r.free
	if variant == "batched" {
		drop = func(ids []pagemem.PageID) { r.arena.ReleaseBulk(ids, stranger) }
	}
	const slices = 15
	rounds := max(1, r.n/slices/len(r.ids))
	cost, err := bench.Timed(slices, rounds*len(r.ids), func() error {
		for range rounds {
			for i := range r.ids {
				f, err := r.bias.Alloc(r.size, r.align)
				if err != nil {
					return err
				}
				r.ids[i] = f.Page
			}
			drop(r.ids[:])
		}
		return nil
	})
	if err != nil {
		return bench.Sample{}, err
	}
	return bench.Sample{Cost: cost}, r.settle()
}
