package hostile

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/vhostuser"
	"github.com/vhostd/vhostd/virtio"
)

// slot is the region that slot k stands for.
func slot(k int) guestmem.RegionSpec {
	return guestmem.RegionSpec{GPA: 1<<40 + uint64(k)<<20, UVA: 1<<44 + uint64(k)<<20, Size: 1 << 16, MmapOffset: uint64(k%2) << 12}
}

// steps are what a life consists of.
var steps []func(c *chaos) error

func init() { steps = append(messages, restart, restart, restart, transferState, transferState) }

// messages are the steps of one message or two.
var messages = []func(c *chaos) error{
	func(c *chaos) error { return c.client.SetFeatures(c.client.Features ^ virtio.FVhostLogAll) },
	func(c *chaos) error { return c.client.SetFeatures(c.client.Features | virtio.FVhostLogAll) },
	func(c *chaos) error { return c.client.SetFeatures(c.features() | virtio.FVhostUserProtocolFeatures) },
	func(c *chaos) error {
		if !c.one(4) {
			return nil
		}
		p := c.client.Protocol
		for range 2 {
			p &^= 1 << c.rng.IntN(24)
		}
		return c.client.SetProtocolFeatures(p | vhostuser.ProtoReplyAck)
	},
	func(c *chaos) error { return c.client.Do(vhostuser.ReqResetDevice, nil) },
	func(c *chaos) error { return c.client.SetMemory(c.mem) },
	func(c *chaos) error { return c.client.AddMemReg(slot(c.rng.IntN(20)), c.memfd(1<<17)) },
	func(c *chaos) error { return c.client.RemMemReg(slot(c.rng.IntN(20))) },
	func(c *chaos) error { // the rings' own
		r := c.mem.Regions[c.rng.IntN(2)]
		if err := c.client.RemMemReg(r.RegionSpec); gone(err) {
			return err
		}
		c.traffic()
		return c.client.AddMemReg(r.RegionSpec, r.FD)
	},
	func(c *chaos) error { return c.client.RemMemReg(c.mem.Regions[c.rng.IntN(2)].RegionSpec) },
	func(c *chaos) error {
		size := uint64(1) << c.rng.IntN(20)
		fd := c.memfd(int64(size) + 4096)
		if err := c.client.SetLogBase(size, c.rng.Uint64N(16), fd); gone(err) {
			return err
		}
		if c.one(16) {
			_ = unix.Ftruncate(fd, 0)
		}
		return nil
	},
	func(c *chaos) error { return c.client.SetLogFD(c.eventfd()) },
	func(c *chaos) error {
		if q := c.queue(); q != nil {
			return c.client.SetVringAddr(c.address(q))
		}
		return nil
	},
	func(c *chaos) error { return c.shareInflight() },
	func(c *chaos) error {
		if c.inflight != nil && c.one(8) {
			_ = unix.Ftruncate(c.inflight.FD, 0)
		}
		return nil
	},
	func(c *chaos) error { return c.client.SetVringEnable(c.rng.IntN(9), c.one(2)) },
	func(c *chaos) error {
		if q := c.queue(); q != nil {
			return c.client.SetVringKick(q.Index, q.KickFD)
		}
		return nil
	},
	func(c *chaos) error { return c.client.SetVringCall(c.rng.IntN(9), c.eventfd()) },
	func(c *chaos) error { _, err := c.client.GetVringBase(c.rng.IntN(9)); return err },
	func(c *chaos) error { return c.client.SetVringBase(c.rng.IntN(4), c.rng.Uint32()&0x803f803f) },
	func(c *chaos) error { _, _, err := c.client.Stop(c.rng.IntN(2)); return err },
	func(c *chaos) error {
		msg := vhostuser.IOTLBMsg{IOVA: c.iova + c.rng.Uint64N(16<<20)&^4095, Size: 1 << c.rng.IntN(24), Type: vhostuser.IOTLBInvalidate}
		return c.client.IOTLB(msg)
	},
	func(c *chaos) error {
		return c.client.IOTLB(vhostuser.IOTLBMsg{Size: 1<<64 - 1, Type: vhostuser.IOTLBInvalidate})
	},
	func(c *chaos) error {
		at := c.rng.Uint64N(8<<20) &^ 4095
		msg := vhostuser.IOTLBMsg{IOVA: c.iova + at, Size: 4096 << c.rng.IntN(8), UVA: c.mem.UVA(at), Perm: uint8(c.rng.IntN(4)), Type: vhostuser.IOTLBUpdate}
		return c.client.IOTLB(msg)
	},
	func(c *chaos) error {
		kind := unix.SOCK_STREAM
		if c.one(2) {
			kind = unix.SOCK_SEQPACKET
		}
		return c.client.DoAck(vhostuser.ReqSetBackendReqFD, nil, c.socket(kind)[0])
	},
	func(c *chaos) error { return c.client.CheckDeviceState() },
	func(c *chaos) error {
		payload := append(vhostuser.ConfigSpace{Size: 6, Flags: uint32(c.rng.IntN(4))}.Append(nil), 2, 0, 0, 0, 0, byte(c.rng.IntN(4)))
		return c.client.DoAck(vhostuser.ReqSetConfig, payload)
	},
	func(c *chaos) error { _, err := c.client.GetConfig(0, 12); return err },
	func(c *chaos) error { return c.client.NetSetMTU(1500) },
	func(c *chaos) error {
		if !c.one(30) {
			return nil
		}
		_ = unix.Ftruncate(c.mem.Regions[c.rng.IntN(2)].FD, 4096)
		return errors.New("the guest's memory is gone")
	},
}

// restart starts a pair again, as a driver that begins anew or that goes on.
func restart(c *chaos) error {
	if len(c.pairs) == 0 {
		return nil
	}
	i := c.rng.IntN(len(c.pairs))
	if c.one(2) {
		if _, _, err := c.client.Stop(i); gone(err) {
			return err
		}
		if c.one(2) {
			c.pairs[i].Reset()
		}
	}
	if c.one(4) {
		if err := c.client.SetFeatures(c.client.Features); gone(err) {
			return err
		}
	}
	_, err := c.client.StartPair(i)
	return ignoreRefusal(err)
}

func ignoreRefusal(err error) error {
	if gone(err) {
		return err
	}
	return nil
}

// transferState saves the state, and loads what was saved, or leaves a transfer standing.
func transferState(c *chaos) error {
	for i := range 4 {
		if _, err := c.client.GetVringBase(i); gone(err) {
			return err
		}
	}
	ends := c.socket(unix.SOCK_STREAM)
	if err := c.client.SetDeviceStateFD(vhostuser.StateSave, ends[0]); err != nil {
		return ignoreRefusal(err)
	}
	if c.one(4) {
		return nil
	}
	if err := c.client.CheckDeviceState(); gone(err) {
		return err
	}
	saved := make([]byte, 1<<16)
	n, _, err := unix.Recvfrom(ends[1], saved, unix.MSG_DONTWAIT)
	if err != nil {
		return nil
	}
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		return nil
	}
	defer unix.Close(pipe[0])
	defer unix.Close(pipe[1])
	_, _ = unix.Write(pipe[1], saved[:n])
	if err := c.client.SetDeviceStateFD(vhostuser.StateLoad, pipe[0]); err != nil {
		return ignoreRefusal(err)
	}
	// The memory, the log and the features change while it waits.
	for range c.rng.IntN(4) {
		if err := messages[c.rng.IntN(12)](c); gone(err) {
			return err
		}
	}
	unix.Close(pipe[1])
	pipe[1] = -1
	return ignoreRefusal(c.client.CheckDeviceState())
}
