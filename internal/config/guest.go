// Package config is what a person tells the daemon: the same keys serve as command line flags,
// as YAML in the configuration file and as JSON in the control API, and one place judges them.
package config

import (
	"fmt"
	"io/fs"
	"net"
	"os/user"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/vhostd/vhostd/internal/network"
	"github.com/vhostd/vhostd/internal/unixsock"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtionet"
)

// Limits of a guest's keys.
const (
	MaxQueuePairs = 128   // 256 rings, as many as the protocol's 8-bit ring index can name
	MinMTU        = 68    // IPv4's minimum, the lower bound of virtio's mtu field
	MaxMTU        = 65520 // the largest MTU of a tap
	MaxTxLag      = 1024
)

// Guest describes one guest as written. Zero values are not the defaults: start from
// DefaultGuest. Parse judges it.
type Guest struct {
	Name         string   `yaml:"name" json:"name"`
	Socket       string   `yaml:"socket" json:"socket"`
	Client       bool     `yaml:"client" json:"client,omitempty"`
	Network      string   `yaml:"network" json:"network"`
	Publish      []string `yaml:"publish" json:"publish,omitempty"`
	QueuePairs   int      `yaml:"queue-pairs" json:"queue-pairs"`
	MAC          string   `yaml:"mac" json:"mac,omitempty"`
	MTU          int      `yaml:"mtu" json:"mtu,omitempty"`
	Copy         string   `yaml:"copy" json:"copy"`
	TxAlloc      string   `yaml:"tx-alloc" json:"tx-alloc"`
	TxLag        int      `yaml:"tx-lag" json:"tx-lag"`
	SocketMode   string   `yaml:"socket-mode" json:"socket-mode"`
	SocketOwner  string   `yaml:"socket-owner" json:"socket-owner,omitempty"`
	Experimental []string `yaml:"experimental" json:"experimental,omitempty"`
}

// DefaultGuest returns a Guest with every default filled in; name and socket have none.
func DefaultGuest() Guest {
	return Guest{Network: "user", QueuePairs: 8, Copy: "auto", TxAlloc: "frag", SocketMode: "0600"}
}

// GuestSpec is a Guest after Parse.
type GuestSpec struct {
	Name       string
	Socket     string
	Client     bool
	Network    network.Network
	QueuePairs int
	MAC        net.HardwareAddr // nil: the front-end decides
	MTU        int              // 0: the network decides
	Copy       virtionet.CopyPolicy
	TxAlloc    virtionet.TxAlloc
	TxLag      int
	Listen     unixsock.Options
	Protocol   vhostuser.ProtocolFeatures // offered in addition
}

// KeyError reports a key with a value that is not accepted.
type KeyError struct {
	Key string // as flag, YAML and JSON spell it, without dashes in front
	Err error
}

// Error names the key and says what is wrong.
func (e *KeyError) Error() string { return e.Key + ": " + e.Err.Error() }

// Unwrap returns the reason without the key.
func (e *KeyError) Unwrap() error { return e.Err }

func keyErrorf(key, format string, args ...any) error {
	return &KeyError{Key: key, Err: fmt.Errorf(format, args...)}
}

