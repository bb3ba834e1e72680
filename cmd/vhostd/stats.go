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

const statsHelp = `Print the counters of a running daemon: rings, allocators, sandbox. With the name of a view, print that of the user
networks, of all or of the guest or switch NAME:

  flows    counters of each protocol, and flows: both ends, state, age, time without payload, traffic
  leases   what DHCP has given out
  dns      questions by where the answer came from, resolvers, static names
  policy   rules with how many flows and look-ups each decided, refusals by reason, flows that were ended
  publish  ports of the host that lead to guests`

var errControlMissing = errors.New("--control is missing: give the path that vhostd serve --control was given")

func newStats() *cobra.Command {
	var path string
	var asJSON bool
	var flows flowFlags
	cmd := &cobra.Command{
		Use:   "stats --control PATH [" + strings.Join(control.Views(), "|") + " [NAME]]",
		Short: "Print the counters of a running daemon",
		Long:  statsHelp,
		Example: `  vhostd stats --control /run/vhostd/control.sock
  vhostd stats --control /run/vhostd/control.sock flows vm1 --sort bytes --limit 10`,
		Args:      func(_ *cobra.Command, args []string) error { return viewArgs(args) },
		ValidArgs: control.Views(),
		RunE: func(cmd *cobra.Command, args []string) error {
			if path == "" {
				return errControlMissing
			}
			if len(args) > 0 {
				return showView(cmd, path, args, &flows, asJSON)
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
	flows.add(cmd.Flags())
	return cmd
}

// showView prints the view that is named first, of the network that may be named second.
func showView(cmd *cobra.Command, path string, args []string, flows *flowFlags, asJSON bool) error {
	query, err := flows.query()
	if err != nil {
		return err
	}
	if args[0] != control.ViewFlows {
		query = ""
	}
	list, err := views(cmd.Context(), path, args[0], query, append(args, "")[1])
	if err != nil {
		return failure{err}
	}
	if asJSON {
		return json.NewEncoder(cmd.OutOrStdout()).Encode(struct {
			Networks []networkView `json:"networks"`
		}{list})
	}
	if err := printViews(cmd.OutOrStdout(), args[0], list); err != nil {
		return failure{err}
	}
	return nil
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
