package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"time"

	sd "github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"github.com/vhostd/vhostd/internal/attach"
	"github.com/vhostd/vhostd/internal/ratelog"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/worker"
)

const attachHelp = `Give a network namespace an interface whose other end is a vhost-user back-end, until SIGTERM, SIGINT or SIGHUP.

This is a front-end without a virtual machine. The back-end may be vhostd serve with any network, in this or another
process, or any other one. Checksums and segments pass unfinished where both sides can. When the interface can be used one line
is printed: "attached eth0 in NETNS to PATH", with --dhcp after the first lease, whose address it ends with.

The interface is a tap. It is made by the program's own helper in the namespace, which needs /dev/net/tun and CAP_NET_ADMIN there.
Root may name any namespace. Another user may name one that belongs to a user namespace of his own with uid 0 mapped to
him, as those of unshare -rn, rootless Podman and RootlessKit are; nsenter (util-linux) enters it. The interface is removed at the end.

Addresses: those of --address, and of --dhcp (IPv4; the helper stays and renews the lease). IPv6 addresses come from router
advertisements by the kernel, without any flag. The name servers of a lease are logged; resolv.conf is not touched:
/etc/netns/NAME/resolv.conf is what ip netns exec uses.

With --reconnect the socket is dialed until there is a back-end, and again when it goes away; the interface stays, without carrier
meanwhile, and frames under way are lost and counted (under_way). Without, the end of the back-end ends the program with status 1.

Exit status: 0 after a signal, 1 when something failed, 2 for wrong flags.`

const attachExample = `  ip netns add web; vhostd attach --socket /run/vhostd/vm1.sock --netns web --dhcp
  vhostd attach --socket vm.sock --netns 4711 --ifname net0 --address 10.0.2.15/24 --gateway 10.0.2.2`

// attachFlags are the flags of vhostd attach.
type attachFlags struct {
	opts                          attach.Options
	mac, ring, wake, spin, level  string
	addresses, gateways, disabled []string
	stats, asJSON                 bool
}

