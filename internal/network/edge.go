package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vhostd/vhostd/internal/capture"
	"github.com/vhostd/vhostd/internal/netspec"
	"github.com/vhostd/vhostd/internal/ratelimit"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/edge"
	"github.com/vhostd/vhostd/port/user"
)

// edgeSpec is what stands between a guest and its network: a guard, limits of the rate, and a capture.
type edgeSpec struct {
	in, out ratelimit.Rate
	source  edge.Source
	capture capture.Options
	// changes says that an edge is there even without any of it, so that limits and guard can come while frames pass.
	changes bool
}

// edgeKeys are the parameters that a running edge follows.
var edgeKeys = []string{"rate-in", "rate-out", "guard"}

// parseEdge reads the parameters that every network with others at its end has.
func parseEdge(s *netspec.Spec) (e edgeSpec, err error) {
	wrong := func(key string, err error) (edgeSpec, error) {
		return e, fmt.Errorf("network %s: %s: %w", s.Kind, key, err)
	}
	for _, r := range []struct {
		key string
		to  *ratelimit.Rate
	}{{"rate-in", &e.in}, {"rate-out", &e.out}} {
		if text := s.String(r.key, ""); text != "" {
			if *r.to, err = ratelimit.ParseRate(text); err != nil {
				return wrong(r.key, err)
			}
		}
	}
	if e.source, err = parseGuard(s); err != nil {
		return e, err
	}
	e.capture.Path = s.String("capture", "")
	e.capture.SnapLen = s.Int("snaplen", 0, 0, capture.MaxSnapLen)
	if text := s.String("rotate", ""); text != "" {
		if e.capture.Rotate, err = capture.ParseSize(text); err != nil {
			return wrong("rotate", err)
		}
	}
	if e.capture.Path == "" {
		if e.capture.SnapLen != 0 || e.capture.Rotate != 0 {
			return wrong("capture", errors.New("the file is missing that snaplen and rotate are about"))
		}
		return e, nil
	}
	if err := e.capture.Validate(); err != nil {
		return wrong("capture", err)
	}
	return e, nil
}

// parseGuard reads what the guest may call itself: one Ethernet address, and IP addresses and networks.
func parseGuard(s *netspec.Spec) (source edge.Source, err error) {
	wrong := func(text, why string) (edge.Source, error) {
		return edge.Source{}, fmt.Errorf("network %s: guard=%s: %s (accepted are a MAC, and addresses and prefixes such as 10.0.2.15 and "+
			"fd00:1::/64, again and again)", s.Kind, text, why)
	}
	for _, p := range s.List("guard") {
		if mac, err := net.ParseMAC(p.Value); err == nil {
			switch {
			case len(mac) != len(source.MAC) || mac[0]&1 != 0 || [6]byte(mac) == [6]byte{}:
				return wrong(p.Value, "is no Ethernet address of a guest")
			case source.MAC != [6]byte{}:
				return wrong(p.Value, "is the second MAC")
			}
			source.MAC = [6]byte(mac)
			continue
		}
		prefix, err := netip.ParsePrefix(p.Value)
		if addr, no := netip.ParseAddr(p.Value); no == nil && addr.Zone() == "" {
			prefix, err = netip.PrefixFrom(addr, addr.BitLen()), nil
		}
		switch {
		case err != nil:
			return wrong(p.Value, "is neither a MAC nor an address")
		case prefix != prefix.Masked():
			return wrong(p.Value, "has bits beyond its prefix")
		}
		source.Addrs = append(source.Addrs, prefix)
	}
	if _, err := edge.NewGuard(source); err != nil {
		return source, fmt.Errorf("network %s: %w", s.Kind, err)
	}
	return source, nil
}

// none says that nothing stands there, and never will.
func (e *edgeSpec) none() bool {
	return e.in == 0 && e.out == 0 && e.source.MAC == [6]byte{} && len(e.source.Addrs) == 0 && e.capture.Path == "" && !e.changes
}

// edged is a port with an edge, and with the capture that it ends.
type edged struct {
	port.Port
	inner port.Port
	opts  edge.Options
}

// wrap puts the edge around a port, or returns the port if there is none and frames at a time are not limited.
func (e *edgeSpec) wrap(inner port.Port, with Options) (port.Port, error) {
	if e.none() {
		if with.Batch == 0 {
			return inner, nil
		}
		opts := edge.Options{Batch: with.Batch}
		return &edged{Port: edge.Wrap(inner, opts), inner: inner, opts: opts}, nil
	}
	opts := edge.Options{ToGuest: ratelimit.New(e.in), FromGuest: ratelimit.New(e.out), Batch: with.Batch}
	var err error
	if opts.Guard, err = edge.NewGuard(e.source); err != nil {
		return nil, errors.Join(err, inner.Close())
	}
	if e.capture.Path != "" {
		o := e.capture
		o.Name, o.Logger = with.Name, with.Logger
		if opts.Capture, err = capture.Open(o); err != nil {
			return nil, errors.Join(err, inner.Close())
		}
	}
	return &edged{Port: edge.Wrap(inner, opts), inner: inner, opts: opts}, nil
}

// follow changes what a running edge can: from the next batch on.
func (e *edged) follow(to *edgeSpec) error {
	if e.opts.Guard == nil {
		return nil // it limits frames at a time, and nothing else
	}
	if err := e.opts.Guard.Set(to.source); err != nil {
		return err
	}
	e.opts.ToGuest.SetRate(to.in)
	e.opts.FromGuest.SetRate(to.out)
	return nil
}

// Close closes the port and then the capture.
func (e *edged) Close() error {
	err := e.Port.Close()
	if e.opts.Capture != nil {
		err = errors.Join(err, e.opts.Capture.Close())
	}
	return err
}

// FollowMTU implements [port.MTUFollower] as the edge does.
func (e *edged) FollowMTU(mtu int) error {
	if f, ok := e.Port.(port.MTUFollower); ok {
		return f.FollowMTU(mtu)
	}
	return e.Port.SetMTU(mtu)
}

// MaySend implements [port.AddressKeeper] as the edge does.
func (e *edged) MaySend(mac [6]byte) error {
	if k, ok := e.Port.(port.AddressKeeper); ok {
		return k.MaySend(mac)
	}
	return nil
}

// UserPort returns the user network that p is, at whatever edge.
func UserPort(p port.Port) (*user.Port, bool) {
	if e, ok := p.(*edged); ok {
		p = e.inner
	}
	u, ok := p.(*user.Port)
	return u, ok
}
