package main

import (
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/vhostd/vhostd/internal/config"
	"github.com/vhostd/vhostd/internal/network"
	"github.com/vhostd/vhostd/virtionet"
)

// defaultName is the guest's name when the command line describes the only one.
const defaultName = "vm0"

// guestFlags are the flags that describe one guest; a configuration file takes their place.
func guestFlags(g *config.Guest) *pflag.FlagSet {
	f := pflag.NewFlagSet("guest", pflag.ContinueOnError)
	f.StringVar(&g.Name, "name", defaultName, "`NAME` of the guest in logs, metrics and the control API")
	f.StringVar(&g.Socket, "socket", "", "`PATH` of the vhost-user socket; with socket activation the inherited one is the default")
	f.BoolVar(&g.Client, "client", g.Client, "dial the socket instead of listening on it, again and again (default off)")
	f.StringVar(&g.Network, "network", g.Network, "`KIND[,key=value…]` of the network: "+strings.Join(network.Kinds(), ", "))
	f.IntVar(&g.QueuePairs, "queue-pairs", g.QueuePairs, "number `N` of queue pairs offered")
	f.StringVar(&g.MAC, "mac", g.MAC, "`MAC` address shown to front-ends that ask for it (default the front-end's)")
	f.IntVar(&g.MTU, "mtu", g.MTU, "`MTU` of guest and network, 0 for the network's own (default 0)")
	f.StringVar(&g.Copy, "copy", g.Copy, "transmit copies past the cache: `never|auto|always`")
	f.StringVar(&g.TxAlloc, "tx-alloc", g.TxAlloc, "allocator of transmit buffers: `frag|fragpool|refpage`")
	f.IntVar(&g.TxLag, "tx-lag", g.TxLag, "newest `N` transmit completions held back while traffic flows (default 0)")
	f.StringVar(&g.SocketMode, "socket-mode", g.SocketMode, "octal permissions `MODE` of the socket")
	f.StringVar(&g.SocketOwner, "socket-owner", g.SocketOwner, "`USER[:GROUP]` that owns the socket (default the process's)")
	f.StringSliceVar(&g.Experimental, "experimental", g.Experimental, "`LIST` of protocol features to offer that some front-ends cannot bear: "+strings.Join(config.Experiments(), ", ")+" (default none)")
	f.SortFlags = false
	return f
}

// processFlags are the flags of the daemon as a whole; given with a configuration file they
// override it.
func processFlags(p *config.Process) *pflag.FlagSet {
	f := pflag.NewFlagSet("process", pflag.ContinueOnError)
	f.StringVar(&p.Control, "control", p.Control, "`PATH` of the control socket (default none)")
	f.StringVar(&p.ControlMode, "control-mode", p.ControlMode, "octal permissions `MODE` of the control socket")
	f.StringVar(&p.Wake, "wake", p.Wake, "how workers wait: `block|adaptive|poll`")
	f.StringVar(&p.Spin, "spin", p.Spin, "how long an adaptive worker polls before it sleeps (`DURATION`)")
	f.StringVar(&p.CPUs, "cpus", p.CPUs, "one worker pinned to each CPU of `LIST`, such as 0,2-3 (default one worker that is not pinned)")
	f.StringVar(&p.ArenaSize, "arena-size", p.ArenaSize, "address space for frames in flight of all guests (`SIZE`); memory is used when touched")
	f.StringVar(&p.ArenaHugePages, "arena-hugepages", p.ArenaHugePages, "take the arena from the kernel's pool of huge pages, of 2 MiB or 1 GiB: `off|try|require[,2M|,1G]`")
	f.StringVar(&p.ArenaNode, "arena-node", p.ArenaNode, "take the arena from NUMA node `N` (default any)")
	f.StringVar(&p.Sandbox, "sandbox", p.Sandbox, "drop after the start what is not needed any more: `on|off`")
	f.StringVar(&p.SocketDirs, "socket-dirs", p.SocketDirs, "`LIST` of directories in which guests added later may have their sockets, besides those of the sockets at the start (default none)")
	f.StringVar(&p.StateDir, "state-dir", p.StateDir, "`DIR`, on a tmpfs, that keeps the positions of packed rings over a crash (default none)")
	f.StringVar(&p.Postcopy, "postcopy", p.Postcopy, "offer postcopy migration, with a process that touches the memory of each guest that arrives so: `on|off`")
	f.StringVar(&p.LogLevel, "log-level", p.LogLevel, "`LEVEL` of logs on stderr: debug, info, warn, error")
	f.StringVar(&p.LogFormat, "log-format", p.LogFormat, "format of logs: `text|json`")
	f.SortFlags = false
	return f
}

// complete offers the fixed values of flags to the shell.
func complete(cmd *cobra.Command) {
	for flag, values := range map[string][]string{
		"network":         network.Kinds(),
		"wake":            {"block", "adaptive", "poll"},
		"copy":            {"never", "auto", "always"},
		"tx-alloc":        virtionet.TxAllocs(),
		"sandbox":         config.SandboxModes(),
		"postcopy":        {"on", "off"},
		"arena-hugepages": config.ArenaHugePages(),
		"experimental":    config.Experiments(),
		"log-level":       {"debug", "info", "warn", "error"},
		"log-format":      config.LogFormats(),
	} {
		// It fails only for a flag that does not exist or was given values before.
		if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp)); err != nil {
			panic(err)
		}
	}
}
