package virtio_test

import (
	"bytes"
	"encoding/binary"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/vhostd/vhostd/virtio"
)

func TestFeatureSets(t *testing.T) {
	f := virtio.FNetCSum | virtio.FNetGuestCSum | 1<<41
	if got := f.String(); got != "CSUM|GUEST_CSUM|bit41" {
		t.Errorf("String = %q", got)
	}
	if virtio.Features(0).String() != "none" || len(virtio.Features(0).Names()) != 0 {
		t.Errorf("no feature is %q, %v", virtio.Features(0), virtio.Features(0).Names())
	}
	if !f.Has(virtio.FNetCSum|virtio.FNetGuestCSum) || f.Has(virtio.FNetCSum|virtio.FNetMQ) || !f.Has(0) {
		t.Error("Has is not about all of the bits")
	}
	if !f.Any(virtio.FNetCSum|virtio.FNetMQ) || f.Any(virtio.FNetMQ) || f.Any(0) {
		t.Error("Any is not about one of the bits")
	}
}

// The numbers as the headers have them, where a slip would go unnoticed.
func TestFeatureBits(t *testing.T) {
	for bit, f := range map[int]virtio.Features{
		0: virtio.FNetCSum, 11: virtio.FNetHostTSO4, 15: virtio.FNetMrgRxBuf, 22: virtio.FNetMQ, 24: virtio.FNotifyOnEmpty,
		26: virtio.FVhostLogAll, 28: virtio.FRingIndirectDesc, 29: virtio.FRingEventIdx, 30: virtio.FVhostUserProtocolFeatures,
		32: virtio.FVersion1, 33: virtio.FAccessPlatform, 34: virtio.FRingPacked, 35: virtio.FInOrder, 40: virtio.FRingReset,
		54: virtio.FNetGuestUSO4, 56: virtio.FNetHostUSO, 60: virtio.FNetRSS, 63: virtio.FNetSpeedDuplex,
	} {
		if f != 1<<bit || strings.HasPrefix(f.String(), "bit") {
			t.Errorf("bit %d is %#x, %v", bit, uint64(f), f)
		}
	}
	// All bits of QEMU 7.2's virtio-net over DPDK, traced: VERSION_1, IN_ORDER, MRG_RXBUF, INDIRECT_DESC, PROTOCOL_FEATURES.
	want := []string{"MRG_RXBUF", "INDIRECT_DESC", "PROTOCOL_FEATURES", "VERSION_1", "IN_ORDER"}
	if diff := cmp.Diff(want, virtio.Features(0x950008000).Names()); diff != "" {
		t.Error(diff)
	}
}

func TestNetHdrCodec(t *testing.T) {
	h := virtio.NetHdr{Flags: 1, GSOType: 0x84, HdrLen: 0x0203, GSOSize: 0x0405, CsumStart: 0x0607, CsumOffset: 0x0809, NumBuffers: 0x0a0b}
	want := []byte{1, 0x84, 3, 2, 5, 4, 7, 6, 9, 8, 0xb, 0xa}
	b := make([]byte, 12)
	h.Encode(b)
	if !bytes.Equal(b, want) || binary.Size(h) != virtio.NetHdrLen {
		t.Errorf("Encode = % x, want % x", b, want)
	}
	short := make([]byte, 10)
	h.Encode(short)
	if !bytes.Equal(short, want[:10]) {
		t.Errorf("Encode of 10 = % x", short)
	}
	var got virtio.NetHdr
	got.Decode(b)
	if got != h {
		t.Errorf("Decode = %+v", got)
	}
	got.Decode(short)
	h.NumBuffers = 0
	if got != h {
		t.Errorf("Decode of 10 = %+v", got)
	}
	for f, n := range map[virtio.Features]int{0: 10, virtio.FVersion1: 12, virtio.FNetMrgRxBuf: 12, virtio.FNetCSum: 10} {
		if f.NetHdrLen() != n {
			t.Errorf("%v: header of %d bytes, want %d", f, f.NetHdrLen(), n)
		}
	}
}

const allTx = virtio.FNetCSum | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN | virtio.FNetHostUFO | virtio.FNetHostUSO

