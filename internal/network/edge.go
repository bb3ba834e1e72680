package network

import (
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/internal/capture"
	"github.com/vhostd/vhostd/internal/netspec"
	"github.com/vhostd/vhostd/internal/ratelimit"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/edge"
	"github.com/vhostd/vhostd/port/user"
)

// edgeSpec is what stands between a guest and its network: limits of the rate, and a capture.
type edgeSpec struct {
	in, out ratelimit.Rate
	capture capture.Options
}

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

// edged is a port with an edge, and with the capture that it ends.
type edged struct {
	port.Port
	inner  port.Port
	writer *capture.Writer // nil without a capture
}

// wrap puts the edge around a port, or returns the port if there is none.
func (e edgeSpec) wrap(inner port.Port, with Options) (port.Port, error) {
	if e == (edgeSpec{}) {
		return inner, nil
	}
	opts := edge.Options{}
	if e.in != 0 {
		opts.ToGuest = ratelimit.New(e.in)
	}
	if e.out != 0 {
		opts.FromGuest = ratelimit.New(e.out)
	}
	if e.capture.Path != "" {
		o := e.capture
		o.Name, o.Logger = with.Name, with.Logger
		var err error
		if opts.Capture, err = capture.Open(o); err != nil {
			return nil, errors.Join(err, inner.Close())
		}
	}
	return &edged{Port: edge.Wrap(inner, opts), inner: inner, writer: opts.Capture}, nil
}

// Close closes the port and then the capture.
func (e *edged) Close() error {
	err := e.Port.Close()
	if e.writer != nil {
		err = errors.Join(err, e.writer.Close())
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
