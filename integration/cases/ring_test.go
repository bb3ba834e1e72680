package cases

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

const (
	next     = driver.DescFNext
	write    = driver.DescFWrite
	indirect = driver.DescFIndirect
)

// hole is a guest address outside the memory table.
const hole = 0x7000_0000

func TestRING01_ChainPointsAtItself(t *testing.T) {
	for _, n := range []uint32{0, 64} {
		t.Run(fmt.Sprint("length ", n), func(t *testing.T) {
			g := newGuest(t, "echo", ordinary())
			second := pair(t, g.c, 1)
			data := driver.Buf{Addr: g.alloc(64), Len: n}

			tx := g.raw(g.TX)
			tx.desc(0, data, next, 1)
			tx.desc(1, data, next, 0)
			tx.desc(2, data, next, 2)
			table := g.alloc(32)
			driver.PokeTable(g.mem.Host(table), 0, data.Addr, n, next, 1)
			driver.PokeTable(g.mem.Host(table), 1, data.Addr, n, next, 0)
			tx.desc(3, driver.Buf{Addr: table, Len: 32}, indirect, 0)
			for i := range uint16(200) { // one loop through most of the ring
				tx.desc(10+i, data, next, 10+(i+1)%200)
			}
			tx.offer(0, 2, 3, 10)
			tx.returned(0, 2, 3, 10)
			tx.done()
			g.dropped(1, "loop", 4)

			rx := g.raw(g.RX)
			data.Write = true
			rx.desc(0, data, next, 1)
			rx.desc(1, data, next, 0)
			rx.offer(0)
			must(t, g.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
			rx.returned(0)
			rx.done()
			g.dropped(0, "loop", 1)

			g.d.idle(0.25, 100*time.Millisecond)
			flows(t, second)
			_, err := g.PostRx(4)
			must(t, err)
			expect(t, g.Pair, frameOf(60, 1))
			flows(t, g.Pair)
		})
	}
}

func TestRING04_ChainShorterThanTheHeader(t *testing.T) {
	opts := ordinary()
	opts.RingSize = 64
	for _, mergeable := range []bool{true, false} {
		t.Run(fmt.Sprint("mergeable ", mergeable), func(t *testing.T) {
			opts := opts
			if !mergeable {
				opts.Features &^= virtio.FNetMrgRxBuf
			}
			g := newGuest(t, "echo", opts)
			lengths := []uint32{0, 1, 11, 12, 13}
			at := g.alloc(64)
			for i := range 100 {
				n := lengths[i%len(lengths)]
				bufs := []driver.Buf{{Addr: at, Len: n}}
				if i >= 50 && n > 1 { // the header in several descriptors
					bufs = []driver.Buf{{Addr: at, Len: 1}, {Addr: at, Len: 0}, {Addr: at + 1, Len: n - 1}}
				}
				g.returned(g.TX, g.add(g.TX, bufs...))
			}
			g.dropped(1, "too_short", 100)
			testSmallReceiveBuffers(t, g, mergeable)
			flows(t, g.Pair)
		})
	}
}

// testSmallReceiveBuffers offers buffers that cannot hold a header, and one that holds nothing else. Only mergeable buffers may be
// that small, and then the next buffer takes the frame.
func testSmallReceiveBuffers(t *testing.T, g *guest, mergeable bool) {
	var heads []uint16
	for _, n := range []int{0, 11, 12} {
		heads = append(heads, g.add(g.RX, driver.Buf{Addr: g.alloc(64), Len: uint32(n), Write: true}))
	}
	good := g.room(256)
	heads = append(heads, g.add(g.RX, good))
	must(t, g.RX.Flush())
	must(t, g.SendTx(virtio.NetHdr{}, frameOf(60, 2), frontend.Direct))
	want := []usedEntry{{heads[0], 0}, {heads[1], 0}, {heads[2], 0}, {heads[3], 72}}
	data, bad := g.mem.Bytes(good.Addr+virtio.NetHdrLen, 60), 3
	if mergeable {
		want[2].written, want[3].written, bad = 12, 60, 2
		data = g.mem.Bytes(good.Addr, 60)
	}
	for i, e := range g.take(g.RX, len(heads)) {
		if e != want[i] {
			t.Errorf("used entry %d is %+v, want %+v", i, e, want[i])
		}
	}
	if !bytes.Equal(data, swapped(frameOf(60, 2))) {
		t.Errorf("received % x", data)
	}
	g.dropped(0, "rx_buffer_unusable", bad)
}

func TestRING10_BadBufferAddresses(t *testing.T) {
	mem := &frontend.Memory{}
	for i, gpa := range []uint64{1 << 20, 4 << 30} { // nothing at address 0
		_, err := mem.Add(regionAt(gpa, 32<<20, i))
		must(t, err)
	}
	t.Cleanup(func() { must(t, mem.Close()) })
	g := serve(t, "echo").guest(mem, ordinary())
	at := g.alloc(64)
	bad := [][]driver.Buf{
		{{Addr: hole, Len: 72}},
		{{Addr: 0, Len: 72}},
		{{Addr: ^uint64(0), Len: 72}},
		{{Addr: at, Len: 12}, {Addr: hole, Len: 60}},
		{{Addr: at, Len: 12}, {Addr: ^uint64(0) - 30, Len: 60}},
	}
	total := rounds(1000, 1000)
	faults, broughtBack := 0, 0
	for i := range 2 * total {
		if i < total && i%2 == 0 {
			g.returned(g.TX, g.add(g.TX, bad[i/2%len(bad)]...))
			faults++
			if i%20 == 0 {
				g.add(g.RX, driver.Buf{Addr: at, Len: 0, Write: true})
				broughtBack++
			}
			continue
		}
		testGoodFrame(t, g, byte(i), &broughtBack)
	}
	g.dropped(1, "address", faults)
	flows(t, g.Pair)
}

// testGoodFrame sends a frame and wants it back behind the useless receive buffers.
func testGoodFrame(t *testing.T, g *guest, seed byte, useless *int) {
	t.Helper()
	frame := frameOf(60, seed)
	b := g.scratch(0, 2048)
	copy(g.mem.Bytes(b, 72)[12:], frame)
	rx := driver.Buf{Addr: g.scratch(1, 2048), Len: 2048, Write: true}
	head := g.add(g.RX, rx)
	must(t, g.RX.Flush())
	g.returned(g.TX, g.add(g.TX, driver.Buf{Addr: b, Len: 72}))
	used := g.take(g.RX, *useless+1)
	*useless = 0
	if last := used[len(used)-1]; last != (usedEntry{head, 72}) {
		t.Fatalf("used entry %+v, want head %d with 72 bytes", last, head)
	}
	if got := g.mem.Bytes(rx.Addr+12, 60); !bytes.Equal(got, swapped(frame)) {
		t.Fatalf("received % x", got)
	}
}

func TestRING11_OddSizes(t *testing.T) {
	d := serve(t, "null")
	g := d.guest(memory(t), ordinary())
	num := func(n uint32) error {
		return g.c.DoAck(vhostuser.ReqSetVringNum, vhostuser.VringState{Index: 2, Num: n}.Append(nil))
	}
	for _, n := range []uint32{1, 2, 32768, 256} {
		if err := num(n); err != nil {
			t.Errorf("size %d: %v", n, err)
		}
	}
	for _, n := range []uint32{0, 3, 100, 32769, 0x10000, 0x80000000, 0xffffffff} {
		refused(t, fmt.Sprint("size ", n), num(n))
	}
	for _, r := range d.status().Rings {
		if r.Index == 2 && r.Size != 256 {
			t.Errorf("size is %d after refused ones, was 256", r.Size)
		}
	}
	base := d.use()
	for range 10000 {
		must(t, g.c.SetVringNum(2, 256))
	}
	must(t, g.c.Sync())
	d.flat(base)
	refused(t, "another size of a started ring", g.c.DoAck(vhostuser.ReqSetVringNum, vhostuser.VringState{Index: 1, Num: 128}.Append(nil)))
	must(t, g.SendTx(virtio.NetHdr{}, frameOf(60, 3), frontend.Direct))
	must(t, g.DrainTx(patience))
}

func refused(t *testing.T, what string, err error) {
	t.Helper()
	var r *frontend.RefusedError
	if !errors.As(err, &r) {
		t.Errorf("%s: %v, want a refusal", what, err)
	}
}

func TestRING12_RingIndexOutOfRange(t *testing.T) {
	d := serve(t, "echo", "--queue-pairs", "1")
	g := d.guest(memory(t), ordinary())
	flows(t, g.Pair)
	base := d.use()
	for _, i := range []uint32{200, 256, 0x10000, 0x10001, 0xffffffff} {
		state := vhostuser.VringState{Index: i, Num: 1}.Append(nil)
		for _, req := range []vhostuser.Request{vhostuser.ReqSetVringNum, vhostuser.ReqSetVringBase, vhostuser.ReqSetVringEnable} {
			refused(t, fmt.Sprint(req, " of ring ", i), g.c.DoAck(req, state))
		}
		addr := g.TX.Addr()
		addr.Index = i
		refused(t, fmt.Sprint("SET_VRING_ADDR of ring ", i), g.c.DoAck(vhostuser.ReqSetVringAddr, addr.Append(nil)))
		for _, req := range []vhostuser.Request{vhostuser.ReqSetVringKick, vhostuser.ReqSetVringCall, vhostuser.ReqSetVringErr} {
			body := binary.LittleEndian.AppendUint64(nil, uint64(i))
			refused(t, fmt.Sprint(req, " of ring ", i), g.c.DoAck(req, body, g.TX.KickFD))
		}
		flows(t, g.Pair)
		d.flat(base)
	}
	must(t, g.c.Close())
	for _, i := range []int{200, 256, 0x10000, 0x10001} { // no answer is possible: the connection ends
		c := d.connectLater(g.mem, ordinary())
		if _, err := c.GetVringBase(i); err == nil {
			t.Errorf("GET_VRING_BASE of ring %d was answered", i)
		}
		must(t, c.Close())
	}
}

func TestRING15_LeastAlignment(t *testing.T) {
	for name, place := range map[string]func(int, uint64) driver.Layout{"odd": driver.Odd, "packed": driver.Packed} {
		for _, size := range []int{1, 2, 64, 256} {
			t.Run(fmt.Sprint(name, " ", size), func(t *testing.T) {
				opts := ordinary()
				opts.Place, opts.RingSize = place, size
				g := newGuest(t, "echo", opts)
				for range 2*size + 3 {
					flows(t, g.Pair)
				}
			})
		}
	}
	g := newGuest(t, "echo", ordinary())
	for _, off := range [][3]uint64{{8, 0, 0}, {0, 1, 0}, {0, 0, 2}, {1, 1, 1}} {
		a := g.TX.Addr()
		a.Index, a.Desc, a.Avail, a.Used = 3, a.Desc+off[0], a.Avail+off[1], a.Used+off[2]
		refused(t, fmt.Sprint("ring misaligned by ", off), g.c.DoAck(vhostuser.ReqSetVringAddr, a.Append(nil)))
	}
	flows(t, g.Pair)
}

func TestRING17_FramesOfAnyLength(t *testing.T) {
	g := newGuest(t, "null", ordinary())
	const piece = 64 << 10
	at := g.alloc(2 * piece)
	pieces := func(total int) (bufs []driver.Buf) {
		for ; total > 0; total -= piece {
			bufs = append(bufs, driver.Buf{Addr: at, Len: uint32(min(total, piece))})
		}
		return bufs
	}
	send := func(total int) { g.returned(g.TX, g.add(g.TX, pieces(total)...)) }
	for range 10 {
		send(256 * piece)
		send(12 + virtio.MaxFrame)
	}
	base := g.d.use()
	n := rounds(300, 1000)
	for range n {
		for _, frame := range []int{65549, 65553, 65554, 131072} {
			send(12 + frame)
		}
		send(256 * piece)
	}
	g.d.flat(base)
	g.dropped(1, "too_long", 3*n+10)
	eventually(t, "the frames up to the limit pass", func() bool { return g.d.ring(1).Packets == uint64(2*n+10) })
	must(t, g.SendTx(virtio.NetHdr{}, frameOf(60, 3), frontend.Direct))
	must(t, g.DrainTx(patience))
}
