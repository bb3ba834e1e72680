package virtionet

import (
	"fmt"
	"testing"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

const legacyFeatures = virtio.FRingIndirectDesc // neither VERSION_1 nor MRG_RXBUF: a header of 10 bytes

// txLayouts are ways to lay out header and frame; they return the buffers' lengths.
var txLayouts = []struct {
	name string
	cut  func(hdr, n int) []int
}{
	{"one buffer", func(int, int) []int { return nil }},
	{"header alone", func(hdr, _ int) []int { return []int{hdr} }},
	{"header in single bytes", func(hdr, _ int) []int { return repeat(1, hdr) }},
	{"header in three", func(hdr, _ int) []int { return []int{1, hdr - 3, 2} }},
	{"header and some payload", func(hdr, _ int) []int { return []int{hdr + 5, 7} }},
	{"empty descriptors between", func(hdr, _ int) []int { return []int{0, hdr, 0, 3, 0} }},
	{"split in the Ethernet header", func(hdr, _ int) []int { return []int{hdr - 1, 2, 6, 6} }},
	{"thirds", func(hdr, n int) []int { return repeat((hdr+n)/3+1, 2) }},
}

// TestTransmitLayouts sends frames of every interesting length in every layout, direct
// and indirect, with both header lengths, with and without reading headers.
func TestTransmitLayouts(t *testing.T) {
	sizes := []int{1514, 4082, 4083, 4084, 4096, 4097, 8192, 9014, 65535, 65549, virtio.MaxFrame}
	for n := 14; n <= 60; n++ {
		sizes = append(sizes, n)
	}
	for _, features := range append(formats(baseFeatures), legacyFeatures, baseFeatures|virtio.FNetCSum, virtio.FVersion1|virtio.FRingIndirectDesc) {
		for i, policy := range []CopyPolicy{CopyNever, CopyAlways, CopyAuto} {
			t.Run(fmt.Sprintf("%v/%v/%v", features, policy, allTxAllocs[i]), func(t *testing.T) {
				p := newFakePort()
				r := newRig(t, p, rigOptions{features: features, copy: policy, alloc: allTxAllocs[i]})
				for _, l := range txLayouts {
					for seed, n := range sizes {
						f := plain(n, seed)
						raw := r.raw(virtio.NetHdr{}, f.data)
						bufs := cut(r.place(raw), len(raw), false, l.cut(features.NetHdrLen(), n)...)
						heads := []uint16{r.post(1, bufs), r.postIndirect(1, bufs)}
						r.run()
						wantSent(t, p, f, f)
						r.wantUsed(1, heads...)
					}
				}
				r.wantDrops(1, nil)
			})
		}
	}
}

// TestTransmitRefused posts every kind of frame that is dropped, each between two good
// ones: all heads come back in order, the good frames arrive in order, all are counted.
func TestTransmitRefused(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures, size: 1024})
	var heads []uint16
	var good []frame
	want := map[string]uint64{}
	seed := 0
	pass := func() {
		seed++
		good = append(good, plain(60+seed, seed))
		heads = append(heads, r.send(good[len(good)-1]))
	}
	refuse := func(reason string, bufs []driver.Buf) {
		pass()
		want[reason]++
		heads = append(heads, r.post(1, bufs))
	}
	at := r.place(make([]byte, 4096))
	for n := range 12 + 14 { // shorter than a header, a header alone, runts
		refuse("too_short", cut(at, n, false, n))
	}
	refuse("too_short", cut(at, 12, false, repeat(1, 12)...))
	refuse("too_long", pieces(at, 12+virtio.MaxFrame+1, 4096, false))
	refuse("too_long", pieces(at, 131072, 65536, false)[:2])
	var huge []driver.Buf
	for range 256 {
		huge = append(huge, driver.Buf{Addr: r.bufs, Len: 64 << 10})
	}
	refuse("too_long", huge)
	refuse("address", []driver.Buf{{Addr: 1 << 40, Len: 100}})
	refuse("address", []driver.Buf{{Addr: ^uint64(0), Len: 100}})
	refuse("address", []driver.Buf{{Addr: at, Len: 72}, {Addr: 1 << 40, Len: 10}})
	refuse("address", []driver.Buf{{Addr: rigSeam + rigRegion - 50, Len: 100}})
	refuse("direction", []driver.Buf{{Addr: at, Len: 100, Write: true}})
	refuse("direction", []driver.Buf{{Addr: at, Len: 72}, {Addr: at, Len: 100, Write: true}})
	pass()
	before := r.arena.InUse()
	r.run()
	wantSent(t, p, good...)
	r.wantUsed(1, heads...)
	r.wantDrops(1, want)
	if after := r.arena.InUse(); after > before+8 {
		t.Errorf("%d pages in use, %d before: refused frames took memory", after, before)
	}
}

