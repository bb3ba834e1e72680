package tap

import (
	"fmt"
	"log/slog"
	"os/user"
	"strconv"
	"strings"
	"unicode"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/port"
)

const kind = "tap"

// Bounds and default of [Options].
const (
	DefaultName = "vhostd%d"
	MaxName     = unix.IFNAMSIZ - 1
	MaxQueues   = port.MaxQueues
	// MinMTU is the least that IPv4 allows (RFC 791). MaxMTU leaves room for the Ethernet header, which the kernel counts
	// against the 65,535 bytes of a tap (tun_net_init, drivers/net/tun.c).
	MinMTU = 68
	MaxMTU = 65520
)

// Options configure a tap.
type Options struct {
	// Name is the interface: an existing tap is attached to, which must have been made persistent and be unused; otherwise
	// the interface is created. One %d stands for the first free number. "" means DefaultName.
	Name string
	// Queues is the number of queue pairs, 0 means 1. With more than one the tap is a multi-queue tap.
	Queues int
	// Bridge is the bridge that the tap joins; "" leaves the tap's bridge as it is.
	Bridge string
	// MTU is the interface's MTU; 0 leaves it as it is.
	MTU int
	// Persist keeps an interface that was created here after Close.
	Persist bool
	// Owner and Group, names or numbers, are who may attach to an interface that was created here; "" sets none.
	Owner, Group string
	// LeaveDown does not bring the interface up.
	LeaveDown bool
	// Logger receives changes of the tap's condition, at most one line a cause in ten seconds; nil means slog.Default.
	Logger *slog.Logger
}

// Validate returns a [port.OptionError] for the first option with a value that is not accepted. It does not look at the
// system's interfaces.
func (o Options) Validate() error {
	wrong := func(option, value, accept string) error {
		return &port.OptionError{Kind: kind, Option: option, Value: value, Accept: accept}
	}
	if o.Name != "" && !validName(o.Name, true) {
		return wrong("name", strconv.Quote(o.Name), fmt.Sprintf("1 to %d characters without '/', ':', spaces and '%%', except one %%d", MaxName))
	}
	if o.Bridge != "" && !validName(o.Bridge, false) {
		return wrong("bridge", strconv.Quote(o.Bridge), fmt.Sprintf("1 to %d characters without '/', ':', '%%' and spaces", MaxName))
	}
	if o.Queues < 0 || o.Queues > MaxQueues {
		return wrong("queues", strconv.Itoa(o.Queues), fmt.Sprintf("1 to %d", MaxQueues))
	}
	if o.MTU != 0 && !validMTU(o.MTU) {
		return wrong("mtu", strconv.Itoa(o.MTU), fmt.Sprintf("%d to %d bytes", MinMTU, MaxMTU))
	}
	if _, err := lookupID(o.Owner, userID); err != nil {
		return wrong("owner", strconv.Quote(o.Owner), "the name or number of a user")
	}
	if _, err := lookupID(o.Group, groupID); err != nil {
		return wrong("group", strconv.Quote(o.Group), "the name or number of a group")
	}
	return nil
}

func validMTU(mtu int) bool { return mtu >= MinMTU && mtu <= MaxMTU }

// validName applies the kernel's rules for names of interfaces (dev_valid_name, net/core/dev.c), with one %d if pattern.
func validName(name string, pattern bool) bool {
	if name == "" || len(name) > MaxName || name == "." || name == ".." {
		return false
	}
	if pattern {
		name = strings.Replace(name, "%d", "", 1)
	}
	return !strings.ContainsFunc(name, func(r rune) bool {
		return r == '/' || r == ':' || r == '%' || unicode.IsSpace(r) || unicode.IsControl(r)
	})
}

// lookupID resolves a name or number; -1 stands for "".
func lookupID(text string, byName func(string) (string, error)) (int, error) {
	if text == "" {
		return -1, nil
	}
	if n, err := strconv.ParseUint(text, 10, 31); err == nil {
		return int(n), nil
	}
	id, err := byName(text)
	if err != nil {
		return -1, err
	}
	return strconv.Atoi(id)
}

func userID(name string) (string, error) {
	u, err := user.Lookup(name)
	if err != nil {
		return "", err
	}
	return u.Uid, nil
}

func groupID(name string) (string, error) {
	g, err := user.LookupGroup(name)
	if err != nil {
		return "", err
	}
	return g.Gid, nil
}
