package frontend

import (
	"errors"
	"fmt"
	"time"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// Layout is how a frame to send is spread over descriptors.
type Layout uint8

// Layouts.
const (
	Direct   Layout = iota // header and frame in one descriptor
	Chained                // the header in its own, the frame in pieces
	Indirect               // as Chained, in an indirect table
)

// ErrFull says that every slot of the ring is in use.
var ErrFull = errors.New("no free slot in the ring")

// Stage puts one frame into the transmitq without showing it to the device; see
// Flush. It takes back used chains when the ring is full, and fails with ErrFull
// if there are none.
func (p *Pair) Stage(hdr virtio.NetHdr, frame []byte, layout Layout) error {
	q := p.TX
	i, ok := q.takeSlot()
	if !ok {
		if _, err := p.ReapTx(); err != nil {
			return err
		}
		if i, ok = q.takeSlot(); !ok {
			return ErrFull
		}
	}
	head, err := p.stage(&q.slots[i], hdr, frame, layout)
	if errors.Is(err, driver.ErrFull) {
		// Earlier chains may be used already and hold the descriptors.
		if _, err := p.ReapTx(); err != nil {
			return err
		}
		head, err = p.stage(&q.slots[i], hdr, frame, layout)
	}
	if err != nil {
		q.free = append(q.free, i)
		if errors.Is(err, driver.ErrFull) {
			return ErrFull
		}
		return err
	}
	q.inUse[head] = i
	return nil
}

func (p *Pair) stage(s *slot, hdr virtio.NetHdr, frame []byte, layout Layout) (head uint16, err error) {
	hdrLen := p.features.NetHdrLen()
	total := hdrLen + len(frame)
	if total > len(s.data) {
		return 0, fmt.Errorf("frame of %d bytes with its header is larger than Options.TxBuf (%d)", len(frame), len(s.data))
	}
	hdr.Encode(s.data[:hdrLen])
	copy(s.data[hdrLen:], frame)
	return p.TX.add(s, total, layout)
}

// add stages the first n bytes of a slot as one chain.
func (q *Queue) add(s *slot, n int, layout Layout) (head uint16, err error) {
	at, write := q.iova+s.buf, q.Index%2 == 0
	if layout == Direct {
		return q.Driver.AddDirect(driver.Buf{Addr: at, Len: uint32(n), Write: write})
	}
	bufs := append(q.bufs[:0], driver.Buf{Addr: at, Len: uint32(q.hdrLen), Write: write})
	for off := q.hdrLen; off < n; off += q.chunk {
		bufs = append(bufs, driver.Buf{Addr: at + uint64(off), Len: uint32(min(q.chunk, n-off)), Write: write})
	}
	q.bufs = bufs
	if layout == Chained {
		return q.Driver.AddChain(bufs)
	}
	if len(bufs) > maxPieces {
		return 0, fmt.Errorf("%d bytes need %d descriptors in pieces of %d, the indirect table holds %d", n, len(bufs), q.chunk, maxPieces)
	}
	return q.Driver.AddIndirect(q.mem.Host(s.table), q.iova+s.table, bufs)
}

// SendTx stages one frame and shows it to the device.
func (p *Pair) SendTx(hdr virtio.NetHdr, frame []byte, layout Layout) error {
	if err := p.Stage(hdr, frame, layout); err != nil {
		return err
	}
	return p.TX.Flush()
}

// ReapTx takes back the transmit chains that the device has used.
func (p *Pair) ReapTx() (n int, err error) {
	for {
		i, _, ok, err := p.TX.collect()
		if !ok {
			return n, err
		}
		p.TX.free = append(p.TX.free, i)
		n++
	}
}

// DrainTx waits until the device has used every transmit chain.
func (p *Pair) DrainTx(timeout time.Duration) error {
	deadline := time.Now().Add(timeout)
	for {
		if _, err := p.ReapTx(); err != nil {
			return err
		}
		if p.TX.Driver.Outstanding() == 0 {
			return nil
		}
		if err := p.TX.WaitUsed(time.Until(deadline)); err != nil {
			return fmt.Errorf("%d frames not yet sent: %w", p.TX.Driver.Outstanding(), err)
		}
	}
}

// PostRx offers up to n free receive buffers to the device, in Options.RxLayout,
// and returns how many those were.
func (p *Pair) PostRx(n int) (posted int, err error) {
	q := p.RX
	for posted < n {
		i, ok := q.takeSlot()
		if !ok {
			break
		}
		s := &q.slots[i]
		head, err := q.add(s, len(s.data), p.rxLayout)
		if err != nil {
			q.free = append(q.free, i)
			if errors.Is(err, driver.ErrFull) {
				break
			}
			return posted, err
		}
		q.inUse[head] = i
		posted++
	}
	return posted, q.Flush()
}

// TryRecv returns the next frame if there is one; see AppendRecv.
func (p *Pair) TryRecv() (hdr virtio.NetHdr, frame []byte, ok bool, err error) {
	return p.AppendRecv(nil)
}

// AppendRecv appends the next frame to b if there is one. With mergeable buffers
// it joins the num_buffers buffers, all of which must be there at once. The
// buffers it came in are free again for PostRx.
func (p *Pair) AppendRecv(b []byte) (hdr virtio.NetHdr, frame []byte, ok bool, err error) {
	first, written, ok, err := p.RX.collect()
	if !ok {
		return hdr, nil, false, err
	}
	hdrLen := p.features.NetHdrLen()
	data, err := p.received(first, written)
	if err != nil {
		return hdr, nil, false, err
	}
	if len(data) < hdrLen {
		return hdr, nil, false, fmt.Errorf("receive buffer used with %d bytes, the header alone has %d", written, hdrLen)
	}
	hdr.Decode(data[:hdrLen])
	frame = append(b, data[hdrLen:]...)
	buffers := 1
	if hdrLen == virtio.NetHdrLen {
		buffers = int(hdr.NumBuffers)
	}
	if buffers == 0 || buffers > 1 && !p.features.Has(virtio.FNetMrgRxBuf) {
		return hdr, nil, false, fmt.Errorf("num_buffers is %d", buffers)
	}
	for k := 1; k < buffers; k++ {
		i, written, ok, err := p.RX.collect()
		if err != nil {
			return hdr, nil, false, err
		}
		if !ok {
			return hdr, nil, false, fmt.Errorf("frame of %d buffers became visible with only %d of them", buffers, k)
		}
		data, err := p.received(i, written)
		if err != nil {
			return hdr, nil, false, err
		}
		frame = append(frame, data...)
	}
	return hdr, frame, true, nil
}

// received returns what the device wrote into a slot, valid until PostRx.
func (p *Pair) received(i int, written uint32) ([]byte, error) {
	p.RX.free = append(p.RX.free, i)
	data := p.RX.slots[i].data
	if uint64(written) > uint64(len(data)) {
		return nil, fmt.Errorf("receive buffer of %d bytes used with %d", len(data), written)
	}
	return data[:written], nil
}

// RecvFrame waits for the next frame; see TryRecv.
func (p *Pair) RecvFrame(timeout time.Duration) (virtio.NetHdr, []byte, error) {
	deadline := time.Now().Add(timeout)
	for {
		hdr, frame, ok, err := p.TryRecv()
		if ok || err != nil {
			return hdr, frame, err
		}
		if err := p.RX.WaitUsed(time.Until(deadline)); err != nil {
			return hdr, nil, err
		}
	}
}
