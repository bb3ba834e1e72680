package offload_test

import (
	"bytes"
	"testing"

	"github.com/gopacket/gopacket"

	"github.com/vhostd/vhostd/offload"
	"github.com/vhostd/vhostd/virtio"
)

// FuzzFinish feeds any header and any frame to receivers of any features. The
// helper's checks hold for whatever comes out: nothing shared changes, nothing
// leaks, no marks that the receiver may not see.
func FuzzFinish(f *testing.F) {
	add := func(s spec, size int) {
		frame, h := s.gso(f, size)
		var b [virtio.NetHdrLen]byte
		h.Encode(b[:])
		f.Add(b[:], frame, uint64(0), uint16(40))
		f.Add(b[:], frame, uint64(virtio.FNetGuestCSum), uint16(0))
		h.GSOType = 0
		h.Encode(b[:])
		f.Add(b[:], frame, uint64(0), uint16(1))
	}
	for _, v6 := range []bool{false, true} {
		for _, udp := range []bool{false, true} {
			for tags := range 3 {
				add(spec{v6: v6, udp: udp, tags: tags, ipOpts: 8 * tags, payload: pattern(500)}, 100)
			}
		}
	}
	f.Add(make([]byte, virtio.NetHdrLen), []byte{}, uint64(0), uint16(0))
	r := newRig(f)
	f.Fuzz(func(t *testing.T, header, frame []byte, rx uint64, cut uint16) {
		if len(header) < virtio.NetHdrLen || len(frame) == 0 || len(frame) > virtio.MaxFrame {
			return
		}
		var h virtio.NetHdr
		h.Decode(header[:virtio.NetHdrLen])
		p := r.packet(t, h, frame, int(cut))
		checked := offload.Check(&p)
		frames, hdrs, reason := r.finish(t, p, virtio.Features(rx))
		if checked == offload.OK && reason != offload.OK {
			t.Errorf("%+v was accepted and then refused: %v", h, reason)
		}
		if reason == offload.OK && h.GSOType != 0 && h.Flags&virtio.HdrFNeedsCsum != 0 && hdrs[0].GSOType == 0 {
			reassemble(t, frame, frames, int(h.CsumStart), h.GSOType == virtio.GSOUDPL4)
		}
		r.settled(t)
	})
}

// reassemble verifies that the payloads of segments add up to that of frame and
// that each one's transport checksum is right. Their transport header is at l4.
func reassemble(t *testing.T, frame []byte, segments [][]byte, l4 int, udp bool) {
	l3 := 14
	for frame[l3-2] == 0x81 && frame[l3-1] == 0 || frame[l3-2] == 0x88 && frame[l3-1] == 0xa8 {
		l3 += 4
	}
	from, to := l3+12, l3+20
	if frame[l3]>>4 == 6 {
		from, to = l3+8, l3+40
	}
	proto, end := uint32(6), l4+int(frame[l4+12]>>4)*4
	if udp {
		proto, end = 17, l4+8
	}
	var payload []byte
	for i, s := range segments {
		payload = append(payload, s[end:]...)
		sum := gopacket.ComputeChecksum(s[from:to], proto+uint32(len(s)-l4))
		if got := gopacket.FoldChecksum(gopacket.ComputeChecksum(s[l4:], sum)); got != 0 {
			t.Errorf("segment %d: the checksum is off by %#x", i, got)
		}
	}
	if !bytes.Equal(payload, frame[end:]) {
		t.Errorf("%d bytes of payload became %d", len(frame)-end, len(payload))
	}
}
