package experiments

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"sync/atomic"

	"github.com/vhostd/vhostd/fragalloc"
	"github.com/vhostd/vhostd/internal/bench"
)

// Kinds of copies: nt stores all whole lines past the cache, hybrid the first 128 bytes as usual; both with one fence a call.
var copyKinds = map[string]func([]fragalloc.CopyOp){"cached": fragalloc.CopyVec, "nt": copyStream, "hybrid": copyHybrid}

func copyStream(ops []fragalloc.CopyOp) { fragalloc.CopyVecStream(ops, fragalloc.NoCacheMin) }
func copyHybrid(ops []fragalloc.CopyOp) { fragalloc.CopyVecNoCache(ops, fragalloc.NoCacheMin) }

// copyBatch is how many packets are copied before anybody reads them.
const copyBatch = 64

// copies is E6: cached and non-temporal copies of packets by size, area and reader, and whether auto chooses well.
func copies() bench.Experiment {
	return bench.Experiment{
		Name: "E6", Command: "copy", Title: "Copies of packets: cached, past the cache, and what auto chooses",
		Claim: "non-temporal stores pay where the copy is not read soon: auto is never worse than 0.97 times the best fixed choice",
		Source: "skb_do_copy_data_nocache (net/core); measured rules in this project's design: 2.5 times at 64 MiB, 1536 bytes, never read; " +
			"a fence costs 170 ns",
		Options: []bench.Option{
			{Name: "size", Default: "256,1536,16K", Full: "64,256,1536,4096,16K,32K", Help: "bytes of a packet (`LIST`)"},
			{Name: "area", Default: "32K,1M,64M", Full: "32K,256K,1M,4M,32M,64M,1G", Help: "bytes that copies go round in (`LIST`)"},
			{Name: "after", Default: "none,self,other", Help: "who reads a batch after it was copied (`LIST` of none, self, other)"},
			{Name: "kind", Default: "cached,nt,hybrid", Help: "copies to hold against what auto chooses (`LIST` of cached, nt, hybrid)"},
			{Name: "n", Default: "1M", Full: "64M", Help: "bytes copied in one slice of an observation (`N`)"},
		},
		Build: buildCopies,
	}
}

func buildCopies(p bench.Params) (list []bench.Comparison, err error) {
	sizes, err := p.Sizes("size", 64, 64<<10)
	if err != nil {
		return nil, err
	}
	areas, err := p.Sizes("area", 4096, 4<<30)
	if err != nil {
		return nil, err
	}
	readers, err := p.List("after", "none", "self", "other")
	if err != nil {
		return nil, err
	}
	kinds, err := p.List("kind", "cached", "nt", "hybrid")
	if err != nil {
		return nil, err
	}
	n, err := p.Size("n", 1024, 1<<30)
	if err != nil {
		return nil, err
	}
	for _, area := range areas {
		for _, size := range sizes {
			for _, after := range readers {
				s := copySetting{size: size, area: area, after: after, bytes: n, cpu: p.CPU(1)}
				list = append(list, s.comparisons(kinds)...)
			}
			if size == 1536 {
				s := copySetting{size: size, area: area, after: "none", bytes: n / 8}
				list = append(list, s.comparison("hybrid, a fence a packet", "hybrid, a fence for 64", 0,
					"a fence costs about 170 ns: once for a batch, not for a packet"))
			}
		}
	}
	return list, nil
}

// copySetting is a place of the grid.
type copySetting struct {
	size, area int
	after      string
	bytes, cpu int
}

func (s copySetting) String() string {
	return fmt.Sprintf("%s bytes, area %s, read by %s", strconv.Itoa(s.size), bench.FormatSize(s.area), s.after)
}

// auto is what the policy chooses (--copy auto). A port whose frames this core reads holds none back for another; an area that
// nobody has read yet is held back as a whole.
func (s copySetting) auto() string {
	if s.after != "self" && s.size >= fragalloc.AutoMin && fragalloc.PastCache(s.area) {
		return "hybrid"
	}
	return "cached"
}

// comparisons want what auto chooses to be at most 3 % slower than each kind.
func (s copySetting) comparisons(kinds []string) (list []bench.Comparison) {
	for _, kind := range kinds {
		if chosen := s.auto(); kind != chosen {
			list = append(list, s.comparison(kind, chosen, autoTarget, ""))
		}
		if kind != "cached" && s.after == "none" && s.size == 1536 && s.area == 64<<20 {
			list = append(list, s.comparison("cached", kind, 1.5,
				"at 64 MiB, 1536 bytes, never read, copies past the cache are at least 1.5 times as fast"))
		}
	}
	return list
}

// autoTarget is what the choice of auto may lose against the best one.
const autoTarget = 0.97

func (s copySetting) comparison(a, b string, target float64, claim string) bench.Comparison {
	name := s.String() + ": " + a + " against " + b
	if target == autoTarget {
		name += " (auto)"
	}
	return bench.Comparison{Variant: name, A: a, B: b, Target: target, Claim: claim, Unit: "ns/packet",
		Open: func(context.Context) (bench.Runner, error) { return newCopyRunner(s) }}
}