// TestTransmitTooLongTakesNoMemory is RING-17: frames above the cap are dropped before
// anything is allocated for them.
func TestTransmitTooLongTakesNoMemory(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures, arena: 1 << 20})
	huge := make([]driver.Buf, 256)
	for i := range huge {
		huge[i] = driver.Buf{Addr: r.bufs, Len: 64 << 10}
	}
	for range 1000 {
		head := r.postIndirect(1, huge)
		r.run()
		r.wantUsed(1, head)
	}
	if n := r.arena.InUse(); n > 8 {
		t.Errorf("%d pages in use", n)
	}
	r.wantDrops(1, map[string]uint64{"too_long": 1000})
}

// TestTransmitAcrossRegions puts the seam between two regions into every byte of header
// and the first bytes of the frame.
func TestTransmitAcrossRegions(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	for off := range 40 {
		f := plain(100, off)
		raw := r.raw(virtio.NetHdr{}, f.data)
		at := uint64(rigSeam - off)
		copy(r.mem.Bytes(at, uint64(off)), raw[:off])
		copy(r.mem.Bytes(rigSeam, uint64(len(raw)-off)), raw[off:])
		head := r.post(1, []driver.Buf{{Addr: at, Len: uint32(len(raw))}})
		r.run()
		wantSent(t, p, f)
		r.wantUsed(1, head)
	}
	f := plain(100, 1)
	raw := r.raw(virtio.NetHdr{}, f.data)
	end := uint64(rigSeam + rigRegion - len(raw)) // ends exactly with the last region
	copy(r.mem.Bytes(end, uint64(len(raw))), raw)
	head := r.post(1, []driver.Buf{{Addr: end, Len: uint32(len(raw))}})
	r.run()
	wantSent(t, p, f)
	r.wantUsed(1, head)
}

