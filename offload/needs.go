package offload

import (
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/virtio"
)

// Needs reports whether p must go through [Finisher.Finish] before a receiver
// that negotiated rx may see it: because it lacks GUEST_CSUM or the segmentation
// feature that the marks ask for, or because the header carries leftovers that a
// strict driver rejects.
func Needs(p *packet.Packet, rx virtio.Features) bool {
	h := &p.Hdr
	if h.Flags|h.GSOType == 0 {
		return h.HdrLen|h.GSOSize|h.CsumStart|h.CsumOffset != 0
	}
	if !rx.Has(virtio.FNetGuestCSum | gsoFeatures(h.GSOType)) {
		return true
	}
	return h.Flags != virtio.HdrFNeedsCsum && h.Flags != virtio.HdrFDataValid
}

// gsoFeatures is what a receiver must have negotiated to be given a frame of the
// type. An unknown type asks for everything.
func gsoFeatures(gsoType uint8) virtio.Features {
	if gsoType == virtio.GSONone {
		return 0
	}
	need := virtio.FNetGuestCSum
	switch gsoType &^ virtio.GSOECN {
	case virtio.GSOTCPv4:
		need |= virtio.FNetGuestTSO4
	case virtio.GSOTCPv6:
		need |= virtio.FNetGuestTSO6
	case virtio.GSOUDPL4:
		need |= virtio.FNetGuestUSO4 | virtio.FNetGuestUSO6
	default:
		need = ^virtio.Features(0)
	}
	if gsoType&virtio.GSOECN != 0 {
		need |= virtio.FNetGuestECN
	}
	return need
}