// copyRunner copies batches and has them read.
type copyRunner struct {
	copySetting
	area    *area
	batches int
	turn    atomic.Uint32 // odd: the reader's
	quit    atomic.Bool
	ended   chan error
}

func newCopyRunner(s copySetting) (*copyRunner, error) {
	a, err := newArea(s.area, s.size, copyBatch)
	if err != nil {
		return nil, err
	}
	r := &copyRunner{copySetting: s, area: a, batches: max(1, s.bytes/(s.size*copyBatch)), ended: make(chan error, 1)}
	if s.after != "other" {
		r.ended <- nil
		return r, nil
	}
	started := make(chan error)
	go r.reader(started)
	if err := <-started; err != nil {
		return nil, errors.Join(err, a.close())
	}
	return r, nil
}

// reader is the other core.
func (r *copyRunner) reader(started chan<- error) {
	unlock, err := bench.LockThread(r.cpu)
	started <- err
	if err != nil {
		return
	}
	defer unlock()
	for !r.quit.Load() {
		if r.turn.Load()&1 == 1 {
			r.area.read()
			r.turn.Add(1)
		}
		spin()
	}
	r.ended <- nil
}

// spin has the stack check that a loop which waits needs for the collector's sake.
//
//go:noinline
func spin() { runtime.KeepAlive(nil) }

func (r *copyRunner) Run(_ context.Context, variant string) (bench.Sample, error) {
	copyVec, fence := copyKinds[variant], copyBatch
	switch variant {
	case "hybrid, a fence a packet":
		copyVec, fence = copyHybrid, 1
	case "hybrid, a fence for 64":
		copyVec = copyHybrid
	}
	cost, err := bench.Timed(15, r.batches*copyBatch, func() error {
		for range r.batches {
			r.area.copy(copyVec, fence)
			switch r.after {
			case "self":
				r.area.read()
			case "other":
				for turn := r.turn.Add(1); r.turn.Load() == turn; {
					spin()
				}
			}
		}
		return nil
	})
	if err == nil {
		err = r.area.check()
	}
	return bench.Sample{Cost: cost}, err
}

func (r *copyRunner) Close() error {
	r.quit.Store(true)
	return errors.Join(<-r.ended, r.area.close())
}

// copyVictim is E6v: copies between two looks of somebody at a working set of his own.
func copyVictim() bench.Experiment {
	return bench.Experiment{
		Name: "E6v", Command: "copy", Title: "Copies beside a working set",
		Claim:  "a core that copies and also walks 1 MiB of its own needs 1.3 times as long with cached copies, from areas of 1 MiB on",
		Source: "measured rules in this project's design: 1.35 to 2.35 times, 0.66 to 1.0 for an area of 32 KiB",
		Options: []bench.Option{
			{Name: "victim", Default: "1M", Help: "bytes of the working set (`N`)"},
			{Name: "victim-area", Default: "32K,1M,64M", Help: "bytes that copies go round in (`LIST`)"},
		},
		Build: func(p bench.Params) ([]bench.Comparison, error) {
			set, err := p.Size("victim", 4096, 1<<30)
			if err != nil {
				return nil, err
			}
			areas, err := p.Sizes("victim-area", 4096, 4<<30)
			if err != nil {
				return nil, err
			}
			var list []bench.Comparison
			for _, bytes := range areas {
				target := 0.0
				if bytes >= 1<<20 {
					target = 1.3
				}
				list = append(list, bench.Comparison{
					Variant: fmt.Sprintf("area %s, working set %s", bench.FormatSize(bytes), bench.FormatSize(set)), A: "cached", B: "hybrid", Target: target,
					Unit: "ns/packet", Open: func(context.Context) (bench.Runner, error) { return newVictimRunner(bytes, set) },
				})
			}
			return list, nil
		},
	}
}

type victimRunner struct {
	area *area
	walk *walk
}

func newVictimRunner(bytes, set int) (*victimRunner, error) {
	a, err := newArea(bytes, 1536, copyBatch)
	if err != nil {
		return nil, err
	}
	w, err := newWalk(set)
	if err != nil {
		return nil, errors.Join(err, a.close())
	}
	return &victimRunner{a, w}, nil
}

func (r *victimRunner) Run(_ context.Context, variant string) (bench.Sample, error) {
	const batches = 8
	lines := len(r.walk.memory) / 64
	cost, err := bench.Timed(15, batches*copyBatch, func() error {
		for range batches {
			r.area.copy(copyKinds[variant], copyBatch)
			r.walk.steps(lines / 4)
		}
		return nil
	})
	return bench.Sample{Cost: cost}, errors.Join(err, r.area.check())
}

func (r *victimRunner) Close() error { return errors.Join(r.area.close(), r.walk.close()) }
