package experiments

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/vhostd/vhostd/internal/bench"
)

const fragPoolSource = "pfrag_pool (RFC of August 2021, cover letter), iperf on Kunpeng 920 with hns3, 100 Gbit/s, MTU 1500"

// Values of --map: what a fresh buffer costs. strict is what an IOMMU in strict mode asks for, passthrough is none of it.
const (
	mapStrict      = "strict"
	mapPassthrough = "passthrough"
)

// fragPoolOptions are those of the three experiments.
func fragPoolOptions(flows, msg string, more ...bench.Option) []bench.Option {
	return append([]bench.Option{
		{Name: "map", Default: "strict,passthrough", Help: "buffers without a pool: mapped and unmapped each time, or from the arena (`LIST` of strict, passthrough)"},
		{Name: "flows", Default: flows, Help: "senders, each on a thread (`N`; with a fixed rate 4)"},
		{Name: "msg", Default: msg, Help: "bytes of a message (`LIST`)"},
	}, more...)
}

// fragPool is E2: a sender whose buffers are mapped for each fragment against one whose buffers come back mapped.
func fragPool() bench.Experiment {
	return fragPoolExperiment("E2", "64K", mapStrict, 1.367, "Sender's buffers: mapped each time or recycled",
		"recycling raises the throughput of one flow by 36.7 % (30 to 41 Gbit/s), with the IOMMU in strict mode")
}

// fragPoolPassthrough is E2p: the same where mapping costs nothing.
func fragPoolPassthrough() bench.Experiment {
	// Messages of 64K are all copying; short ones show what sharing a page saves.
	return fragPoolExperiment("E2p", "64K,256", mapPassthrough, 1.025, "Sender's buffers: from the arena or recycled",
		"recycling raises the throughput of one flow by about 2.5 % with the IOMMU in passthrough mode")
}

func fragPoolExperiment(name, msg, mapping string, target float64, title, claim string) bench.Experiment {
	return bench.Experiment{
		Name: name, Command: "pfragpool", Title: title, Claim: claim, Source: fragPoolSource,
		Options: fragPoolOptions("1", msg, bench.Option{Name: "n", Default: "16M", Full: "1G", Help: "bytes of one observation, of each flow (`N`)"}),
		Build: func(p bench.Params) ([]bench.Comparison, error) {
			n, err := p.Size("n", 64<<10, 1<<30)
			if err != nil {
				return nil, err
			}
			return buildFragPool(p, mapping, sendSetting{bytes: n}, func(s sendSetting) bench.Comparison {
				return bench.Comparison{Variant: s.String(), Target: target, Unit: "ns/KiB"}
			})
		},
	}
}

// fragPoolCPU is E2c: processor time at a fixed rate.
func fragPoolCPU() bench.Experiment {
	return bench.Experiment{
		Name: "E2c", Command: "pfragpool", Title: "Sender's buffers: processor time at a fixed rate",
		Claim:  "four flows at line rate take 20 % less processor time with recycling, the IOMMU in strict mode: 1.25 times as much without",
		Source: fragPoolSource,
		Options: fragPoolOptions("4", "64K",
			bench.Option{Name: "rate", Default: "256M", Full: "1G", Help: "bytes a second, of all flows together (`N`)"},
			bench.Option{Name: "seconds", Default: "1", Full: "10", Help: "seconds of one observation (`N`)"}),
		Build: func(p bench.Params) ([]bench.Comparison, error) {
			rate, err := p.Size("rate", 1<<20, 1<<36)
			if err != nil {
				return nil, err
			}
			seconds, err := p.Size("seconds", 1, 3600)
			if err != nil {
				return nil, err
			}
			return buildFragPool(p, mapStrict, sendSetting{rate: rate, seconds: seconds}, func(s sendSetting) bench.Comparison {
				return bench.Comparison{Variant: fmt.Sprintf("%v, %s a second", s, bench.FormatSize(rate)), Target: 1.25, Unit: "CPU ns/KiB"}
			})
		},
	}
}

