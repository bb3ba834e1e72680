package attach

import (
	"fmt"
	"log/slog"
	"math/bits"
	"net"
	"net/netip"
	"time"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/worker"
)

// Limits and defaults of Options.
const (
	DefaultInterface  = "eth0"
	DefaultRingSize   = 256
	DefaultSpin       = 50 * time.Microsecond
	MinRingSize       = 16
	MaxRingSize       = 4096
	MaxQueuePairs     = 64
	MinMTU            = 68
	MaxMTU            = 65521 // of a tap (drivers/net/tun.c)
	maxInterfaceBytes = 15
)

// Options describe one attachment. Socket and Netns are required; New judges all.
type Options struct {
	// Socket is the path of the back-end's socket.
	Socket string
	// Netns is the network namespace: a name below /run/netns, a path (with a slash), or the number of a process in it.
	Netns string
	// Interface is the name of the interface that is made there.
	Interface string
	// QueuePairs is how many queue pairs are wanted; a back-end that offers fewer gets those.
	QueuePairs int
	// RingSize is the number of descriptors of each ring, a power of two.
	RingSize int
	// Packed asks for packed rings where the back-end offers them.
	Packed bool
	// MAC is the interface's address; nil takes the device's, or a random one if it shows none.
	MAC net.HardwareAddr
	// MTU is the interface's; 0 takes the device's, or 1500 if it shows none.
	MTU int
	// Addresses and Gateways configure the interface.
	Addresses []netip.Prefix
	Gateways  []netip.Addr
	// DHCP asks for an IPv4 address, and goes on to renew it.
	DHCP bool
	// Reconnect dials the socket again and again, also at the start.
	Reconnect bool
	// Without are features that are not acknowledged though they are offered.
	Without virtio.Features
	// Wake and Spin are how the workers wait.
	Wake worker.Wake
	Spin time.Duration
	// Logger receives what happens; nil means slog.Default.
	Logger *slog.Logger
	// Ready is called when the interface can be used for the first time; nil is none.
	Ready func(Attached)
}

// Attached describes an interface that can be used.
type Attached struct {
	Interface, Netns, Socket string
	// Lease is the address by DHCP, with its prefix, "" without.
	Lease string
}

// String is the line for people and scripts.
func (a Attached) String() string {
	text := fmt.Sprintf("attached %s in %s to %s", a.Interface, a.Netns, a.Socket)
	if a.Lease != "" {
		text += " with " + a.Lease
	}
	return text
}

// OptionError is a value that is not accepted.
type OptionError struct{ Flag, Text string }

func (e *OptionError) Error() string { return "--" + e.Flag + e.Text }

func refuse(flag, format string, args ...any) error {
	return &OptionError{Flag: flag, Text: fmt.Sprintf(format, args...)}
}

// withDefaults judges the options; an error is an *OptionError.
func (o Options) withDefaults() (Options, error) {
	if o.Interface == "" {
		o.Interface = DefaultInterface
	}
	if o.QueuePairs == 0 {
		o.QueuePairs = 1
	}
	if o.RingSize == 0 {
		o.RingSize = DefaultRingSize
	}
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	for _, judge := range []func() error{o.judgeNames, o.judgeNumbers, o.judgeAddresses} {
		if err := judge(); err != nil {
			return o, err
		}
	}
	return o, nil
}

func (o *Options) judgeNames() error {
	const longest = 107 // sun_path without its final zero
	switch {
	case o.Socket == "":
		return refuse("socket", " is missing, such as --socket /run/vhostd/vm1.sock")
	case len(o.Socket) > longest:
		return refuse("socket", ": %s: %d bytes: accepted are at most %d", o.Socket, len(o.Socket), longest)
	case o.Netns == "":
		return refuse("netns", " is missing: give the name, the path or a process of a network namespace")
	case len(o.Interface) > maxInterfaceBytes || !plainName(o.Interface):
		return refuse("ifname", ": %q: accepted are 1 to %d characters without spaces, slashes, colons and percent signs",
			o.Interface, maxInterfaceBytes)
	}
	return nil
}

// plainName says whether the kernel accepts the name and takes it as it is (dev_valid_name, net/core/dev.c).
func plainName(name string) bool {
	for _, c := range name {
		if c <= ' ' || c > '~' || c == '/' || c == ':' || c == '%' {
			return false
		}
	}
	return name != "." && name != ".."
}

func (o *Options) judgeNumbers() error {
	switch {
	case o.QueuePairs < 1 || o.QueuePairs > MaxQueuePairs:
		return refuse("queue-pairs", ": %d: accepted are 1 to %d", o.QueuePairs, MaxQueuePairs)
	case o.RingSize < MinRingSize || o.RingSize > MaxRingSize || bits.OnesCount(uint(o.RingSize)) != 1:
		return refuse("ring-size", ": %d: accepted are powers of two from %d to %d", o.RingSize, MinRingSize, MaxRingSize)
	case o.MTU != 0 && (o.MTU < MinMTU || o.MTU > MaxMTU):
		return refuse("mtu", ": %d: accepted are %d to %d, and 0 for the device's", o.MTU, MinMTU, MaxMTU)
	case o.MAC != nil && !usableMAC(o.MAC):
		return refuse("mac", ": %s: accepted are unicast addresses of six bytes", o.MAC)
	case o.Spin < 0 || o.Spin > time.Second:
		return refuse("spin", ": %v: accepted are 0 to 1s", o.Spin)
	}
	return nil
}

func usableMAC(mac net.HardwareAddr) bool {
	var sum byte
	for _, b := range mac {
		sum |= b
	}
	return len(mac) == 6 && mac[0]&1 == 0 && sum != 0
}

func (o *Options) judgeAddresses() error {
	for _, a := range o.Addresses {
		if !a.IsValid() || !a.Addr().IsGlobalUnicast() && !a.Addr().IsLinkLocalUnicast() {
			return refuse("address", ": %v: accepted are unicast addresses with a prefix, such as 10.0.2.15/24", a)
		}
	}
	for _, g := range o.Gateways {
		if !g.IsGlobalUnicast() && !g.IsLinkLocalUnicast() {
			return refuse("gateway", ": %v: accepted are unicast addresses, such as 10.0.2.2", g)
		}
	}
	return nil
}
