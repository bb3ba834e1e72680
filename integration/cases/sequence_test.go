package cases

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/vhostd/vhostd/integration/rig"
	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// sequenceCell is one kind of rings and chains.
type sequenceCell struct {
	packed, eventIdx, inOrder bool
	layout                    frontend.Layout
}

func (c sequenceCell) String() string {
	word := func(on bool, yes, no string) string {
		if on {
			return yes
		}
		return no
	}
	return fmt.Sprintf("%s, %s, %s, %s", word(c.packed, "packed", "split"), [...]string{"direct", "chained", "indirect"}[c.layout],
		word(c.eventIdx, "event index", "flags"), word(c.inOrder, "in order", "any order"))
}

func sequenceCells() (cells []sequenceCell) {
	both := []bool{false, true}
	for _, packed := range both {
		for _, layout := range []frontend.Layout{frontend.Direct, frontend.Chained, frontend.Indirect} {
			for _, event := range both {
				for _, order := range both {
					cells = append(cells, sequenceCell{packed, event, order, layout})
				}
			}
		}
	}
	return cells
}

// mergeable says whether receive buffers merge, as they do in half of the cells of each property; in the others one buffer holds
// the largest frame.
func (c sequenceCell) mergeable() bool { return c.eventIdx == c.inOrder }

func (c sequenceCell) options() frontend.Options {
	o := frontend.Options{
		Features: virtio.FVersion1 | virtio.FNetMQ | virtio.FRingIndirectDesc,
		RingSize: 256, RxBuf: 2048, TxBuf: virtio.NetHdrLen + virtio.MaxFrame, RxLayout: c.layout, Chunk: 1024,
	}
	if c.packed {
		o.Features |= virtio.FRingPacked
		o.RingSize = 250
	}
	if c.eventIdx {
		o.Features |= virtio.FRingEventIdx
	}
	if c.inOrder {
		o.Features |= virtio.FInOrder
	}
	if c.mergeable() {
		o.Features |= virtio.FNetMrgRxBuf
	} else {
		o.RxBuf, o.Chunk = o.TxBuf, 4096
	}
	return o
}

// TestSequence sends numbered frames of all lengths through the echo network and wants each back once, in order and unharmed.
func TestSequence(t *testing.T) {
	plain, err := rig.Build(t.TempDir(), false)
	must(t, err)
	t.Run("plain", func(t *testing.T) { runSequence(t, plain, uint64(rounds(100_000, 10_000_000))) })
	t.Run("race detector", func(t *testing.T) { runSequence(t, program, uint64(rounds(10_000, 100_000))) })
}

func runSequence(t *testing.T, program string, frames uint64) {
	for _, cell := range sequenceCells() {
		t.Run(cell.String(), func(t *testing.T) {
			d := prepare(t, "echo")
			d.program = program
			d.start()
			g := d.guest(memory(t), cell.options())
			begin := time.Now()
			sent := make(chan error, 1)
			go func() { sent <- sendSequence(g.Pair, cell.layout, frames) }()
			if err := receiveSequence(g.Pair, frames); err != nil {
				t.Errorf("%v; drops %v and %v", err, d.ring(0).Drops, d.ring(1).Drops)
			}
			must(t, <-sent)
			must(t, g.DrainTx(patience))
			t.Logf("%.0f frames per second", float64(frames)/time.Since(begin).Seconds())
			g.none()
			for i := range 2 {
				if r := d.ring(i); r.Packets != frames || d.drops(i) != 0 {
					t.Errorf("ring %d counted %d frames, want %d, and these drops: %v", i, r.Packets, frames, r.Drops)
				}
			}
		})
	}
}

// pieces is the material of all frames: a frame's payload begins at a place that its number gives.
var pieces = func() []byte {
	b := make([]byte, 2*virtio.MaxFrame)
	random := rand.NewChaCha8([32]byte{1})
	_, _ = random.Read(b)
	return b
}()

// mix spreads a number over 64 bits (the finalizer of MurmurHash3).
func mix(n uint64) uint64 {
	n ^= n >> 33
	n *= 0xff51afd7ed558ccd
	n ^= n >> 33
	n *= 0xc4ceb9fe1a85ec53
	return n ^ n>>33
}

