package network

import (
	"fmt"
	"io/fs"
	"net"
	"strconv"

	"github.com/vhostd/vhostd/internal/netspec"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/echo"
	"github.com/vhostd/vhostd/port/null"
	"github.com/vhostd/vhostd/port/sock"
	"github.com/vhostd/vhostd/port/source"
	"github.com/vhostd/vhostd/port/tap"
)

// tapKind is the only kind that the host's interfaces are managed for, as a network or as the uplink of a switch.
const tapKind = "tap"

var kinds = []kind{
	{"echo", parseEcho, false},
	{"null", parseNull, false},
	{"sock", parseSock, true},
	{"source", parseSource, false},
	{"switch", parseSwitch, true},
	{tapKind, parseTap, true},
	{userKind, parseUser, true},
}

func parseNull(*netspec.Spec) (opener, error) {
	return openFunc(func(Options) (port.Port, error) { return null.New(), nil }), nil
}

func parseEcho(s *netspec.Spec) (opener, error) {
	o := echo.Options{
		Swap:    s.Bool("swap", true),
		Backlog: s.Int("backlog", echo.DefaultBacklog, 1, echo.MaxBacklog),
	}
	return openFunc(func(with Options) (port.Port, error) {
		o := o
		o.Budget = with.Echoes
		return echo.New(o)
	}), o.Validate()
}

func parseSource(s *netspec.Spec) (opener, error) {
	o := source.Options{
		Size:  s.Int("size", source.DefaultSize, source.MinSize, source.MaxSize),
		Rate:  s.Float("rate", 0, 0, source.MaxRate),
		Flows: s.Int("flows", 1, 1, source.MaxFlows),
	}
	if text := s.String("mac", ""); text != "" {
		mac, err := net.ParseMAC(text)
		if err != nil {
			return nil, fmt.Errorf("network source: mac=%s: accepted are six hexadecimal bytes such as 52:54:00:12:34:56", text)
		}
		o.MAC = mac
	}
	return openFunc(func(Options) (port.Port, error) { return source.New(o) }), o.Validate()
}

// sockSpec is a socket network, whose path the sandbox must know.
type sockSpec struct{ opts sock.Options }

func parseSock(s *netspec.Spec) (opener, error) {
	o := sock.Options{Path: s.String("path", ""), Connect: s.Bool("connect", false)}
	if text := s.String("mode", ""); text != "" {
		mode, err := strconv.ParseUint(text, 8, 32)
		if err != nil {
			return nil, fmt.Errorf("network sock: mode=%s: accepted are octal permissions such as 0660", text)
		}
		o.Mode = fs.FileMode(mode)
	}
	return sockSpec{o}, o.Validate()
}

func (s sockSpec) open(with Options) (port.Port, error) {
	o := s.opts
	o.Logger = with.Logger
	return sock.New(o)
}

func parseTap(s *netspec.Spec) (opener, error) {
	o := tap.Options{
		Name:      s.String("name", ""),
		Bridge:    s.String("bridge", ""),
		Persist:   s.Bool("persist", false),
		Owner:     s.String("owner", ""),
		Group:     s.String("group", ""),
		LeaveDown: !s.Bool("up", true),
		Queues:    s.Int("queues", 0, 1, tap.MaxQueues),
	}
	return openFunc(func(with Options) (port.Port, error) {
		o := o
		if o.Queues == 0 {
			o.Queues = with.QueuePairs
		}
		o.Logger = with.Logger
		return tap.New(o)
	}), o.Validate()
}