// TestTransmitHeader checks the private copy of the header that the network gets.
func TestTransmitHeader(t *testing.T) {
	csum := virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: 34, CsumOffset: 16}
	for _, test := range []struct {
		name   string
		acked  virtio.Features
		hdr    virtio.NetHdr
		want   virtio.NetHdr
		reason string
	}{
		{"not acked: ignored", 0, virtio.NetHdr{Flags: 1, GSOType: 1, CsumStart: 0xffff}, virtio.NetHdr{}, ""},
		{"num_buffers", virtio.FNetCSum, virtio.NetHdr{NumBuffers: 77}, virtio.NetHdr{}, ""},
		{"leftovers", virtio.FNetCSum, virtio.NetHdr{HdrLen: 1, GSOSize: 2, CsumStart: 3, CsumOffset: 4}, virtio.NetHdr{}, ""},
		{"unknown flags", virtio.FNetCSum, virtio.NetHdr{Flags: 0xfe}, virtio.NetHdr{}, ""},
		{"checksum", virtio.FNetCSum, csum, csum, ""},
		{"checksum not acked", virtio.FNetHostTSO4, csum, virtio.NetHdr{}, "csum_not_acked"},
		{"checksum in the last two bytes", virtio.FNetCSum, virtio.NetHdr{Flags: 1, CsumStart: 90, CsumOffset: 8}, virtio.NetHdr{Flags: 1, CsumStart: 90, CsumOffset: 8}, ""},
		{"checksum one byte beyond", virtio.FNetCSum, virtio.NetHdr{Flags: 1, CsumStart: 90, CsumOffset: 9}, virtio.NetHdr{}, "csum_out_of_range"},
		{"checksum wraps", virtio.FNetCSum, virtio.NetHdr{Flags: 1, CsumStart: 0xffff, CsumOffset: 0x30}, virtio.NetHdr{}, "csum_out_of_range"},
		{"checksum in the Ethernet header", virtio.FNetCSum, virtio.NetHdr{Flags: 1, CsumStart: 2, CsumOffset: 2}, virtio.NetHdr{}, "csum_out_of_range"},
		{"segmentation not acked", virtio.FNetCSum, virtio.NetHdr{Flags: 1, GSOType: 1, GSOSize: 1448, CsumStart: 34, CsumOffset: 16}, virtio.NetHdr{}, "gso_not_acked"},
		{"unknown segmentation", fakeOffloads, virtio.NetHdr{Flags: 1, GSOType: 0x7f, GSOSize: 1448, CsumStart: 34, CsumOffset: 16}, virtio.NetHdr{}, "gso_unknown"},
		{"segment size 0", fakeOffloads, virtio.NetHdr{Flags: 1, GSOType: 1, CsumStart: 34, CsumOffset: 16}, virtio.NetHdr{}, "gso_size_too_small"},
		{"segments without checksum", fakeOffloads, virtio.NetHdr{GSOType: 1, GSOSize: 1448}, virtio.NetHdr{}, "gso_without_csum"},
		{"segments of no protocol", fakeOffloads, virtio.NetHdr{Flags: 1, GSOType: 1, GSOSize: 1448, CsumStart: 34, CsumOffset: 16}, virtio.NetHdr{}, "gso_protocol_mismatch"},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := newFakePort()
			r := newRig(t, p, rigOptions{features: baseFeatures | test.acked})
			marked := frame{test.hdr, pattern(100, 1)}
			head, next := r.send(marked), r.send(plain(60, 2))
			r.run()
			sent := p.take()
			if test.reason == "" {
				if len(sent) != 2 || sent[0].hdr != test.want {
					t.Fatalf("the network got %+v, want header %+v", sent, test.want)
				}
				r.wantDrops(1, nil)
			} else {
				if len(sent) != 1 {
					t.Fatalf("%d frames were sent, want the good one only", len(sent))
				}
				n := uint64(0)
				for reason, count := range r.drops(1) {
					t.Logf("%s: %d", reason, count)
					if reason == test.reason {
						n = count
					}
				}
				if n != 1 {
					t.Errorf("%d drops for %s, want 1", n, test.reason)
				}
			}
			r.wantUsed(1, head, next)
		})
	}
}

// TestTransmitDisabled is MQ-03: frames of a started but disabled ring are consumed and
// nothing reaches the network.
func TestTransmitDisabled(t *testing.T) {
	p := newFakePort()
	r := newRig(t, p, rigOptions{features: baseFeatures})
	r.dev.EnableRing(1, false)
	var heads []uint16
	for i := range 100 {
		heads = append(heads, r.send(plain(60, i)))
	}
	r.run()
	wantSent(t, p)
	r.wantUsed(1, heads...)
	r.wantDrops(1, map[string]uint64{"queue_disabled": 100})
	r.dev.EnableRing(1, true)
	head := r.send(plain(60, 1))
	r.run()
	wantSent(t, p, plain(60, 1))
	r.wantUsed(1, head)
	if base := r.stop(1); base != 101 {
		t.Errorf("ring stopped at %d, want 101", base)
	}
}
