package attach

import (
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/virtio"
)

// txBuffer has room for one byte more than the longest frame, so that a longer one shows.
const txBuffer = virtio.NetHdrLen + virtio.MaxFrame + 1

// full says that no frame can be sent before the back-end has used one.
func (p *pair) full() bool { return len(p.tx.free) == 0 }

// reap takes back what the back-end has sent.
func (p *pair) reap() (n int) {
	for {
		i, _, ok := p.tx.take()
		if !ok {
			return n
		}
		p.tx.free = append(p.tx.free, i)
		n++
	}
}

// send moves frames from the tap to the transmitq. While the ring is full they stay in the tap, whose queue the kernel bounds.
func (p *pair) send() (progress bool) {
	if p.drained && !p.polls && !p.full() {
		return false
	}
	progress = p.reap() > 0
	if err := p.tx.ring.Err(); err != nil {
		p.fail(err)
		return false
	}
	var frames, bytes, shown int
	for reads := 0; reads < turnFrames && bytes < turnBytes && !p.full(); reads++ {
		n, more := p.read(&p.tx.slots[p.tx.free[len(p.tx.free)-1]])
		if !more {
			break
		}
		if n == 0 {
			continue // dropped and counted
		}
		i := p.tx.free[len(p.tx.free)-1]
		p.tx.free = p.tx.free[:len(p.tx.free)-1]
		p.tx.put(i, n, false)
		frames++
		bytes += n - p.hdrLen
		if frames%publishFrames == 0 || bytes-shown >= publishBytes {
			p.tx.show(p.loop)
			shown = bytes
		}
	}
	if frames == 0 {
		return progress
	}
	p.tx.show(p.loop)
	p.tx.count.frames.Add(uint64(frames))
	p.tx.count.bytes.Add(uint64(bytes))
	return true
}

// read reads the tap's next frame into a slot. n is its length with the header, 0 if it was dropped; more is false when there is
// nothing to read now.
func (p *pair) read(s *slot) (n int, more bool) {
	n, errno := readFrame(p.tap, s.data)
	switch {
	case errno == unix.EAGAIN:
		p.drained = true
		return 0, false
	case errno == unix.EINTR:
		return 0, false // drained stays false: the worker comes back
	case gone(errno):
		p.fail(errDeleted)
		return 0, false
	case errno != 0:
		p.tx.count.drop(readError)
		return 0, true
	case n < p.hdrLen+virtio.EthernetHdrLen:
		p.tx.count.drop(tooShort)
		return 0, true
	case n > p.hdrLen+virtio.MaxFrame:
		p.tx.count.drop(tooLong)
		return 0, true
	}
	hdr := s.data[:p.hdrLen]
	if p.marks {
		hdr[0] &= virtio.HdrFNeedsCsum // the kernel says DATA_VALID too, which a driver must not (virtio 1.3 section 5.1.6.2.1)
		clear(hdr[virtio.NetHdrLenLegacy:])
	} else {
		clear(hdr)
	}
	return n, true
}
