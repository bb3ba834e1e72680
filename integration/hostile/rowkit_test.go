package hostile

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/internal/daemon"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// Guest addresses of the rows: behind what rings use of the first region, and outside the memory.
const (
	bufAt     = 40 << 20
	tableAt   = 48 << 20
	regionEnd = 64 << 20
	hole      = 0x7000_0000
	highAt    = 4 << 30 // the second region
)

// attack is one row while it is played.
type attack struct {
	*vhostd
	t    *testing.T
	slow map[string]*frontend.Conn
	// checked gets the answer to CHECK_DEVICE_STATE for a transfer that does not end.
	checked <-chan error
	drops0  map[string]uint64
}

// in plays a part of a row as a test of its own.
func (a *attack) in(name string, play func(a *attack)) {
	a.t.Helper()
	a.t.Run(name, func(t *testing.T) {
		sub := *a.vhostd
		sub.t = t
		part := *a
		part.vhostd, part.t = &sub, t
		part.drops0 = part.allDrops()
		play(&part)
	})
}

// formats plays a part with split and with packed rings.
func (a *attack) formats(play func(a *attack, f virtio.Features)) {
	a.t.Helper()
	a.in("split", func(a *attack) { play(a, features) })
	a.in("packed", func(a *attack) { play(a, features|virtio.FRingPacked) })
}

// dial is a bare connection as evil.
func (a *attack) dial() *frontend.Conn {
	a.t.Helper()
	a.settled("evil")
	c, err := frontend.Dial(filepath.Join(a.dir, "evil"))
	must(a.t, err)
	a.t.Cleanup(func() { c.Close() })
	return c
}

// conn is one that has acknowledged all protocol features and wants to hear of every message.
func (a *attack) conn() *frontend.Conn {
	a.t.Helper()
	c := a.dial()
	p, err := c.GetProtocolFeatures()
	must(a.t, err)
	must(a.t, c.SetProtocolFeatures(p))
	c.NeedReply = true
	return c
}

// client is evil with memory and no ring.
func (a *attack) client(opts frontend.Options) *frontend.Client {
	a.t.Helper()
	return a.clientOn(memory(a.t, 64<<20, 64<<20), opts)
}

func (a *attack) clientOn(mem *frontend.Memory, opts frontend.Options) *frontend.Client {
	a.t.Helper()
	if opts.Features == 0 {
		opts.Features = features
	}
	if opts.RingSize == 0 {
		opts.RingSize = 64
	}
	opts.NeedReply = true
	a.settled("evil")
	c, err := frontend.Connect(filepath.Join(a.dir, "evil"), mem, opts)
	must(a.t, err)
	a.t.Cleanup(func() { c.Close() })
	return c
}

// running is evil with a running queue pair.
func (a *attack) running(opts frontend.Options) (*frontend.Client, *frontend.Pair) {
	a.t.Helper()
	c := a.client(opts)
	return c, a.pair(c, 0)
}

func (a *attack) pair(c *frontend.Client, i int) *frontend.Pair {
	a.t.Helper()
	p, err := c.StartPair(i)
	must(a.t, err)
	must(a.t, c.Sync())
	return p
}

// restart stops pair 0 and starts it as a new driver does.
func (a *attack) restart(c *frontend.Client, p *frontend.Pair) {
	a.t.Helper()
	_, _, err := c.Stop(0)
	must(a.t, err)
	p.Reset()
	a.pair(c, 0)
}

// flows demands that an ordinary frame still goes round.
func (a *attack) flows(p *frontend.Pair) {
	a.t.Helper()
	if err := roundTrip(p, frameOf(60, 0x5a)); err != nil {
		a.t.Fatal(err)
	}
}

// frameOf is a frame of n bytes that depend on seed.
func frameOf(n int, seed byte) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i) + seed
	}
	copy(b, []byte{0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1, 0x88, 0xb5}) // a local experimental EtherType
	return b
}

func isRefused(err error) bool {
	var r *frontend.RefusedError
	return errors.As(err, &r)
}

