package virtionet

import (
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/port/echo"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
	"github.com/vhostd/vhostd/worker"
)

// pairModel is a plain description of what a pair must do with what it is given. The
// worker is run to the end after every action, so the outcome is determined.
type pairModel struct {
	hdr, size int
	credit    int // frames the network takes
	txOn      bool
	rxOn      bool
	tx        []modelChain
	rx        []modelChain
	incoming  []frame // not delivered yet, oldest first
	held      int     // the first so many have been taken from the network

	sent             []frame
	txUsed, rxUsed   []usedEntry
	delivered        []modelFrame
	txCount, rxCount int // chains completed in this life of the ring
}

type modelChain struct {
	head uint16
	room int // bytes a receive chain holds
	bad  bool
	f    frame // a good transmit chain's
	b    rxBuffer
}

// modelFrame is a frame and where the guest finds it.
type modelFrame struct {
	f      frame
	chains []modelChain
}

func (m *pairModel) transmit() {
	for len(m.tx) > 0 {
		c := m.tx[0]
		if m.txOn && !c.bad {
			if m.credit == 0 {
				return
			}
			m.credit--
			m.sent = append(m.sent, c.f)
		}
		m.tx = m.tx[1:]
		m.txUsed = append(m.txUsed, usedEntry{c.head, 0})
		m.txCount++
	}
}

func (m *pairModel) receive() {
	for m.rxOn {
		if m.held == 0 {
			if len(m.rx) == 0 {
				return
			}
			m.held = min(32, len(m.incoming))
		}
		if m.held == 0 || !m.place(m.incoming[0]) {
			return
		}
	}
}

// place says whether anything came of offering the frame to the chains.
func (m *pairModel) place(f frame) bool {
	room, need := 0, len(f.data)+m.hdr
	for n, c := range m.rx {
		if c.bad || c.room == 0 || n == 0 && c.room < m.hdr {
			m.use(n+1, 0)
			return true
		}
		if room += c.room; room >= need {
			m.delivered = append(m.delivered, modelFrame{f, m.rx[:n+1]})
			m.use(n+1, need)
			m.drop()
			return true
		}
	}
	if len(m.rx) >= m.size {
		m.drop()
		return true
	}
	return false
}

func (m *pairModel) drop() {
	m.incoming = m.incoming[1:]
	m.held--
}

// use completes the first n receive chains, filling them with written bytes.
func (m *pairModel) use(n, written int) {
	for _, c := range m.rx[:n] {
		w := min(c.room, written)
		written -= w
		m.rxUsed = append(m.rxUsed, usedEntry{c.head, uint32(w)})
	}
	m.rx = m.rx[n:]
	m.rxCount += n
}

// TestPairModel does random things to both rings, legal and not, and compares with the
// model after each: frames, used entries, positions.
func TestPairModel(t *testing.T) { pairModelTest(t, false) }

func pairModelTest(t *testing.T, missing bool) {
	rapid.Check(t, func(rt *rapid.T) {
		p := newFakePort()
		p.allow(0)
		lag := rapid.SampledFrom([]int{0, 5}).Draw(rt, "lag")
		o := rigOptions{features: rapid.SampledFrom(formats(baseFeatures)).Draw(rt, "features"), size: 64, lag: lag}
		o.alloc = rapid.SampledFrom(allTxAllocs).Draw(rt, "alloc")
		if missing {
			o.via, o.wake = newPager(rapid.SampledFrom([]uint64{512, 4096}).Draw(rt, "page")), worker.Block
		}
		r := newRig(t, p, o)
		defer r.finishEarly()
		m := &pairModel{hdr: 12, size: 64, txOn: true, rxOn: true}
		seed := 0
		for range rapid.IntRange(1, 60).Draw(rt, "actions") {
			seed++
			p.allow(0) // a worker that has not gone to sleep yet must not send before the model does
			modelAction(rt, r, p, m, seed)
			if missing && rapid.Bool().Draw(rt, "forget") {
				r.forget()
				r.loop.Do(func() {}) // the turn that this caused is over
			}
			p.allow(m.credit)
			m.transmit()
			m.receive()
			r.untilAnswered(func() {
				r.pair().emptyTurns = 0 // a refused frame is offered again
				for r.pair().Run() {
				}
				r.pair().flush()
			})
			if missing {
				p.allow(0)
				r.loop.Do(func() {}) // the turn after the last answer is over
			}
			m.compare(rt, r, p)
		}
	})
}

