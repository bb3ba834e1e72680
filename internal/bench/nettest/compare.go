package nettest

import (
	"context"
	"slices"

	"github.com/vhostd/vhostd/internal/bench"
)

// origin of the throughput run.
const origin = "vhost_net_test (tools/virtio, Linux)"

// runner runs variants of the throughput run for package bench.
type runner struct {
	variants map[string]Options
	tell     func(variant, phase string, received, of int)
	keep     func(variant string, m Measurement)
}

// Compare makes a comparison of two variants, whose cost is the time per frame. tell and keep may be nil; keep gets every measurement,
// of the warm-up too.
func Compare(names [2]string, variants [2]Options, tell func(variant, phase string, received, of int),
	keep func(variant string, m Measurement)) bench.Comparison {
	return bench.Comparison{
		Variant: variants[0].String() + ": " + names[0] + " against " + names[1], A: names[0], B: names[1], Unit: "ns/frame",
		Open: func(context.Context) (bench.Runner, error) {
			return &runner{variants: map[string]Options{names[0]: variants[0], names[1]: variants[1]}, tell: tell, keep: keep}, nil
		},
	}
}

func (r *runner) Run(ctx context.Context, variant string) (bench.Sample, error) {
	m, err := Run(ctx, r.variants[variant], func(phase string, received, of int) {
		if r.tell != nil {
			r.tell(variant, phase, received, of)
		}
	})
	if err != nil {
		return bench.Sample{}, err
	}
	if r.keep != nil {
		r.keep(variant, m)
	}
	return bench.Sample{Cost: m.Elapsed.Seconds() * 1e9 / float64(m.Frames), Counters: m.Counters()}, nil
}

func (*runner) Close() error { return nil }

// Experiment is what a comparison of --vs belongs to.
func Experiment() bench.Experiment {
	return bench.Experiment{Name: "net-test", Command: "net-test", Title: "Throughput run", Source: origin}
}

// Wires are the accepted values of Options.Wire.
func Wires() []string { return slices.Clone([]string{Pair, Sock, Tap, Reflect}) }
