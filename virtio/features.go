package virtio

import (
	"math/bits"
	"slices"
	"strconv"
	"strings"
)

// Features is a set of feature bits as it travels in VHOST_USER_GET_FEATURES
// and VHOST_USER_SET_FEATURES: virtio's own bits plus the two that vhost adds.
type Features uint64

// Feature bits: virtio 1.3 sections 5.1.3 and 6, linux/vhost.h for LOG_ALL and
// the vhost-user specification for PROTOCOL_FEATURES.
const (
	FNetCSum              Features = 1 << 0  // VIRTIO_NET_F_CSUM
	FNetGuestCSum         Features = 1 << 1  // VIRTIO_NET_F_GUEST_CSUM
	FNetCtrlGuestOffloads Features = 1 << 2  // VIRTIO_NET_F_CTRL_GUEST_OFFLOADS
	FNetMTU               Features = 1 << 3  // VIRTIO_NET_F_MTU
	FNetMAC               Features = 1 << 5  // VIRTIO_NET_F_MAC
	FNetGSO               Features = 1 << 6  // VIRTIO_NET_F_GSO, legacy only
	FNetGuestTSO4         Features = 1 << 7  // VIRTIO_NET_F_GUEST_TSO4
	FNetGuestTSO6         Features = 1 << 8  // VIRTIO_NET_F_GUEST_TSO6
	FNetGuestECN          Features = 1 << 9  // VIRTIO_NET_F_GUEST_ECN
	FNetGuestUFO          Features = 1 << 10 // VIRTIO_NET_F_GUEST_UFO
	FNetHostTSO4          Features = 1 << 11 // VIRTIO_NET_F_HOST_TSO4
	FNetHostTSO6          Features = 1 << 12 // VIRTIO_NET_F_HOST_TSO6
	FNetHostECN           Features = 1 << 13 // VIRTIO_NET_F_HOST_ECN
	FNetHostUFO           Features = 1 << 14 // VIRTIO_NET_F_HOST_UFO
	FNetMrgRxBuf          Features = 1 << 15 // VIRTIO_NET_F_MRG_RXBUF
	FNetStatus            Features = 1 << 16 // VIRTIO_NET_F_STATUS
	FNetCtrlVQ            Features = 1 << 17 // VIRTIO_NET_F_CTRL_VQ
	FNetCtrlRX            Features = 1 << 18 // VIRTIO_NET_F_CTRL_RX
	FNetCtrlVLAN          Features = 1 << 19 // VIRTIO_NET_F_CTRL_VLAN
	FNetCtrlRXExtra       Features = 1 << 20 // VIRTIO_NET_F_CTRL_RX_EXTRA
	FNetGuestAnnounce     Features = 1 << 21 // VIRTIO_NET_F_GUEST_ANNOUNCE
	FNetMQ                Features = 1 << 22 // VIRTIO_NET_F_MQ
	FNetCtrlMACAddr       Features = 1 << 23 // VIRTIO_NET_F_CTRL_MAC_ADDR
	FNotifyOnEmpty        Features = 1 << 24 // VIRTIO_F_NOTIFY_ON_EMPTY, legacy only
	FVhostLogAll          Features = 1 << 26 // VHOST_F_LOG_ALL
	FAnyLayout            Features = 1 << 27 // VIRTIO_F_ANY_LAYOUT, legacy only
	FRingIndirectDesc     Features = 1 << 28 // VIRTIO_F_INDIRECT_DESC
	FRingEventIdx         Features = 1 << 29 // VIRTIO_F_EVENT_IDX

	FVhostUserProtocolFeatures Features = 1 << 30 // VHOST_USER_F_PROTOCOL_FEATURES

	FVersion1         Features = 1 << 32 // VIRTIO_F_VERSION_1
	FAccessPlatform   Features = 1 << 33 // VIRTIO_F_ACCESS_PLATFORM
	FRingPacked       Features = 1 << 34 // VIRTIO_F_RING_PACKED
	FInOrder          Features = 1 << 35 // VIRTIO_F_IN_ORDER
	FOrderPlatform    Features = 1 << 36 // VIRTIO_F_ORDER_PLATFORM
	FSRIOV            Features = 1 << 37 // VIRTIO_F_SR_IOV
	FNotificationData Features = 1 << 38 // VIRTIO_F_NOTIFICATION_DATA
	FNotifConfigData  Features = 1 << 39 // VIRTIO_F_NOTIF_CONFIG_DATA
	FRingReset        Features = 1 << 40 // VIRTIO_F_RING_RESET
	FNetVQNotfCoal    Features = 1 << 52 // VIRTIO_NET_F_VQ_NOTF_COAL
	FNetNotfCoal      Features = 1 << 53 // VIRTIO_NET_F_NOTF_COAL
	FNetGuestUSO4     Features = 1 << 54 // VIRTIO_NET_F_GUEST_USO4
	FNetGuestUSO6     Features = 1 << 55 // VIRTIO_NET_F_GUEST_USO6
	FNetHostUSO       Features = 1 << 56 // VIRTIO_NET_F_HOST_USO
	FNetHashReport    Features = 1 << 57 // VIRTIO_NET_F_HASH_REPORT
	FNetGuestHdrLen   Features = 1 << 59 // VIRTIO_NET_F_GUEST_HDRLEN
	FNetRSS           Features = 1 << 60 // VIRTIO_NET_F_RSS
	FNetRSCExt        Features = 1 << 61 // VIRTIO_NET_F_RSC_EXT
	FNetStandby       Features = 1 << 62 // VIRTIO_NET_F_STANDBY
	FNetSpeedDuplex   Features = 1 << 63 // VIRTIO_NET_F_SPEED_DUPLEX
)

