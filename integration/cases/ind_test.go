package cases

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

func TestIND01_TablesOfOddLength(t *testing.T) {
	g := newGuest(t, "null", ordinary())
	frame := g.put(frameOf(60, 1))
	table := g.alloc(16 * 257)
	host := g.mem.Host(table)
	for i := range 257 { // header and frame in the first two entries, the others are not linked
		driver.PokeTable(host, i, frame.Addr, 12, next, 1)
	}
	driver.PokeTable(host, 1, frame.Addr+12, 60, 0, 0)

	tx := g.raw(g.TX)
	lengths := []uint32{0, 8, 24, 16 * 65536, 0xfffffff0}
	for i, n := range lengths {
		tx.desc(uint16(i), driver.Buf{Addr: table, Len: n}, indirect, 0)
		tx.offer(uint16(i))
		tx.returned(uint16(i))
	}
	g.dropped(1, "indirect", len(lengths))

	// 257 entries on a ring of 256: the table may be longer than the ring, as Linux drivers make it, and so may the chain in it.
	tx.desc(0, driver.Buf{Addr: table, Len: 16 * 257}, indirect, 0)
	tx.offer(0)
	tx.returned(0)
	for i := range uint16(256) {
		driver.PokeTable(host, int(i), frame.Addr, 12, next, i+1)
	}
	driver.PokeTable(host, 256, frame.Addr, 12, 0, 0)
	tx.offer(0)
	tx.returned(0)
	tx.done()
	eventually(t, "both long tables pass", func() bool { return g.d.ring(1).Packets == 2 })
	must(t, g.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Indirect))
	must(t, g.DrainTx(patience))
}

func TestIND03_TablesAtOddAddresses(t *testing.T) {
	g := newGuest(t, "echo", ordinary())
	frame := frameOf(60, 1)
	b := g.put(frame)
	page := g.alloc(4096)
	for _, off := range []uint64{8, 1, 15, 2, 4} {
		t.Run(fmt.Sprint("offset ", off), func(t *testing.T) {
			at := page + 64 + off
			head, err := g.TX.Ring.AddIndirect(g.mem.Host(at), at, []driver.Buf{{Addr: b.Addr, Len: 12}, {Addr: b.Addr + 12, Len: 60}})
			must(t, err)
			g.returned(g.TX, head)

			rx, table := []driver.Buf{g.room(12), g.room(100)}, page+1024+off
			head, err = g.RX.Ring.AddIndirect(g.mem.Host(table), table, rx)
			must(t, err)
			if e := g.take(g.RX, 1)[0]; e != (usedEntry{head, 72}) {
				t.Fatalf("used entry %+v, want head %d with 72 bytes", e, head)
			}
			if got := g.mem.Bytes(rx[1].Addr, 60); !bytes.Equal(got, swapped(frame)) {
				t.Errorf("received % x", got)
			}
		})
	}
	flows(t, g.Pair)
}
