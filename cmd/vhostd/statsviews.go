package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"
	"unicode"

	"github.com/spf13/pflag"

	"github.com/vhostd/vhostd/internal/control"
	"github.com/vhostd/vhostd/internal/daemon"
	"github.com/vhostd/vhostd/port/user"
)

// flowFlags choose flows.
type flowFlags struct {
	limit       int
	sort, proto string
}

func (f *flowFlags) add(set *pflag.FlagSet) {
	set.IntVar(&f.limit, "limit", user.DefaultListed, "list at most `N` flows of each network")
	set.StringVar(&f.sort, "sort", user.FlowOrders()[0], "which flows come first: `"+strings.Join(user.FlowOrders(), "|")+"`")
	set.StringVar(&f.proto, "proto", "", "only flows of `tcp|udp|icmp` (default all)")
}

// query judges the flags, so that a slip is found before the daemon is asked.
func (f *flowFlags) query() (string, error) {
	q := user.FlowQuery{Proto: f.proto, Sort: f.sort, Limit: f.limit}
	if err := q.Validate(); err != nil || f.limit < 1 {
		return "", cmp.Or(err, fmt.Errorf("limit=%d: accepted are 1 to %d", f.limit, user.MaxListed))
	}
	values := url.Values{"limit": {strconv.Itoa(f.limit)}, "sort": {f.sort}}
	if f.proto != "" {
		values.Set("proto", f.proto)
	}
	return "?" + values.Encode(), nil
}

// viewArgs wants the name of a view and perhaps that of a guest or switch.
func viewArgs(args []string) error {
	switch {
	case len(args) > 0 && !slices.Contains(control.Views(), args[0]):
		return fmt.Errorf("stats: no view %q: accepted are %s", args[0], strings.Join(control.Views(), ", "))
	case len(args) > 2:
		return fmt.Errorf("stats: %d names, wanted one of a guest or switch: vhostd stats --control PATH %s NAME", len(args)-1, args[0])
	}
	return nil
}

// networkView is one network's view, as the daemon has told it.
type networkView struct {
	Owner string          `json:"owner"`
	Name  string          `json:"name"`
	View  json.RawMessage `json:"view"`
}

// views asks for a view of all user networks, or of those with a name.
func views(ctx context.Context, socket, view, query, name string) ([]networkView, error) {
	body, err := control.Get(ctx, socket, "/v1/networks")
	if err != nil {
		return nil, err
	}
	var networks control.NetworksReply
	if err := json.Unmarshal(body, &networks); err != nil {
		return nil, fmt.Errorf("control socket %s: answer is not understood: %w", socket, err)
	}
	list := []networkView{}
	var gone error
	for _, n := range networks.Networks {
		if name != "" && n.Name != name {
			continue
		}
		if body, err = control.Get(ctx, socket, n.Path+"/"+view+query); err != nil {
			gone = err // it was removed meanwhile
			continue
		}
		list = append(list, networkView{n.Owner, n.Name, body})
	}
	if name == "" || len(list) > 0 {
		return list, nil
	}
	if gone == nil {
		// The daemon says what there is instead.
		if _, gone = control.Get(ctx, socket, "/v1/guests/"+url.PathEscape(name)+"/"+view); gone == nil {
			gone = fmt.Errorf("%s: %w", name, daemon.ErrNoUserNetwork)
		}
	}
	return nil, gone
}

// printViews prints the tables of a view.
func printViews(w io.Writer, view string, list []networkView) error {
	if len(list) == 0 {
		_, err := fmt.Fprintln(w, "no guest and no switch has a user network")
		return err
	}
	print := map[string]func(*tabwriter.Writer, json.RawMessage) error{
		control.ViewFlows: printFlows, control.ViewLeases: printLeases, control.ViewDNS: printDNS, control.ViewPolicy: printPolicy,
		control.ViewPublish: printPublish,
	}[view]
	for i, n := range list {
		if i > 0 {
			fmt.Fprintln(w)
		}
		fmt.Fprintf(w, "%s %s\n", n.Owner, cell(n.Name))
		table := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		if err := errors.Join(print(table, n.View), table.Flush()); err != nil {
			return err
		}
	}
	return nil
}

