package frontend

import (
	"fmt"
	"time"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// StartControl starts and enables the control queue, which is the ring behind the
// data rings of pairs queue pairs, and behind the first pair's without MQ. Its ring
// and buffers are allocated on first use. pairs is max_virtqueue_pairs of the
// device's configuration space.
func (c *Client) StartControl(pairs int) (*Queue, error) {
	if !c.Features.Has(virtio.FNetCtrlVQ) {
		return nil, fmt.Errorf("the control queue needs VIRTIO_NET_F_CTRL_VQ, acknowledged are %v", c.Features)
	}
	index := 2
	if c.Features.Has(virtio.FNetMQ) {
		index = 2 * pairs
	}
	if c.control == nil {
		q, err := newQueue(c.Mem, index, c.Features, c.opts, c.opts.TxBuf)
		if err != nil {
			return nil, err
		}
		c.control = q
	}
	if err := c.startRing(c.control); err != nil {
		return nil, fmt.Errorf("ring %d: %w", index, err)
	}
	return c.control, c.SetVringEnable(index, true)
}

// Command sends one command on a control queue, waits for the answer and returns
// it with the length that the device has written. layout says how header, data and
// answer are spread: Direct uses a descriptor for the two and one for the answer.
func (q *Queue) Command(class, command byte, data []byte, layout Layout, timeout time.Duration) (answer byte, written uint32, err error) {
	i, ok := q.takeSlot()
	if !ok {
		return 0, 0, ErrFull
	}
	s := &q.slots[i]
	n := virtio.CtrlHdrLen + len(data)
	if n >= len(s.data) {
		return 0, 0, fmt.Errorf("command of %d bytes, the buffer has %d", n, len(s.data))
	}
	s.data[0], s.data[1], s.data[n] = class, command, 0xff
	copy(s.data[virtio.CtrlHdrLen:], data)
	ack := driver.Buf{Addr: s.buf + uint64(n), Len: 1, Write: true}
	bufs := []driver.Buf{{Addr: s.buf, Len: uint32(n)}, ack}
	if layout != Direct && len(data) > 0 {
		bufs = []driver.Buf{{Addr: s.buf, Len: virtio.CtrlHdrLen}, {Addr: s.buf + virtio.CtrlHdrLen, Len: uint32(len(data))}, ack}
	}
	var head uint16
	if layout == Indirect {
		head, err = q.Driver.AddIndirect(q.mem.Host(s.table), s.table, bufs)
	} else {
		head, err = q.Driver.AddChain(bufs)
	}
	if err != nil {
		return 0, 0, err
	}
	q.inUse[head] = i
	if err := q.Flush(); err != nil {
		return 0, 0, err
	}
	if err := q.WaitUsed(timeout); err != nil {
		return 0, 0, err
	}
	i, written, ok, err = q.collect()
	if err != nil || !ok {
		return 0, 0, fmt.Errorf("no answer: %w", err)
	}
	q.free = append(q.free, i)
	return q.slots[i].data[n], written, nil
}