var featureNames = [64]string{
	0: "CSUM", 1: "GUEST_CSUM", 2: "CTRL_GUEST_OFFLOADS", 3: "MTU", 5: "MAC", 6: "GSO",
	7: "GUEST_TSO4", 8: "GUEST_TSO6", 9: "GUEST_ECN", 10: "GUEST_UFO",
	11: "HOST_TSO4", 12: "HOST_TSO6", 13: "HOST_ECN", 14: "HOST_UFO",
	15: "MRG_RXBUF", 16: "STATUS", 17: "CTRL_VQ", 18: "CTRL_RX", 19: "CTRL_VLAN",
	20: "CTRL_RX_EXTRA", 21: "GUEST_ANNOUNCE", 22: "MQ", 23: "CTRL_MAC_ADDR",
	24: "NOTIFY_ON_EMPTY", 26: "LOG_ALL", 27: "ANY_LAYOUT", 28: "INDIRECT_DESC",
	29: "EVENT_IDX", 30: "PROTOCOL_FEATURES", 32: "VERSION_1", 33: "ACCESS_PLATFORM",
	34: "RING_PACKED", 35: "IN_ORDER", 36: "ORDER_PLATFORM", 37: "SR_IOV",
	38: "NOTIFICATION_DATA", 39: "NOTIF_CONFIG_DATA", 40: "RING_RESET",
	52: "VQ_NOTF_COAL", 53: "NOTF_COAL", 54: "GUEST_USO4", 55: "GUEST_USO6", 56: "HOST_USO",
	57: "HASH_REPORT", 59: "GUEST_HDRLEN", 60: "RSS", 61: "RSC_EXT", 62: "STANDBY",
	63: "SPEED_DUPLEX",
}

// Has reports whether all of bits are set.
func (f Features) Has(bits Features) bool { return f&bits == bits }

// Any reports whether at least one of bits is set.
func (f Features) Any(bits Features) bool { return f&bits != 0 }

// Names lists the set bits from the lowest up, with the specification's names
// less their prefix (CSUM for VIRTIO_NET_F_CSUM); a bit without a name is
// "bit" and its number.
func (f Features) Names() []string {
	names := make([]string, 0, bits.OnesCount64(uint64(f)))
	for rest := uint64(f); rest != 0; rest &= rest - 1 {
		n := bits.TrailingZeros64(rest)
		name := featureNames[n]
		if name == "" {
			name = "bit" + strconv.Itoa(n)
		}
		names = append(names, name)
	}
	return names
}

// ParseFeature returns the bit that Names gives that name.
func ParseFeature(name string) (bit Features, ok bool) {
	n := slices.Index(featureNames[:], name)
	if n < 0 || name == "" {
		return 0, false
	}
	return 1 << n, true
}

// String joins Names with "|"; the empty set is "none".
func (f Features) String() string {
	if f == 0 {
		return "none"
	}
	return strings.Join(f.Names(), "|")
}
