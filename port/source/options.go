package source

import (
	"fmt"
	"net"
	"strconv"

	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
)

const kind = "source"

// Bounds and default of [Options].
const (
	DefaultSize = 64
	MinSize     = virtio.EthernetHdrLen
	MaxSize     = virtio.MaxFrame
	MaxFlows    = 1<<16 - firstPort
	MaxRate     = 1e9
)

// Options configure a source.
type Options struct {
	// Size is the length of each frame in bytes, from the Ethernet header to the last payload byte, without the check
	// sequence. 0 means DefaultSize. Frames of 60 bytes and more are UDP over IPv4; shorter ones, which no real network
	// delivers, carry the local experimental EtherType.
	Size int
	// Rate bounds the frames per second of each queue pair; 0 means as fast as the guest takes them.
	Rate float64
	// Flows is the number of UDP flows, told apart by the source port, that each queue pair cycles through; 0 means 1.
	Flows int
	// MAC is the frames' destination; nil means broadcast.
	MAC net.HardwareAddr
}

// Validate returns a [port.OptionError] for the first option with a value that is not accepted.
func (o Options) Validate() error {
	wrong := func(option, value, accept string) error {
		return &port.OptionError{Kind: kind, Option: option, Value: value, Accept: accept}
	}
	switch {
	case o.Size != 0 && (o.Size < MinSize || o.Size > MaxSize):
		return wrong("size", strconv.Itoa(o.Size), fmt.Sprintf("%d to %d bytes", MinSize, MaxSize))
	case !(o.Rate >= 0 && o.Rate <= MaxRate):
		return wrong("rate", strconv.FormatFloat(o.Rate, 'g', -1, 64), fmt.Sprintf("0 to %g frames per second", float64(MaxRate)))
	case o.Flows < 0 || o.Flows > MaxFlows:
		return wrong("flows", strconv.Itoa(o.Flows), fmt.Sprintf("1 to %d", MaxFlows))
	case len(o.MAC) != 0 && len(o.MAC) != macLen:
		return wrong("mac", o.MAC.String(), "an address of 6 bytes")
	}
	return nil
}
