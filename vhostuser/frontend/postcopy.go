package frontend

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
)

// PostcopyAdvise asks for the back-end's userfaultfd, which the caller owns then. -1 means that the
// back-end has none to give.
func (c *Conn) PostcopyAdvise() (fd int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.Send(vhostuser.ReqPostcopyAdvise, c.flags(), nil); err != nil {
		return -1, err
	}
	r, err := c.Recv(0)
	if err != nil {
		return -1, fmt.Errorf("reply to POSTCOPY_ADVISE: %w", err)
	}
	const flags = vhostuser.FlagVersion | vhostuser.FlagReply
	if r.Request != vhostuser.ReqPostcopyAdvise || r.Flags != flags || r.Size != 0 || len(r.FDs) > 1 {
		r.closeFDs()
		return -1, fmt.Errorf("reply to POSTCOPY_ADVISE: got %+v with %d descriptors", r.Header, len(r.FDs))
	}
	if len(r.FDs) == 0 {
		return -1, nil
	}
	return r.FDs[0], nil
}

// PostcopyListen has the memory that is shared from now on be such that arrives.
func (c *Conn) PostcopyListen() error { return c.DoAck(vhostuser.ReqPostcopyListen, nil) }

// PostcopyEnd says that all memory has arrived.
func (c *Conn) PostcopyEnd() error {
	v, err := c.callU64(vhostuser.ReqPostcopyEnd)
	if err == nil && v != 0 {
		err = &RefusedError{vhostuser.ReqPostcopyEnd, v}
	}
	return err
}

// SetMemTableListening replaces the memory table after PostcopyListen, and returns the first address of each
// region in the back-end. PostcopyAck has to follow.
func (c *Conn) SetMemTableListening(specs []guestmem.RegionSpec, fds []int) (bases []uint64, err error) {
	sent := vhostuser.AppendMemTable(nil, specs)
	b, err := c.Call(vhostuser.ReqSetMemTable, sent, fds...)
	if err != nil {
		return nil, err
	}
	return regionBases(vhostuser.ReqSetMemTable, sent, b)
}

// AddMemRegListening adds a region likewise.
func (c *Conn) AddMemRegListening(spec guestmem.RegionSpec, fd int) (base uint64, err error) {
	sent := vhostuser.AppendMemReg(nil, spec)
	b, err := c.Call(vhostuser.ReqAddMemReg, sent, fd)
	if err != nil {
		return 0, err
	}
	bases, err := regionBases(vhostuser.ReqAddMemReg, sent, b)
	if err != nil {
		return 0, err
	}
	return bases[0], nil
}

// PostcopyAck confirms with a message of the same request that the addresses are known.
func (c *Conn) PostcopyAck(req vhostuser.Request, value uint64) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.Send(req, vhostuser.FlagVersion, u64(value))
}

// regionBases takes the addresses out of a reply, which must be what was sent in everything else.
func regionBases(req vhostuser.Request, sent, got []byte) (bases []uint64, err error) {
	const header, region, address = 8, 32, 16
	if len(sent) != len(got) {
		return nil, fmt.Errorf("reply to %v has %d bytes, %d are right", req, len(got), len(sent))
	}
	for at := header; at < len(got); at += region {
		bases = append(bases, binary.LittleEndian.Uint64(got[at+address:]))
		copy(got[at+address:at+address+8], sent[at+address:])
	}
	if string(got) != string(sent) {
		return nil, errors.New("reply to " + req.String() + " names other regions")
	}
	return bases, nil
}
