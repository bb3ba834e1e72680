package cases

import (
	"bytes"
	"fmt"
	"testing"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

const (
	canSend    = virtio.FNetCSum | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN
	canReceive = virtio.FNetGuestCSum | virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6 | virtio.FNetGuestECN
	tcpCWR     = 0x80
)

// offloading are the options of a guest that sends with all offloads and receives with those of rx.
func offloading(rx virtio.Features) frontend.Options {
	opts := ordinary()
	opts.Features |= canSend | rx
	opts.TxBuf, opts.RxBuf, opts.Chunk = 12+virtio.MaxFrame, 2048, 4096
	opts.RingSize = 128
	return opts
}

func newOffloading(t testing.TB, network string, opts frontend.Options) *guest {
	t.Helper()
	g := newGuest(t, network, opts)
	_, err := g.PostRx(opts.RingSize)
	must(t, err)
	return g
}

// shapes are segments of every form that the marks can describe.
func shapes(payload []byte) (all []segment) {
	for _, v6 := range []bool{false, true} {
		for _, udp := range []bool{false, true} {
			for tags := range 3 {
				all = append(all, segment{v6: v6, udp: udp, tags: tags, payload: payload})
			}
			if v6 {
				all = append(all, segment{v6: true, udp: udp, ext: true, payload: payload})
			}
		}
	}
	return all
}

func TestOFF01_UnfinishedChecksums(t *testing.T) {
	full, without := newOffloading(t, "echo", offloading(canReceive)), newOffloading(t, "echo", offloading(0))
	for _, s := range shapes(text(501)) {
		t.Run(s.String(), func(t *testing.T) {
			full.t, without.t = t, t
			frame, _ := s.frame()
			full.sent(s.marks(0), frame, frontend.Direct, s.marks(0))

			must(t, without.SendTx(s.marks(0), frame, frontend.Chained))
			hdr, got := without.recv()
			if want := (virtio.NetHdr{NumBuffers: 1}); hdr != want {
				t.Errorf("header %+v without GUEST_CSUM, want %+v", hdr, want)
			}
			if !bytes.Equal(got, swapped(s.finished())) {
				t.Errorf("the checksum was not completed:\n% x\nwant\n% x", head(got), head(swapped(s.finished())))
			}
		})
	}
	flows(t, full.Pair)
	flows(t, without.Pair)
}

func TestOFF03_LargeFramesForGuestsThatCannotTakeThem(t *testing.T) {
	noMerge := offloading(canReceive)
	noMerge.Features &^= virtio.FNetMrgRxBuf
	for _, r := range []struct {
		name  string
		opts  frontend.Options
		ecn   bool
		whole bool // as one frame, else as segments
		lost  bool
	}{
		{name: "all features", opts: offloading(canReceive), whole: true},
		{name: "all features, ECN", opts: offloading(canReceive), ecn: true, whole: true},
		{name: "no GUEST_TSO", opts: offloading(virtio.FNetGuestCSum)},
		{name: "no GUEST_CSUM", opts: offloading(0)},
		{name: "no GUEST_ECN", opts: offloading(canReceive &^ virtio.FNetGuestECN), ecn: true},
		{name: "no mergeable buffers", opts: noMerge, lost: true},
	} {
		t.Run(r.name, func(t *testing.T) {
			g := newOffloading(t, "echo", r.opts)
			for i, s := range []segment{{payload: text(60000)}, {v6: true, payload: text(60000)}, {tags: 1, payload: text(20001)}, {v6: true, tags: 2, payload: text(20001)}} {
				hdr := s.marks(mss)
				if r.ecn {
					s.tcpFlags = tcpCWR
					hdr.GSOType |= virtio.GSOECN
				}
				frame, _ := s.frame()
				switch {
				case r.whole:
					g.sent(hdr, frame, frontend.Chained, hdr)
				case r.lost:
					must(t, g.SendTx(hdr, frame, frontend.Chained))
					g.dropped(0, "rx_buffers_too_small", i+1)
				default:
					must(t, g.SendTx(hdr, frame, frontend.Chained))
					g.segments(s)
				}
				must(t, g.DrainTx(patience))
				flows(t, g.Pair)
			}
		})
	}
}

// segments receives the pieces of s, finished.
func (g *guest) segments(s segment) {
	g.t.Helper()
	r := reassembly{of: s}
	for !r.complete() {
		hdr, frame := g.recv()
		if want := (virtio.NetHdr{NumBuffers: 1}); hdr != want {
			g.t.Fatalf("segment with header %+v, want %+v", hdr, want)
		}
		if err := r.add(frame); err != nil {
			g.t.Fatalf("%v: after %d bytes: %v", s, len(r.got), err)
		}
	}
}

func TestOFF05_ChecksumOfZero(t *testing.T) {
	g := newOffloading(t, "echo", offloading(0))
	for _, v6 := range []bool{false, true} {
		for _, udp := range []bool{true, false} {
			s := zeroChecksum(segment{v6: v6, udp: udp})
			frame, _ := s.frame()
			must(t, g.SendTx(s.marks(0), frame, frontend.Direct))
			_, got := g.recv()
			p, err := parse(got)
			must(t, err)
			want := uint16(0)
			if udp {
				want = 0xffff
			}
			if p.csum != want {
				t.Errorf("%v: checksum %#x, want %#x", s, p.csum, want)
			}
		}
	}
	flows(t, g.Pair)
}

// zeroChecksum gives s two bytes of payload with which its checksum is zero.
func zeroChecksum(s segment) segment {
	s.payload = []byte{0, 0}
	frame, l4 := s.frame()
	rest := ^fold(sum(frame[l4:]))
	s.payload = []byte{byte(rest >> 8), byte(rest)}
	return s
}

func TestOFF07_PseudoHeaderSum(t *testing.T) {
	g := newOffloading(t, "echo", offloading(canReceive))
	for _, s := range shapes(text(300)) {
		frame, l4 := s.frame()
		must(t, g.SendTx(s.marks(0), frame, frontend.Direct))
		hdr, got := g.recv()
		if hdr.Flags != virtio.HdrFNeedsCsum || int(hdr.CsumStart) != l4 || hdr.CsumOffset != s.csumOffset() {
			t.Errorf("%v: header %+v, want a checksum at %d, %d", s, hdr, l4, s.csumOffset())
			continue
		}
		if _, err := parse(finish(got, int(hdr.CsumStart), hdr.CsumOffset)); err != nil {
			t.Errorf("%v: finished by its marks: %v", s, err)
		}
	}
	flows(t, g.Pair)
}

func TestOFF09_VLANTags(t *testing.T) {
	g := newOffloading(t, "echo", offloading(0))
	for _, v6 := range []bool{false, true} {
		for tags := 1; tags <= 2; tags++ {
			s := segment{v6: v6, tags: tags, payload: text(9000)}
			frame, _ := s.frame()
			must(t, g.SendTx(s.marks(mss), frame, frontend.Chained))
			g.segments(s)
		}
	}
	unknown := frameOf(200, 9) // three tags, the outermost of a kind that nobody knows
	copy(unknown[12:], []byte{0x91, 0x00, 0, 1, 0x81, 0x00, 0, 2, 0x81, 0x00, 0, 3, 0x88, 0xb5})
	g.sent(virtio.NetHdr{}, unknown, frontend.Direct, virtio.NetHdr{})
	flows(t, g.Pair)
}

func TestOFF10_NoMarksForAGuestWithoutOffloads(t *testing.T) {
	sent := newOffloading(t, "echo", offloading(0))
	for _, s := range shapes(text(100)) {
		frame, _ := s.frame()
		must(t, sent.SendTx(s.marks(0), frame, frontend.Direct))
		unmarked(t, sent)
	}
	// Marks of a guest that may not set any are not looked at.
	silent := newGuest(t, "echo", ordinary())
	_, err := silent.PostRx(16)
	must(t, err)
	must(t, silent.SendTx(virtio.NetHdr{Flags: 7, GSOType: 1, HdrLen: 9, GSOSize: 9, CsumStart: 34, CsumOffset: 6}, frameOf(100, 1), frontend.Direct))
	unmarked(t, silent)

	generated := newGuest(t, "source,size=100,rate=100", ordinary())
	_, err = generated.PostRx(16)
	must(t, err)
	unmarked(t, generated)
}

func unmarked(t *testing.T, g *guest) {
	t.Helper()
	hdr, _ := g.recv()
	if want := (virtio.NetHdr{NumBuffers: 1}); hdr != want {
		t.Errorf("header %+v, want %+v", hdr, want)
	}
}

// TestOFF11_OffersWhatWorks sends one frame for each offload that a network offers, and sees it through.
func TestOFF11_OffersWhatWorks(t *testing.T) {
	for network, want := range map[string]virtio.Features{
		"null":   canSend,
		"source": canSend,
		"echo":   canSend | canReceive,
	} {
		t.Run(network, func(t *testing.T) {
			g := newGuest(t, network, frontend.Options{TxBuf: 12 + virtio.MaxFrame, RingSize: 128})
			offers(t, g, want)
			for i, o := range offloads() {
				frame, _ := o.of.frame()
				if network == "echo" {
					_, err := g.PostRx(128)
					must(t, err)
					g.sent(o.hdr, frame, frontend.Chained, o.hdr)
				} else {
					must(t, g.SendTx(o.hdr, frame, frontend.Chained))
				}
				eventually(t, fmt.Sprint(o.name, " is sent"), func() bool { return g.d.ring(1).Packets == uint64(i+1) })
			}
		})
	}
}

// offers demands the offload features of exactly want.
func offers(t *testing.T, g *guest, want virtio.Features) {
	t.Helper()
	const all = canSend | canReceive | virtio.FNetHostUFO | virtio.FNetGuestUFO | virtio.FNetHostUSO | virtio.FNetGuestUSO4 | virtio.FNetGuestUSO6
	if got := g.c.Features & all; got != want {
		t.Errorf("offers %v, want %v", got, want)
	}
}

type offload struct {
	name string
	of   segment
	hdr  virtio.NetHdr
}

// offloads are one frame for each HOST_ feature.
func offloads() []offload {
	small, v4, v6, ecn := segment{payload: text(100)}, segment{payload: text(30000)}, segment{v6: true, payload: text(30000)}, segment{payload: text(30000), tcpFlags: tcpCWR}
	all := []offload{
		{"CSUM", small, small.marks(0)}, {"HOST_TSO4", v4, v4.marks(mss)}, {"HOST_TSO6", v6, v6.marks(mss)}, {"HOST_ECN", ecn, ecn.marks(mss)},
	}
	all[3].hdr.GSOType |= virtio.GSOECN
	return all
}
