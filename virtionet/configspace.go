package virtionet

import (
	"errors"
	"fmt"
	"slices"

	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
)

// macLen is where the part of the configuration space ends that a legacy driver may
// write (virtio 1.2 section 5.1.4.3); the link's state follows it.
const (
	macLen    = 6
	statusEnd = 8
)

// Config implements vhostuser.Device: there is something to show only when a MAC was
// configured, because QEMU warns about a net back-end that offers CONFIG. The link's
// state is shown to a driver that acknowledged STATUS; a front-end that reads the
// space once, before that, must not keep a link that was down.
func (d *Device) Config() []byte {
	if d.opts.MAC == nil {
		return nil
	}
	up := d.opts.Port.Status().Up
	d.mu.Lock()
	defer d.mu.Unlock()
	c := virtio.NetConfig{MAC: d.mac, MaxQueuePairs: uint16(d.opts.QueuePairs), MTU: uint16(d.mtu)}
	if up || !d.features.Has(virtio.FNetStatus) {
		c.Status = virtio.NetStatusLinkUp
	}
	return c.Encode()
}

// SetConfig implements vhostuser.Device. A driver may write the MAC address, byte by
// byte, if it is a legacy one and has no command for that. A front-end that restores
// the space of a guest that came from elsewhere may do so, too, but everything else
// must be as it is here; the link is this host's own.
func (d *Device) SetConfig(offset int, data []byte, migrating bool) error {
	now := d.Config()
	if offset < 0 || offset > len(now) || len(data) > len(now)-offset {
		return fmt.Errorf("bytes %d to %d of a configuration space of %d", offset, offset+len(data), len(now))
	}
	want := slices.Clone(now)
	copy(want[offset:], data)
	if migrating {
		copy(want[macLen:statusEnd], now[macLen:statusEnd])
	}
	if !slices.Equal(want[macLen:], now[macLen:]) {
		return errors.New("only the MAC address can be written, and the other bytes are not those of this device")
	}
	if slices.Equal(want, now) {
		return nil
	}
	d.control.Lock()
	defer d.control.Unlock()
	if !migrating && d.features.Any(virtio.FVersion1|virtio.FNetCtrlMACAddr) {
		return errors.New("the MAC address can be written by legacy drivers only; others have a command on the control queue")
	}
	mac := [macLen]byte(want)
	if k, ok := d.opts.Port.(port.AddressKeeper); ok {
		if err := k.MaySend(mac); err != nil {
			return err
		}
	}
	d.state.mac = mac
	d.follow()
	return nil
}

// SetMTU implements vhostuser.Device.
func (d *Device) SetMTU(mtu uint64) error {
	if mtu < 68 || mtu > 65535 {
		return fmt.Errorf("MTU %d: accepted are 68 to 65535", mtu)
	}
	set := d.opts.Port.SetMTU
	if f, ok := d.opts.Port.(port.MTUFollower); ok {
		set = f.FollowMTU
	}
	if err := set(int(mtu)); err != nil {
		return err
	}
	d.readMTU()
	return nil
}

// readMTU finds out what the configuration space is to say: the operator's word, or
// the network's.
func (d *Device) readMTU() {
	mtu := d.opts.MTU
	if mtu <= 0 {
		mtu = d.opts.Port.MTU()
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mtu = mtu
}
