package frontend

import (
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// Order is the order of messages of a real front-end (recorded or read in its
// source).
type Order uint8

// Orders that differ in what a back-end must cope with.
const (
	// QEMU enables rings before it acknowledges features, and hands over the call
	// descriptor after the kick.
	QEMU Order = iota
	// DPDK (virtio-user) owns the session first, sends no err descriptor and
	// enables last.
	DPDK
	// CloudHypervisor sends the address before the base, the kick last, asks for
	// an acknowledgement of every message and enables last.
	CloudHypervisor
	// Crosvm sends each ring with the address before the base and enables it at
	// once; it passes the control queue.
	Crosvm
	// Libkrun owns the session and shares memory before it acknowledges features,
	// sends the call descriptor, the same for all rings, after the kick, and passes
	// the control queue.
	Libkrun
)

// controlled are the features that only a driver with a control queue has; of these
// front-ends that serve it themselves pass on none.
const controlled = virtio.FNetCtrlVQ | virtio.FNetCtrlRX | virtio.FNetCtrlRXExtra | virtio.FNetCtrlVLAN |
	virtio.FNetCtrlMACAddr | virtio.FNetCtrlGuestOffloads

// Options of a Client. The zero value acknowledges what QEMU would of everything
// offered but packed rings and logging, in QEMU's order, with rings of 256.
type Options struct {
	// Features are acknowledged as far as offered; 0 means all but RING_PACKED, LOG_ALL,
	// ACCESS_PLATFORM, which needs IOMMU, and, in the orders of front-ends that do not
	// pass the control queue, what belongs to it.
	Features virtio.Features
	// Protocol features, likewise.
	Protocol vhostuser.ProtocolFeatures
	Order    Order
	// NeedReply asks for acknowledgements in any order.
	NeedReply bool
	// RingSize is the number of descriptors. Default 256.
	RingSize int
	// Place lays a ring out. Default driver.Paged, packed driver.PackedFormat.
	Place func(size int, at uint64) driver.Layout
	// RxBuf and TxBuf are the bytes for each receive buffer and each frame to
	// send, virtio-net header included. Default 2048 each.
	RxBuf, TxBuf int
	// Chunk is the size of the pieces in chained and indirect layouts. Default 512.
	Chunk int
	// RxLayout is how receive buffers are spread over descriptors. Default Direct.
	RxLayout Layout
	// IOMMU, when set, stands between the device and the memory, if the back-end
	// offers what it needs. It belongs to one client.
	IOMMU *IOMMU
	// Region is the index of the memory region for rings and buffers.
	Region int
	// Ended, when closed, says that the back-end's process is no more: who waits for a ring
	// then learns it as ErrEnded. Nil waits until the timeout.
	Ended <-chan struct{}
}

// ErrEnded is the error of waiting for a ring when Options.Ended says so.
var ErrEnded = errors.New("the back-end ended")

func (o Options) withDefaults() Options {
	if o.RingSize == 0 {
		o.RingSize = 256
	}
	if o.RxBuf == 0 {
		o.RxBuf = 2048
	}
	if o.TxBuf == 0 {
		o.TxBuf = 2048
	}
	if o.Chunk == 0 {
		o.Chunk = 512
	}
	return o
}

// Client is a front-end with a driver: Negotiate, SetMemory, StartPair, then
// frames. One goroutine uses it; pairs may be used from one goroutine each.
type Client struct {
	*Conn
	// Features and Protocol are the acknowledged sets, QueueNum the answer to
	// GET_QUEUE_NUM; valid after Negotiate.
	Features virtio.Features
	Protocol vhostuser.ProtocolFeatures
	QueueNum int
	// Mem is the shared memory, valid after SetMemory. It is the caller's.
	Mem *Memory

	opts    Options
	pairs   map[int]*Pair
	enabled map[int]bool
	control *Queue
}

// NewClient makes a client on a connection, which Close closes.
func NewClient(c *Conn, opts Options) *Client {
	c.NeedReply = opts.NeedReply || opts.Order == CloudHypervisor
	return &Client{Conn: c, opts: opts.withDefaults(), pairs: map[int]*Pair{}, enabled: map[int]bool{}}
}

// Connect dials the back-end's socket, negotiates and shares mem.
func Connect(path string, mem *Memory, opts Options) (*Client, error) {
	conn, err := Dial(path)
	if err != nil {
		return nil, err
	}
	c := NewClient(conn, opts)
	if err := c.Negotiate(); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	if err := c.SetMemory(mem); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// Negotiate agrees on features. In QEMU's order it enables pair 0 on the way.
func (c *Client) Negotiate() error {
	if c.opts.Order != QEMU && c.opts.Order != Libkrun {
		if err := c.SetOwner(); err != nil {
			return err
		}
	}
	offered, err := c.GetFeatures()
	if err != nil {
		return err
	}
	if offered.Has(virtio.FVhostUserProtocolFeatures) {
		if err := c.negotiateProtocol(); err != nil {
			return err
		}
	}
	if c.opts.Order == QEMU {
		if err := c.SetOwner(); err != nil {
			return err
		}
		if err := c.Enable(0, true); err != nil {
			return err
		}
	}
	c.Features = offered &^ (virtio.FRingPacked | virtio.FAccessPlatform | virtio.FVhostLogAll)
	if c.opts.Order < Crosvm {
		c.Features &^= controlled
	}
	if c.opts.Features != 0 {
		c.Features = offered & (c.opts.Features | virtio.FVhostUserProtocolFeatures)
	}
	if c.opts.IOMMU != nil {
		if err := c.opts.IOMMU.attach(c, offered); err != nil {
			return err
		}
	}
	if c.opts.Order == Libkrun {
		return nil // SetMemory does
	}
	return c.SetFeatures(c.Features)
}

func (c *Client) negotiateProtocol() error {
	offered, err := c.GetProtocolFeatures()
	if err != nil {
		return err
	}
	if c.opts.Protocol != 0 {
		offered &= c.opts.Protocol
	}
	c.Protocol = offered
	if err := c.SetProtocolFeatures(offered); err != nil {
		return err
	}
	if offered&vhostuser.ProtoMQ != 0 {
		c.QueueNum, err = c.GetQueueNum()
	}
	return err
}

// SetMemory shares mem, also while pairs run.
func (c *Client) SetMemory(mem *Memory) error {
	first := c.Mem == nil
	c.Mem = mem
	specs, fds := mem.Table()
	if c.Protocol&vhostuser.ProtoReplyAck == 0 || c.opts.Order >= Crosvm {
		if !first || c.opts.Order != Libkrun {
			return c.SetMemTable(specs, fds)
		}
		for _, step := range []func() error{
			c.SetOwner, func() error { return c.SetMemTable(specs, fds) }, func() error { return c.SetFeatures(c.Features) },
		} {
			if err := step(); err != nil {
				return err
			}
		}
		return nil
	}
	return c.DoAck(vhostuser.ReqSetMemTable, vhostuser.AppendMemTable(nil, specs), fds...)
}

// StartPair starts queue pair i, whose rings and buffers it allocates on first
// use, and enables it. Its rings go on where they were.
func (c *Client) StartPair(i int) (*Pair, error) {
	p := c.pairs[i]
	if p == nil {
		var err error
		if p, err = newPair(c.Mem, i, c.Features, c.opts); err != nil {
			return nil, err
		}
		c.pairs[i] = p
	}
	for _, q := range [...]*Queue{p.RX, p.TX} {
		if err := c.startRing(q); err != nil {
			return nil, fmt.Errorf("ring %d: %w", q.Index, err)
		}
	}
	if c.opts.Order >= Crosvm {
		c.enabled[i] = true
	}
	return p, c.Enable(i, true)
}

func (c *Client) startRing(q *Queue) error {
	num := func() error { return c.SetVringNum(q.Index, uint32(q.Driver.Size())) }
	base := func() error { return c.SetVringBase(q.Index, q.base()) }
	addr := func() error { return c.SetVringAddr(q.Addr()) }
	if c.Protocol&vhostuser.ProtoGPAAddresses != 0 {
		addr = func() error { return c.SetVringAddr(q.GuestAddr()) }
	}
	if c.opts.IOMMU != nil {
		addr = func() error { return c.SetVringAddr(q.IOVAAddr()) }
	}
	kick := func() error { return c.SetVringKick(q.Index, q.KickFD) }
	call := func() error { return c.SetVringCall(q.Index, q.CallFD) }
	fail := func() error { return c.SetVringErr(q.Index, q.ErrFD) }
	enable := func() error { return c.SetVringEnable(q.Index, true) }
	steps := map[Order][]func() error{
		QEMU:            {fail, num, base, addr, kick, call},
		DPDK:            {call, num, base, addr, kick},
		CloudHypervisor: {num, addr, base, call, kick},
		Crosvm:          {num, addr, base, call, kick, enable},
		Libkrun:         {num, base, addr, kick, call, enable},
	}
	for _, step := range steps[c.opts.Order] {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// Enable enables or disables both rings of pair i, if that is a change.
func (c *Client) Enable(i int, on bool) error {
	if c.enabled[i] == on {
		return nil
	}
	for _, ring := range [...]int{2 * i, 2*i + 1} {
		if err := c.SetVringEnable(ring, on); err != nil {
			return err
		}
	}
	c.enabled[i] = on
	return nil
}

// Stop stops pair i and returns the positions of its two rings, of packed ones the
// lower half. StartPair starts it again.
func (c *Client) Stop(i int) (rx, tx uint16, err error) {
	positions := [2]uint32{}
	for k := range positions {
		if positions[k], err = c.GetVringBase(2*i + k); err != nil {
			return 0, 0, err
		}
	}
	if p := c.pairs[i]; p != nil {
		p.RX.position, p.TX.position = positions[0], positions[1]
	}
	return uint16(positions[0]), uint16(positions[1]), nil
}

// Adopt takes over a pair of another client, for a front-end that reconnects
// with its rings in use. StartPair then starts it as it is.
func (c *Client) Adopt(p *Pair) {
	c.pairs[p.RX.Index/2] = p
	p.RX.ended, p.TX.ended = c.opts.Ended, c.opts.Ended
}

// Release gives the client's pairs up without closing them, for Adopt.
func (c *Client) Release() { clear(c.pairs) }

// Close closes the connection and the eventfds of the client's pairs.
func (c *Client) Close() error {
	errs := []error{c.Conn.Close()}
	if c.opts.IOMMU != nil {
		errs = append(errs, c.opts.IOMMU.Close())
	}
	if c.control != nil {
		errs = append(errs, c.control.close())
	}
	for _, p := range c.pairs {
		errs = append(errs, p.Close())
	}
	clear(c.pairs)
	return errors.Join(errs...)
}
