package attach

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/virtio"
)

// Sizes of receive buffers, header included.
const (
	minRxBuffer = 2048
	// tsoRxBuffer is with mergeable buffers: a large frame takes five of them.
	tsoRxBuffer = 16 << 10
)

// rxBuffer is the size of receive buffers under features for frames of that MTU.
func rxBuffer(f virtio.Features, mtu int) int {
	large := f.Any(virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6)
	const vlan = 4
	switch {
	case large && f.Has(virtio.FNetMrgRxBuf):
		return tsoRxBuffer
	case large:
		return virtio.NetHdrLen + virtio.MaxFrame
	case f.Has(virtio.FNetMrgRxBuf):
		return minRxBuffer
	}
	return max(minRxBuffer, virtio.NetHdrLen+virtio.EthernetHdrLen+vlan+mtu)
}

// refill puts all free buffers on the receiveq.
func (p *pair) refill() {
	for _, i := range p.rx.free {
		p.rx.put(i, len(p.rx.slots[i].data), true)
	}
	p.rx.free = p.rx.free[:0]
	p.rx.show(p.loop)
}

// receive moves frames from the receiveq to the tap. A tap takes what it is given, or the frame is lost and counted.
func (p *pair) receive() (progress bool) {
	var frames, bytes, returned int
	for frames < turnFrames && bytes < turnBytes && !p.broken {
		i, written, ok := p.rx.take()
		if !ok {
			break
		}
		progress = true
		bytes += p.deliver(i, written)
		frames++
		if returned++; returned == publishFrames {
			p.refill()
			returned = 0
		}
	}
	if err := p.rx.ring.Err(); err != nil {
		p.fail(err)
	}
	if !progress || p.broken {
		return false
	}
	if returned > 0 {
		p.refill()
	}
	return true
}

// deliver writes the frame that begins in a slot to the tap and returns how many bytes it had. Its slots are free afterwards.
func (p *pair) deliver(first uint16, written uint32) (bytes int) {
	p.pieces = append(p.pieces[:0], iovec{base: addressOf(p.hdr[:]), len: uint64(p.hdrLen)})
	data, ok := p.used(first, written)
	if !ok {
		return 0
	}
	if len(data) < p.hdrLen {
		p.fail(fmt.Errorf("a receive buffer came back with %d bytes, the header alone has %d", written, p.hdrLen))
		return 0
	}
	var hdr virtio.NetHdr
	copy(p.hdr[:], data[:p.hdrLen])
	hdr.Decode(p.hdr[:p.hdrLen])
	bytes = p.piece(data[p.hdrLen:])
	more, ok := p.merged(int(hdr.NumBuffers))
	bytes += more
	if !ok || p.broken {
		return bytes
	}
	switch e := hdr.CheckTx(bytes, p.accepts); {
	case e == virtio.HdrFrameShort:
		p.rx.count.drop(tooShort)
	case e != virtio.HdrOK:
		p.rx.count.drop(badHeader)
	default:
		hdr.Encode(p.hdr[:p.hdrLen])
		p.write(bytes)
	}
	return bytes
}

// merged adds the further buffers of a frame. Without MRG_RXBUF the number counts for nothing: some back-ends do not set it.
func (p *pair) merged(buffers int) (bytes int, ok bool) {
	if !p.merges {
		return 0, true
	}
	if buffers < 1 || buffers > maxPieces {
		p.rx.count.drop(badMerge)
		return 0, false
	}
	for range buffers - 1 {
		i, written, ok := p.rx.take()
		if !ok {
			// All buffers of a frame become visible at once (virtio 1.3 section 5.1.6.4), so the number is wrong.
			p.rx.count.drop(badMerge)
			return bytes, false
		}
		data, ok := p.used(i, written)
		if !ok {
			return bytes, false
		}
		bytes += p.piece(data)
	}
	return bytes, true
}

// used frees a slot and returns what the back-end says it wrote there, valid until the next refill.
func (p *pair) used(i uint16, written uint32) (data []byte, ok bool) {
	p.rx.free = append(p.rx.free, i)
	data = p.rx.slots[i].data
	if uint64(written) > uint64(len(data)) {
		p.fail(fmt.Errorf("a receive buffer of %d bytes came back with %d", len(data), written))
		return nil, false
	}
	return data[:written], true
}

// piece adds data to the frame that is written.
func (p *pair) piece(data []byte) int {
	if len(data) > 0 {
		p.pieces = append(p.pieces, iovec{base: addressOf(data), len: uint64(len(data))})
	}
	return len(data)
}

func (p *pair) write(bytes int) {
	switch errno := writeFrame(p.tap, p.pieces); {
	case errno == 0:
		p.rx.count.frames.Add(1)
		p.rx.count.bytes.Add(uint64(bytes))
	case errno == unix.EIO:
		p.rx.count.drop(interfaceOff)
	case gone(errno):
		p.fail(errDeleted)
	case errno == unix.EINVAL:
		p.rx.count.drop(badHeader)
	case errno == unix.EAGAIN, errno == unix.ENOBUFS, errno == unix.ENOMEM:
		p.rx.count.drop(noBuffers)
	default:
		p.rx.count.drop(writeError)
	}
}