func modelAction(rt *rapid.T, r *rig, p *fakePort, m *pairModel, seed int) {
	switch rapid.SampledFrom([]string{"send", "send bad", "credit", "buffers", "bad buffers", "feed", "feed", "switch", "resume", "swap", "break"}).Draw(rt, "action") {
	case "send":
		for range rapid.IntRange(1, 40).Draw(rt, "n") {
			if r.tx.Free() < 3 {
				return
			}
			f := plain(rapid.IntRange(14, 5000).Draw(rt, "bytes"), seed)
			raw := r.raw(f.hdr, f.data)
			head := r.post(1, cut(r.place(raw), len(raw), false, rapid.IntRange(0, 30).Draw(rt, "a"), rapid.IntRange(0, 30).Draw(rt, "b")))
			m.tx = append(m.tx, modelChain{head: head, f: f})
		}
	case "send bad":
		if r.tx.Free() > 0 {
			b := rapid.SampledFrom([]driver.Buf{{Addr: 1 << 40, Len: 99}, {Addr: r.bufs, Len: 25}, {Addr: r.bufs, Len: 70000}, {Addr: r.bufs, Len: 99, Write: true}}).Draw(rt, "buf")
			m.tx = append(m.tx, modelChain{head: r.post(1, []driver.Buf{b}), bad: true})
		}
	case "credit":
		m.credit = rapid.IntRange(0, 50).Draw(rt, "n")
	case "buffers":
		size := rapid.SampledFrom([]int{5, 12, 64, 500, 2000}).Draw(rt, "size")
		for range rapid.IntRange(1, 40).Draw(rt, "n") {
			if r.rx.Free() > 0 {
				b := r.offer(size)
				m.rx = append(m.rx, modelChain{head: b.head, room: size, b: b})
			}
		}
	case "bad buffers":
		if r.rx.Free() > 0 {
			b := rapid.SampledFrom([]driver.Buf{{Addr: 1 << 40, Len: 99, Write: true}, {Addr: r.bufs, Len: 0, Write: true}, {Addr: r.bufs, Len: 99}}).Draw(rt, "buf")
			m.rx = append(m.rx, modelChain{head: r.post(0, []driver.Buf{b}), bad: true})
		}
	case "feed":
		var frames []frame
		for range rapid.IntRange(1, 10).Draw(rt, "n") {
			frames = append(frames, plain(rapid.SampledFrom([]int{14, 60, 1514, 9000, 20000}).Draw(rt, "bytes"), seed))
		}
		p.queue(frames...)
		m.incoming = append(m.incoming, frames...)
	case "switch":
		m.txOn, m.rxOn = rapid.Bool().Draw(rt, "tx"), rapid.Bool().Draw(rt, "rx")
		r.dev.EnableRing(0, m.rxOn)
		r.dev.EnableRing(1, m.txOn)
	case "resume":
		i := rapid.IntRange(0, 1).Draw(rt, "ring")
		m.stopped(rt, r, i)
		r.start(i)
		m.started(i)
	case "swap":
		r.swap(false)
		r.swap(true)
	case "break":
		i := rapid.IntRange(0, 1).Draw(rt, "ring")
		if !r.breakRing(i) {
			return
		}
		r.run()
		if i == 0 && m.rxOn && m.held == 0 {
			m.held = min(32, len(m.incoming)) // fetched before the ring was seen to be broken
		}
		m.stopped(rt, r, i)
		r.reset(i)
		if i == 1 {
			m.tx, m.txCount = nil, 0
		} else {
			m.rx, m.rxCount = nil, 0
		}
		r.start(i)
		m.started(i)
	}
}

