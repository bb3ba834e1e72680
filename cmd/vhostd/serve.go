package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/vhostd/vhostd/internal/config"
)

const serveHelp = `Serve guests until SIGTERM or SIGINT, without a configuration file also until SIGHUP. Another signal, a second
or more after the first, ends the process at once. With --config, SIGHUP and vhostd reload have the file read again and what
is different applied; vhostd reload --help says what a guest that is served follows.

One guest is described by flags, many by a configuration file whose keys are the same
words. When everything is ready one line is printed: "listening" and the socket paths.

Networks (default user):
  user     the host's networks through a TCP/IP stack in the process, without privileges, IPv4 and
           IPv6; a value with commas stands in quotes ("):
           subnet=10.0.2.0/24, gateway=10.0.2.2, guest=10.0.2.15 (the first lease, to which
           published ports lead), subnet6=PREFIX/64 (default one of the machine and the guest's
           name), gateway6=ADDR, lease=MAC=ADDR or lease=NAME=ADDR (again and again),
           ipv4=on, ipv6=on, dhcp=on, ra=on, mtu=1500, max-flows=65536,
           dns=on|off|ADDR[:PORT]|/DOMAIN/ADDR (upstream resolvers, again and again; default those
           of /etc/resolv.conf, followed while running), search=DOMAIN and host=NAME:ADDR (again
           and again), host-loopback=off (on: the gateway's address, host.vhostd.internal, reaches
           the host's loopback), publish=[ADDR:]PORT[-PORT]:[GUEST:]GUESTPORT[/tcp|/udp] or
           publish=unix:PATH:GUESTPORT (again and again), allow=WHAT and deny=WHAT (CIDR, CIDR:PORT,
           [CIDR6]:PORT, NAME or *.NAME, in the order of the rules, again and again; any allow makes
           the rest deny; metadata services and loopback are denied unless named)
  null     discards what the guest sends
  source   generates frames towards the guest: size=64, rate=0 (frames a second, 0 without
           limit), flows=1, mac=ff:ff:ff:ff:ff:ff
  echo     returns each frame: swap=on (exchange the MAC addresses), backlog=1024 (frames)
  sock     a Unix socket of type SEQPACKET, a frame a message: path=PATH, made here and removed at the
           end; connect=on dials a peer's instead; mode=0600 (of the socket that is made)
  tap      a Linux tap interface, created or attached to: name=vhostd%d, bridge=BRIDGE,
           queues=N (default --queue-pairs), persist=off, owner=USER, group=GROUP, up=on
  switch   guests that give the same name=NAME are on one segment: mac=MAC (the only address the
           guest may send from, and nobody else), backlog=512 (frames waiting in a queue),
           ageing=300s, uplink=tap or uplink=user with uplink-KEY=VALUE for its parameters and
           uplink-queues=1; ageing and uplink belong to the switch: one guest says them for all
User, tap, switch and sock take rate-in=RATE and rate-out=RATE (such as 10Mbit; towards and from
the guest; default none), guard=WHAT (a MAC, an IP address or a prefix, again and again: frames that
the guest sends under another one are dropped; with addresses it is no router and no DHCP server
either; default none), and capture=FILE (pcapng; default none) with snaplen=BYTES and rotate=SIZE.

Front-ends: the guest's memory must be shared with this process (QEMU: memory-backend-memfd with
share=on); kicks without any movement of the rings are warned about once. One front-end at a time
is served per guest, and always the next one after it.

Control socket (--control): HTTP with GET /v1/status, /v1/stats, /healthz and /metrics
(Prometheus), POST /v1/guests with the configuration file's keys of one guest as JSON, DELETE
/v1/guests/NAME, PATCH /v1/guests/NAME with tx-alloc and copy, POST /v1/reload. Of user networks,
which GET /v1/networks lists: GET /v1/guests/NAME/VIEW, or /v1/networks/SWITCH/VIEW for the uplink of a
switch, with flows (?limit=, sort=, proto=, guest=), leases, dns, policy and publish for VIEW; POST and
DELETE of publish take {"publish":"…"} as the key of this name. /healthz fails and names the cause
while a worker is dead or a network is down; with a watchdog of the service manager a dead worker
makes it restart the process. A fault inside the program ends the process with a status other than 0.

Sandbox: when everything is ready the process drops what it does not need any more, with Landlock,
seccomp and its capabilities; GET /v1/status tells what is in force. Sockets of guests that are
added later must be in the directories of the sockets at the start, or in --socket-dirs.

Exit status: 0 after a clean stop, 1 when something failed, 2 for wrong flags or configuration.`

