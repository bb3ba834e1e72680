package vhostuser

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"reflect"
	"testing"

	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/virtio"
)

func drawState(rt *rapid.T) (d deviceState) {
	d.features = virtio.Features(rapid.Uint64().Draw(rt, "features"))
	packed := d.features.Has(virtio.FRingPacked)
	if rapid.Bool().Draw(rt, "mtu known") {
		d.mtu = rapid.Uint32Range(minMTU, maxMTU).Draw(rt, "mtu")
	}
	for i := range rapid.IntRange(0, MaxSessionRings).Draw(rt, "rings") {
		r := ringPosition{index: uint16(i), size: 1 << rapid.IntRange(0, 15).Draw(rt, "size")}
		if packed {
			at := rapid.Uint32Range(0, uint32(r.size)-1)
			r.base = at.Draw(rt, "avail") | at.Draw(rt, "used")<<16 | 1<<31
		} else {
			r.base = rapid.Uint32Range(0, 0xffff).Draw(rt, "base")
		}
		d.rings = append(d.rings, r)
	}
	return d
}

// TestStateRoundTrip: every state comes back, within the limit that is read.
func TestStateRoundTrip(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		d := drawState(rt)
		b := d.encode()
		got, err := decodeState(b)
		if err != nil || !reflect.DeepEqual(got, d) || len(b) > maxState {
			rt.Fatalf("%d bytes: %+v, %v; want %+v", len(b), got, err, d)
		}
	})
}

// seal puts the checksum right, so that what is in front of it gets judged.
func seal(b []byte) []byte {
	if len(b) < 4 {
		return b
	}
	end := len(b) - 4
	binary.LittleEndian.PutUint32(b[end:], crc32.ChecksumIEEE(b[:end]))
	return b
}

func TestStateValues(t *testing.T) {
	ring := ringPosition{index: 3, size: 256, base: 9}
	for name, d := range map[string]deviceState{
		"MTU 67":         {mtu: 67},
		"MTU 65536":      {mtu: 65536},
		"rings twice":    {rings: []ringPosition{ring, ring}},
		"size 0":         {rings: []ringPosition{{index: 0}}},
		"size 3":         {rings: []ringPosition{{size: 3}}},
		"size 32769":     {features: virtio.FRingPacked, rings: []ringPosition{{size: 32769}}},
		"base of 17 bit": {rings: []ringPosition{{size: 256, base: 1 << 16}}},
		"packed base":    {features: virtio.FRingPacked, rings: []ringPosition{{size: 8, base: 8 | 1<<31}}},
	} {
		if _, err := decodeState(d.encode()); err == nil {
			t.Errorf("%s is accepted", name)
		}
	}
}

// FuzzDeviceState: nothing that is read makes the parser panic, and what it accepts is
// exactly what encode writes.
func FuzzDeviceState(f *testing.F) {
	for _, d := range []deviceState{
		{}, {features: virtio.FVersion1, mtu: 1500, rings: []ringPosition{{0, 256, 300}, {1, 256, 5}}},
		{features: virtio.FRingPacked, rings: []ringPosition{{7, 3, 1<<31 | 2}}},
	} {
		f.Add(d.encode())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		_, _ = decodeState(b)
		b = seal(bytes.Clone(b))
		d, err := decodeState(b)
		if err == nil && !bytes.Equal(d.encode(), b) {
			t.Fatalf("%x was taken for %+v", b, d)
		}
	})
}
