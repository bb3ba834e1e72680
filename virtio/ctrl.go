package virtio

// Classes and commands of the control queue, as struct virtio_net_ctrl_hdr holds
// them: class in the first byte, command in the second (virtio 1.2 section 5.1.6.5).
const (
	CtrlRX               = 0 // VIRTIO_NET_CTRL_RX
	CtrlRXPromisc        = 0 // VIRTIO_NET_CTRL_RX_PROMISC
	CtrlRXAllMulti       = 1 // VIRTIO_NET_CTRL_RX_ALLMULTI
	CtrlRXAllUni         = 2 // VIRTIO_NET_CTRL_RX_ALLUNI
	CtrlRXNoMulti        = 3 // VIRTIO_NET_CTRL_RX_NOMULTI
	CtrlRXNoUni          = 4 // VIRTIO_NET_CTRL_RX_NOUNI
	CtrlRXNoBcast        = 5 // VIRTIO_NET_CTRL_RX_NOBCAST
	CtrlMAC              = 1 // VIRTIO_NET_CTRL_MAC
	CtrlMACTableSet      = 0 // VIRTIO_NET_CTRL_MAC_TABLE_SET
	CtrlMACAddrSet       = 1 // VIRTIO_NET_CTRL_MAC_ADDR_SET
	CtrlVLAN             = 2 // VIRTIO_NET_CTRL_VLAN
	CtrlVLANAdd          = 0 // VIRTIO_NET_CTRL_VLAN_ADD
	CtrlVLANDel          = 1 // VIRTIO_NET_CTRL_VLAN_DEL
	CtrlMQ               = 4 // VIRTIO_NET_CTRL_MQ
	CtrlMQPairsSet       = 0 // VIRTIO_NET_CTRL_MQ_VQ_PAIRS_SET
	CtrlOffloads         = 5 // VIRTIO_NET_CTRL_GUEST_OFFLOADS
	CtrlOffloadsSet      = 0 // VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET
	CtrlHdrLen           = 2 // bytes before the command's data
	CtrlOK          byte = 0 // VIRTIO_NET_OK
	CtrlErr         byte = 1 // VIRTIO_NET_ERR
)

// GuestOffloads are the features that VIRTIO_NET_CTRL_GUEST_OFFLOADS_SET switches
// while the device runs (virtio 1.2 section 5.1.6.5.6).
const GuestOffloads = FNetGuestCSum | FNetGuestTSO4 | FNetGuestTSO6 | FNetGuestECN | FNetGuestUFO |
	FNetGuestUSO4 | FNetGuestUSO6
