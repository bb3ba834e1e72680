package porttest

import (
	"bytes"
	"testing"
	"time"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/pool"
	"github.com/vhostd/vhostd/port"
)

// settle bounds the wait for what other parties, such as the kernel or a pool's reaper, do soon.
const settle = 5 * time.Second

// Rig is what surrounds a port in a test: an arena, a worker's identity and a pool. Its methods stand for the worker.
type Rig struct {
	Arena *pagemem.Arena
	Owner pagemem.OwnerID
	Pool  *pool.Pool
}

// NewRig makes the surroundings and checks, when the test ends, that every page is back in the arena. Whatever uses the rig
// must be closed before: register it with t.Cleanup after this call.
func NewRig(t testing.TB) *Rig {
	t.Helper()
	a, err := pagemem.NewArena(pagemem.Config{Bytes: 16 << 20, Name: "porttest"})
	if err != nil {
		t.Fatal(err)
	}
	r := &Rig{Arena: a, Owner: pagemem.NewOwnerID()}
	if r.Pool, err = pool.New(pool.Config{Arena: a, Owner: r.Owner}); err != nil {
		a.Close()
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.Pool.Destroy()
		if !Eventually(func() bool { return a.InUse() == 0 }) && !t.Failed() {
			t.Errorf("%d pages did not come back to the arena", a.InUse())
		}
		if s := a.Stats(); s.Misuse != 0 {
			t.Errorf("arena counted misuse: %+v", s)
		}
		if err := a.Close(); err != nil && !t.Failed() {
			t.Errorf("close arena: %v", err)
		}
	})
	return r
}

// Resources are what a queue opened by this rig may draw on.
func (r *Rig) Resources() port.Resources {
	return port.Resources{Arena: r.Arena, Owner: r.Owner, Pool: r.Pool}
}

// Open opens queue pair i of p and closes it when the test ends.
func (r *Rig) Open(t testing.TB, p port.Port, i int) port.Queue {
	t.Helper()
	q, err := p.OpenQueue(i, r.Resources())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := q.Close(); err != nil {
			t.Errorf("close queue %d: %v", i, err)
		}
	})
	return q
}

// Packet makes a packet of frame in pages of its own, with at most piece bytes in each fragment; 0 means a page.
func (r *Rig) Packet(t testing.TB, frame []byte, piece int) packet.Packet {
	t.Helper()
	if piece == 0 {
		piece = pagemem.PageSize
	}
	var p packet.Packet
	for rest := frame; len(rest) > 0; {
		page, ok := r.Arena.Alloc(0, pagemem.NoReserve)
		if !ok {
			t.Fatal("arena is exhausted")
		}
		n := min(piece, len(rest))
		if !p.Append(packet.Frag{Addr: r.Arena.Addr(page), Len: uint32(n), Page: page}) {
			t.Fatalf("frame of %d bytes in pieces of %d needs too many fragments", len(frame), piece)
		}
		copy(p.Bytes(int(p.NFrag)-1), rest)
		rest = rest[n:]
	}
	return p
}

// Release drops packets as the worker does.
func (r *Rig) Release(pkts []packet.Packet) { packet.Release(r.Arena, pkts, r.Owner) }

// Recv receives frames until n have come or time is up, and returns copies.
func (r *Rig) Recv(t testing.TB, q port.Queue, n int) (frames [][]byte) {
	t.Helper()
	var pkts [port.MaxBatch]packet.Packet
	Eventually(func() bool {
		got := q.Recv(pkts[:min(n-len(frames), len(pkts))])
		for i := range pkts[:got] {
			checkPacket(t, &pkts[i])
			frames = append(frames, Bytes(&pkts[i]))
		}
		r.Release(pkts[:got])
		return len(frames) >= n
	})
	return frames
}

// Bytes is a copy of a packet's frame.
func Bytes(p *packet.Packet) []byte {
	b := make([]byte, p.Len)
	return b[:p.CopyTo(b, 0)]
}

// Frame makes a frame of n bytes between two made-up stations, of the local experimental EtherType, whose contents depend on
// n and seed. Frames shorter than an Ethernet header are cut off.
func Frame(n int, seed byte) []byte {
	b := make([]byte, max(n, 14))
	for i := range b {
		b[i] = byte(i) ^ byte(i>>8) ^ seed
	}
	copy(b, []byte{0x02, 0, 0, 0, 0, 0x0a, 0x02, 0, 0, 0, 0, 0x0b, 0x88, 0xb5})
	return b[:n]
}

// Swapped is frame with its two addresses exchanged.
func Swapped(frame []byte) []byte {
	b := bytes.Clone(frame)
	copy(b[:6], frame[6:12])
	copy(b[6:12], frame[:6])
	return b
}

// DropCount is the queue's count of frames lost for the reason, or for all reasons if it is "".
func DropCount(q port.Queue, reason string) (total uint64) {
	q.Drops(func(r string, n uint64) {
		if reason == "" || r == reason {
			total += n
		}
	})
	return total
}

// Eventually repeats check until it holds or a few seconds have passed.
func Eventually(check func() bool) bool {
	deadline := time.Now().Add(settle)
	for !check() {
		if time.Now().After(deadline) {
			return false
		}
		time.Sleep(time.Millisecond)
	}
	return true
}
