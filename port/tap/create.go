package tap

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/virtio"
)

const device = "/dev/net/tun"

// setUp makes the port's interface. On error the caller closes the port, which removes what was created: an interface
// becomes persistent last.
func (p *Port) setUp(opts Options) error {
	if err := p.openLink(); err != nil {
		return err
	}
	existing, err := p.lookUp(opts)
	if err != nil {
		return err
	}
	flags := uint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	p.multi = opts.Queues > 1
	if existing != nil {
		p.multi = existing.multi
	} else {
		flags |= unix.IFF_TUN_EXCL // made by somebody else since we looked: refuse
	}
	if p.multi {
		flags |= unix.IFF_MULTI_QUEUE
	}
	queues := opts.Queues
	if !p.multi {
		queues = 1 // an existing tap has what it was made with; further pairs send through it
	}
	for range queues {
		if err := p.addQueue(flags); err != nil {
			return err
		}
		flags &^= unix.IFF_TUN_EXCL
	}
	if err := p.setHeader(); err != nil {
		return err
	}
	if p.features, err = p.probe(); err != nil {
		return err
	}
	if err := p.configureLink(opts); err != nil {
		return err
	}
	if existing != nil {
		return nil
	}
	return p.setOwnership(opts)
}

// addQueue opens one more queue of the interface and leaves it detached if the interface can have several. The first call
// makes or attaches to the interface and resolves its name.
func (p *Port) addQueue(flags uint16) error {
	fd, err := unix.Open(device, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return explainOpen(err)
	}
	p.fds = append(p.fds, fd)
	request, err := unix.NewIfreq(p.name)
	if err != nil {
		return fmt.Errorf("name of the interface: %w", err)
	}
	request.SetUint16(flags)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		return explainAttach(err)
	}
	p.name = request.Name()
	if !p.multi {
		return nil
	}
	return steer(fd, false)
}

// setHeader fixes the form of the header in front of each frame.
func (p *Port) setHeader() error {
	if err := unix.IoctlSetPointerInt(p.fds[0], unix.TUNSETVNETHDRSZ, virtio.NetHdrLen); err != nil {
		return fmt.Errorf("set the virtio header's length to %d: %w", virtio.NetHdrLen, err)
	}
	if err := unix.IoctlSetPointerInt(p.fds[0], unix.TUNSETVNETLE, 1); err != nil {
		return fmt.Errorf("make the virtio header little endian: %w", err)
	}
	return nil
}

func (p *Port) setOwnership(opts Options) error {
	for _, step := range []struct {
		text    string
		byName  func(string) (string, error)
		request uint
		what    string
	}{
		{opts.Owner, userID, unix.TUNSETOWNER, "owner"},
		{opts.Group, groupID, unix.TUNSETGROUP, "group"},
	} {
		id, err := lookupID(step.text, step.byName)
		if err == nil && id >= 0 {
			err = unix.IoctlSetInt(p.fds[0], step.request, id)
		}
		if err != nil {
			return fmt.Errorf("set %s %s: %w", step.what, step.text, err)
		}
	}
	if opts.Persist {
		if err := unix.IoctlSetInt(p.fds[0], unix.TUNSETPERSIST, 1); err != nil {
			return fmt.Errorf("make the interface persistent: %w", err)
		}
	}
	return nil
}

// steer attaches a queue of a multi-queue tap, so that the kernel spreads frames over it, or detaches it, which also throws
// away what waits in it (tun_set_queue and __tun_detach, drivers/net/tun.c).
func steer(fd int, on bool) error {
	request, err := unix.NewIfreq("")
	if err != nil {
		return fmt.Errorf("prepare request: %w", err)
	}
	request.SetUint16(unix.IFF_DETACH_QUEUE)
	verb := "detach"
	if on {
		request.SetUint16(unix.IFF_ATTACH_QUEUE)
		verb = "attach"
	}
	if err := unix.IoctlIfreq(fd, unix.TUNSETQUEUE, request); err != nil {
		return fmt.Errorf("%s queue: %w", verb, err)
	}
	return nil
}

func explainOpen(err error) error {
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV), errors.Is(err, unix.ENXIO):
		return fmt.Errorf("open %s: %w (the tun module is not loaded: modprobe tun; in a container, pass the device in)", device, err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fmt.Errorf("open %s: %w (no permission: the file must be readable and writable for this user)", device, err)
	}
	return fmt.Errorf("open %s: %w", device, err)
}

func explainAttach(err error) error {
	const doing = "create or attach"
	switch {
	case errors.Is(err, unix.EPERM):
		return fmt.Errorf("%s: %w (creating a tap needs CAP_NET_ADMIN; without it, let root make one for this user: "+
			"ip tuntap add dev NAME mode tap vnet_hdr user USER)", doing, err)
	case errors.Is(err, unix.EBUSY):
		return fmt.Errorf("%s: %w (another guest or another process uses the tap: stop it, or choose another name)", doing, err)
	case errors.Is(err, unix.EINVAL):
		return fmt.Errorf("%s: %w (the name is taken by another kind of interface, or the kernel lacks virtio headers for taps)", doing, err)
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// explainWrite adds what an error of writing a frame means.
func explainWrite(err error) error {
	switch {
	case errors.Is(err, unix.EIO):
		return fmt.Errorf("%w (the interface is down)", err)
	case gone(err):
		return fmt.Errorf("%w (the interface was deleted)", err)
	}
	return err
}

// gone says whether an error means that the interface does not exist any more (tun_chr_write_iter and tun_chr_ioctl).
func gone(err error) bool {
	return errors.Is(err, unix.EBADFD) || errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ENODEV)
}
