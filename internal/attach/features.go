package attach

import (
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
)

const (
	ringWishes = virtio.FVersion1 | virtio.FAnyLayout | virtio.FRingEventIdx | virtio.FNetMrgRxBuf | virtio.FNetMTU |
		virtio.FNetMAC | virtio.FNetMQ | virtio.FVhostUserProtocolFeatures
	sendWishes = virtio.FNetCSum | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN
	recvWishes = virtio.FNetGuestCSum | virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6 | virtio.FNetGuestECN

	protocolWishes = vhostuser.ProtoMQ | vhostuser.ProtoReplyAck | vhostuser.ProtoNetMTU | vhostuser.ProtoConfig
)

// choose are the features that are acknowledged of what is offered.
func choose(offered virtio.Features, o *Options) virtio.Features {
	wishes := ringWishes | sendWishes | recvWishes
	if o.Packed {
		wishes |= virtio.FRingPacked
	}
	f := offered & wishes &^ o.Without
	if o.QueuePairs == 1 {
		f &^= virtio.FNetMQ
	}
	// Each needs the one before (virtio 1.3 section 5.1.3.1).
	for _, need := range [...]struct{ of, any virtio.Features }{
		{virtio.FNetHostTSO4 | virtio.FNetHostTSO6, virtio.FNetCSum},
		{virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6, virtio.FNetGuestCSum},
		{virtio.FNetHostECN, virtio.FNetHostTSO4},
		{virtio.FNetGuestECN, virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6},
		{virtio.FRingPacked, virtio.FVersion1},
	} {
		if !f.Any(need.any) {
			f &^= need.of
		}
	}
	return f
}

// tapOffloads are the TUN_F_* flags: what the namespace may leave unfinished.
func tapOffloads(f virtio.Features) (flags int) {
	for _, o := range [...]struct {
		feature virtio.Features
		flag    int
	}{{virtio.FNetCSum, unix.TUN_F_CSUM}, {virtio.FNetHostTSO4, unix.TUN_F_TSO4}, {virtio.FNetHostTSO6, unix.TUN_F_TSO6},
		{virtio.FNetHostECN, unix.TUN_F_TSO_ECN}} {
		if f.Has(o.feature) {
			flags |= o.flag
		}
	}
	return flags
}
