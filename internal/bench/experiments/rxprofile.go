package experiments

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime/pprof"
	"slices"
	"strings"
	"time"

	"github.com/google/pprof/profile"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/pool"
)

// allocatorShare is the percentage below which no function can be one of a profile's first fifteen: the source's fifteenth has about 1.3 %.
const allocatorShare = 1.0

// profileComparison is E4's other half: how much of the receiver's time the page allocator takes.
func profileComparison(variant string, size int, target float64) bench.Comparison {
	return bench.Comparison{
		Variant: fmt.Sprintf("%d bytes, allocator in the profile, recycle %s", size, variant), A: variant, Target: target, AtMost: true,
		Unit: "% of samples", Claim: "with recycling the allocator leaves the profile: its functions had 10.07 % before",
		Open: func(context.Context) (bench.Runner, error) {
			r, err := newDropRunner(pool.Config{}, size, 0)
			if err != nil {
				return nil, err
			}
			return &profileRunner{r, 500 * time.Millisecond}, nil
		},
	}
}

// profileRunner receives and drops under the sampling profiler, whose clock ticks a hundred times a second.
type profileRunner struct {
	*dropRunner
	length time.Duration
}

func (r *profileRunner) Run(ctx context.Context, variant string) (bench.Sample, error) {
	var out bytes.Buffer
	if err := pprof.StartCPUProfile(&out); err != nil {
		return bench.Sample{}, err
	}
	err := r.work(ctx, variant == "on")
	pprof.StopCPUProfile()
	if err != nil {
		return bench.Sample{}, err
	}
	p, err := profile.Parse(&out)
	if err != nil {
		return bench.Sample{}, err
	}
	share, samples := sharesOf(p, isAllocator)
	if samples == 0 {
		return bench.Sample{}, errors.New("the profile has no samples (does this machine lack SIGPROF timers?)")
	}
	return bench.Sample{Cost: 100 * share, Counters: map[string]float64{"samples": float64(samples)}}, nil
}

// work receives until the thread has run for the length, however long that takes on a machine that is busy.
func (r *profileRunner) work(ctx context.Context, recycle bool) error {
	begin, err := threadTime()
	for now := begin; err == nil && ctx.Err() == nil && now-begin < r.length; {
		if err = r.batches(recycle, 256); err == nil {
			now, err = threadTime()
		}
	}
	return err
}

func threadTime() (time.Duration, error) {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &ts); err != nil {
		return 0, fmt.Errorf("processor time of this thread: %w", err)
	}
	return time.Duration(ts.Nano()), nil
}

// allocatorMethods of the arena get pages from its free lists or give them back there. Counting a page's holders is not part of
// it: recycling needs that, too.
var allocatorMethods = []string{"Alloc", "AllocBulk", "Free", "FreeBulk", "clean", "account", "takeChunk", "carve", "takeWhole", "takePages",
	"addPartial", "giveBack", "pushWhole", "link", "unlink", "zoneOf"}

func isAllocator(function string) bool {
	_, method, ok := strings.Cut(function, "/pagemem.(*Arena).")
	return ok && slices.Contains(allocatorMethods, method)
}

// sharesOf returns the part of all samples taken in functions that match, inlined ones included. A sample inside of what
// they call elsewhere, such as the runtime's preemption or the race detector, counts for the function of this program that was there.
func sharesOf(p *profile.Profile, match func(function string) bool) (share float64, samples int64) {
	var matching int64
	for _, s := range p.Sample {
		samples += s.Value[0]
		if match(innermost(s)) {
			matching += s.Value[0]
		}
	}
	if samples == 0 {
		return 0, 0
	}
	return float64(matching) / float64(samples), samples
}

func innermost(s *profile.Sample) string {
	for _, location := range s.Location {
		for _, line := range location.Line {
			if name := line.Function.Name; strings.HasPrefix(name, "github.com/vhostd/") {
				return name
			}
		}
	}
	return ""
}
