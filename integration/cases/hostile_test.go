package cases

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// entry is a descriptor as a hostile driver writes it.
type entry struct {
	addr        uint64
	len         uint32
	flags, next uint16
}

func (r *raw) write(at int, es ...entry) {
	for i, e := range es {
		r.q.Ring.PokeDesc(uint16(at+i), e.addr, e.len, e.flags, e.next)
	}
}

// region is the length of each of the two regions of most cases.
const region = 64 << 20

// TestHostileChains offers chains with one thing wrong in each, on both rings: they come back empty and counted, and the ring goes on.
func TestHostileChains(t *testing.T) {
	const buf, table = 1 << 20, 2 << 20 // guest addresses beyond what the rings use
	for _, c := range []struct {
		name   string
		chain  []entry // from descriptor 0
		table  []entry
		reason string
	}{
		{name: "buffer that runs out of its region", chain: []entry{{region - 10, 1514, 0, 0}}, reason: "address"},
		{name: "one byte behind the region", chain: []entry{{region - 71, 72, 0, 0}}, reason: "address"},
		{name: "buffer in a hole", chain: []entry{{hole, 72, 0, 0}}, reason: "address"},
		{name: "buffer from a hole into a region", chain: []entry{{4<<30 - 10, 72, 0, 0}}, reason: "address"},
		{name: "buffer that wraps", chain: []entry{{^uint64(0) - 20, 72, 0, 0}}, reason: "address"},
		{name: "buffer that ends with the last address", chain: []entry{{^uint64(0) - 71, 72, 0, 0}}, reason: "address"},
		{name: "length 0xffffffff", chain: []entry{{buf, 0xffffffff, 0, 0}}, reason: "address"},
		{name: "bad second buffer", chain: []entry{{buf, 12, next, 1}, {hole, 60, next, 2}, {buf, 60, next, 0xffff}}, reason: "address"},
		{name: "4 GiB in all", chain: gigabytes(66), reason: "length"},
		{name: "next is the ring's size", chain: []entry{{buf, 12, next, 256}}, reason: "next"},
		{name: "next is 0xffff", chain: []entry{{buf, 12, next, 0xffff}}, reason: "next"},
		{name: "loop of one", chain: []entry{{buf, 12, next, 0}}, reason: "loop"},
		{name: "loop of two", chain: []entry{{buf, 12, next, 1}, {buf, 1, next, 0}}, reason: "loop"},
		{name: "endless and empty", chain: []entry{{buf, 0, next, 1}, {buf, 0, next, 1}}, reason: "loop"},
		{name: "wrong direction", chain: []entry{{buf, 72, write, 0}}, reason: "direction"},
		{name: "wrong direction behind a right one", chain: []entry{{buf, 72, next, 1}, {buf, 72, write, 0}}, reason: "direction"},
		{name: "indirect with next", chain: []entry{{table, 32, indirect | next, 1}, {buf, 72, 0, 0}}, table: []entry{{buf, 72, 0, 0}, {buf, 72, 0, 0}}, reason: "indirect"},
		{name: "indirect in indirect", chain: []entry{{table, 32, indirect, 0}}, table: []entry{{table, 32, indirect, 0}, {buf, 72, 0, 0}}, reason: "nested"},
		{name: "nested behind a buffer", chain: []entry{{table, 32, indirect, 0}}, table: []entry{{buf, 72, next, 1}, {table, 32, indirect, 0}}, reason: "nested"},
		{name: "table without bytes", chain: []entry{{table, 0, indirect, 0}}, reason: "indirect"},
		{name: "table of 17 bytes", chain: []entry{{table, 17, indirect, 0}}, reason: "indirect"},
		{name: "table beyond the largest ring", chain: []entry{{table, 16 * 32769, indirect, 0}}, reason: "indirect"},
		{name: "table in a hole", chain: []entry{{hole, 32, indirect, 0}}, reason: "address"},
		{name: "table that runs out of its region", chain: []entry{{region - 24, 32, indirect, 0}}, table: nil, reason: "next"},
		{name: "table that wraps", chain: []entry{{^uint64(0) - 15, 32, indirect, 0}}, reason: "address"},
		{name: "next outside the table", chain: []entry{{table, 32, indirect, 0}}, table: []entry{{buf, 12, next, 2}, {buf, 72, 0, 0}}, reason: "next"},
		{name: "loop in the table", chain: []entry{{table, 32, indirect, 0}}, table: []entry{{buf, 12, next, 1}, {buf, 72, next, 0}}, reason: "loop"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newGuest(t, "echo", ordinary())
			last := g.mem.Bytes(region-24, 24) // where a table's first entry is good and its second has no room
			binary.LittleEndian.PutUint64(last, buf)
			copy(last[8:], []byte{12, 0, 0, 0, next, 0, 9, 0})
			testHostileChain(t, g, g.TX, c.chain, c.table, c.reason)

			must(t, g.SendTx(virtio.NetHdr{}, frameOf(60, 9), frontend.Direct))
			testHostileChain(t, g, g.RX, c.chain, c.table, c.reason)
			_, err := g.PostRx(4)
			must(t, err)
			expect(t, g.Pair, frameOf(60, 9))
			flows(t, g.Pair)
		})
	}
}