// numberedFrame appends frame n to b as the driver sends it, or as the echo network returns it. Its addresses hold the number,
// so that the shortest frame has it.
func numberedFrame(b []byte, n uint64, returned bool) []byte {
	h := mix(n)
	length := 14 + int(h>>8)%(1514-14+1)
	switch h % 256 {
	case 0:
		length = virtio.MaxFrame - int(h>>8)%50_000
	case 1:
		length = virtio.MaxFrame
	case 2, 3:
		length = 14
	case 4, 5:
		length = 1514
	}
	var own [16]byte
	binary.BigEndian.PutUint64(own[:], n)
	binary.BigEndian.PutUint64(own[8:], h)
	to, from := append([]byte{0x02}, own[3:8]...), append([]byte{0x02}, own[11:]...)
	if returned {
		to, from = from, to
	}
	b = append(append(append(b, to...), from...), 0x88, 0xb5)
	at := int(h>>32) % virtio.MaxFrame
	return append(b, pieces[at:at+length-14]...)
}

// numberOf is the number of a returned frame.
func numberOf(frame []byte) uint64 {
	var b [8]byte
	copy(b[3:], frame[7:12])
	return binary.BigEndian.Uint64(b[:])
}

// sendSequence sends frames 0 to n-1 in bursts of all lengths and sleeps whenever the ring is full, so that a lost wake-up ends it.
func sendSequence(p *frontend.Pair, layout frontend.Layout, n uint64) error {
	random := rand.New(rand.NewPCG(1, 1))
	var frame []byte
	for i := uint64(0); i < n; {
		for burst := random.IntN(64); burst >= 0 && i < n; burst-- {
			frame = numberedFrame(frame[:0], i, false)
			err := p.Stage(virtio.NetHdr{}, frame, layout)
			if errors.Is(err, frontend.ErrFull) {
				if err = p.TX.Flush(); err == nil {
					err = p.TX.WaitUsed(patience)
				}
			} else if err == nil {
				i++
			}
			if err != nil {
				return fmt.Errorf("frame %d of %d bytes: %w", i, len(frame), err)
			}
		}
		if err := p.TX.Flush(); err != nil {
			return err
		}
	}
	return nil
}

// receiveSequence demands frames 0 to n-1 as the echo network returns them.
func receiveSequence(p *frontend.Pair, n uint64) error {
	var got, want []byte
	for i := uint64(0); i < n; {
		if _, err := p.PostRx(p.RX.Driver.Size()); err != nil {
			return err
		}
		for burst := 0; burst < 64 && i < n; burst++ {
			hdr, frame, ok, err := p.AppendRecv(got[:0])
			if err != nil {
				return fmt.Errorf("frame %d: %w", i, err)
			}
			if !ok {
				if burst == 0 {
					err = p.RX.WaitUsed(patience)
				}
				if err != nil {
					return fmt.Errorf("frame %d: %w", i, err)
				}
				break
			}
			got, want = frame, numberedFrame(want[:0], i, true)
			if err := compareNumbered(hdr, got, want, i); err != nil {
				return err
			}
			i++
		}
	}
	return nil
}

func compareNumbered(hdr virtio.NetHdr, got, want []byte, i uint64) error {
	if bytes.Equal(got, want) && hdr.Flags == 0 && hdr.GSOType == 0 {
		return nil
	}
	if len(got) >= 14 && bytes.Equal(got, numberedFrame(nil, numberOf(got), true)) && numberOf(got) != i {
		if numberOf(got) < i {
			return fmt.Errorf("frame %d came again instead of frame %d", numberOf(got), i)
		}
		return fmt.Errorf("frame %d came instead of frame %d: that one is lost or late", numberOf(got), i)
	}
	at := 0
	for at < min(len(got), len(want)) && got[at] == want[at] {
		at++
	}
	return fmt.Errorf("frame %d is damaged: header %+v, %d bytes, want %d; they differ from byte %d", i, hdr, len(got), len(want), at)
}
