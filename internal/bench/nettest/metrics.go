package nettest

import (
	"fmt"
	"io"
	"math"
	"strings"

	"github.com/vhostd/vhostd/internal/bench"
)

// Metric is one figure of a measurement. Value is NaN where it cannot be had.
type Metric struct {
	Name, Unit, Note string
	Value            float64
}

// Metrics are the figures of a measurement in the order in which they are shown.
func (m Measurement) Metrics() []Metric {
	frames, seconds := float64(m.Frames), m.Elapsed.Seconds()
	own := func(v float64) float64 {
		if m.Own {
			return v
		}
		return math.NaN()
	}
	list := []Metric{
		{"elapsed", "s", "", seconds},
		{"time per frame", "ns", "", seconds * 1e9 / frames},
		{"rate", "Mpps", "", frames / seconds / 1e6},
		{"CPUs utilized", "", "guest and daemon", own((m.Guest.CPU + m.Daemon.CPU) / seconds)},
		{"guest CPU", "s", "", m.Guest.CPU},
		{"daemon CPU", "s", "", own(m.Daemon.CPU)},
		{"guest voluntary switches", "", perFrame(m.Guest.Voluntary, frames), float64(m.Guest.Voluntary)},
		{"worker voluntary switches", "", perFrame(m.Worker.Voluntary, frames), own(float64(m.Worker.Voluntary))},
		{"context switches", "", "all threads, both kinds",
			own(float64(m.Guest.Voluntary + m.Guest.Involuntary + m.Daemon.Voluntary + m.Daemon.Involuntary))},
		{"guest minor faults", "", "", float64(m.Guest.Minor)},
		{"worker minor faults", "", "", own(float64(m.Worker.Minor))},
		{"kicks sent", "", perFrame(m.Driver.Kicks, frames), float64(m.Driver.Kicks)},
		{"kicks suppressed", "", "", float64(m.Driver.KicksSpared)},
		{"calls received", "", perFrame(m.Driver.Calls, frames), float64(m.Driver.Calls)},
		{"calls suppressed", "", "batches without a call", float64(m.Batches) - float64(m.Calls)},
		{"spurious wake-ups", "", "of the guest", float64(m.Driver.Spurious)},
		{"guest sleeps", "", "", float64(m.Driver.Sleeps + m.Wire.Sleeps)},
		{"worker sleeps", "", "", float64(m.Sleeps)},
		{"resets", "", "", float64(m.Driver.Resets)},
		{"other frames", "", "of the network itself", float64(m.Driver.Foreign + m.Wire.Foreign)},
	}
	if m.Driver.Unset > 0 {
		list = append(list, Metric{"num_buffers unset", "", "virtio 1.3 section 5.1.6.4.1 wants 1", float64(m.Driver.Unset)})
	}
	for _, name := range []string{"rx", "tx", "loop"} {
		if d, ok := m.Phases[name]; ok {
			n := frames / float64(len(m.Phases))
			list = append(list, Metric{name + " time per frame", "ns", "", d.Seconds() * 1e9 / n})
		}
	}
	for _, h := range hardware {
		value := math.NaN()
		if m.Hardware != nil {
			value = m.Hardware[h.name]
		}
		list = append(list, Metric{h.name, "", "", value})
	}
	return list
}

func perFrame(n uint64, frames float64) string {
	return fmt.Sprintf("%.4f per frame", float64(n)/frames)
}

// Counters are the metrics that could be had, by name.
func (m Measurement) Counters() map[string]float64 {
	all := map[string]float64{}
	for _, metric := range m.Metrics() {
		if !math.IsNaN(metric.Value) {
			all[metric.Name] = metric.Value
		}
	}
	return all
}

// Print writes repetitions of one variant as perf stat does: mean, standard error and its share of the mean.
func Print(w io.Writer, title string, repetitions []Measurement) {
	fmt.Fprintf(w, "\n Throughput of %q (%d repetition%s):\n\n", title, len(repetitions), map[bool]string{true: "s"}[len(repetitions) != 1])
	columns := make([][]float64, 0, 32)
	for _, m := range repetitions {
		for i, metric := range m.Metrics() {
			if i == len(columns) {
				columns = append(columns, nil)
			}
			columns[i] = append(columns[i], metric.Value)
		}
	}
	for i, metric := range repetitions[len(repetitions)-1].Metrics() {
		mean, stderr := bench.MeanOf(columns[i]).Mean, bench.StdErr(columns[i])
		if math.IsNaN(mean) {
			fmt.Fprintf(w, "  %18s %-5s %s\n", "n/a", "", metric.Name)
			continue
		}
		line := fmt.Sprintf("  %18s %-5s %-28s", grouped(mean), metric.Unit, metric.Name)
		if !math.IsNaN(stderr) && mean != 0 {
			line += fmt.Sprintf(" ( +- %5.2f%% )", 100*stderr/math.Abs(mean))
		} else if !math.IsNaN(stderr) {
			line += strings.Repeat(" ", 13)
		}
		if metric.Note != "" {
			line += " # " + metric.Note
		}
		fmt.Fprintln(w, strings.TrimRight(line, " "))
	}
}

// grouped writes a number with separators and four significant digits behind the point at most.
func grouped(v float64) string {
	digits := 0
	if v != math.Trunc(v) {
		digits = max(0, min(6, 4-int(math.Floor(math.Log10(math.Abs(v))))))
	}
	text := fmt.Sprintf("%.*f", digits, v)
	whole, fraction, _ := strings.Cut(text, ".")
	for i := len(whole) - 3; i > 0 && whole[i-1] != '-'; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if fraction != "" {
		return whole + "." + fraction
	}
	return whole
}
