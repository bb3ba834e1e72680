package offload_test

import (
	"bytes"
	"encoding/binary"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/offload"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/virtio"
)

// checkSegments segments the frame that s.gso made and compares every segment
// with one that is built from scratch.
func (r *rig) checkSegments(t fataler, s spec, frame []byte, h virtio.NetHdr, rx virtio.Features, cuts ...int) {
	t.Helper()
	p := r.packet(t, h, frame, cuts...)
	if reason := offload.Check(&p); reason != offload.OK {
		t.Fatalf("Check: %v", reason)
	}
	segments, hdrs, reason := r.finish(t, p, rx)
	if reason != offload.OK {
		t.Fatalf("Finish: %v", reason)
	}
	size := int(h.GSOSize)
	n := (len(s.payload) + size - 1) / size
	if len(segments) != n {
		t.Fatalf("%d segments, want %d", len(segments), n)
	}
	for i, got := range segments {
		if hdrs[i] != (virtio.NetHdr{}) {
			t.Fatalf("segment %d has marks: %+v", i, hdrs[i])
		}
		verify(t, got)
		if want := s.segment(t, i, size); !bytes.Equal(got, want) {
			t.Fatalf("segment %d of %d:\n got %x\nwant %x", i, n, got[:min(len(got), s.end()+8)], want[:min(len(want), s.end()+8)])
		}
	}
}

// segment builds the wanted i-th segment.
func (s spec) segment(t fataler, i, size int) []byte {
	whole := s.payload
	s.payload = whole[i*size : min((i+1)*size, len(whole))]
	b := s.build(t)
	if !s.v6 {
		ip := b[s.l3():s.l4()]
		binary.BigEndian.PutUint16(ip[4:], binary.BigEndian.Uint16(ip[4:])+uint16(i))
		binary.BigEndian.PutUint16(ip[10:], 0)
		binary.BigEndian.PutUint16(ip[10:], foldedSum(ip))
	}
	l4 := b[s.l4():]
	if !s.udp {
		binary.BigEndian.PutUint32(l4[4:], binary.BigEndian.Uint32(l4[4:])+uint32(i*size))
		if i > 0 {
			l4[13] &^= flagCWR
		}
		if (i+1)*size < len(whole) {
			l4[13] &^= flagFIN | flagPSH
		}
	}
	field := l4[s.csumOffset():]
	binary.BigEndian.PutUint16(field, s.pseudo(b))
	sum := foldedSum(l4)
	if s.udp && sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(field, sum)
	return b
}

// foldedSum is the checksum of RFC 1071, word by word.
func foldedSum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(b[i])<<8 | uint32(b[i+1])
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// OFF-03, OFF-09: a large frame meets a receiver that lacks the feature.
func TestSegments(t *testing.T) {
	for name, s := range protocols() {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			s.payload = pattern(9001)
			if !s.udp {
				s.tcpFlags |= flagFIN | flagPSH | flagCWR
			}
			for _, size := range []int{48, 1448, 4500, 9000, 9001, 20000} {
				frame, h := s.gso(t, size)
				r.checkSegments(t, s, frame, h, 0)
				r.checkSegments(t, s, frame, h, virtio.FNetGuestCSum, s.end(), s.end()+1, 3000)
				r.checkSegments(t, s, frame, h, virtio.FNetGuestCSum, 5, s.end()+7)
			}
		})
	}
}

// OFF-03: which receivers get the frame whole.
func TestReceiversOfLargeFrames(t *testing.T) {
	const (
		csum = virtio.FNetGuestCSum
		ecn  = virtio.FNetGuestECN
	)
	v4 := spec{payload: pattern(60000)}
	v4ECN := spec{payload: pattern(60000), tcpFlags: flagCWR}
	v6 := spec{payload: pattern(60000), v6: true}
	udp := spec{payload: pattern(60000), udp: true}
	for _, test := range []struct {
		name  string
		s     spec
		rx    virtio.Features
		whole bool
	}{
		{"TSO4", v4, csum | virtio.FNetGuestTSO4, true},
		{"TSO4 without checksums", v4, virtio.FNetGuestTSO4, false},
		{"checksums only", v4, csum, false},
		{"the other family", v4, csum | virtio.FNetGuestTSO6, false},
		{"ECN", v4ECN, csum | virtio.FNetGuestTSO4 | ecn, true},
		{"no ECN", v4ECN, csum | virtio.FNetGuestTSO4, false},
		{"TSO6", v6, csum | virtio.FNetGuestTSO6, true},
		{"TSO6 missing", v6, csum | virtio.FNetGuestTSO4, false},
		{"USO", udp, csum | virtio.FNetGuestUSO4 | virtio.FNetGuestUSO6, true},
		{"half of USO", udp, csum | virtio.FNetGuestUSO4, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			r := newRig(t)
			frame, h := test.s.gso(t, 1448)
			if !test.whole {
				r.checkSegments(t, test.s, frame, h, test.rx)
				return
			}
			frames, hdrs, reason := r.finish(t, r.packet(t, h, frame), test.rx)
			if reason != offload.OK || len(frames) != 1 || hdrs[0] != h || !bytes.Equal(frames[0], frame) {
				t.Errorf("reason %v, %d frames", reason, len(frames))
			}
		})
	}
}

