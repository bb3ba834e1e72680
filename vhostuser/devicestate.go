package vhostuser

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
)

// deviceState is what moves with SET_DEVICE_STATE_FD. The guest's memory and what
// front-ends repeat at every start (enabled rings, status) move without it. It has
// what a front-end may leave out (the MTU, positions, which a packed ring cannot do
// without), and the features, so that a destination that lacks one says so before the
// guest runs on it.
type deviceState struct {
	features virtio.Features // acknowledged, without sessionFeatures
	mtu      uint32          // 0: none was told
	rings    []ringPosition  // ascending indexes
}

type ringPosition struct {
	index, size uint16
	base        uint32
}

// The encoding is stateMagic, then little endian: u32 version, u32 bytes of the body,
// the body (u64 features, u32 mtu, u32 rings, for each u16 index, u16 size, u32
// base), u32 CRC-32 (IEEE) of everything before it.
const (
	stateMagic   = "vhostd\x00n"
	stateVersion = 1
	stateHeader  = len(stateMagic) + 8
	stateFixed   = 16 // of the body
	stateRing    = 8
	// maxState bounds what is read.
	maxState = 64 << 10
)

func (d deviceState) encode() []byte {
	b := append(make([]byte, 0, maxState), stateMagic...)
	b = binary.LittleEndian.AppendUint32(b, stateVersion)
	b = binary.LittleEndian.AppendUint32(b, uint32(stateFixed+stateRing*len(d.rings)))
	b = binary.LittleEndian.AppendUint64(b, uint64(d.features))
	b = binary.LittleEndian.AppendUint32(b, d.mtu)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(d.rings)))
	for _, r := range d.rings {
		b = binary.LittleEndian.AppendUint16(b, r.index)
		b = binary.LittleEndian.AppendUint16(b, r.size)
		b = binary.LittleEndian.AppendUint32(b, r.base)
	}
	return binary.LittleEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
}

// decodeState checks the form and every value by itself. Whether this device can have
// the state is for the session to say.
func decodeState(b []byte) (d deviceState, err error) {
	body, err := stateBody(b)
	if err != nil {
		return d, err
	}
	d.features = virtio.Features(binary.LittleEndian.Uint64(body))
	d.mtu = binary.LittleEndian.Uint32(body[8:])
	if d.mtu != 0 && (d.mtu < minMTU || d.mtu > maxMTU) {
		return d, fmt.Errorf("device state: MTU %d, %d to %d is accepted", d.mtu, minMTU, maxMTU)
	}
	rings := body[stateFixed:]
	if n := uint64(binary.LittleEndian.Uint32(body[12:])); n*stateRing != uint64(len(rings)) {
		return d, fmt.Errorf("device state: %d rings announced, %d bytes of rings are there", n, len(rings))
	}
	for next := 0; len(rings) > 0; rings = rings[stateRing:] {
		r := ringPosition{binary.LittleEndian.Uint16(rings), binary.LittleEndian.Uint16(rings[2:]), binary.LittleEndian.Uint32(rings[4:])}
		if int(r.index) < next {
			return d, fmt.Errorf("device state: ring %d is out of order", r.index)
		}
		if err := r.check(d.features.Has(virtio.FRingPacked)); err != nil {
			return d, fmt.Errorf("device state: ring %d: %w", r.index, err)
		}
		next = int(r.index) + 1
		d.rings = append(d.rings, r)
	}
	return d, nil
}

// stateBody checks the frame around the body.
func stateBody(b []byte) ([]byte, error) {
	if len(b) < stateHeader || !bytes.HasPrefix(b, []byte(stateMagic)) {
		return nil, fmt.Errorf("device state: %d bytes that do not begin as this device's state does", len(b))
	}
	if v := binary.LittleEndian.Uint32(b[len(stateMagic):]); v != stateVersion {
		return nil, fmt.Errorf("device state: version %d, this program knows %d", v, stateVersion)
	}
	n := uint64(binary.LittleEndian.Uint32(b[len(stateMagic)+4:]))
	if want := uint64(stateHeader) + n + 4; n < stateFixed || uint64(len(b)) != want {
		return nil, fmt.Errorf("device state: %d bytes, its header announces %d", len(b), want)
	}
	end := len(b) - 4
	if crc32.ChecksumIEEE(b[:end]) != binary.LittleEndian.Uint32(b[end:]) {
		return nil, errors.New("device state: the checksum is wrong")
	}
	return b[stateHeader:end], nil
}

func (r ringPosition) check(packed bool) error {
	if err := checkRingSize(uint32(r.size), packed); err != nil {
		return err
	}
	_, err := virtqueue.ParsePosition(r.base, r.size, packed)
	return err
}

// saveState describes the stopped device. Rings without a size or position never ran.
func (s *Session) saveState() deviceState {
	d := deviceState{features: s.acked &^ sessionFeatures, mtu: uint32(s.mtu)}
	for _, r := range s.rings {
		if r != nil && r.size != 0 && r.hasBase {
			d.rings = append(d.rings, ringPosition{uint16(r.index), r.size, r.base})
		}
	}
	return d
}

// loadState takes the state over, or nothing of it: SET_VRING_BASE and NET_SET_MTU
// win over what it says.
func (s *Session) loadState(d deviceState) error {
	if missing := d.features &^ s.offered; missing != 0 {
		return fmt.Errorf("device state: the guest uses %v, which this device does not offer", missing)
	}
	for _, r := range d.rings {
		if int(r.index) >= len(s.rings) {
			return fmt.Errorf("device state: ring %d, this device has %d", r.index, len(s.rings))
		}
	}
	if err := s.allStopped(); err != nil {
		return err
	}
	if d.mtu != 0 && s.mtu == 0 {
		if err := s.dev.SetMTU(uint64(d.mtu)); err != nil {
			return fmt.Errorf("device state: %w", err)
		}
		s.mtu = uint64(d.mtu)
	}
	for _, p := range d.rings {
		r, err := s.ring(uint32(p.index))
		if err != nil {
			return err
		}
		if !r.hasBase {
			r.base, r.hasBase = p.base, true
		}
	}
	return nil
}

// allStopped refuses while a ring runs: its position is still moving.
func (s *Session) allStopped() error {
	for _, r := range s.rings {
		if r != nil && r.started {
			return fmt.Errorf("ring %d is running; GET_VRING_BASE stops it", r.index)
		}
	}
	return nil
}
