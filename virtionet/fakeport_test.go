package virtionet

import (
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
)

// frame is what passes between a test and its fake network.
type frame struct {
	hdr  virtio.NetHdr
	data []byte
}

// fakePort records what it is sent and delivers what the test feeds it.
type fakePort struct {
	mu        sync.Mutex
	sent      []frame
	credit    int  // frames it still takes; negative: any number
	quiet     bool // counts what it is sent instead of keeping it
	count     int
	incoming  []frame
	piece     int // bytes in a fragment of what is delivered, 0: a page
	taken     int // frames the device asked for and got
	recvs     int
	arms      int
	enabled   bool
	acked     virtio.Features
	mtu       int
	announced [6]byte
	ready     int
	res       port.Resources
	opened    int
	closed    int
	down      atomic.Bool
}

func newFakePort() *fakePort {
	return &fakePort{credit: -1, ready: must(unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK))}
}

const fakeOffloads = virtio.FNetCSum | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN |
	virtio.FNetGuestCSum | virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6 | virtio.FNetGuestECN

func (f *fakePort) Kind() string              { return "fake" }
func (f *fakePort) Features() virtio.Features { return fakeOffloads }
func (f *fakePort) MTU() int                  { return 0 }
func (f *fakePort) SetMTU(mtu int) error      { f.mtu = mtu; return nil }
func (f *fakePort) Status() port.Status       { return port.Status{Up: !f.down.Load()} }

func (f *fakePort) Announce(mac [6]byte) error {
	f.announced = mac
	return nil
}

func (f *fakePort) Configure(acked virtio.Features) error {
	f.acked = acked
	return nil
}

func (f *fakePort) OpenQueue(_ int, r port.Resources) (port.Queue, error) {
	f.res, f.enabled = r, true
	f.opened++
	if f.opened-f.closed > 1 {
		return mute{(*fakeQueue)(f)}, nil
	}
	return (*fakeQueue)(f), nil
}

// mute is a further queue of a fake network, which shares everything but the descriptor.
type mute struct{ *fakeQueue }

func (mute) ReadyFD() int { return -1 }

func (f *fakePort) Close() error { return unix.Close(f.ready) }

// feed queues frames for the guest and makes the queue readable.
func (f *fakePort) feed(frames ...frame) {
	f.queue(frames...)
	_, _ = unix.Write(f.ready, []byte{1, 0, 0, 0, 0, 0, 0, 0})
}

// queue is feed without waking the worker.
func (f *fakePort) queue(frames ...frame) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.incoming = append(f.incoming, frames...)
}

func (f *fakePort) allow(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.credit = n
}

// take returns what was sent since the last call.
func (f *fakePort) take() []frame {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.sent
	f.sent = nil
	return s
}

func (f *fakePort) counts() (sent, taken, recvs int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.count, f.taken, f.recvs
}

type fakeQueue fakePort

func (q *fakeQueue) Send(pkts []packet.Packet) (n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for n < len(pkts) && q.credit != 0 {
		p := &pkts[n]
		if !q.quiet {
			f := frame{p.Hdr, make([]byte, p.Len)}
			p.CopyTo(f.data, 0)
			q.sent = append(q.sent, f)
		}
		q.count++
		packet.Release(q.res.Arena, pkts[n:n+1], q.res.Owner)
		n++
		q.credit = max(q.credit-1, -1)
	}
	return n
}

func (q *fakeQueue) Recv(pkts []packet.Packet) (n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.recvs++
	var clear [8]byte
	_, _ = unix.Read(q.ready, clear[:])
	for n < len(pkts) && len(q.incoming) > 0 {
		q.build(&pkts[n], q.incoming[0])
		q.incoming = q.incoming[1:]
		n++
	}
	q.taken += n
	return n
}

func (q *fakeQueue) build(p *packet.Packet, f frame) {
	p.Reset()
	p.Hdr = f.hdr
	piece := q.piece
	if piece == 0 {
		piece = pagemem.PageSize
	}
	for rest := f.data; len(rest) > 0; {
		id, ok := q.res.Arena.Alloc(0, pagemem.NoReserve)
		if !ok {
			panic("the fake network is out of pages")
		}
		part := packet.Frag{Addr: q.res.Arena.Addr(id), Len: uint32(min(piece, len(rest))), Page: id}
		copy(part.Bytes(), rest)
		if !p.Append(part) {
			panic("too many fragments")
		}
		rest = rest[part.Len:]
	}
}

func (q *fakeQueue) ReadyFD() int { return q.ready }

func (q *fakeQueue) Arm() bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.arms++
	return len(q.incoming) > 0
}

func (q *fakeQueue) SetEnabled(on bool) error {
	q.enabled = on
	return nil
}

func (q *fakeQueue) Drops(visit func(string, uint64)) { visit("lost", 0) }

func (q *fakeQueue) Close() error {
	q.closed++
	return nil
}
