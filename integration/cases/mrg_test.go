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

// largest is the largest frame that IP allows without a VLAN tag.
const largest = 65535 + 14

func large(opts frontend.Options) frontend.Options {
	opts.TxBuf, opts.Chunk = 12+virtio.MaxFrame, 32<<10
	return opts
}

func TestMRG01_UsedEntriesNameTheHeads(t *testing.T) {
	g := newGuest(t, "echo", ordinary())
	rx, piece := g.raw(g.RX), make([]driver.Buf, 6)
	for i := range piece {
		piece[i] = g.room(40)
	}
	rx.desc(5, piece[0], next, 9)
	rx.desc(9, piece[1], next, 2)
	rx.desc(2, piece[2], 0, 0)
	rx.desc(10, piece[3], next, 4)
	rx.desc(4, piece[4], next, 7)
	rx.desc(7, piece[5], 0, 0)
	rx.offer(5, 10)
	frame := frameOf(200, 1)
	must(t, g.SendTx(virtio.NetHdr{}, frame, frontend.Direct))
	for i, e := range rx.take(2) {
		if want := []usedEntry{{5, 120}, {10, 92}}[i]; e != want {
			t.Errorf("used entry %d is %+v, want %+v", i, e, want)
		}
	}
	var got []byte
	for _, p := range piece {
		got = append(got, g.mem.Bytes(p.Addr, 40)...)
	}
	if n := binary.LittleEndian.Uint16(got[10:]); n != 2 {
		t.Errorf("num_buffers is %d, want 2", n)
	}
	if !bytes.Equal(got[12:212], swapped(frame)) || !bytes.Equal(got[212:], make([]byte, 28)) {
		t.Errorf("received % x", got)
	}
	rx.done()
	flows(t, g.Pair)
}

func TestMRG03_NotEnoughBuffersYet(t *testing.T) {
	opts := large(ordinary())
	opts.RxBuf = 1526
	for _, posted := range []int{40, 43} {
		t.Run(fmt.Sprint(posted, " buffers"), func(t *testing.T) {
			g := newGuest(t, "echo", opts)
			_, err := g.PostRx(posted)
			must(t, err)
			big, small := frameOf(largest, 1), frameOf(60, 2)
			must(t, g.Stage(virtio.NetHdr{}, big, frontend.Chained))
			must(t, g.Stage(virtio.NetHdr{}, small, frontend.Direct))
			must(t, g.TX.Flush())
			if posted < 43 {
				time.Sleep(quiet)
				if n := g.RX.Ring.PeekUsedIdx(); n != 0 {
					t.Fatalf("%d buffers used for a frame that does not fit", n)
				}
				_, err = g.PostRx(43 - posted)
				must(t, err)
			}
			hdr, got, err := g.RecvFrame(patience)
			must(t, err)
			if hdr.NumBuffers != 43 || !bytes.Equal(got, swapped(big)) {
				t.Fatalf("%d bytes in %d buffers, want %d in 43", len(got), hdr.NumBuffers, len(big))
			}
			_, err = g.PostRx(1)
			must(t, err)
			expect(t, g.Pair, small)
			flows(t, g.Pair)
		})
	}
	t.Run("never enough", func(t *testing.T) {
		g := newGuest(t, "echo", opts)
		_, err := g.PostRx(40)
		must(t, err)
		must(t, g.Stage(virtio.NetHdr{}, frameOf(largest, 1), frontend.Chained))
		must(t, g.Stage(virtio.NetHdr{}, frameOf(60, 2), frontend.Direct))
		must(t, g.TX.Flush())
		_, got, err := g.RecvFrame(patience)
		must(t, err)
		if !bytes.Equal(got, swapped(frameOf(60, 2))) {
			t.Fatalf("received % x, want the small frame behind the one that never fits", head(got))
		}
		g.dropped(0, "rx_buffers_too_small", 1)
		flows(t, g.Pair)
	})
}

func TestMRG04_HundredsOfTinyBuffers(t *testing.T) {
	for _, c := range []struct{ ring, buffer, pieces, frame int }{
		{1024, 64, 1, largest},      // needs 1025 buffers: never fits
		{1024, 64, 1, largest - 64}, // exactly 1024
		{256, 256, 1, 256*256 - 12}, // exactly 256
		{256, 256, 1, largest},      // 257: never fits
		{1024, 64, 4, 256*64 - 12},  // each buffer is a chain of four descriptors
		{1024, 64, 4, 256*64 - 11},
	} {
		t.Run(fmt.Sprintf("ring %d, buffers of %d in %d pieces, frame %d", c.ring, c.buffer, c.pieces, c.frame), func(t *testing.T) {
			opts := large(ordinary())
			opts.RingSize = c.ring
			opts.TxBuf, opts.RxBuf = 256, 64
			g := newGuest(t, "echo", opts)
			memory := make([]driver.Buf, 0, c.ring)
			for range c.ring / c.pieces {
				var chain []driver.Buf
				for range c.pieces {
					chain = append(chain, g.room(c.buffer/c.pieces))
				}
				memory = append(memory, chain...)
				g.add(g.RX, chain...)
			}
			must(t, g.RX.Flush())
			frame := frameOf(c.frame, 1)
			g.add(g.TX, g.put(frame))
			need := (c.frame + 12 + c.buffer - 1) / c.buffer
			if need > c.ring/c.pieces {
				g.take(g.TX, 1)
				g.dropped(0, "rx_buffers_too_small", 1)
				must(t, g.SendTx(virtio.NetHdr{}, frameOf(60, 2), frontend.Direct))
				g.take(g.RX, (72+c.buffer-1)/c.buffer)
				return
			}
			g.take(g.TX, 1)
			testMerged(t, g, memory, need, c.buffer, frame)
		})
	}
}

