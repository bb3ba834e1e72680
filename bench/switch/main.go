// Command switch measures a switch of vhostd between two front-ends of the vhost-user protocol: frames a second, and processor time of
// vhostd a frame. `scripts/bench.sh switch` builds and runs it. The front-ends take turns on one thread, so that two processors are
// enough. Runs of all cells are interleaved; what is printed is the median with the range.
package main

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"time"
)

// cell is one thing to measure.
type cell struct {
	size int
	wake string
}

// result is what one run of a cell gave.
type result struct {
	rate float64 // frames a second that arrived
	cpu  float64 // nanoseconds of vhostd's processor time a frame that arrived
	lost float64 // share of the frames
}

func main() {
	binary := flag.String("vhostd", "bin/vhostd", "program to measure (`PATH`)")
	runs := flag.Int("runs", 5, "runs of each cell (`N`)")
	seconds := flag.Float64("seconds", 2, "length of a run (`SECONDS`)")
	cpus := flag.String("cpus", "0", "processors of vhostd's workers (`LIST`)")
	own := flag.Int("own-cpu", 1, "processor of the front-ends, -1 for any (`N`)")
	flag.Parse()
	if err := run(*binary, *cpus, *own, *runs, time.Duration(*seconds*float64(time.Second))); err != nil {
		fmt.Fprintln(os.Stderr, "switch:", err)
		os.Exit(1)
	}
}

func run(binary, cpus string, own, runs int, length time.Duration) error {
	if err := pin(own); err != nil {
		return err
	}
	var cells []cell
	for _, wake := range []string{"poll", "adaptive"} {
		for _, size := range []int{64, 1500} {
			cells = append(cells, cell{size, wake})
		}
	}
	results := make([][]result, len(cells))
	for range runs {
		for i, c := range cells {
			r, err := measure(binary, cpus, c, length)
			if err != nil {
				return fmt.Errorf("%d bytes, --wake %s: %w", c.size, c.wake, err)
			}
			results[i] = append(results[i], r)
		}
	}
	fmt.Println("| bytes | --wake | Mpps | CPU of vhostd, ns a frame | lost |\n|---|---|---|---|---|")
	for i, c := range cells {
		show := func(format string, value func(result) float64) string {
			var all []float64
			for _, r := range results[i] {
				all = append(all, value(r))
			}
			slices.Sort(all)
			return fmt.Sprintf(format+" ["+format+".."+format+"]", all[len(all)/2], all[0], all[len(all)-1])
		}
		fmt.Printf("| %d | %s | %s | %s | %s %% |\n", c.size, c.wake,
			show("%.2f", func(r result) float64 { return r.rate / 1e6 }), show("%.0f", func(r result) float64 { return r.cpu }),
			show("%.2f", func(r result) float64 { return 100 * r.lost }))
	}
	return nil
}