const serveExample = `  vhostd serve --socket "$XDG_RUNTIME_DIR/vm1.sock" --publish 127.0.0.1:2222:22
  vhostd serve --socket /run/vhostd/vm1.sock --network tap,name=tap0,bridge=br0
  vhostd serve --config /etc/vhostd/vhostd.yaml --control /run/vhostd/control.sock`

// serveFlags are the flags of vhostd serve.
type serveFlags struct {
	guest              config.Guest
	process            config.Process
	ofGuest, ofProcess *pflag.FlagSet // the flags that set the two
	file               string
}

// newServeFlags makes the flags with their defaults, for one command.
func newServeFlags() *serveFlags {
	s := &serveFlags{guest: config.DefaultGuest(), process: config.DefaultProcess()}
	s.ofGuest, s.ofProcess = guestFlags(&s.guest), processFlags(&s.process)
	return s
}

func newServe() *cobra.Command {
	s := newServeFlags()
	cmd := &cobra.Command{
		Use:     "serve --socket PATH --network KIND[,key=value…] | --config FILE",
		Short:   "Serve guests until a signal",
		Long:    serveHelp,
		Example: serveExample,
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			plan, err := s.plan()
			if err != nil {
				return err
			}
			return plan.run(cmd.OutOrStdout())
		},
	}
	cmd.Flags().SortFlags = false
	cmd.Flags().AddFlagSet(s.ofGuest)
	cmd.Flags().StringVar(&s.file, "config", "", "`FILE` that describes many guests (YAML)")
	cmd.Flags().AddFlagSet(s.ofProcess)
	complete(cmd)
	return cmd
}

// plan judges the flags, and the configuration file if there is one.
func (s *serveFlags) plan() (*plan, error) {
	guests, process := []config.Guest{s.guest}, s.process
	var reload *reloader
	if s.file != "" {
		if name := changed(s.ofGuest); name != "" {
			return nil, fmt.Errorf("--%s describes one guest and --config names many: write it into %s", name, s.file)
		}
		f, err := config.ReadFile(s.file)
		if err != nil {
			return nil, err
		}
		guests, process = f.Guests, override(f.Process, s.ofProcess)
		if reload, err = newReloader(s.file, s.ofProcess, process, guests); err != nil {
			return nil, err
		}
	}
	in, err := takeInherited(guests, s.file != "")
	if err != nil {
		return nil, err
	}
	if s.file == "" && guests[0].Socket == "" {
		return nil, errors.New("--socket is missing, such as --socket /run/vhostd/vm1.sock")
	}
	p, err := newPlan(process, guests, in.guests)
	if err != nil {
		return nil, err
	}
	p.control, p.rings, p.reload = in.control, in.rings, reload
	if len(p.guests) == 0 && p.process.Control == "" && p.control == nil {
		return nil, fmt.Errorf("%s: no guests, and no control socket to add any: describe guests, or give --control", s.file)
	}
	return p, nil
}

// changed returns the name of the first flag of the set that was given, or "".
func changed(set *pflag.FlagSet) (name string) {
	set.VisitAll(func(f *pflag.Flag) {
		if f.Changed && name == "" {
			name = f.Name
		}
	})
	return name
}

// override returns p with the values of the flags that were given.
func override(p config.Process, given *pflag.FlagSet) config.Process {
	onto := processFlags(&p)
	given.VisitAll(func(f *pflag.Flag) {
		if f.Changed {
			// Both sets have the same flags and the value was accepted once.
			_ = onto.Set(f.Name, f.Value.String())
		}
	})
	return p
}

// oneLine makes an error fit for one line and adds "--" to the key of a flag.
func oneLine(err error) string {
	var key *config.KeyError
	var file *config.Error
	text := err.Error()
	if errors.As(err, &key) && !errors.As(err, &file) {
		text = "--" + text
	}
	return strings.ReplaceAll(strings.TrimSpace(text), "\n", "; ")
}
