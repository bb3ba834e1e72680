package frontend

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
)

func u64(v uint64) []byte { return binary.LittleEndian.AppendUint64(nil, v) }

func state(i int, num uint32) []byte {
	return vhostuser.VringState{Index: uint32(i), Num: num}.Append(nil)
}

// GetFeatures asks for the offered device features, bit 30 included.
func (c *Conn) GetFeatures() (virtio.Features, error) {
	v, err := c.callU64(vhostuser.ReqGetFeatures)
	return virtio.Features(v), err
}

// SetFeatures acknowledges device features.
func (c *Conn) SetFeatures(f virtio.Features) error {
	return c.Do(vhostuser.ReqSetFeatures, u64(uint64(f)))
}

// SetOwner begins the session.
func (c *Conn) SetOwner() error { return c.Do(vhostuser.ReqSetOwner, nil) }

// ResetOwner sends the deprecated RESET_OWNER.
func (c *Conn) ResetOwner() error { return c.Do(vhostuser.ReqResetOwner, nil) }

// GetProtocolFeatures asks for the offered protocol features.
func (c *Conn) GetProtocolFeatures() (vhostuser.ProtocolFeatures, error) {
	v, err := c.callU64(vhostuser.ReqGetProtocolFeatures)
	return vhostuser.ProtocolFeatures(v), err
}

// SetProtocolFeatures acknowledges protocol features. The new set decides about
// acknowledgements from the next message on.
func (c *Conn) SetProtocolFeatures(p vhostuser.ProtocolFeatures) error {
	if err := c.Do(vhostuser.ReqSetProtocolFeatures, u64(uint64(p))); err != nil {
		return err
	}
	c.protocol = p
	return nil
}

// GetQueueNum asks for the number of queues.
func (c *Conn) GetQueueNum() (int, error) {
	v, err := c.callU64(vhostuser.ReqGetQueueNum)
	return int(v), err
}

// SetMemTable replaces the memory table; fd i belongs to region i.
func (c *Conn) SetMemTable(specs []guestmem.RegionSpec, fds []int) error {
	return c.Do(vhostuser.ReqSetMemTable, vhostuser.AppendMemTable(nil, specs), fds...)
}

// GetMaxMemSlots asks how many memory regions the back-end takes.
func (c *Conn) GetMaxMemSlots() (uint64, error) { return c.callU64(vhostuser.ReqGetMaxMemSlots) }

// AddMemReg adds a region of the file fd to the memory table.
func (c *Conn) AddMemReg(spec guestmem.RegionSpec, fd int) error {
	return c.Do(vhostuser.ReqAddMemReg, vhostuser.AppendMemReg(nil, spec), fd)
}

// RemMemReg removes a region. Some front-ends attach its file, most none.
func (c *Conn) RemMemReg(spec guestmem.RegionSpec, fds ...int) error {
	return c.Do(vhostuser.ReqRemMemReg, vhostuser.AppendMemReg(nil, spec), fds...)
}

// SetVringEndian sets the byte order of ring i: 0 is little, 1 big endian.
func (c *Conn) SetVringEndian(i int, order uint32) error {
	return c.Do(vhostuser.ReqSetVringEndian, state(i, order))
}

// SetVringNum sets the size of ring i.
func (c *Conn) SetVringNum(i int, n uint32) error {
	return c.Do(vhostuser.ReqSetVringNum, state(i, n))
}

// SetVringBase sets the next available index of ring i.
func (c *Conn) SetVringBase(i int, base uint32) error {
	return c.Do(vhostuser.ReqSetVringBase, state(i, base))
}

// SetVringAddr sets the addresses of a ring.
func (c *Conn) SetVringAddr(a vhostuser.VringAddr) error {
	return c.Do(vhostuser.ReqSetVringAddr, a.Append(nil))
}

// GetVringBase stops ring i and returns its next available index.
func (c *Conn) GetVringBase(i int) (uint32, error) {
	b, err := c.Call(vhostuser.ReqGetVringBase, state(i, 0))
	if err != nil {
		return 0, err
	}
	if len(b) != 8 {
		return 0, fmt.Errorf("reply to GET_VRING_BASE has %d bytes, 8 are right", len(b))
	}
	v := vhostuser.DecodeVringState(b)
	if v.Index != uint32(i) {
		return 0, fmt.Errorf("reply to GET_VRING_BASE of ring %d names ring %d", i, v.Index)
	}
	return v.Num, nil
}

func (c *Conn) vringFD(req vhostuser.Request, i, fd int) error {
	if fd < 0 {
		return c.Do(req, u64(uint64(i)|vhostuser.VringNoFD))
	}
	return c.Do(req, u64(uint64(i)), fd)
}

