package nettest

import (
	"bytes"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func newFlow(sizes ...int) *flow {
	return &flow{seed: 7, src: [6]byte{2, 0, 0, 0, 0, 1}, dst: [6]byte{2, 0, 0, 0, 0, 2}, sizes: sizes}
}

// TestFrames: what is written is accepted once, in order; anything else is not, whatever byte differs.
func TestFrames(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		sizes := rapid.SliceOfN(rapid.IntRange(MinFrame, 3000), 1, 4).Draw(t, "sizes")
		out, in := newFlow(sizes...), newFlow(sizes...)
		start := rapid.Uint64Range(0, 1<<40).Draw(t, "start")
		out.next, in.next = start, start
		b := make([]byte, out.longest())
		for i := range 5 {
			n := out.write(b)
			if n != out.size(start+uint64(i)) || !ours(b[:n]) {
				t.Fatalf("frame of %d bytes", n)
			}
			at := rapid.IntRange(0, n-1).Draw(t, "at")
			flip := byte(1 << rapid.IntRange(0, 7).Draw(t, "bit"))
			b[at] ^= flip
			if err := in.check(b[:n]); err == nil {
				t.Fatalf("byte %d of frame %d is different and nobody says so", at, i)
			}
			b[at] ^= flip
			for _, length := range []int{0, headLen, n - 1} {
				if in.check(b[:length]) == nil {
					t.Fatalf("%d of %d bytes are accepted", length, n)
				}
			}
			if err := in.check(b[:n]); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestFramesExplained(t *testing.T) {
	out, in := newFlow(100), newFlow(100)
	frames := make([][]byte, 4)
	for i := range frames {
		frames[i] = make([]byte, 100)
		out.write(frames[i])
	}
	check := func(b []byte, want string) {
		t.Helper()
		if err := in.check(b); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
	}
	check(frames[2], "frame 2 came instead of frame 0: that one is lost or late")
	for i := range 3 {
		if err := in.check(frames[i]); err != nil {
			t.Fatal(err)
		}
	}
	check(frames[1], "frame 1 came again instead of frame 3")
	frames[3][50] ^= 1
	check(frames[3], "frame 3 is damaged: 100 bytes came, want 100; they differ from byte 50 on")
	check(nil, "0 bytes came")
	other := newFlow(100)
	other.seed, other.next = 8, 3
	other.write(frames[3])
	check(frames[3], "damaged")
}

func TestSwappedAddresses(t *testing.T) {
	out, in := newFlow(60), newFlow(60)
	b := make([]byte, 60)
	out.write(b)
	swapped := append(append(bytes.Clone(b[6:12]), b[:6]...), b[12:]...)
	if in.check(swapped) == nil {
		t.Error("exchanged addresses are accepted")
	}
	in.swapped = true
	if err := in.check(swapped); err != nil {
		t.Error(err)
	}
}

func TestCanaries(t *testing.T) {
	m, err := newMemory(pageSize, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	for _, n := range []int{1, 63, 64, 65, 2048, 65548} {
		b, err := newBuffer(m, n)
		if err != nil {
			t.Fatal(err)
		}
		fill(b.data, poison)
		if !b.intact() || !only(b.data, poison) || len(b.data) != n {
			t.Errorf("%d bytes: a new buffer is not intact", n)
		}
		for _, at := range []int{0, canaryLen - 1, canaryLen + n, len(b.all) - 1} {
			b.all[at] ^= 0xff
			if b.intact() {
				t.Errorf("%d bytes: a write at %d is not found", n, at)
			}
			b.all[at] ^= 0xff
		}
	}
}
