package offload_test

import (
	"testing"

	"github.com/vhostd/vhostd/offload"
	"github.com/vhostd/vhostd/packet"
)

func BenchmarkFinish(b *testing.B) {
	for _, test := range []struct {
		name string
		s    spec
		size int
	}{
		{"complete1400", spec{udp: true, payload: pattern(1400)}, 0},
		{"segment64k", spec{payload: pattern(65000)}, 1448},
	} {
		b.Run(test.name, func(b *testing.B) {
			r := newRig(b)
			frame, h := test.s.partial(b)
			if test.size > 0 {
				frame, h = test.s.gso(b, test.size)
			}
			p := r.packet(b, h, frame)
			b.SetBytes(int64(len(frame)))
			for b.Loop() {
				q := r.share(&p)
				if offload.Check(&q) != offload.OK {
					b.Fatal("refused")
				}
				n, _ := r.f.Finish(&q, 0, r.out)
				packet.Release(r.arena, r.out[:n], 0)
			}
			p.Release(r.arena, 0)
		})
	}
}
