package virtionet

import (
	"encoding/binary"
	"testing"

	"github.com/vhostd/vhostd/port/echo"
	"github.com/vhostd/vhostd/virtio"
)

// fuzzInput hands out numbers of an input, zeros behind its end.
type fuzzInput []byte

func (in *fuzzInput) next() (v uint64) {
	var b [8]byte
	n := copy(b[:4], *in)
	*in = (*in)[n:]
	return binary.LittleEndian.Uint64(b[:])
}

// FuzzRings writes descriptors, available rings and buffers that make no sense and lets an
// echoing device work on them: it may break the rings but must stay alive, give back every
// page, and never use up more chains than were made available.
func FuzzRings(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte("\x01\x00\x00\x00" + "aaaabbbbccccddddeeeeffffgggghhhh"))
	rows := []uint32{7, 3, 0x10, 100, 0, 0, 3, 0x2000, 4000, 1, 1, 3, 0x3000, 64, 2, 0, 3, 0x3000, 4000, 2, 1}
	var seed []byte
	for _, v := range rows {
		seed = binary.LittleEndian.AppendUint32(seed, v)
	}
	f.Add(seed)
	f.Fuzz(func(t *testing.T, data []byte) {
		in := fuzzInput(data)
		offers := []virtio.Features{0, virtio.FNetCSum | virtio.FNetHostTSO4, guestOffloads, virtio.FNetCSum | virtio.FNetHostTSO4 | guestOffloads}
		bases := []virtio.Features{baseFeatures, modernSingle, legacyFeatures, baseFeatures | virtio.FRingEventIdx}
		pick := in.next()
		r := newRig(t, must(echo.New(echo.Options{Backlog: 8})), rigOptions{
			features: bases[pick%4] | offers[pick/4%4], size: 16, lag: int(pick / 16 % 8),
		})
		defer r.finishEarly()
		at := [...]uint64{r.bufs, rigSeam - 32, rigSeam + rigRegion - 64, 1 << 40, ^uint64(0) - 100}
		n := int(in.next() % 40)
		for k := range n {
			d := split(r.rings[k&1])
			a := in.next()
			d.PokeDesc(uint16(k/2), at[a%5]+uint64(a>>8), uint32(in.next()), uint16(in.next())&7, uint16(in.next()))
			d.PokeAvail(uint16(k/2), uint16(in.next()%18))
		}
		copy(r.mem.Bytes(r.bufs, 4096), in)
		for i := range 2 {
			split(r.rings[i]).PokeAvailIdx(uint16(in.next() % 20))
		}
		r.run()
		for i := range 2 {
			if used := split(r.rings[i]).PeekUsedIdx(); used > 16 {
				t.Errorf("ring %d: %d chains used of at most 16", i, used)
			}
		}
	})
}