// testHostileChain offers the chain twice; on the receiveq the direction of each buffer is the other one.
func testHostileChain(t *testing.T, g *guest, q *frontend.Queue, chain, table []entry, reason string) {
	t.Helper()
	turn := func(es []entry) (turned []entry) {
		for _, e := range es {
			if q == g.RX && e.flags&indirect == 0 {
				e.flags ^= write
			}
			turned = append(turned, e)
		}
		return turned
	}
	r := g.raw(q)
	r.write(0, turn(chain)...)
	for i, e := range turn(table) {
		driver.PokeTable(g.mem.Host(2<<20), i, e.addr, e.len, e.flags, e.next)
	}
	if last := g.mem.Bytes(region-24+12, 1); q == g.RX {
		last[0] = next | write
	}
	r.offer(0, 0)
	r.returned(0, 0)
	r.done()
	g.dropped(q.Index, reason, 2)
}

// gigabytes is a chain of n buffers of 63 MiB each.
func gigabytes(n int) (chain []entry) {
	for i := range n {
		chain = append(chain, entry{1 << 20, 63 << 20, next, uint16(i + 1)})
	}
	chain[n-1].flags = 0
	return chain
}

// TestHostileIndirectNotNegotiated uses indirect tables without the feature (C58).
func TestHostileIndirectNotNegotiated(t *testing.T) {
	opts := ordinary()
	opts.Features &^= virtio.FRingIndirectDesc
	g := newGuest(t, "echo", opts)
	testHostileChain(t, g, g.TX, []entry{{2 << 20, 16, indirect, 0}}, []entry{{1 << 20, 72, 0, 0}}, "indirect")
	flows(t, g.Pair)
}