func TestCheckTx(t *testing.T) {
	csum := func(start, offset uint16) virtio.NetHdr {
		return virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: start, CsumOffset: offset}
	}
	gso := func(kind uint8, size uint16) virtio.NetHdr {
		return virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, GSOType: kind, GSOSize: size, HdrLen: 54, CsumStart: 34, CsumOffset: 16}
	}
	noCsum := gso(virtio.GSOTCPv4, 1448)
	noCsum.Flags = 0
	for _, c := range []struct {
		name  string
		hdr   virtio.NetHdr
		frame int
		acked virtio.Features
		want  virtio.HdrError
	}{
		{"plain", virtio.NetHdr{}, 60, 0, virtio.HdrOK},
		{"empty", virtio.NetHdr{}, 0, allTx, virtio.HdrFrameShort},
		{"negative", virtio.NetHdr{}, -1, allTx, virtio.HdrFrameShort},
		{"13 bytes", virtio.NetHdr{}, 13, allTx, virtio.HdrFrameShort},
		{"14 bytes", virtio.NetHdr{}, 14, allTx, virtio.HdrOK},
		{"longest", virtio.NetHdr{}, 65553, 0, virtio.HdrOK},
		{"too long", virtio.NetHdr{}, 65554, allTx, virtio.HdrFrameLong},

		{"checksum", csum(34, 16), 60, allTx, virtio.HdrOK},
		{"checksum at the end", csum(34, 16), 52, allTx, virtio.HdrOK},
		{"checksum half out", csum(34, 16), 51, allTx, virtio.HdrCsumOutOfRange},
		{"checksum wraps 16 bits", csum(0xffff, 0xffff), 65553, allTx, virtio.HdrCsumOutOfRange},
		{"checksum wraps to 0", csum(0xfff0, 0x0010), 1514, allTx, virtio.HdrCsumOutOfRange},
		{"checksum start out", csum(0xffff, 0), 60, allTx, virtio.HdrCsumOutOfRange},
		{"checksum not acked", csum(34, 16), 60, allTx &^ virtio.FNetCSum, virtio.HdrCsumNotAcked},
		{"garbage without NEEDS_CSUM", virtio.NetHdr{CsumStart: 0xffff, CsumOffset: 0xffff}, 60, 0, virtio.HdrOK},

		{"TSO4", gso(virtio.GSOTCPv4, 1448), 9000, allTx, virtio.HdrOK},
		{"TSO4 not acked", gso(virtio.GSOTCPv4, 1448), 9000, allTx &^ virtio.FNetHostTSO4, virtio.HdrGSONotAcked},
		{"TSO6", gso(virtio.GSOTCPv6, 1428), 9000, allTx, virtio.HdrOK},
		{"TSO6 not acked", gso(virtio.GSOTCPv6, 1428), 9000, allTx &^ virtio.FNetHostTSO6, virtio.HdrGSONotAcked},
		{"UFO", gso(virtio.GSOUDP, 1448), 9000, allTx, virtio.HdrOK},
		{"UFO not acked", gso(virtio.GSOUDP, 1448), 9000, allTx &^ virtio.FNetHostUFO, virtio.HdrGSONotAcked},
		{"USO", gso(virtio.GSOUDPL4, 1448), 9000, allTx, virtio.HdrOK},
		{"USO not acked", gso(virtio.GSOUDPL4, 1448), 9000, allTx &^ virtio.FNetHostUSO, virtio.HdrGSONotAcked},
		{"ECN", gso(virtio.GSOTCPv4|virtio.GSOECN, 1448), 9000, allTx, virtio.HdrOK},
		{"ECN not acked", gso(virtio.GSOTCPv4|virtio.GSOECN, 1448), 9000, allTx &^ virtio.FNetHostECN, virtio.HdrECNNotAcked},
		{"ECN with UDP", gso(virtio.GSOUDPL4|virtio.GSOECN, 1448), 9000, allTx, virtio.HdrECNNotAcked},
		{"ECN alone", gso(virtio.GSOECN, 1448), 9000, allTx, virtio.HdrGSOUnknown},
		{"type 2", gso(2, 1448), 9000, allTx, virtio.HdrGSOUnknown},
		{"type 7", gso(7, 1448), 9000, allTx, virtio.HdrGSOUnknown},
		{"type 0x7f", gso(0x7f, 1448), 9000, allTx, virtio.HdrGSOUnknown},
		{"size 0", gso(virtio.GSOTCPv4, 0), 9000, allTx, virtio.HdrGSOSizeTooSmall},
		{"size 1", gso(virtio.GSOTCPv4, 1), 65535, allTx, virtio.HdrGSOSizeTooSmall},
		{"size 47", gso(virtio.GSOTCPv4, 47), 9000, allTx, virtio.HdrGSOSizeTooSmall},
		{"size 48", gso(virtio.GSOTCPv4, 48), 9000, allTx, virtio.HdrOK},
		{"size 65535", gso(virtio.GSOTCPv4, 65535), 9000, allTx, virtio.HdrOK},
		{"without checksum", noCsum, 9000, allTx, virtio.HdrGSOWithoutCsum},
		{"frame of 20 bytes", gso(virtio.GSOTCPv4, 1448), 20, allTx, virtio.HdrCsumOutOfRange},
		{"headers cut", gso(virtio.GSOTCPv4, 1448), 53, allTx, virtio.HdrGSOHeadersShort},
	} {
		h := c.hdr
		if got := h.CheckTx(c.frame, c.acked); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

// A good header leaves CheckTx without what the driver has no say in.
func TestCheckTxNormalizes(t *testing.T) {
	plain := virtio.NetHdr{Flags: 0xfe, HdrLen: 9, GSOSize: 9, CsumStart: 9, CsumOffset: 9, NumBuffers: 9}
	if e := plain.CheckTx(60, 0); e != virtio.HdrOK || plain != (virtio.NetHdr{}) {
		t.Errorf("%v, %+v", e, plain)
	}
	tso := virtio.NetHdr{Flags: 0xff, GSOType: 1, GSOSize: 1448, HdrLen: 60000, CsumStart: 34, CsumOffset: 16, NumBuffers: 3}
	want := virtio.NetHdr{Flags: 1, GSOType: 1, GSOSize: 1448, CsumStart: 34, CsumOffset: 16}
	if e := tso.CheckTx(9000, allTx); e != virtio.HdrOK || tso != want {
		t.Errorf("%v, %+v", e, tso)
	}
}

func TestHdrErrorNames(t *testing.T) {
	seen := map[string]bool{virtio.HdrOK.String(): true}
	for _, e := range virtio.HdrErrors() {
		if s := e.String(); s == "" || s == "unknown" || seen[s] {
			t.Errorf("reason %d is called %q", e, s)
		}
		seen[e.String()] = true
	}
	if virtio.HdrCsumOutOfRange.String() != "csum_out_of_range" || virtio.HdrError(250).String() != "unknown" {
		t.Error("names moved")
	}
}

// Whatever passes has every number inside the frame.
func FuzzCheckTx(f *testing.F) {
	f.Add([]byte{1, 1, 54, 0, 0, 6, 34, 0, 16, 0, 0, 0}, 1514, uint64(allTx))
	f.Add([]byte{1, 0x84, 0, 0, 48, 0, 255, 255, 255, 255, 1, 1}, 65553, uint64(allTx))
	f.Add([]byte{0, 0, 0, 0, 0, 0, 0, 0, 0, 0}, 13, uint64(0))
	f.Fuzz(func(t *testing.T, b []byte, frame int, acked uint64) {
		if len(b) < virtio.NetHdrLenLegacy {
			return
		}
		var h virtio.NetHdr
		h.Decode(b)
		if h.CheckTx(frame, virtio.Features(acked)) != virtio.HdrOK {
			return
		}
		switch {
		case frame < 14 || frame > virtio.MaxFrame,
			h.Flags&^virtio.HdrFNeedsCsum != 0,
			h.Flags != 0 && int(h.CsumStart)+int(h.CsumOffset)+2 > frame,
			h.GSOType != 0 && (h.GSOSize < virtio.MinGSOSize || h.Flags == 0 || int(h.CsumStart)+8 > frame),
			int(h.HdrLen) > frame:
			t.Errorf("frame of %d, acked %v: %+v passed", frame, virtio.Features(acked), h)
		}
	})
}

func TestNetConfig(t *testing.T) {
	c := virtio.NetConfig{
		MAC: [6]byte{2, 0, 0, 1, 2, 3}, Status: virtio.NetStatusLinkUp, MaxQueuePairs: 8, MTU: 9000, Speed: 10000, Duplex: 1,
		RSSMaxKeySize: 40, RSSMaxIndirectionTableLen: 128, SupportedHashTypes: 0x01020304,
	}
	want := []byte{2, 0, 0, 1, 2, 3, 1, 0, 8, 0, 0x28, 0x23, 0x10, 0x27, 0, 0, 1, 40, 128, 0, 4, 3, 2, 1}
	b := c.Encode()
	if !bytes.Equal(b, want) {
		t.Errorf("Encode = % x, want % x", b, want)
	}
	var got virtio.NetConfig
	if err := got.Decode(b); err != nil || got != c {
		t.Errorf("Decode = %+v, %v", got, err)
	}
	if err := got.Decode(b[:23]); err == nil {
		t.Error("23 bytes are a configuration space")
	}
}

// TestFeatureNames: every name leads back to its bit, and nothing else to any.
func TestFeatureNames(t *testing.T) {
	for n := range 64 {
		f := virtio.Features(1) << n
		got, ok := virtio.ParseFeature(f.String())
		if named := !strings.HasPrefix(f.String(), "bit"); ok != named || ok && got != f {
			t.Errorf("%v: %v, %v", f, got, ok)
		}
	}
	if _, ok := virtio.ParseFeature(""); ok {
		t.Error("nothing is the name of a feature")
	}
}