// testMerged wants the frame in the first buffers of the memory, one used entry for each.
func testMerged(t *testing.T, g *guest, memory []driver.Buf, need, buffer int, frame []byte) {
	t.Helper()
	total := 0
	for i, e := range g.take(g.RX, need) {
		if want := min(buffer, len(frame)+12-total); int(e.written) != want {
			t.Fatalf("used entry %d has %d bytes, want %d", i, e.written, want)
		}
		total += int(e.written)
	}
	var got []byte
	for _, b := range memory {
		got = append(got, g.mem.Bytes(b.Addr, uint64(b.Len))...)
	}
	if n := int(binary.LittleEndian.Uint16(got[10:])); n != need {
		t.Errorf("num_buffers is %d, want %d", n, need)
	}
	if !bytes.Equal(got[12:12+len(frame)], swapped(frame)) {
		t.Error("the frame's bytes are wrong")
	}
}

func TestMRG05_LayoutsOfReceiveBuffers(t *testing.T) {
	const legacy = plain &^ virtio.FVersion1 &^ virtio.FNetMrgRxBuf
	same := func(n, length int) (lengths []int) {
		for range n {
			lengths = append(lengths, length)
		}
		return lengths
	}
	for _, c := range []struct {
		name     string
		features virtio.Features
		lengths  []int // of the descriptors of one buffer
		indirect bool
	}{
		{"header alone", plain, []int{12, 1514}, false},
		{"header alone, not mergeable", plain &^ virtio.FNetMrgRxBuf, []int{12, 1514}, false},
		{"header of 10 bytes alone", legacy, []int{10, 1514}, false},
		{"table of 19", plain &^ virtio.FNetMrgRxBuf, append(append([]int{12}, same(17, 4096)...), 1000), true},
		{"mergeable, indirect", plain, []int{12, 1024, 1024}, true},
		{"one of 65562", plain &^ virtio.FNetMrgRxBuf, []int{65562}, false},
		{"an empty descriptor", plain, []int{12, 0, 2036}, false},
		{"descriptors of 2 bytes", plain &^ virtio.FNetMrgRxBuf, same(763, 2), false},
		{"indirect descriptors of 2 bytes", plain &^ virtio.FNetMrgRxBuf, same(763, 2), true},
		{"header cut in two", plain, []int{5, 2000}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			opts := large(frontend.Options{Features: c.features, RingSize: 1024, RxBuf: 64})
			opts.TxBuf = 2048
			g := newGuest(t, "echo", opts)
			hdr, room := c.features.NetHdrLen(), -c.features.NetHdrLen()
			for _, n := range c.lengths {
				room += n
			}
			for _, n := range []int{60, 1514, room} {
				if n <= room && n <= largest {
					testLayout(t, g, hdr, c.lengths, c.indirect, frameOf(n, byte(n)))
				}
			}
		})
	}
}

// testLayout posts one buffer with descriptors of the lengths and wants the frame in it.
func testLayout(t *testing.T, g *guest, hdr int, lengths []int, indirect bool, frame []byte) {
	t.Helper()
	var bufs []driver.Buf
	for _, n := range lengths {
		bufs = append(bufs, g.room(n))
	}
	head := uint16(0)
	if indirect {
		var err error
		table := g.alloc(uint64(16 * len(bufs)))
		head, err = g.RX.Ring.AddIndirect(g.mem.Host(table), table, bufs)
		must(t, err)
	} else {
		head = g.add(g.RX, bufs...)
	}
	must(t, g.RX.Flush())
	b := g.alloc(uint64(hdr + len(frame)))
	copy(g.mem.Bytes(b+uint64(hdr), uint64(len(frame))), frame)
	g.returned(g.TX, g.add(g.TX, driver.Buf{Addr: b, Len: uint32(hdr + len(frame))}))
	if e := g.take(g.RX, 1)[0]; e != (usedEntry{head, uint32(hdr + len(frame))}) {
		t.Fatalf("frame of %d bytes: used entry %+v, want head %d with %d bytes", len(frame), e, head, hdr+len(frame))
	}
	var got []byte
	for _, b := range bufs {
		got = append(got, g.mem.Bytes(b.Addr, uint64(b.Len))...)
	}
	if !bytes.Equal(got[hdr:hdr+len(frame)], swapped(frame)) {
		t.Fatalf("frame of %d bytes was received wrong", len(frame))
	}
}

// TestMRG07_FramesBecomeVisibleWhole watches the used index; AppendRecv fails when only a part of num_buffers is there.
func TestMRG07_FramesBecomeVisibleWhole(t *testing.T) {
	opts := ordinary()
	opts.RxBuf = 1526
	g := newGuest(t, "source,size=9000", opts)
	_, err := g.PostRx(256)
	must(t, err)
	var frame []byte
	for i := 0; i < rounds(20000, 100000); {
		hdr, got, ok, err := g.AppendRecv(frame[:0])
		if err != nil {
			t.Fatalf("frame %d: %v", i, err)
		}
		if !ok {
			continue
		}
		if hdr.NumBuffers != 6 || len(got) != 9000 {
			t.Fatalf("frame %d: %d bytes in %d buffers, want 9000 in 6", i, len(got), hdr.NumBuffers)
		}
		i, frame = i+1, got
		if i%8 == 0 {
			_, err := g.PostRx(256)
			must(t, err)
		}
	}
}