// The IP length fields and the checksum field of a frame that is to be segmented
// do not matter: some senders leave them zero.
func TestLengthFieldsAreNotRead(t *testing.T) {
	for _, s := range []spec{{payload: pattern(5000)}, {payload: pattern(5000), v6: true}} {
		r := newRig(t)
		frame, h := s.gso(t, 1000)
		lengthField := frame[s.l3()+2:]
		if s.v6 {
			lengthField = frame[s.l3()+4:]
		}
		for _, v := range []uint16{0, 0xffff} {
			binary.BigEndian.PutUint16(lengthField, v)
			binary.BigEndian.PutUint16(frame[s.l4()+16:], v)
			r.checkSegments(t, s, frame, h, 0)
		}
	}
}

// A large frame from a network that verified it carries DATA_VALID instead.
func TestValidatedLargeFrame(t *testing.T) {
	r := newRig(t)
	s := spec{payload: pattern(5000)}
	frame, h := s.gso(t, 1448)
	h.Flags, h.CsumStart, h.CsumOffset = virtio.HdrFDataValid, 0, 0
	r.checkSegments(t, s, frame, h, guestAll&^virtio.FNetGuestTSO4)
	_, hdrs, reason := r.finish(t, r.packet(t, h, frame), guestAll)
	if reason != offload.OK || len(hdrs) != 1 || hdrs[0] != h {
		t.Errorf("reason %v, headers %+v", reason, hdrs)
	}
}

// RING-08: the worst frame costs a bounded number of segments and little time.
func TestWorstFrame(t *testing.T) {
	r := newRig(t)
	s := spec{payload: pattern(65535 - 40)}
	frame, h := s.gso(t, virtio.MinGSOSize)
	p := r.packet(t, h, frame)
	start := time.Now()
	n, reason := r.f.Finish(&p, 0, r.out)
	took := time.Since(start)
	if n != 1365 || reason != offload.OK {
		t.Errorf("%d segments, %v", n, reason)
	}
	packet.Release(r.arena, r.out[:n], 0)
	t.Logf("%d segments in %v", n, took)
	if took > 100*time.Millisecond {
		t.Errorf("took %v", took)
	}
}

func TestSegmentsOfAnyFrame(t *testing.T) {
	r := newRig(t)
	rapid.Check(t, func(t *rapid.T) {
		s := spec{
			v6:       rapid.Bool().Draw(t, "v6"),
			udp:      rapid.Bool().Draw(t, "udp"),
			tags:     rapid.IntRange(0, 2).Draw(t, "tags"),
			ipOpts:   8 * rapid.IntRange(0, 5).Draw(t, "IP options / 8"),
			tcpOpts:  rapid.IntRange(0, 40).Draw(t, "TCP options"),
			tcpFlags: rapid.Byte().Draw(t, "flags") & (flagFIN | flagPSH | flagACK | flagCWR),
		}
		if s.udp {
			s.tcpOpts, s.tcpFlags = 0, 0
		}
		s.payload = pattern(rapid.IntRange(1, 65535-60-s.tcpOpts-40).Draw(t, "payload"))
		size := rapid.OneOf(rapid.IntRange(48, 1500), rapid.IntRange(48, 65535)).Draw(t, "gso_size")
		frame, h := s.gso(t, size)
		cuts := rapid.SliceOfNDistinct(rapid.IntRange(1, len(frame)-1), 0, min(14, len(frame)-2), rapid.ID).Draw(t, "cuts")
		slices.Sort(cuts)
		r.checkSegments(t, s, frame, h, rapid.SampledFrom([]virtio.Features{0, virtio.FNetGuestCSum}).Draw(t, "rx"), cuts...)
		r.settled(t)
	})
}
