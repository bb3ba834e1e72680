package hostile

import (
	"encoding/binary"
	"time"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// offloads are features of a driver that leaves checksums and segments to the device, and takes none itself.
const offloads = features | virtio.FNetCSum | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN

// tcp is a TCP segment over IPv4 with n bytes, whose header is long at most.
func tcp(n int) []byte {
	f := frameOf(14+20+20+n, 0)
	copy(f[12:], []byte{0x08, 0x00, 0x45, 0, 0, 0, 0, 1, 0, 0, 64, 6, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2})
	binary.BigEndian.PutUint16(f[16:], uint16(40+n))
	copy(f[34:], []byte{0x10, 0, 0x20, 0, 0, 0, 0, 1, 0, 0, 0, 2, 0x50, 0x10, 0xff, 0xff, 0, 0, 0, 0})
	sum := uint32(0)
	for i := 14; i < 34; i += 2 {
		sum += uint32(binary.BigEndian.Uint16(f[i:]))
	}
	binary.BigEndian.PutUint16(f[24:], ^uint16(sum+sum>>16))
	return f
}

// marks are those of a frame to be cut into segments of 1000 bytes.
func marks(change func(h *virtio.NetHdr)) virtio.NetHdr {
	h := virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, GSOType: virtio.GSOTCPv4, HdrLen: 54, GSOSize: 1000, CsumStart: 34, CsumOffset: 16}
	change(&h)
	return h
}

// marked sends a frame with marks and demands that it is dropped for the reason.
func (a *attack) marked(p *frontend.Pair, h virtio.NetHdr, frame []byte, reason string) {
	a.t.Helper()
	a.drops0 = a.allDrops()
	must(a.t, p.SendTx(h, frame, frontend.Chained))
	must(a.t, p.DrainTx(patience))
	a.dropped(1, reason, 1)
	a.flows(p)
}

// markedFrames plays marks on frames with both formats.
func markedFrames(f virtio.Features, cases ...markedFrame) func(a *attack) {
	return func(a *attack) {
		a.formats(func(a *attack, format virtio.Features) {
			_, p := a.running(frontend.Options{Features: f | format, TxBuf: 8 << 10})
			for _, c := range cases {
				a.marked(p, c.hdr, c.frame, c.reason)
			}
		})
	}
}

type markedFrame struct {
	hdr    virtio.NetHdr
	frame  []byte
	reason string
}

func csum(start, offset uint16) virtio.NetHdr {
	return virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: start, CsumOffset: offset}
}

