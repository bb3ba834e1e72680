package edge

import (
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"

	"github.com/vhostd/vhostd/internal/capture"
	"github.com/vhostd/vhostd/internal/ratelimit"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
)

// queue is a queue with an edge. It belongs to one worker, as the inner one does.
type queue struct {
	port.Queue
	opts   Options
	arena  *pagemem.Arena
	owner  pagemem.OwnerID
	ring   *capture.Ring // nil without capture
	pause  *pause        // nil without a limit towards the guest
	leave  func()        // takes the queue off its port's list
	closed bool

	head    [peek]byte // private copy of the start of the frame that is judged
	refused [refusals]atomic.Uint64
}

// Send implements [port.Queue].
func (q *queue) Send(pkts []packet.Packet) (n int) {
	for n < len(pkts) {
		run, why := q.judge(pkts[n:])
		if run > 0 {
			sent := q.pass(pkts[n : n+run])
			if n += sent; sent < run {
				return n
			}
		}
		if why != fine {
			q.refused[why].Add(1)
			pkts[n].Release(q.arena, q.owner)
			n++
		}
	}
	return n
}

// judge returns how many frames from the first on may pass, and what is wrong with the next one.
func (q *queue) judge(pkts []packet.Packet) (run int, why refusal) {
	if q.opts.Guard == nil {
		return len(pkts), fine
	}
	rules := q.opts.Guard.rules.Load()
	if rules.open() {
		return len(pkts), fine
	}
	for run < len(pkts) {
		p := &pkts[run]
		if why = rules.judge(q.head[:p.PeekHeader(q.head[:])], int(p.Len)); why != fine {
			return run, why
		}
		run++
	}
	return run, fine
}

// pass hands frames to the network, as many as their rate and the network allow, at most a batch of the port's.
func (q *queue) pass(pkts []packet.Packet) (sent int) {
	var lengths [port.MaxBatch]uint32 // Send empties the packets
	bucket, now, run := q.opts.FromGuest, q.opts.FromGuest.Now(), 0
	for run < min(len(pkts), port.MaxBatch) && bucket.TakeAt(now, int(pkts[run].Len)) == 0 {
		lengths[run] = pkts[run].Len
		run++
	}
	if run == 0 {
		return 0
	}
	q.stage(pkts[:run], capture.FromGuest)
	sent = q.Queue.Send(pkts[:run])
	if q.ring != nil {
		q.ring.Commit(sent)
	}
	unsent := 0
	for _, n := range lengths[sent:run] {
		unsent += int(n)
	}
	bucket.GiveBack(unsent)
	return sent
}

// Recv implements [port.Queue]. Frames are paid for after they came, because their lengths are not known before: a batch is no larger
// than what the burst allows.
func (q *queue) Recv(pkts []packet.Packet) int {
	bucket := q.opts.ToGuest
	now := bucket.Now()
	if rate := bucket.Rate(); rate != 0 {
		if bucket.TakeAt(now, 0) > 0 {
			return 0
		}
		pkts = pkts[:min(len(pkts), batchFor(rate))]
	}
	n := q.Queue.Recv(pkts)
	if n == 0 {
		return 0
	}
	bytes := 0
	for i := range pkts[:n] {
		bytes += int(pkts[i].Len)
	}
	bucket.Charge(now, bytes)
	if q.ring != nil {
		q.stage(pkts[:n], capture.ToGuest)
		q.ring.Commit(n)
	}
	return n
}

// limited is a queue with a limit of frames at a time. It is a type of its own so that other queues do not pay for it.
type limited struct {
	*queue
	batch int
}

// Recv implements [port.Queue].
func (q limited) Recv(pkts []packet.Packet) int { return q.queue.Recv(pkts[:min(len(pkts), q.batch)]) }

// batchFor is the number of largest frames that a burst has room for.
func batchFor(rate ratelimit.Rate) int {
	burst := int64(rate) / 8 * int64(ratelimit.DefaultBurst) / int64(time.Second)
	return int(min(max(burst/virtio.MaxFrame, 1), port.MaxBatch))
}

// ReadyFD implements [port.Queue].
func (q *queue) ReadyFD() int {
	if q.pause != nil {
		return q.pause.poll
	}
	return q.Queue.ReadyFD()
}

// Arm implements [port.Queue]. During a pause the network's frames do not matter; when it ends, the worker looks by itself.
func (q *queue) Arm() bool {
	if q.pause != nil {
		if wait := q.opts.ToGuest.Take(0); wait > 0 {
			return !q.pause.set(wait)
		}
	}
	return q.Queue.Arm()
}

// SetEnabled implements [port.Enabler].
func (q *queue) SetEnabled(on bool) error {
	if e, ok := q.Queue.(port.Enabler); ok {
		return e.SetEnabled(on)
	}
	return nil
}

// Held implements [port.Holder]: 0 if the network's queue does not, which means the same.
func (q *queue) Held() int {
	if h, ok := q.Queue.(port.Holder); ok {
		return h.Held()
	}
	return 0
}

// Drops implements [port.Queue].
func (q *queue) Drops(visit func(reason string, n uint64)) {
	q.Queue.Drops(visit)
	if q.opts.Guard != nil {
		for why := fine + 1; why < refusals; why++ {
			visit(refusalNames[why], q.refused[why].Load())
		}
	}
}

// Close implements [port.Queue].
func (q *queue) Close() error {
	if q.closed {
		return nil
	}
	q.closed = true
	if q.ring != nil {
		q.ring.Close()
	}
	err := q.Queue.Close()
	if q.pause != nil {
		q.pause.close()
	}
	q.leave()
	return err
}

// stage has the capture copy frames, which are still the caller's.
func (q *queue) stage(pkts []packet.Packet, way capture.Direction) {
	if q.ring == nil {
		return
	}
	now := time.Now()
	for i := range pkts {
		p := &pkts[i]
		info := capture.Info{Time: now, Direction: way, Length: int(p.Len)}
		info.Mark, info.Size = mark(&p.Hdr)
		if buf := q.ring.Stage(info, int(p.Len)); buf != nil {
			p.CopyTo(buf, 0)
			finish(p, buf)
		}
	}
}

func mark(h *virtio.NetHdr) (capture.Mark, uint16) {
	switch h.GSOType &^ virtio.GSOECN {
	case virtio.GSOTCPv4:
		return capture.TCPv4Segments, h.GSOSize
	case virtio.GSOTCPv6:
		return capture.TCPv6Segments, h.GSOSize
	case virtio.GSOUDPL4:
		return capture.UDPSegments, h.GSOSize
	}
	return capture.Whole, 0
}

// finish completes in the copy the checksum that p leaves to a device. The field holds the sum over the pseudo header, which takes part.
// Marks that lie outside of the frame are left alone.
func finish(p *packet.Packet, buf []byte) {
	const udpCsumOffset = 6
	start, field := int(p.Hdr.CsumStart), int(p.Hdr.CsumStart)+int(p.Hdr.CsumOffset)
	if p.Hdr.Flags&virtio.HdrFNeedsCsum == 0 || field+2 > len(buf) {
		return
	}
	var c checksum.Checksumer
	for i := range int(p.NFrag) {
		b := p.Bytes(i)
		c.Add(b[min(start, len(b)):])
		start -= min(start, len(b))
	}
	sum := ^c.Checksum()
	if sum == 0 && p.Hdr.CsumOffset == udpCsumOffset {
		sum = 0xffff // 0 would mean that there is none (RFC 768)
	}
	buf[field], buf[field+1] = byte(sum>>8), byte(sum)
}
