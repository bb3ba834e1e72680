package cases

import (
	"bytes"
	"testing"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

func TestOFF01_UnfinishedChecksumsToAMachineWithoutOffloads(t *testing.T) {
	atTaps(t, testUnfinishedChecksumsToAMachineWithoutOffloads)
}

func testUnfinishedChecksumsToAMachineWithoutOffloads(t *testing.T, h *host) {
	m := h.bridge()
	g := h.guest(offloading(0))
	h.join(tapName)
	for _, s := range shapes(text(501)) {
		frame, _ := s.frame()
		must(t, g.SendTx(s.marks(0), frame, frontend.Chained))
		if got := m.recv(); !bytes.Equal(got, s.finished()) {
			t.Errorf("%v: the machine received\n% x\nwant\n% x", s, head(got), head(s.finished()))
		}
	}
	h.cable(tapName).passes(g)
}

func TestOFF03_LargeFramesToAMachineWithoutOffloads(t *testing.T) {
	atTaps(t, testLargeFramesToAMachineWithoutOffloads)
}

func testLargeFramesToAMachineWithoutOffloads(t *testing.T, h *host) {
	m := h.bridge()
	g := h.guest(offloading(0))
	h.join(tapName)
	for _, s := range []segment{{payload: text(60000)}, {v6: true, payload: text(60000)}, {tags: 1, payload: text(9001)}, {v6: true, tags: 2, payload: text(9001)}} {
		frame, _ := s.frame()
		must(t, g.SendTx(s.marks(mss), frame, frontend.Chained))
		r := reassembly{of: s}
		for !r.complete() {
			if err := r.add(m.recv()); err != nil {
				t.Fatalf("%v: after %d bytes: %v", s, len(r.got), err)
			}
		}
		must(t, g.DrainTx(patience))
	}
	h.cable(tapName).passes(g)
}

// TestOFF07_UnfinishedFramesFromTheKernel sends them to guests that can and cannot finish them.
func TestOFF07_UnfinishedFramesFromTheKernel(t *testing.T) {
	for name, rx := range map[string]virtio.Features{"all features": canReceive, "no GUEST_TSO": virtio.FNetGuestCSum, "no GUEST_CSUM": 0} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			g := h.guest(offloading(rx))
			w := h.cable(tapName)
			for _, s := range shapes(text(300)) {
				frame, l4 := s.frame()
				w.send(s.marks(0), frame)
				hdr, got := g.recv()
				if hdr.Flags&virtio.HdrFNeedsCsum != 0 {
					if rx == 0 {
						t.Errorf("%v: marks %+v without GUEST_CSUM", s, hdr)
					}
					if int(hdr.CsumStart) != l4 || hdr.CsumOffset != s.csumOffset() {
						t.Errorf("%v: header %+v, want a checksum at %d, %d", s, hdr, l4, s.csumOffset())
						continue
					}
					got = finish(got, l4, hdr.CsumOffset)
				} else if rx == 0 && hdr != (virtio.NetHdr{NumBuffers: 1}) {
					t.Errorf("%v: header %+v for a guest without offloads", s, hdr)
				}
				if !bytes.Equal(got, s.finished()) {
					t.Errorf("%v: received\n% x\nwant\n% x", s, head(got), head(s.finished()))
				}
			}
			for _, v6 := range []bool{false, true} {
				testLargeFromKernel(t, g, w, segment{v6: v6, payload: text(30000)}, rx)
			}
			w.passes(g)
		})
	}
}

// testLargeFromKernel wants a large frame whole with marks, or in finished segments, as the guest can take it.
func testLargeFromKernel(t *testing.T, g *guest, w *cable, s segment, rx virtio.Features) {
	t.Helper()
	frame, l4 := s.frame()
	w.send(s.marks(mss), frame)
	if !rx.Has(virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6) {
		r := reassembly{of: s}
		for !r.complete() {
			hdr, got := g.recv()
			if hdr.Flags&virtio.HdrFNeedsCsum != 0 {
				got = finish(got, int(hdr.CsumStart), hdr.CsumOffset)
			}
			if err := r.add(got); err != nil {
				t.Fatalf("%v: after %d bytes: %v", s, len(r.got), err)
			}
		}
		return
	}
	hdr, got := g.recv()
	want := s.marks(mss)
	want.NumBuffers, want.HdrLen, hdr.HdrLen = hdr.NumBuffers, 0, 0 // hdr_len is a hint
	if hdr != want || len(got) != len(frame) {
		t.Fatalf("%v: %d bytes with header %+v, want %d with %+v", s, len(got), hdr, len(frame), want)
	}
	if _, err := parse(finish(got, l4, hdr.CsumOffset)); err != nil {
		t.Errorf("%v: %v", s, err)
	}
}

// TestOFF11_TapOffersWhatWorks: every offload that a tap offers reaches the kernel's end as it was sent.
func TestOFF11_TapOffersWhatWorks(t *testing.T) {
	h := newHost(t)
	g := h.guest(frontend.Options{TxBuf: 12 + virtio.MaxFrame, RingSize: 128})
	offers(t, g, canSend|canReceive)
	w := h.cable(tapName)
	for _, o := range offloads() {
		frame, _ := o.of.frame()
		must(t, g.SendTx(o.hdr, frame, frontend.Chained))
		hdr, got := w.recv()
		if hdr.GSOType != o.hdr.GSOType || hdr.GSOSize != o.hdr.GSOSize || hdr.CsumStart != o.hdr.CsumStart || !bytes.Equal(got, frame) {
			t.Errorf("%s: %d bytes arrived with header %+v, want %d with %+v", o.name, len(got), hdr, len(frame), o.hdr)
		}
	}
	w.passes(g)
}
