package nettest

import (
	"errors"
	"fmt"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// txQueue is a source: the transmitq of a guest.
type txQueue struct{ *queue }

// send stages up to n frames, publishes them together and says how many those were.
func (t txQueue) send(f *flow, n int) (sent int, err error) {
	for sent < n && len(t.free) > 0 {
		i := t.free[len(t.free)-1]
		data := t.buffers[i].data
		clear(data[:virtio.NetHdrLen])
		before := f.next
		length := virtio.NetHdrLen + f.write(data[virtio.NetHdrLen:])
		if err := t.add(i, length); err != nil {
			f.next = before
			if errors.Is(err, driver.ErrFull) {
				break
			}
			return sent, err
		}
		t.free = t.free[:len(t.free)-1]
		sent++
	}
	t.counts.Frames += uint64(sent)
	return sent, t.flush()
}

// reap takes back what was sent and overwrites it at once: whoever still reads it sends something else.
func (t txQueue) reap() (n int, err error) {
	for {
		i, written, ok, err := t.take()
		if !ok {
			return n, err
		}
		if int(written) > len(t.buffers[i].data) {
			return n, fmt.Errorf("ring %d: a chain came back with %d bytes written, its buffer has %d and is not writable",
				t.index, written, len(t.buffers[i].data))
		}
		fill(t.buffers[i].data, overwritten)
		t.free = append(t.free, i)
		n++
	}
}

func (t txQueue) full() bool {
	return len(t.free) == 0 || t.ring.Free() < maxPieces && t.chains == "chained"
}
func (t txQueue) waitFD() int    { return t.call }
func (t txQueue) stats() *Counts { return &t.counts }

// reset stops the ring, takes back what the back-end has used and starts the ring anew. The frames that it has not taken are to be
// sent again: it returns how many.
func (t txQueue) reset(g *guest) (again int, err error) {
	if err := g.stopRing(t.queue); err != nil {
		return 0, err
	}
	if _, err := t.reap(); err != nil {
		return 0, err
	}
	again = t.ring.Outstanding()
	t.forget()
	t.counts.Resets++
	t.counts.Again += uint64(again)
	return again, g.startRing(t.queue)
}

// forget makes the ring as if it were new.
func (q *queue) forget() {
	start := uint16(0)
	if q.packed {
		start = 1 << 15
	}
	q.ring.Reset(start)
	q.free = q.free[:0]
	for i := range q.buffers {
		q.free = append(q.free, i)
	}
}
