package virtionet

import (
	"encoding/binary"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/virtio"
)

const (
	broadcast     = 1<<48 - 1
	groupBit      = 1 << 40 // of an address as a key
	etherTypeVLAN = 0x8100
)

// rxFilter is which frames a driver wants; it is not changed once it is in use. A
// pair without one delivers everything.
type rxFilter struct {
	state  driverState
	mac    uint64
	byMAC  bool
	byVLAN bool
}

// newRxFilter returns nil if the driver wants everything. Without CTRL_RX it has no
// say about addresses, and a promiscuous one sees every VLAN (QEMU's receive_filter,
// hw/net/virtio-net.c).
func newRxFilter(s *driverState, acked virtio.Features) *rxFilter {
	f := &rxFilter{
		state: *s, mac: address(s.mac[:]),
		byMAC: acked.Has(virtio.FNetCtrlRX), byVLAN: acked.Has(virtio.FNetCtrlVLAN),
	}
	if f.byMAC && s.promisc || !f.byMAC && !f.byVLAN {
		return nil
	}
	return f
}

// wants judges a frame by its first 18 bytes, or fewer if it has no more; what is
// too short to tell is wanted.
func (f *rxFilter) wants(header []byte) bool {
	if len(header) < minFrame {
		return true
	}
	if f.byVLAN && len(header) >= 16 && binary.BigEndian.Uint16(header[12:]) == etherTypeVLAN {
		id := binary.BigEndian.Uint16(header[14:]) & 0xfff
		if f.state.vlans[id/64]&(1<<(id%64)) == 0 {
			return false
		}
	}
	return !f.byMAC || f.wantsAddress(address(header))
}

func (f *rxFilter) wantsAddress(dst uint64) bool {
	s := &f.state
	switch {
	case dst == broadcast:
		return !s.noBcast
	case dst&groupBit != 0:
		return !s.noMulti && (s.allMulti || s.multi.has(dst))
	case s.noUni:
		return false
	}
	// A device that was never told the guest's address cannot tell its frames apart.
	return s.allUni || f.mac == 0 || dst == f.mac || s.uni.has(dst)
}

func (t *addressTable) has(addr uint64) bool {
	_, found := t.set[addr]
	return found || t.overflow
}

// screen drops those of the n frames just received that the driver does not want
// and returns how many are left.
func (p *pair) screen(n int) (kept int) {
	for i := range p.incoming[:n] {
		pkt := &p.incoming[i]
		var header [18]byte
		if !p.filter.wants(header[:pkt.PeekHeader(header[:])]) {
			p.rx.dropped(dropUnwanted)
			packet.Release(p.arena, p.incoming[i:i+1], p.owner)
			continue
		}
		if kept != i {
			pkt.MoveTo(&p.incoming[kept])
		}
		kept++
	}
	return kept
}
