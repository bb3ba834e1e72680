package guest

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ethtoolChannels is struct ethtool_channels (include/uapi/linux/ethtool.h).
type ethtoolChannels struct {
	command                                     uint32
	maxRx, maxTx, maxOther, maxCombined         uint32
	rxCount, txCount, otherCount, combinedCount uint32
}

// ethtoolValue is struct ethtool_value.
type ethtoolValue struct{ command, data uint32 }

// interfaceRequest is struct ifreq with ifr_data.
type interfaceRequest struct {
	name [unix.IFNAMSIZ]byte
	data unsafe.Pointer
	_    [16]byte
}

// SetChannels sets and reads the numbers of queue pairs that an interface uses, as `ethtool -L` does.
func SetChannels(args ChannelsArgs) (Channels, error) {
	request := ethtoolChannels{command: unix.ETHTOOL_GCHANNELS}
	// SAFETY: the pointer is to a live local of the size the command reads and writes.
	if err := ethtool(args.Name, unsafe.Pointer(&request)); err != nil {
		return Channels{}, fmt.Errorf("get channels: %w", err)
	}
	if args.Combined > 0 {
		request.command = unix.ETHTOOL_SCHANNELS
		request.combinedCount = uint32(args.Combined)
		// SAFETY: as above.
		if err := ethtool(args.Name, unsafe.Pointer(&request)); err != nil {
			return Channels{}, fmt.Errorf("set %d of %d channels: %w", args.Combined, request.maxCombined, err)
		}
	}
	return Channels{Combined: int(request.combinedCount), Max: int(request.maxCombined)}, nil
}

// SetOffloads switches what `ethtool -K rx tx sg tso gso gro` does. A feature that the device lacks stays off without error.
func SetOffloads(args OffloadsArgs) (struct{}, error) {
	// Segmentation needs checksums and scatter-gather, so they go first when on and last when off; the kernel sorts out the rest.
	commands := []uint32{unix.ETHTOOL_STXCSUM, unix.ETHTOOL_SRXCSUM, unix.ETHTOOL_SSG, unix.ETHTOOL_STSO, unix.ETHTOOL_SGSO, unix.ETHTOOL_SGRO}
	value := ethtoolValue{}
	if args.On {
		value.data = 1
	}
	for _, command := range commands {
		value.command = command
		// SAFETY: the pointer is to a live local of the size the command reads.
		if err := ethtool(args.Name, unsafe.Pointer(&value)); err != nil && err != unix.EOPNOTSUPP {
			return struct{}{}, fmt.Errorf("offload command %#x: %w", command, err)
		}
	}
	return struct{}{}, nil
}

// ethtool issues SIOCETHTOOL; data points to a command structure that starts with its number.
func ethtool(name string, data unsafe.Pointer) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	request := interfaceRequest{data: data}
	copy(request.name[:unix.IFNAMSIZ-1], name)
	// SAFETY: request is a live local with the layout of struct ifreq; the kernel keeps no pointer after the call.
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCETHTOOL, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return errno
	}
	return nil
}
