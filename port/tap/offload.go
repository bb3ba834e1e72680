package tap

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/virtio"
)

// sendable always works: with a virtio header in front, the kernel finishes what the guest left unfinished.
const sendable = virtio.FNetCSum | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN

// offloads pairs each GUEST_* feature with its flag of TUNSETOFFLOAD. needs is what the kernel wants along with it
// (set_offload, drivers/net/tun.c).
var offloads = []struct {
	feature     virtio.Features
	flag, needs int
}{
	{virtio.FNetGuestCSum, unix.TUN_F_CSUM, 0},
	{virtio.FNetGuestTSO4, unix.TUN_F_TSO4, unix.TUN_F_CSUM},
	{virtio.FNetGuestTSO6, unix.TUN_F_TSO6, unix.TUN_F_CSUM},
	{virtio.FNetGuestECN, unix.TUN_F_TSO_ECN, unix.TUN_F_CSUM | unix.TUN_F_TSO4},
}

func setOffload(fd, flags int) error { return unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, flags) }

// probe tries every flag and leaves all of them off. A flag that the kernel refuses is a feature that is not offered.
func (p *Port) probe() (virtio.Features, error) {
	features := sendable
	for _, o := range offloads {
		err := p.offload(p.fds[0], o.flag|o.needs)
		switch {
		case err == nil:
			features |= o.feature
		case !errors.Is(err, unix.EINVAL):
			return 0, fmt.Errorf("try offload %v: %w", o.feature, err)
		}
	}
	if err := p.offload(p.fds[0], 0); err != nil {
		return 0, fmt.Errorf("switch offloads off: %w", err)
	}
	return features, nil
}

// receivable reduces acked to what may come from the kernel: segmentation needs checksums and ECN needs segmentation
// (virtio 1.3 section 5.1.3.1), and a guest that acked one without the other gets neither.
func receivable(acked virtio.Features) virtio.Features {
	const tso = virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6
	if !acked.Has(virtio.FNetGuestCSum) {
		return 0
	}
	r := acked & (virtio.FNetGuestCSum | tso)
	if r.Any(tso) {
		r |= acked & virtio.FNetGuestECN
	}
	return r
}

// offloadFlags are the TUN_F_* flags for a result of receivable.
func offloadFlags(accepted virtio.Features) (flags int) {
	for _, o := range offloads {
		if accepted.Has(o.feature) {
			flags |= o.flag
		}
	}
	return flags
}

// admit says whether the guest can take a frame with header h, and clears what the guest must not see. The kernel applies the
// current offloads when it queues a frame, so only one that was queued before they changed is refused.
func admit(h *virtio.NetHdr, accepted virtio.Features) bool {
	h.Flags &= virtio.HdrFNeedsCsum | virtio.HdrFDataValid
	if !accepted.Has(virtio.FNetGuestCSum) {
		h.Flags &^= virtio.HdrFDataValid // sent whatever the offloads are (virtio_net_hdr_from_skb)
	}
	var need virtio.Features
	if h.Flags&virtio.HdrFNeedsCsum != 0 {
		need |= virtio.FNetGuestCSum
	}
	switch h.GSOType &^ virtio.GSOECN {
	case virtio.GSONone:
	case virtio.GSOTCPv4:
		need |= virtio.FNetGuestTSO4
	case virtio.GSOTCPv6:
		need |= virtio.FNetGuestTSO6
	default:
		return false
	}
	if h.GSOType&virtio.GSOECN != 0 {
		need |= virtio.FNetGuestECN
	}
	return accepted.Has(need)
}