// refused demands a non-zero acknowledgement.
func (a *attack) refused(what string, err error) {
	a.t.Helper()
	if !isRefused(err) {
		a.t.Errorf("%s: %v, want a refusal", what, err)
	}
}

func isClosed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET)
}

// closes demands that the program ends the connection, and serves the next one.
func (a *attack) closes(what string, c *frontend.Conn) {
	a.t.Helper()
	if err := c.AwaitClose(patience); err != nil {
		a.t.Errorf("%s: %v", what, err)
	}
	must(a.t, c.Close())
	a.settled("evil")
}

// allDrops are evil's counters of drops, by "ring reason".
func (a *attack) allDrops() map[string]uint64 {
	a.t.Helper()
	var s daemon.Stats
	a.get("/v1/stats", &s)
	all := map[string]uint64{}
	for _, g := range s.Guests {
		if g.Name != "evil" {
			continue
		}
		for _, r := range g.Rings {
			for reason, n := range r.Drops {
				all[fmt.Sprint(r.Index, " ", reason)] = n
			}
		}
	}
	return all
}

// dropped demands that exactly n more were counted since the row, or the part, began.
func (a *attack) dropped(ring int, reason string, n uint64) {
	a.t.Helper()
	key := fmt.Sprint(ring, " ", reason)
	var now map[string]uint64
	for end := time.Now().Add(patience / 2); ; time.Sleep(2 * time.Millisecond) {
		now = a.allDrops()
		if now[key]-a.drops0[key] == n {
			return
		}
		if time.Now().After(end) {
			a.t.Fatalf("ring %d: %d dropped as %s, want %d; all: %v, before: %v", ring, now[key]-a.drops0[key], reason, n, now, a.drops0)
		}
	}
}

// broken demands that the program reports the ring by its err descriptor and in the status.
func (a *attack) broken(q *frontend.Queue) {
	a.t.Helper()
	if err := q.WaitErr(patience); err != nil {
		a.t.Fatalf("ring %d: no err signal: %v", q.Index, err)
	}
	for _, r := range a.status("evil").Rings {
		if r.Index == q.Index && r.Broken == "" {
			a.t.Errorf("ring %d is not broken in the status", q.Index)
		}
	}
}

// desc is a descriptor as a hostile driver writes it. Packed rings have no next.
type desc struct {
	addr        uint64
	len         uint32
	flags, next uint16
}

const (
	next     = driver.DescFNext
	write    = driver.DescFWrite
	indirect = driver.DescFIndirect
)

// pokeTable writes an indirect table at tableAt.
func pokeTable(mem *frontend.Memory, q *frontend.Queue, ds ...desc) {
	for i, d := range ds {
		if q.Ring != nil {
			driver.PokeTable(mem.Host(tableAt), i, d.addr, d.len, d.flags, d.next)
		} else {
			driver.PokePackedTable(mem.Host(tableAt), i, d.addr, d.len, 0, d.flags)
		}
	}
}

// chain is one that was offered past the driver's bookkeeping. Nothing else may be outstanding.
type chain struct {
	a     *attack
	q     *frontend.Queue
	began uint16
}

// offer shows the descriptors to the device as one chain with head 0.
func (a *attack) offer(q *frontend.Queue, ds ...desc) chain {
	a.t.Helper()
	if n := q.Driver.Outstanding(); n != 0 {
		a.t.Fatalf("ring %d: %d chains are outstanding", q.Index, n)
	}
	c := chain{a, q, q.Driver.AvailIdx()}
	for i, d := range ds {
		if q.Ring != nil {
			q.Ring.PokeDesc(uint16(i), d.addr, d.len, d.flags, d.next)
		} else {
			q.Driver.(*driver.PackedRing).PokeChain(d.addr, d.len, 0, d.flags)
		}
	}
	if q.Ring != nil {
		q.Ring.PokeHead(0)
	}
	q.Driver.Publish()
	must(a.t, q.Kick())
	return c
}