// stopped stops ring i: its position must be exact; frames under way to it are lost.
func (m *pairModel) stopped(rt *rapid.T, r *rig, i int) {
	want := m.txCount
	if i == 0 {
		want = m.rxCount
		m.incoming, m.held = m.incoming[m.held:], 0
	}
	base := r.stop(i)
	if r.packed() { // what is exact shows when the ring goes on
		return
	}
	if int(base) != want {
		rt.Fatalf("ring %d stopped at %d, want %d", i, base, want)
	}
}

// started: a ring starts enabled.
func (m *pairModel) started(i int) {
	if i == 0 {
		m.rxOn = true
	} else {
		m.txOn = true
	}
}

func (m *pairModel) compare(rt *rapid.T, r *rig, p *fakePort) {
	rt.Helper()
	sent := p.take()
	if len(sent) != len(m.sent) {
		rt.Fatalf("%d frames sent, want %d", len(sent), len(m.sent))
	}
	for i := range sent {
		if string(sent[i].data) != string(m.sent[i].data) || sent[i].hdr != (virtio.NetHdr{}) {
			rt.Fatalf("sent frame %d differs", i)
		}
	}
	for i, want := range [][]usedEntry{m.rxUsed, m.txUsed} {
		got := r.used(i)
		if len(got) != len(want) {
			rt.Fatalf("ring %d: %d chains used, want %d", i, len(got), len(want))
		}
		for n := range got {
			if got[n] != want[n] {
				rt.Fatalf("ring %d: used entry %+v, want %+v", i, got[n], want[n])
			}
		}
	}
	for _, d := range m.delivered {
		var b []byte
		for _, c := range d.chains {
			b = append(b, r.content(c.b)...)
		}
		want := r.raw(virtio.NetHdr{NumBuffers: uint16(len(d.chains))}, d.f.data)
		if string(b[:len(want)]) != string(want) || !untouched(b[len(want):]) {
			rt.Fatalf("a frame of %d bytes over %d chains differs", len(d.f.data), len(d.chains))
		}
	}
	m.sent, m.rxUsed, m.txUsed, m.delivered = nil, nil, nil, nil
}

// TestFlippedDescriptors is RING-06: another processor changes descriptors while they are
// worked. Every head comes back once, every frame has a possible length, nothing ends.
func TestFlippedDescriptors(t *testing.T) {
	r := newRig(t, must(echo.New(echo.Options{})), rigOptions{features: baseFeatures | virtio.FNetCSum | virtio.FNetHostTSO4, size: 64})
	quit, ended := make(chan struct{}), make(chan struct{})
	defer func() { close(quit); <-ended }() // before the memory goes away
	flip := func(d *driver.Ring, write uint16) {
		addr := []uint64{r.bufs, r.bufs, r.bufs, 1 << 40, rigSeam - 7, ^uint64(0)}[rand.IntN(6)]
		n := []uint32{60, 100, 1600, 9000, 0, 0xfffff000, 12, 13}[rand.IntN(8)]
		// No indirect ones: the bytes at r.bufs would be the table and may name the rings' own memory.
		flags := []uint16{0, 0, 0, driver.DescFNext, driver.DescFWrite}[rand.IntN(5)]
		d.PokeDesc(uint16(rand.IntN(64)), addr, n, flags^write, uint16(rand.IntN(66)))
	}
	go func() {
		defer close(ended)
		for {
			select {
			case <-quit:
				return
			default:
				flip(split(r.tx), 0)
				flip(split(r.rx), driver.DescFWrite)
				r.mem.Bytes(r.bufs, 64)[rand.IntN(12)] = byte(rand.Uint32()) // the header
			}
		}
	}()
	came := [2]int{}
	for end := time.Now().Add(500 * time.Millisecond); time.Now().Before(end); {
		for i := range 2 {
			for r.rings[i].Free() > 0 {
				r.rings[i].AddDirect(r.buf(0, 200, i == 0))
			}
			r.rings[i].Publish()
			r.forceKick(i)
			came[i] += len(r.used(i))
		}
	}
	if came[0] == 0 || came[1] == 0 {
		t.Errorf("rings came to a stop: %v", came)
	}
	select {
	case err := <-r.fatal:
		t.Errorf("the device gave up: %v", err)
	default:
	}
	t.Logf("%d and %d chains", came[0], came[1])
}
