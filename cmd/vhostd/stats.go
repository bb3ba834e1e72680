package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/vhostd/vhostd/internal/control"
	"github.com/vhostd/vhostd/internal/daemon"
)

func newStats() *cobra.Command {
	var path string
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "stats --control PATH",
		Short: "Print the counters of a running daemon",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if path == "" {
				return errors.New("--control is missing: give the path that vhostd serve --control was given")
			}
			body, err := control.Get(cmd.Context(), path, "/v1/stats")
			if err != nil {
				return failure{err}
			}
			if asJSON {
				_, err := cmd.OutOrStdout().Write(body)
				return err
			}
			var stats daemon.Stats
			if err := json.Unmarshal(body, &stats); err != nil {
				return failure{fmt.Errorf("control socket %s: answer is not understood: %w", path, err)}
			}
			return printStats(cmd.OutOrStdout(), stats)
		},
	}
	cmd.Flags().StringVar(&path, "control", "", "`PATH` of the daemon's control socket")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// printStats prints one line for each ring that has been used, one for the allocators of each guest, and what holds the process.
func printStats(w io.Writer, stats daemon.Stats) error {
	table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "GUEST\tPAIR\tQUEUE\tPACKETS\tBYTES\tKICKS\tCALLS\tBATCHES\tDROPPED PACKETS")
	for _, g := range stats.Guests {
		if len(g.Rings) == 0 {
			fmt.Fprintf(table, "%s\t-\t-\t0\t0 B\t0\t0\t0\t0\n", g.Name)
		}
		for _, r := range g.Rings {
			pair, queue := control.RingLabels(r.Index, r.Control)
			pair = cmp.Or(pair, "-")
			fmt.Fprintf(table, "%s\t%s\t%s\t%d\t%s\t%d\t%d\t%d\t%s\n",
				g.Name, pair, queue, r.Packets, byteSize(r.Bytes), r.Kicks, r.Calls, r.Batches, drops(r.Drops))
		}
	}
	if len(stats.Guests) > 0 {
		fmt.Fprintln(table, "\nGUEST\tTX-ALLOC\tCOPY\tCACHED\tPAST THE CACHE\tFENCES\tPOOL PAGES\tFAST\tREFILLED\tFRESH")
	}
	for _, g := range stats.Guests {
		c, p := g.Copy, g.Pool
		fmt.Fprintf(table, "%s\t%s\t%s\t%s\t%s\t%d\t%d\t%d\t%d\t%d\n",
			g.Name, g.TxAlloc, c.Policy, byteSize(c.Cached), byteSize(c.PastCache), c.Fences, p.InFlight, p.Fast, p.Refill+p.Borrowed, p.Slow)
	}
	if err := table.Flush(); err != nil || stats.Sandbox.Mode == "" {
		return err
	}
	_, err := fmt.Fprintf(w, "sandbox: %v\n", stats.Sandbox)
	return err
}

// byteSize prints n with the largest unit of a power of 1,024 that leaves a whole part.
func byteSize(n uint64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	value, unit := float64(n)/1024, 0
	for value >= 1024 && unit < len(units)-1 {
		value /= 1024
		unit++
	}
	return fmt.Sprintf("%.1f %ciB", value, units[unit])
}

// drops prints the sum and, when there are any, the reasons.
func drops(byReason map[string]uint64) string {
	var sum uint64
	var parts []string
	for _, reason := range slices.Sorted(maps.Keys(byReason)) {
		if n := byReason[reason]; n > 0 {
			sum += n
			parts = append(parts, fmt.Sprintf("%s %d", reason, n))
		}
	}
	if sum == 0 {
		return "0"
	}
	return fmt.Sprintf("%d (%s)", sum, strings.Join(parts, ", "))
}
