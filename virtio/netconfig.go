package virtio

import (
	"encoding/binary"
	"fmt"
)

// NetConfigLen is the size in bytes of struct virtio_net_config up to and
// including supported_hash_types (virtio 1.3 section 5.1.4).
const NetConfigLen = 24

// Values of NetConfig.Status.
const (
	NetStatusLinkUp   = 1 // VIRTIO_NET_S_LINK_UP
	NetStatusAnnounce = 2 // VIRTIO_NET_S_ANNOUNCE
)

// Values of NetConfig.Duplex and NetConfig.Speed when nothing is known.
const (
	NetDuplexUnknown = 0xff
	NetSpeedUnknown  = 0xffffffff
)

// NetConfig is the device's configuration space. Each field counts only when
// its feature is negotiated.
type NetConfig struct {
	MAC                       [6]byte // VIRTIO_NET_F_MAC
	Status                    uint16  // VIRTIO_NET_F_STATUS
	MaxQueuePairs             uint16  // VIRTIO_NET_F_MQ or RSS
	MTU                       uint16  // VIRTIO_NET_F_MTU
	Speed                     uint32  // Mbit/s, VIRTIO_NET_F_SPEED_DUPLEX
	Duplex                    uint8   // 0 half, 1 full
	RSSMaxKeySize             uint8   // bytes
	RSSMaxIndirectionTableLen uint16  // entries
	SupportedHashTypes        uint32
}

// Encode returns the configuration space as the driver reads it.
func (c NetConfig) Encode() []byte {
	b := make([]byte, NetConfigLen)
	copy(b, c.MAC[:])
	binary.LittleEndian.PutUint16(b[6:], c.Status)
	binary.LittleEndian.PutUint16(b[8:], c.MaxQueuePairs)
	binary.LittleEndian.PutUint16(b[10:], c.MTU)
	binary.LittleEndian.PutUint32(b[12:], c.Speed)
	b[16], b[17] = c.Duplex, c.RSSMaxKeySize
	binary.LittleEndian.PutUint16(b[18:], c.RSSMaxIndirectionTableLen)
	binary.LittleEndian.PutUint32(b[20:], c.SupportedHashTypes)
	return b
}

// Decode sets c from a configuration space of at least NetConfigLen bytes.
func (c *NetConfig) Decode(b []byte) error {
	if len(b) < NetConfigLen {
		return fmt.Errorf("virtio: configuration space has %d bytes, need %d", len(b), NetConfigLen)
	}
	copy(c.MAC[:], b)
	c.Status = binary.LittleEndian.Uint16(b[6:])
	c.MaxQueuePairs = binary.LittleEndian.Uint16(b[8:])
	c.MTU = binary.LittleEndian.Uint16(b[10:])
	c.Speed = binary.LittleEndian.Uint32(b[12:])
	c.Duplex, c.RSSMaxKeySize = b[16], b[17]
	c.RSSMaxIndirectionTableLen = binary.LittleEndian.Uint16(b[18:])
	c.SupportedHashTypes = binary.LittleEndian.Uint32(b[20:])
	return nil
}
