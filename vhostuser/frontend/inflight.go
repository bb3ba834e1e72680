package frontend

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
)

// Inflight is an inflight region with its file, which a front-end keeps from one back-end to the next.
type Inflight struct {
	vhostuser.InflightDesc
	FD int
}

// Close closes the file.
func (in Inflight) Close() error { return unix.Close(in.FD) }

// GetInflightFD asks the back-end for a region for rings 0 to queues-1 of up to size descriptors. The caller owns it.
func (c *Conn) GetInflightFD(queues, size uint16) (Inflight, error) {
	const req = vhostuser.ReqGetInflightFD
	if err := c.Send(req, c.flags(), vhostuser.InflightDesc{Queues: queues, QueueSize: size}.Append(nil)); err != nil {
		return Inflight{}, err
	}
	r, err := c.Recv(0)
	if err != nil {
		return Inflight{}, fmt.Errorf("reply to %v: %w", req, err)
	}
	const flags = vhostuser.FlagVersion | vhostuser.FlagReply
	if r.Request != req || r.Flags != flags || len(r.Payload) != 24 || len(r.FDs) != 1 {
		r.closeFDs()
		return Inflight{}, fmt.Errorf("reply to %v: got %v with flags %#x, %d bytes and %d descriptors", req, r.Request, r.Flags, len(r.Payload), len(r.FDs))
	}
	return Inflight{InflightDesc: vhostuser.DecodeInflightDesc(r.Payload), FD: r.FDs[0]}, nil
}

// SetInflightFD hands a region to the back-end, before its rings start.
func (c *Conn) SetInflightFD(in Inflight) error {
	return c.Do(vhostuser.ReqSetInflightFD, in.Append(nil), in.FD)
}