// used reports whether the device has returned the chain, and how many bytes it says it wrote.
func (c chain) used() (written uint32, ok bool) {
	if c.q.Ring != nil {
		if c.q.Ring.PeekUsedIdx() == c.began {
			return 0, false
		}
		_, written = c.q.Ring.PeekUsed(c.began)
		return written, true
	}
	_, written, _, flags := c.q.Driver.(*driver.PackedRing).PeekDesc(int(c.began & 0x7fff))
	avail, used, wrap := flags&driver.DescFAvail != 0, flags&driver.DescFUsed != 0, c.began>>15 != 0
	return written, avail == used && used == wrap
}

// returned demands that the device gives the chain back with so many bytes written.
func (c chain) returned(written uint32) {
	c.a.t.Helper()
	var got uint32
	eventually(c.a.t, fmt.Sprintf("ring %d: the chain is returned", c.q.Index), func() (ok bool) {
		got, ok = c.used()
		return ok
	})
	if got != written {
		c.a.t.Errorf("ring %d: the chain is returned with %d bytes written, want %d", c.q.Index, got, written)
	}
	c.q.Driver.Attach(c.q.Driver.AvailIdx())
}

// fault offers the chain on the transmitq, and with the directions turned around on the receiveq: both return it empty and count
// it, and go on.
func (a *attack) fault(c *frontend.Client, p *frontend.Pair, reason string, table []desc, ds ...desc) {
	a.t.Helper()
	for _, q := range []*frontend.Queue{p.TX, p.RX} {
		a.drops0 = a.allDrops()
		pokeTable(c.Mem, q, turned(q, table)...)
		offered := a.offer(q, turned(q, ds)...)
		if q == p.RX { // a chain is looked at when a frame needs it
			must(a.t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
		}
		offered.returned(0)
		a.dropped(q.Index, reason, 1)
	}
	a.receives(p, frameOf(60, 1))
	a.flows(p)
}

func turned(q *frontend.Queue, ds []desc) (all []desc) {
	for _, d := range ds {
		if q.Index%2 == 0 && d.flags&indirect == 0 {
			d.flags ^= write
		}
		all = append(all, d)
	}
	return all
}

// receives posts a buffer and demands the frame that was sent.
func (a *attack) receives(p *frontend.Pair, sent []byte) {
	a.t.Helper()
	_, err := p.PostRx(1)
	must(a.t, err)
	_, got, err := p.RecvFrame(patience)
	must(a.t, err)
	if string(got) != string(swapped(sent)) {
		a.t.Fatalf("received %d bytes: % x", len(got), got[:min(len(got), 64)])
	}
	must(a.t, p.DrainTx(patience))
}

// memfd is a file of n bytes.
func (a *attack) memfd(n int64) int {
	a.t.Helper()
	fd, err := unix.MemfdCreate("rows", unix.MFD_CLOEXEC|unix.MFD_ALLOW_SEALING)
	must(a.t, err)
	a.t.Cleanup(func() { unix.Close(fd) })
	must(a.t, unix.Ftruncate(fd, n))
	return fd
}

// eventfd makes one with the flags.
func (a *attack) eventfd(flags int) int {
	a.t.Helper()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|flags)
	must(a.t, err)
	a.t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// pipe is an open pipe.
func (a *attack) pipe() (r, w *os.File) {
	a.t.Helper()
	r, w, err := os.Pipe()
	must(a.t, err)
	a.t.Cleanup(func() { r.Close(); w.Close() })
	return r, w
}

// word is a payload of one number.
func word(v uint64) []byte { return binary.LittleEndian.AppendUint64(nil, v) }

// state is a payload of ring index and number.
func state(i, num uint32) []byte { return vhostuser.VringState{Index: i, Num: num}.Append(nil) }

// workers are the threads that serve rings.
func (a *attack) workers() []daemon.WorkerStatus {
	a.t.Helper()
	var s daemon.Status
	a.get("/v1/status", &s)
	return s.Workers
}