// SetVringKick hands over the kick eventfd of ring i, -1 for none. As with all
// descriptors the caller keeps its own copy.
func (c *Conn) SetVringKick(i, fd int) error { return c.vringFD(vhostuser.ReqSetVringKick, i, fd) }

// SetVringCall hands over the call eventfd of ring i, -1 for none.
func (c *Conn) SetVringCall(i, fd int) error { return c.vringFD(vhostuser.ReqSetVringCall, i, fd) }

// SetVringErr hands over the error eventfd of ring i, -1 for none.
func (c *Conn) SetVringErr(i, fd int) error { return c.vringFD(vhostuser.ReqSetVringErr, i, fd) }

// SetVringEnable enables or disables ring i.
func (c *Conn) SetVringEnable(i int, on bool) error {
	num := uint32(0)
	if on {
		num = 1
	}
	return c.Do(vhostuser.ReqSetVringEnable, state(i, num))
}

// SendRARP asks the back-end to announce mac to the network.
func (c *Conn) SendRARP(mac [6]byte) error {
	var b [8]byte
	copy(b[:], mac[:])
	return c.Do(vhostuser.ReqSendRARP, b[:])
}

// NetSetMTU tells the back-end the MTU that the guest was told.
func (c *Conn) NetSetMTU(mtu uint64) error { return c.Do(vhostuser.ReqNetSetMTU, u64(mtu)) }

// SetLogBase hands over the dirty log of size bytes at offset in the file, which takes
// effect with LOG_ALL. When it returns nothing is marked in the log before.
func (c *Conn) SetLogBase(size, offset uint64, fd int) error {
	want := vhostuser.DirtyLog{Size: size, Offset: offset}.Append(nil)
	got, err := c.Call(vhostuser.ReqSetLogBase, want, fd)
	switch {
	case err != nil:
		return err
	case len(got) == 8:
		return &RefusedError{Request: vhostuser.ReqSetLogBase, Value: binary.LittleEndian.Uint64(got)}
	case !bytes.Equal(got, want):
		return fmt.Errorf("reply to SET_LOG_BASE is % x, want % x", got, want)
	}
	return nil
}

// SetLogFD hands over the eventfd that is written after marks.
func (c *Conn) SetLogFD(fd int) error { return c.Do(vhostuser.ReqSetLogFD, nil, fd) }

// SetDeviceStateFD begins a transfer of the device's state over a pipe or socket:
// vhostuser.StateSave from the back-end, vhostuser.StateLoad to it.
func (c *Conn) SetDeviceStateFD(direction uint32, fd int) error {
	payload := state(int(direction), vhostuser.StateStopped)
	b, err := c.Call(vhostuser.ReqSetDeviceStateFD, payload, fd)
	if err != nil {
		return err
	}
	const useOwn = 0x100
	if got := binary.LittleEndian.Uint64(append(b, make([]byte, 8)...)); len(b) != 8 || got != useOwn {
		return &RefusedError{Request: vhostuser.ReqSetDeviceStateFD, Value: got}
	}
	return nil
}

// CheckDeviceState waits for the end of a transfer and returns an error if it failed.
func (c *Conn) CheckDeviceState() error {
	v, err := c.callU64(vhostuser.ReqCheckDeviceState)
	if err == nil && v != 0 {
		err = &RefusedError{Request: vhostuser.ReqCheckDeviceState, Value: v}
	}
	return err
}

// SetStatus sets the virtio device status.
func (c *Conn) SetStatus(status uint8) error {
	return c.Do(vhostuser.ReqSetStatus, u64(uint64(status)))
}

// GetStatus returns the virtio device status set last.
func (c *Conn) GetStatus() (uint8, error) {
	v, err := c.callU64(vhostuser.ReqGetStatus)
	return uint8(v), err
}

// GetConfig reads size bytes of the configuration space at offset.
func (c *Conn) GetConfig(offset, size uint32) ([]byte, error) {
	req := append(vhostuser.ConfigSpace{Offset: offset, Size: size}.Append(nil), make([]byte, size)...)
	b, err := c.Call(vhostuser.ReqGetConfig, req)
	if err != nil {
		return nil, err
	}
	if len(b) != len(req) {
		return nil, fmt.Errorf("reply to GET_CONFIG has %d bytes, %d are right", len(b), len(req))
	}
	return b[len(b)-int(size):], nil
}

// SetConfig writes the configuration space at offset.
func (c *Conn) SetConfig(offset uint32, data []byte, flags uint32) error {
	space := vhostuser.ConfigSpace{Offset: offset, Size: uint32(len(data)), Flags: flags}
	return c.Do(vhostuser.ReqSetConfig, append(space.Append(nil), data...))
}