func printFlows(w *tabwriter.Writer, body json.RawMessage) error {
	var list user.FlowList
	if err := json.Unmarshal(body, &list); err != nil {
		return err
	}
	fmt.Fprintln(w, "PROTO\tFLOWS\tOPENED\tREFUSED\tLIMITED\tFAILED\tFROM GUEST\tPACKETS\tTO GUEST\tPACKETS")
	for _, p := range list.Protocols {
		fmt.Fprintf(w, "%s\t%d\t%d\t%d\t%d\t%d\t%s\t%d\t%s\t%d\n", cell(p.Proto), p.Flows, p.Opened, p.Refused, p.Limited, p.Failed,
			byteSize(p.FromGuest), p.PacketsFrom, byteSize(p.ToGuest), p.PacketsTo)
	}
	fmt.Fprintf(w, "\n%d of %d flows\n", len(list.Flows), list.Total)
	if len(list.Flows) == 0 {
		return nil
	}
	fmt.Fprintln(w, "PROTO\tGUEST\tWAY\tREMOTE\tSTATE\tAGE\tIDLE\tFROM GUEST\tPACKETS\tTO GUEST\tPACKETS")
	for _, f := range list.Flows {
		way, remote := "->", "-"
		if f.Inbound {
			way = "<-"
		}
		if f.Remote.IsValid() {
			remote = f.Remote.String()
		}
		fmt.Fprintf(w, "%s\t%v\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\t%d\n",
			cell(f.Proto), f.Guest, way, remote, cell(f.State), span(f.Age), span(f.Idle),
			byteSize(f.FromGuest), f.PacketsFrom, byteSize(f.ToGuest), f.PacketsTo)
	}
	return nil
}

func printLeases(w *tabwriter.Writer, body json.RawMessage) error {
	var v user.LeaseView
	if err := json.Unmarshal(body, &v); err != nil {
		return err
	}
	if !v.Serving {
		fmt.Fprintln(w, "no DHCP here")
		return nil
	}
	fmt.Fprintln(w, "ADDRESS\tMAC\tDUID\tNAME\tSTATE\tEXPIRES\tPINNED")
	for _, l := range v.Leases {
		pinned := "-"
		if l.Pinned {
			pinned = "yes"
		}
		fmt.Fprintf(w, "%v\t%v\t%s\t%s\t%s\t%s\t%s\n", l.Addr, l.MAC, cell(l.DUID), cell(l.Name), cell(string(l.State)),
			l.Expires.Local().Format(time.DateTime), pinned)
	}
	fmt.Fprintf(w, "\n%d leases, %d addresses heard from, messages without an answer: %s\n", len(v.Leases), v.Neighbors, cell(drops(v.Drops)))
	return nil
}

func printDNS(w *tabwriter.Writer, body json.RawMessage) error {
	var v user.DNSView
	if err := json.Unmarshal(body, &v); err != nil {
		return err
	}
	if !v.Serving {
		fmt.Fprintln(w, "no DNS here")
		return nil
	}
	s := v.Stats
	fmt.Fprintln(w, "QUERIES\tFORWARDED\tSTATIC\tREFUSED\tFAILED\tBUSY\tMALFORMED\tTIMEOUTS\tTRUNCATED\tTCP\tSTRAY")
	fmt.Fprintf(w, "%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\t%d\n", s.Queries, s.Forwarded, s.Local, s.Refused, s.Failed, s.Busy,
		s.Malformed, s.Timeouts, s.Truncated, s.Streams, s.Stray)
	fmt.Fprintln(w, "\nDOMAIN\tUPSTREAM\tSTATE")
	for _, u := range v.Upstreams {
		state := "in use"
		if u.Resting {
			state = "does not answer, asked last"
		}
		fmt.Fprintf(w, "%s\t%v\t%s\n", cell(u.Domain), u.Addr, state)
	}
	fmt.Fprintln(w, "\nSTATIC NAME\tADDRESSES")
	for _, h := range v.Hosts {
		fmt.Fprintf(w, "%s\t%s\n", cell(h.Name), strings.Trim(fmt.Sprint(h.Addrs), "[]"))
	}
	return nil
}

func printPolicy(w *tabwriter.Writer, body json.RawMessage) error {
	var v user.PolicyView
	if err := json.Unmarshal(body, &v); err != nil {
		return err
	}
	fmt.Fprintln(w, "RULE\tDECIDED\tENDED")
	for _, r := range v.Rules {
		fmt.Fprintf(w, "%s\t%d\t%d\n", cell(r.Rule), r.Hits, r.Ended)
	}
	fmt.Fprintf(w, "(the rest) %s\t-\t-\n", cell(v.Rest))
	fmt.Fprintf(w, "\nrefused: %s\nended: %s\n", cell(drops(v.Refusals)), cell(drops(v.Ended)))
	return nil
}

func printPublish(w *tabwriter.Writer, body json.RawMessage) error {
	var v user.PublishView
	if err := json.Unmarshal(body, &v); err != nil {
		return err
	}
	fmt.Fprintln(w, "PROTO\tHOST\tGUEST\tPUBLISH")
	for _, p := range v.Published {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", cell(p.Proto), cell(p.Host), cell(p.Guest), cell(p.Publish))
	}
	return nil
}

// cell makes a text fit for one cell of a table on a terminal, whatever it holds.
func cell(text string) string {
	if text == "" {
		return "-"
	}
	if strings.ContainsFunc(text, func(r rune) bool { return !unicode.IsPrint(r) || r == unicode.ReplacementChar }) {
		return strconv.QuoteToASCII(text)
	}
	return text
}

// span prints seconds with no more figures than matter.
func span(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	switch {
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < time.Minute:
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Second).String()
}