// buildFragPool makes a comparison for each size of a message, none if --map leaves the experiment's mapping out.
func buildFragPool(p bench.Params, mapping string, s sendSetting, describe func(sendSetting) bench.Comparison) (list []bench.Comparison, err error) {
	maps, err := p.List("map", mapStrict, mapPassthrough)
	if err != nil {
		return nil, err
	}
	if s.flows, err = p.Size("flows", 1, 64); err != nil {
		return nil, err
	}
	sizes, err := p.Sizes("msg", 1, maxMessage)
	if err != nil || !slices.Contains(maps, mapping) {
		return nil, err
	}
	s.mapping, s.params = mapping, p
	for _, size := range sizes {
		s.msg = size
		c := describe(s)
		c.A, c.B = map[string]string{mapStrict: "mapped", mapPassthrough: "arena"}[mapping], "fragpool"
		c.Open = openSenders(s)
		list = append(list, c)
	}
	return list, nil
}

// openSenders binds the setting, which the loop goes on changing.
func openSenders(s sendSetting) func(context.Context) (bench.Runner, error) {
	return func(context.Context) (bench.Runner, error) { return newSendRunner(s) }
}

// sendSetting is what senders do.
type sendSetting struct {
	flows, msg    int
	mapping       string
	bytes         int // of each flow; or:
	rate, seconds int // of all flows
	params        bench.Params
}

func (s sendSetting) String() string {
	flows := "1 flow"
	if s.flows > 1 {
		flows = fmt.Sprint(s.flows, " flows")
	}
	return fmt.Sprintf("%s, messages of %s, %s", flows, bench.FormatSize(s.msg), s.mapping)
}

// sendRunner has flows send and adds up what they took.
type sendRunner struct {
	sendSetting
	flows []*sender
}

func newSendRunner(s sendSetting) (*sendRunner, error) {
	r := &sendRunner{sendSetting: s}
	for range s.flows {
		f, err := newSender(s)
		if err != nil {
			return nil, errors.Join(err, r.Close())
		}
		r.flows = append(r.flows, f)
	}
	return r, nil
}

func (r *sendRunner) Run(ctx context.Context, variant string) (sample bench.Sample, err error) {
	results := make([]sent, len(r.flows))
	ended := make(chan error, len(r.flows))
	for i, f := range r.flows {
		go func() { ended <- f.run(ctx, variant, r.params.CPU(i), &results[i]) }()
	}
	for range r.flows {
		err = errors.Join(err, <-ended)
	}
	if err != nil {
		return sample, err
	}
	var total sent
	cost := 0.0
	for _, s := range results {
		total.bytes, total.fragments, total.maps, total.cpu = total.bytes+s.bytes, total.fragments+s.fragments, total.maps+s.maps, total.cpu+s.cpu
		total.elapsed = max(total.elapsed, s.elapsed)
		cost = max(cost, s.best)
	}
	kib := float64(total.bytes) / 1024
	sample.Cost = cost / float64(len(r.flows)) // together they send so many times as much
	if r.rate > 0 {
		sample.Cost = float64(total.cpu.Nanoseconds()) / kib
	}
	sample.Counters = map[string]float64{
		"maps per fragment": float64(total.maps) / float64(total.fragments),
		"CPU ns/KiB":        float64(total.cpu.Nanoseconds()) / kib,
		"MiB/s, all flows":  kib / 1024 / total.elapsed.Seconds(),
	}
	if variant == "fragpool" && total.maps != 0 {
		return sample, fmt.Errorf("%d pages were mapped for %d fragments in the steady state, in which all come back", total.maps, total.fragments)
	}
	if variant == "mapped" && total.maps != total.fragments {
		return sample, fmt.Errorf("%d mappings for %d fragments, each of which has one of its own", total.maps, total.fragments)
	}
	return sample, nil
}

func (r *sendRunner) Close() error {
	var errs []error
	for _, f := range r.flows {
		errs = append(errs, f.close())
	}
	return errors.Join(errs...)
}
