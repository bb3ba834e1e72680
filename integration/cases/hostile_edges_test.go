package cases

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// TestHostileEdges: buffers and tables that touch a region's edge from inside, and headers in many pieces, are right (B1, B2, B4, B30).
func TestHostileEdges(t *testing.T) {
	mem := &frontend.Memory{}
	for i, gpa := range []uint64{0, 16 << 20, 1 << 40} { // the first two are neighbors, but mapped apart
		_, err := mem.Add(regionAt(gpa, 16<<20, i))
		must(t, err)
	}
	t.Cleanup(func() { must(t, mem.Close()) })
	g := serve(t, "echo").guest(mem, frontend.Options{Features: plain, RingSize: 64})
	frame := frameOf(60, 3)
	const seam, end = 16 << 20, 1<<40 + 16<<20
	data := append(make([]byte, 12), frame...)
	place := func(at uint64) { // byte by byte: the seam is a seam for the front-end too
		for i, b := range data {
			mem.Bytes(at+uint64(i), 1)[0] = b
		}
	}
	var headerInPieces []driver.Buf
	for i := range uint64(12) {
		headerInPieces = append(headerInPieces, driver.Buf{Addr: 8<<20 + i, Len: 1}, driver.Buf{Addr: 8 << 20, Len: 0})
	}
	headerInPieces = append(headerInPieces, driver.Buf{Addr: 8<<20 + 12, Len: 60})
	for name, bufs := range map[string][]driver.Buf{
		"ends with the region":      {{Addr: end - 72, Len: 72}},
		"begins with the region":    {{Addr: 1 << 40, Len: 72}},
		"header across the seam":    {{Addr: seam - 5, Len: 72}},
		"frame across the seam":     {{Addr: seam - 40, Len: 72}},
		"header in 12 pieces":       headerInPieces,
		"header and frame in a row": {{Addr: 8 << 20, Len: 40}, {Addr: 8<<20 + 40, Len: 32}},
	} {
		t.Run(name, func(t *testing.T) {
			g.t = t
			place(8 << 20)
			place(bufs[0].Addr)
			g.returned(g.TX, g.add(g.TX, bufs...))
			rx := make([]driver.Buf, len(bufs))
			for i, b := range bufs {
				rx[i] = driver.Buf{Addr: b.Addr, Len: b.Len, Write: true}
			}
			head := g.add(g.RX, rx...)
			if e := g.take(g.RX, 1)[0]; e != (usedEntry{head, 72}) {
				t.Fatalf("used entry %+v, want head %d with 72 bytes", e, head)
			}
			var got []byte
			for _, b := range rx {
				for i := range uint64(b.Len) {
					got = append(got, mem.Bytes(b.Addr+i, 1)[0])
				}
			}
			if !bytes.Equal(got[12:], swapped(frame)) {
				t.Errorf("received % x", got[12:])
			}
		})
	}
	g.t = t
	place(8 << 20)
	testTableAcrossTheSeam(t, g, seam)
	flows(t, g.Pair)
}

// testTableAcrossTheSeam puts an entry of an indirect table into two regions.
func testTableAcrossTheSeam(t *testing.T, g *guest, seam uint64) {
	t.Helper()
	table := make([]byte, 0, 32)
	table = binary.LittleEndian.AppendUint64(table, 8<<20)
	table = append(table, 12, 0, 0, 0, next, 0, 1, 0)
	table = binary.LittleEndian.AppendUint64(table, 8<<20+12)
	table = append(table, 60, 0, 0, 0, 0, 0, 0, 0)
	at := seam - 24
	for i, b := range table {
		g.mem.Bytes(at+uint64(i), 1)[0] = b
	}
	_, err := g.PostRx(1)
	must(t, err)
	tx := g.raw(g.TX)
	tx.write(0, entry{at, 32, indirect, 0})
	tx.offer(0)
	tx.returned(0)
	tx.done()
	expect(t, g.Pair, frameOf(60, 3))
}