// TestHostileBrokenRings: impossible indexes stop that ring and nothing else; a restart brings it back (B12, B19, C62).
func TestHostileBrokenRings(t *testing.T) {
	for name, wreck := range map[string]func(*frontend.Queue){
		"head is the ring's size":        func(q *frontend.Queue) { q.Ring.PokeHead(256) },
		"head 0xffff":                    func(q *frontend.Queue) { q.Ring.PokeHead(0xffff) },
		"bad head behind a good one":     func(q *frontend.Queue) { q.Ring.PokeHead(0); q.Ring.PokeHead(300) },
		"index ahead by the size plus 1": func(q *frontend.Queue) { q.Ring.PokeAvailIdx(q.Ring.PeekUsedIdx() + 257) },
		"index ahead by 32768":           func(q *frontend.Queue) { q.Ring.PokeAvailIdx(q.Ring.PeekUsedIdx() + 32768) },
		"index goes backwards":           func(q *frontend.Queue) { q.Ring.PokeAvailIdx(q.Ring.PeekUsedIdx() - 1) },
	} {
		for _, index := range []int{0, 1} {
			t.Run(fmt.Sprint(name, ", ring ", index), func(t *testing.T) {
				g := newGuest(t, "echo", ordinary())
				second := pair(t, g.c, 1)
				q := g.TX
				if index == 0 {
					q = g.RX // a head is looked at when a frame needs it
					must(t, g.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
					must(t, g.SendTx(virtio.NetHdr{}, frameOf(60, 2), frontend.Direct))
				}
				q.Ring.PokeDesc(0, g.scratch(0, 4096), 72, uint16(1-index)*write, 0)
				wreck(q)
				q.Ring.Publish()
				must(t, q.Kick())
				g.broken(q)
				flows(t, second)
				g.d.idle(0.25, 100*time.Millisecond)
				g.restart()
				flows(t, second)
				if _, err := g.PostRx(8); err != nil {
					t.Fatal(err)
				}
				testNextFrame(t, g)
			})
		}
	}
}

// testNextFrame sends a frame and wants it back, behind what was on its way when the ring broke.
func testNextFrame(t *testing.T, g *guest) {
	t.Helper()
	want := frameOf(60, 77)
	must(t, g.SendTx(virtio.NetHdr{}, want, frontend.Direct))
	for {
		if _, got := g.recv(); bytes.Equal(got, swapped(want)) {
			break
		}
	}
	must(t, g.DrainTx(patience))
}

// TestHostileIndirectLengthChanges changes a table's length while it is read (B10).
func TestHostileIndirectLengthChanges(t *testing.T) {
	g := newGuest(t, "null", ordinary())
	b, table := g.put(frameOf(60, 1)), g.alloc(32)
	driver.PokeTable(g.mem.Host(table), 0, b.Addr, 12, next, 1)
	driver.PokeTable(g.mem.Host(table), 1, b.Addr+12, 60, 0, 0)
	tx := g.raw(g.TX)
	tx.write(0, entry{table, 32, indirect, 0})
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for n := uint32(0); ; n++ {
			select {
			case <-quit:
				return
			default:
				tx.write(0, entry{table, 16 + n%2*16, indirect, 0})
			}
		}
	}()
	rounds := rounds(1000, 20000)
	for range rounds {
		tx.offer(0, 0, 0, 0)
		tx.returned(0, 0, 0, 0)
	}
	close(quit)
	<-done
	tx.done()
	eventually(t, "every chain is a frame or a fault", func() bool {
		r := g.d.ring(1)
		return r.Packets+r.Drops["next"] == uint64(4*rounds)
	})
}

// TestHostileEventIndexes: nonsense there costs notifications at most (C61, C63, C64).
func TestHostileEventIndexes(t *testing.T) {
	g := newGuest(t, "echo", ordinary())
	for i := range 500 {
		g.TX.Ring.PokeUsedEvent(uint16(i * 7919))
		g.RX.Ring.PokeUsedEvent(uint16(i * 104729))
		g.TX.Ring.PokeAvailFlags(uint16(i * 31))
		g.RX.Ring.PokeAvailFlags(0xffff)
		if i%3 == 0 && i > 0 { // used indexes are the device's: it never looks at them again
			g.TX.Ring.PokeUsedIdx(uint16(i * 13))
			g.RX.Ring.PokeUsedIdx(uint16(i * 17))
		}
		head := uint16(i % 128)
		g.TX.Ring.PokeDesc(head, g.scratch(0, 4096), 72, 0, 0)
		g.RX.Ring.PokeDesc(head, g.scratch(1, 4096), 2048, write, 0)
		g.TX.Ring.PokeHead(head)
		g.RX.Ring.PokeHead(head)
		g.TX.Ring.Publish()
		g.RX.Ring.Publish()
		must(t, g.TX.Kick())
		must(t, g.RX.Kick())
		eventually(t, fmt.Sprint("frame ", i, " is used"), func() bool {
			return g.TX.Ring.PeekUsedIdx() == uint16(i+1) && g.RX.Ring.PeekUsedIdx() == uint16(i+1)
		})
	}
	g.TX.Ring.Attach(500)
	g.RX.Ring.Attach(500)
	flows(t, g.Pair)
}