// Names end up as metric labels and in URLs.
var guestName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$`)

// Parse checks every key and returns the usable form. The error is a *KeyError.
func (g Guest) Parse() (GuestSpec, error) {
	spec := GuestSpec{Name: g.Name, Socket: g.Socket, Client: g.Client, QueuePairs: g.QueuePairs, MTU: g.MTU, TxLag: g.TxLag}
	if !guestName.MatchString(g.Name) {
		return spec, keyErrorf("name", "%q: accepted are 1 to 64 letters, digits, '.', '_' and '-', starting with a letter or digit", g.Name)
	}
	if err := unixsock.CheckPath(g.Socket); err != nil {
		return spec, &KeyError{Key: "socket", Err: err}
	}
	if g.QueuePairs < 1 || g.QueuePairs > MaxQueuePairs {
		return spec, keyErrorf("queue-pairs", "%d: accepted are 1 to %d", g.QueuePairs, MaxQueuePairs)
	}
	if g.MTU != 0 && (g.MTU < MinMTU || g.MTU > MaxMTU) {
		return spec, keyErrorf("mtu", "%d: accepted are %d to %d, or 0 for the network's own", g.MTU, MinMTU, MaxMTU)
	}
	if g.TxLag < 0 || g.TxLag > MaxTxLag {
		return spec, keyErrorf("tx-lag", "%d: accepted are 0 to %d", g.TxLag, MaxTxLag)
	}
	for _, parse := range []func(Guest, *GuestSpec) error{parseNetwork, parseMAC, parseCopy, parseTxAlloc, parseListen, parseExperimental} {
		if err := parse(g, &spec); err != nil {
			return spec, err
		}
	}
	return spec, nil
}

func parseNetwork(g Guest, spec *GuestSpec) (err error) {
	if g.Network == "" {
		return keyErrorf("network", "is missing: accepted are %s", strings.Join(network.Kinds(), ", "))
	}
	if spec.Network, err = network.Parse(g.Network); err != nil {
		return &KeyError{Key: "network", Err: err}
	}
	if spec.Network, err = spec.Network.WithPublish(g.Publish); err != nil {
		return &KeyError{Key: "publish", Err: err}
	}
	return nil
}

func parseMAC(g Guest, spec *GuestSpec) error {
	if g.MAC == "" {
		return nil
	}
	mac, err := net.ParseMAC(g.MAC)
	if err != nil || len(mac) != 6 {
		return keyErrorf("mac", "%q: accepted are six hexadecimal bytes such as 52:54:00:12:34:56", g.MAC)
	}
	if mac[0]&1 != 0 || slices.Equal(mac, make(net.HardwareAddr, 6)) {
		return keyErrorf("mac", "%s: is a group address or zero, wanted a unicast address", g.MAC)
	}
	spec.MAC = mac
	return nil
}

func parseCopy(g Guest, spec *GuestSpec) (err error) {
	if spec.Copy, err = virtionet.ParseCopyPolicy(g.Copy); err != nil {
		return &KeyError{Key: "copy", Err: err}
	}
	return nil
}

func parseTxAlloc(g Guest, spec *GuestSpec) (err error) {
	if spec.TxAlloc, err = virtionet.ParseTxAlloc(g.TxAlloc); err != nil {
		return &KeyError{Key: "tx-alloc", Err: err}
	}
	return nil
}

func parseListen(g Guest, spec *GuestSpec) error {
	mode, err := parseMode(g.SocketMode)
	if err != nil {
		return &KeyError{Key: "socket-mode", Err: err}
	}
	spec.Listen = unixsock.Options{Mode: mode, UID: -1, GID: -1}
	if g.SocketOwner == "" {
		return nil
	}
	if spec.Listen.UID, spec.Listen.GID, err = lookupOwner(g.SocketOwner); err != nil {
		return &KeyError{Key: "socket-owner", Err: err}
	}
	return nil
}

func parseMode(text string) (fs.FileMode, error) {
	mode, err := strconv.ParseUint(text, 8, 32)
	if err != nil || mode > 0o777 {
		return 0, fmt.Errorf("%q: accepted are octal permissions such as 0660", text)
	}
	return fs.FileMode(mode), nil
}

// lookupOwner resolves USER[:GROUP], each by name or number; -1 stands for the part left out.
func lookupOwner(text string) (uid, gid int, err error) {
	uid, gid = -1, -1
	userName, groupName, withGroup := strings.Cut(text, ":")
	if userName == "" && groupName == "" || withGroup && groupName == "" {
		return uid, gid, fmt.Errorf("%q: accepted are USER, USER:GROUP and :GROUP", text)
	}
	if userName != "" {
		if uid, err = resolveID(userName, func(s string) (string, error) {
			u, err := user.Lookup(s)
			if err != nil {
				return "", err
			}
			return u.Uid, nil
		}); err != nil {
			return -1, -1, fmt.Errorf("no such user %q", userName)
		}
	}
	if groupName != "" {
		if gid, err = resolveID(groupName, func(s string) (string, error) {
			g, err := user.LookupGroup(s)
			if err != nil {
				return "", err
			}
			return g.Gid, nil
		}); err != nil {
			return -1, -1, fmt.Errorf("no such group %q", groupName)
		}
	}
	return uid, gid, nil
}

func resolveID(text string, lookup func(string) (string, error)) (int, error) {
	id, err := lookup(text)
	if err != nil {
		id = text
	}
	n, err := strconv.ParseUint(id, 10, 31)
	return int(n), err
}