func newAttach() *cobra.Command {
	a := &attachFlags{}
	cmd := &cobra.Command{
		Use:     "attach --socket PATH --netns NAME|PATH|PID",
		Short:   "Give a network namespace an interface over vhost-user",
		Long:    attachHelp,
		Example: attachExample,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := a.parse(); err != nil {
				return err
			}
			return a.run(cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVar(&a.opts.Socket, "socket", "", "`PATH` of the back-end's vhost-user socket")
	f.StringVar(&a.opts.Netns, "netns", "", "network namespace: `NAME|PATH|PID`, a name below /run/netns, a path with a slash, a process")
	f.StringVar(&a.opts.Interface, "ifname", attach.DefaultInterface, "`NAME` of the interface")
	f.StringArrayVar(&a.addresses, "address", nil, "`CIDR` of the interface, again and again (default none)")
	f.StringArrayVar(&a.gateways, "gateway", nil, "`ADDR` of the default route, one each of IPv4 and IPv6 (default none)")
	f.BoolVar(&a.opts.DHCP, "dhcp", false, "ask for an IPv4 address and renew it (default off)")
	f.StringVar(&a.mac, "mac", "", "`MAC` address of the interface (default the device's, or a random one)")
	f.IntVar(&a.opts.MTU, "mtu", 0, "`MTU` of the interface (default the device's, or 1500)")
	f.IntVar(&a.opts.QueuePairs, "queue-pairs", 1, "number `N` of queue pairs, if the back-end has as many")
	f.IntVar(&a.opts.RingSize, "ring-size", attach.DefaultRingSize, "descriptors `N` of each ring")
	f.StringVar(&a.ring, "ring", "split", "form of the rings: `split|packed`; packed where the back-end offers it")
	f.StringSliceVar(&a.disabled, "without", nil, "`LIST` of features not to use, such as MRG_RXBUF,EVENT_IDX (default none)")
	f.BoolVar(&a.opts.Reconnect, "reconnect", false, "dial again when the back-end goes away, or is not there yet (default off)")
	f.StringVar(&a.wake, "wake", "adaptive", "how workers wait: `block|adaptive|poll`")
	f.StringVar(&a.spin, "spin", attach.DefaultSpin.String(), "how long an adaptive worker polls before it sleeps (`DURATION`)")
	f.BoolVar(&a.stats, "stats", false, "print counters at the end (default off)")
	f.BoolVar(&a.asJSON, "json", false, "print them as JSON; implies --stats (default off)")
	f.StringVar(&a.level, "log-level", "info", "`LEVEL` of logs on stderr: debug, info, warn, error")
	for flag, values := range map[string][]string{
		"ring": {"split", "packed"}, "wake": {"block", "adaptive", "poll"}, "log-level": {"debug", "info", "warn", "error"},
	} {
		if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
			panic(err) // a flag that does not exist
		}
	}
	return cmd
}

// parse turns words into the options.
func (a *attachFlags) parse() (err error) {
	for _, text := range a.addresses {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			return fmt.Errorf("--address: %q: accepted are addresses with a prefix, such as 10.0.2.15/24", text)
		}
		a.opts.Addresses = append(a.opts.Addresses, prefix)
	}
	for _, text := range a.gateways {
		gateway, err := netip.ParseAddr(text)
		if err != nil {
			return fmt.Errorf("--gateway: %q: accepted are addresses, such as 10.0.2.2", text)
		}
		a.opts.Gateways = append(a.opts.Gateways, gateway)
	}
	if a.mac != "" {
		if a.opts.MAC, err = net.ParseMAC(a.mac); err != nil {
			return fmt.Errorf("--mac: %q: accepted are addresses such as 52:54:00:12:34:56", a.mac)
		}
	}
	// Zero, which stands for the default in the options, is no number of pairs on a command line.
	if a.opts.QueuePairs == 0 {
		return fmt.Errorf("--queue-pairs: 0: accepted are 1 to %d", attach.MaxQueuePairs)
	}
	if a.opts.RingSize == 0 {
		return fmt.Errorf("--ring-size: 0: accepted are powers of two from %d to %d", attach.MinRingSize, attach.MaxRingSize)
	}
	if a.ring != "split" && a.ring != "packed" {
		return fmt.Errorf("--ring: %q: accepted are split and packed", a.ring)
	}
	a.opts.Packed = a.ring == "packed"
	if a.opts.Wake, err = worker.ParseWake(a.wake); err != nil {
		return fmt.Errorf("--wake: %q: accepted are block, adaptive and poll", a.wake)
	}
	if a.opts.Spin, err = time.ParseDuration(a.spin); err != nil {
		return fmt.Errorf("--spin: %q: accepted are durations such as 50us", a.spin)
	}
	for _, name := range a.disabled {
		feature, ok := virtio.ParseFeature(name)
		if !ok {
			return fmt.Errorf("--without: %q: accepted are names of features such as MRG_RXBUF", name)
		}
		a.opts.Without |= feature
	}
	return nil
}

func (a *attachFlags) run(out io.Writer) error {
	var level slog.Level
	if err := level.UnmarshalText([]byte(a.level)); err != nil || strings.ContainsAny(a.level, "+-") {
		return fmt.Errorf("--log-level: %q: accepted are debug, info, warn, error", a.level)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stop := stopSignal()
	go func() {
		<-stop
		cancel()
	}()
	lines := ratelog.NewWriter(os.Stderr)
	defer lines.Close(flushWithin)
	limit := ratelog.New(slog.NewTextHandler(lines, &slog.HandlerOptions{Level: level}))
	defer limit.Close()
	a.opts.Logger = slog.New(limit)
	a.opts.Ready = func(at attach.Attached) {
		fmt.Fprintln(out, at)
		notify(a.opts.Logger, sd.SdNotifyReady)
	}
	// A worker keeps a thread for each pair; two more run control and the collector.
	runtime.GOMAXPROCS(min(max(a.opts.QueuePairs, 1), attach.MaxQueuePairs) + 2) // the number is judged later
	counters, err := attach.Run(ctx, a.opts)
	var refused *attach.OptionError
	if errors.As(err, &refused) {
		return refused
	}
	if err == nil || counters.Connections > 0 {
		err = errors.Join(err, a.print(out, counters))
	}
	if err != nil {
		return failure{err}
	}
	return nil
}

// print shows the counters if that is wanted.
func (a *attachFlags) print(out io.Writer, counters attach.Counters) (err error) {
	switch {
	case a.asJSON:
		err = json.NewEncoder(out).Encode(counters)
	case a.stats:
		_, err = fmt.Fprintln(out, counters)
	}
	return err
}