// TestHostileHeadersOfEveryKind sends the product of header fields (C66 to C69) to a guest for which everything is finished in
// software.
func TestHostileHeadersOfEveryKind(t *testing.T) {
	g := newOffloading(t, "echo", offloading(0))
	s := segment{payload: text(4000)}
	frame, l4 := s.frame()
	sent := 0
	for _, gsoType := range []uint8{0, 1, 2, 3, 4, 5, 6, 0x40, 0x7f, 0x80, 0x81, 0x83, 0x84, 0x85, 0xff} {
		for _, flags := range []uint8{0, 1, 2, 3, 4, 7, 0xff} {
			for _, size := range []uint16{0, 1, 48, 1448, 0xffff} {
				for _, start := range []int{0, 13, 14, l4, len(frame) - 1, 0xffff} {
					h := virtio.NetHdr{Flags: flags, GSOType: gsoType, HdrLen: size ^ 0xff, GSOSize: size, CsumStart: uint16(start), CsumOffset: 16, NumBuffers: size}
					must(t, g.SendTx(h, frame, frontend.Chained))
					sent++
				}
			}
			must(t, g.DrainTx(patience))
			for _, _, ok, err := g.TryRecv(); ok || err != nil; _, _, ok, err = g.TryRecv() {
				must(t, err)
			}
			_, err := g.PostRx(128)
			must(t, err)
		}
	}
	eventually(t, "every frame is sent or dropped", func() bool {
		return g.d.ring(1).Packets+g.d.drops(1) == uint64(sent)
	})
	for g.d.ring(0).Packets < g.d.ring(1).Packets { // drain what waits for buffers
		if _, _, ok, err := g.TryRecv(); err != nil {
			t.Fatal(err)
		} else if !ok {
			break
		}
		_, err := g.PostRx(128)
		must(t, err)
	}
	testNextFrame(t, g)
}

// TestHostileFrameLargerThanAnyBuffer: without mergeable buffers it is dropped, and the buffer stays (C70).
func TestHostileFrameLargerThanAnyBuffer(t *testing.T) {
	opts := ordinary()
	opts.Features &^= virtio.FNetMrgRxBuf
	opts.RxBuf = 256
	g := newGuest(t, "echo", opts)
	_, err := g.PostRx(1)
	must(t, err)
	must(t, g.SendTx(virtio.NetHdr{}, frameOf(1000, 1), frontend.Direct))
	g.dropped(0, "rx_buffers_too_small", 1)
	if n := g.RX.Ring.PeekUsedIdx(); n != 0 {
		t.Errorf("%d buffers used", n)
	}
	must(t, g.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
	expect(t, g.Pair, frameOf(60, 1))
}

// TestHostileThousandsOfBuffersForOneFrame: a frame may be spread over 1024 of them (C71).
func TestHostileThousandsOfBuffersForOneFrame(t *testing.T) {
	opts := large(ordinary())
	opts.RingSize, opts.RxBuf, opts.TxBuf = 32768, 16, 16
	mem := memory(t, 512<<20, 16<<20)
	g := serve(t, "echo").guest(mem, opts)
	at := g.alloc(12)
	for range opts.RingSize {
		g.add(g.RX, driver.Buf{Addr: at, Len: 12, Write: true})
	}
	must(t, g.RX.Flush())
	g.returned(g.TX, g.add(g.TX, g.put(frameOf(largest, 1))))
	g.dropped(0, "rx_buffers_too_small", 1)
	g.returned(g.TX, g.add(g.TX, g.put(frameOf(12*1023, 1))))
	g.take(g.RX, 1024)
	time.Sleep(quiet)
	if n := g.RX.Ring.PeekUsedIdx(); n != 1024 {
		t.Errorf("%d buffers used, want 1024", n)
	}
}
