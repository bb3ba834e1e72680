package nettest

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// rxQueue is a sink: the receiveq of a guest.
type rxQueue struct {
	*queue
	merged  []byte // scratch for frames in several buffers
	several bool   // VIRTIO_NET_F_MRG_RXBUF
	lenient bool   // others' back-ends may leave num_buffers alone where it can only be 1
}

// post offers every free buffer, poisoned.
func (r *rxQueue) post() error {
	for len(r.free) > 0 {
		i := r.free[len(r.free)-1]
		fill(r.buffers[i].data, poison)
		if err := r.add(i, len(r.buffers[i].data)); err != nil {
			if errors.Is(err, driver.ErrFull) {
				break
			}
			return err
		}
		r.free = r.free[:len(r.free)-1]
	}
	return r.flush()
}

// receive checks what has come and posts the buffers again. It returns how many frames of the flow those were.
func (r *rxQueue) receive(f *flow) (n int, err error) {
	any := false
	for n < sinkBatch {
		i, written, ok, err := r.take()
		if err != nil {
			return n, err
		}
		if !ok {
			break
		}
		any = true
		mine, err := r.frame(f, i, written)
		if err != nil {
			return n, fmt.Errorf("ring %d: %w", r.index, err)
		}
		if mine {
			n++
		} else {
			r.counts.Foreign++
		}
	}
	r.counts.Frames += uint64(n)
	if !any {
		return 0, nil
	}
	return n, r.post()
}

// sinkBatch bounds what a sink takes at once.
const sinkBatch = 64

// frame checks the frame that begins in buffer i, with its header, and whether it is one of the flow.
func (r *rxQueue) frame(f *flow, i int, written uint32) (mine bool, err error) {
	data, err := r.content(i, written)
	if err != nil {
		return false, err
	}
	if len(data) < virtio.NetHdrLen+14 {
		return false, fmt.Errorf("a buffer came back with %d bytes, header and frame have %d at least", written, virtio.NetHdrLen+14)
	}
	header, frame := data[:virtio.NetHdrLen], data[virtio.NetHdrLen:]
	buffers := int(binary.LittleEndian.Uint16(header[10:]))
	if r.lenient && !r.several && buffers != 1 {
		r.counts.Unset++
		buffers = 1
	}
	if buffers == 0 || buffers > 1 && !r.several {
		return false, fmt.Errorf("num_buffers is %d", buffers)
	}
	if buffers > 1 {
		if frame, err = r.rest(frame, buffers-1); err != nil {
			return false, err
		}
	}
	if !ours(frame) {
		return false, nil
	}
	if [10]byte(header) != [10]byte{} {
		return false, fmt.Errorf("the header of frame %d is % x, want zeros and num_buffers", f.next, header)
	}
	return true, f.check(frame)
}

// rest joins the other buffers of a frame, all of which must be there.
func (r *rxQueue) rest(first []byte, more int) ([]byte, error) {
	r.merged = append(r.merged[:0], first...)
	for ; more > 0; more-- {
		i, written, ok, err := r.take()
		if err != nil {
			return nil, err
		}
		if !ok {
			return nil, fmt.Errorf("a frame became visible without its last %d buffers", more)
		}
		data, err := r.content(i, written)
		if err != nil {
			return nil, err
		}
		r.merged = append(r.merged, data...)
	}
	return r.merged, nil
}

// content is what the back-end wrote into buffer i, valid until post. Behind it the poison must be whole.
func (r *rxQueue) content(i int, written uint32) ([]byte, error) {
	r.free = append(r.free, i)
	data := r.buffers[i].data
	if int64(written) > int64(len(data)) {
		return nil, fmt.Errorf("a buffer of %d bytes came back with %d", len(data), written)
	}
	if !only(data[written:], poison) {
		return nil, fmt.Errorf("a buffer came back with %d bytes, and bytes behind those were written", written)
	}
	return data[:written], nil
}

func (r *rxQueue) waitFD() int    { return r.call }
func (r *rxQueue) stats() *Counts { return &r.counts }

// reset stops the ring, of which everything was received, and starts it anew.
func (r *rxQueue) reset(g *guest) error {
	if err := g.stopRing(r.queue); err != nil {
		return err
	}
	if r.ring.HasUsed() {
		return fmt.Errorf("ring %d: frames came after all had come", r.index)
	}
	r.forget()
	r.counts.Resets++
	if err := g.startRing(r.queue); err != nil {
		return err
	}
	// A switch drops frames for a ring that is not enabled yet.
	if err := g.conn.Sync(); err != nil {
		return err
	}
	return r.post()
}