var packetRows = []row{
	{"B4", "header_over_many_descriptors_or_chain_below_it", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f})
			store(c.Mem, bufAt, append(make([]byte, 12), frameOf(60, 3)...))
			var pieces []desc
			for i := range uint16(12) {
				pieces = append(pieces, desc{bufAt + uint64(i), 1, next, 2*i + 1}, desc{bufAt, 0, next, 2*i + 2})
			}
			a.offer(p.TX, append(pieces, desc{bufAt + 12, 60, 0, 0})...).returned(0)
			a.receives(p, frameOf(60, 3))
			for _, n := range []uint32{0, 1, 11, 12, 13} {
				a.drops0 = a.allDrops()
				a.offer(p.TX, desc{bufAt, n / 2, next, 1}, desc{bufAt, n - n/2, 0, 0}).returned(0)
				a.dropped(1, "too_short", 1)
			}
			a.flows(p)
		})
	}},
	{"B5", "checksum_beyond_packet", markedFrames(offloads,
		markedFrame{csum(0xffff, 0), tcp(100), "csum_out_of_range"}, markedFrame{csum(0xffff, 0xffff), tcp(100), "csum_out_of_range"},
		markedFrame{csum(34, 119), tcp(100), "csum_out_of_range"}, markedFrame{csum(0xfff0, 0x0020), tcp(100), "csum_out_of_range"})},
	{"B6", "header_changes_between_check_and_use", func(a *attack) { a.flips(flipHeader) }},
	{"B7", "gso_size_0", markedFrames(offloads, markedFrame{marks(func(h *virtio.NetHdr) { h.GSOSize = 0 }), tcp(3000), "gso_size_too_small"},
		markedFrame{marks(func(h *virtio.NetHdr) { h.GSOSize = 1 }), tcp(3000), "gso_size_too_small"})},
	{"B9", "receive_buffers_below_the_header", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			for _, f := range []virtio.Features{f, f &^ virtio.FNetMrgRxBuf} {
				c, p := a.running(frontend.Options{Features: f})
				for _, n := range []uint32{0, 1, 11} {
					a.drops0 = a.allDrops()
					offered := a.offer(p.RX, desc{bufAt, n, write, 0})
					must(a.t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
					offered.returned(0)
					a.dropped(0, "rx_buffer_unusable", 1)
					a.receives(p, frameOf(60, 1))
				}
				a.flows(p)
				must(a.t, c.Close())
			}
		})
	}},
	{"B14", "headers_beyond_segment_or_packet", markedFrames(offloads,
		markedFrame{marks(func(h *virtio.NetHdr) {}), tcp(0), "header_truncated"},
		markedFrame{marks(func(h *virtio.NetHdr) {}), tcp(3000)[:40], "csum_out_of_range"},
		markedFrame{marks(func(h *virtio.NetHdr) {}), longHeader(), "header_truncated"})},
	{"B21", "guest_refills_as_fast_as_emptied", func(a *attack) {
		c, p := a.running(frontend.Options{RingSize: 256})
		p.TX.Ring.PokeDesc(0, bufAt, 12+1514, 0, 0)
		p.RX.Ring.PokeDesc(0, bufAt+8192, 2048, write, 0)
		stop, ended := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(ended)
			go feed(p.RX, stop)
			feed(p.TX, stop)
		}()
		for end := time.Now().Add(500 * time.Millisecond); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
			begin := time.Now()
			must(a.t, c.Sync())
			if took := time.Since(begin); took > 2*time.Second {
				a.t.Errorf("a message was answered after %v", took)
			}
		}
		_, _, err := c.Stop(0)
		must(a.t, err)
		close(stop)
		<-ended
	}},
	{"B22", "merged_buffers_and_memory_that_leaves", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f, RxBuf: 64})
			specs, fds := c.Mem.Table()
			for i := range 30 {
				frame := frameOf(1000, byte(i))
				_, err := p.PostRx(64)
				must(a.t, err)
				must(a.t, p.SendTx(virtio.NetHdr{}, frame, frontend.Direct))
				must(a.t, table8(c, specs[1:], fds[1:])) // whatever has been written by now
				must(a.t, table8(c, specs, fds))
				hdr, got, err := p.RecvFrame(patience) // fails unless all buffers become visible at once
				must(a.t, err)
				if hdr.NumBuffers != 16 || string(got) != string(swapped(frame)) {
					a.t.Fatalf("%d buffers, %d bytes", hdr.NumBuffers, len(got))
				}
			}
		})
	}},
	{"B23", "header_size_follows_what_was_acknowledged", func(a *attack) {
		c, p := a.running(frontend.Options{})
		for _, first := range []uint32{12, 13, 19, 20} { // 20 bytes are the header with a hash
			offered := a.offer(p.RX, desc{bufAt, first, write | next, 1}, desc{bufAt + 4096, 200, write, 0})
			must(a.t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
			offered.returned(72)
			must(a.t, p.DrainTx(patience))
			got := append(load(c.Mem, bufAt+12, int(first-12)), load(c.Mem, bufAt+4096, 72-int(first))...)
			if string(got) != string(swapped(frameOf(60, 1))) {
				a.t.Errorf("first buffer of %d bytes: % x", first, got)
			}
		}
		_, _, err := c.Stop(0)
		must(a.t, err)
		a.refused("HASH_REPORT", c.SetFeatures(c.Features|virtio.FNetHashReport))
	}},
	{"C65", "frames_of_impossible_length", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			c, p := a.running(frontend.Options{Features: f})
			for n, reason := range map[uint32]string{0: "too_short", 1: "too_short", 65554: "too_long", 131072: "too_long", 1 << 20: "too_long"} {
				a.drops0 = a.allDrops()
				a.offer(p.TX, desc{bufAt, 12 + n, 0, 0}).returned(0)
				a.dropped(1, reason, 1)
			}
			for _, n := range []int{14, 33, 59} { // short ones pass
				must(a.t, p.SendTx(virtio.NetHdr{}, frameOf(n, 1), frontend.Direct))
				a.receives(p, frameOf(n, 1))
			}
			store(c.Mem, bufAt, make([]byte, 12+65553)) // and so does the longest
			big := many(1, 12+65553, 0)
			a.offer(p.TX, big...).returned(0)
			a.offer(p.RX, desc{bufAt + 1<<20, 12 + 65553, write, 0}).returned(12 + 65553)
			a.flows(p)
		})
	}},
	{"C66", "every_gso_type_and_size", func(a *attack) {
		_, p := a.running(frontend.Options{Features: offloads, TxBuf: 8 << 10, RingSize: 256})
		frame := tcp(3000)
		for _, kind := range []uint8{0, 1, 2, 3, 4, 5, 7, 0x7f, 0x80, 0x81, 0x83, 0x84, 0x85, 0xff} {
			for _, size := range []uint16{0, 1, 48, 1448, 0xffff} {
				for _, hdrLen := range []uint16{0, 54, 0xffff} {
					h := marks(func(h *virtio.NetHdr) { h.GSOType, h.GSOSize, h.HdrLen = kind, size, hdrLen })
					must(a.t, p.SendTx(h, frame, frontend.Chained))
				}
			}
			must(a.t, p.DrainTx(patience))
			a.drainRx2(p)
		}
		a.drainRx(p)
		must(a.t, p.DrainTx(patience))
	}},
	{"C67", "segmentation_not_acknowledged", markedFrames(features|virtio.FNetCSum, markedFrame{marks(func(h *virtio.NetHdr) {}), tcp(3000), "gso_not_acked"},
		markedFrame{marks(func(h *virtio.NetHdr) { h.GSOType |= virtio.GSOECN }), tcp(3000), "gso_not_acked"})},
	{"C68", "checksum_not_acknowledged", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			// Without any of these features the header is not read at all.
			_, p := a.running(frontend.Options{Features: f})
			must(a.t, p.SendTx(csum(0xffff, 0xffff), frameOf(60, 1), frontend.Direct))
			a.receives(p, frameOf(60, 1))
		})
	}},
	{"C69", "num_buffers_of_a_frame_to_send", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			_, p := a.running(frontend.Options{Features: f})
			for _, n := range []uint16{1, 7, 0xffff} {
				must(a.t, p.SendTx(virtio.NetHdr{NumBuffers: n}, frameOf(60, 1), frontend.Direct))
				a.receives(p, frameOf(60, 1))
			}
		})
	}},
	{"C70", "frame_larger_than_every_buffer", func(a *attack) {
		a.formats(func(a *attack, f virtio.Features) {
			_, p := a.running(frontend.Options{Features: f &^ virtio.FNetMrgRxBuf, RxBuf: 256})
			_, err := p.PostRx(1)
			must(a.t, err)
			must(a.t, p.SendTx(virtio.NetHdr{}, frameOf(1000, 1), frontend.Direct))
			must(a.t, p.DrainTx(patience))
			a.dropped(0, "rx_buffers_too_small", 1)
			if p.RX.Driver.HasUsed() {
				a.t.Error("the buffer is consumed")
			}
			must(a.t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
			_, got, err := p.RecvFrame(patience)
			must(a.t, err)
			if string(got) != string(swapped(frameOf(60, 1))) {
				a.t.Errorf("received % x", got)
			}
		})
	}},
	{"C71", "frame_for_more_buffers_than_can_be_merged", func(a *attack) {
		c, p := a.running(frontend.Options{RingSize: 2048, RxBuf: 16, TxBuf: 128})
		_, err := p.PostRx(2048)
		must(a.t, err)
		store(c.Mem, bufAt, append(make([]byte, 12), frameOf(60000, 0)...))
		a.offer(p.TX, desc{bufAt, 12 + 60000, 0, 0}).returned(0)
		a.dropped(0, "rx_buffers_too_small", 1)
		must(a.t, p.SendTx(virtio.NetHdr{}, frameOf(60, 1), frontend.Direct))
		if _, got, err := p.RecvFrame(patience); err != nil || string(got) != string(swapped(frameOf(60, 1))) {
			a.t.Errorf("received % x, %v", got, err)
		}
	}},
}

// longHeader is a frame whose TCP header says that it is longer than the frame.
func longHeader() []byte {
	f := tcp(8)
	f[46] = 0xf0
	return f
}

// drainRx2 takes what is there.
func (a *attack) drainRx2(p *frontend.Pair) {
	a.t.Helper()
	_, err := p.PostRx(64)
	must(a.t, err)
	for {
		if _, _, ok, err := p.TryRecv(); err != nil || !ok {
			must(a.t, err)
			return
		}
	}
}
