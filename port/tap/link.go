package tap

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/port"
)

// linkTimeout bounds each request to the kernel's network configuration.
const linkTimeout = 5 * time.Second

// openLink opens the port's own connection to the kernel's network configuration: it stays with the namespace of today,
// whatever thread uses it later.
func (p *Port) openLink() error {
	link, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return fmt.Errorf("open netlink: %w", err)
	}
	p.link = link
	if err := link.SetSocketTimeout(linkTimeout); err != nil {
		return fmt.Errorf("set up netlink: %w", err)
	}
	return nil
}

// existingTap is an interface that was there before.
type existingTap struct{ multi bool }

// lookUp checks the interfaces that opts names and returns the tap to attach to, nil if it must be created.
func (p *Port) lookUp(opts Options) (*existingTap, error) {
	if opts.Bridge != "" {
		if _, err := p.bridge(opts.Bridge); err != nil {
			return nil, err
		}
	}
	if strings.Contains(opts.Name, "%d") {
		return nil, nil
	}
	link, err := p.link.LinkByName(opts.Name)
	var missing netlink.LinkNotFoundError
	switch {
	case errors.As(err, &missing):
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("look up interface: %w", err)
	}
	t, ok := link.(*netlink.Tuntap)
	if !ok || t.Mode != netlink.TUNTAP_MODE_TAP {
		return nil, fmt.Errorf("the name is taken by an interface of kind %s that is not a tap: choose another name", link.Type())
	}
	multi := t.Flags&netlink.TUNTAP_MULTI_QUEUE != 0
	if t.Queues+t.DisabledQueues > 0 {
		return nil, fmt.Errorf("attach: %w (another guest or another process uses the tap: stop it, or choose another name)", unix.EBUSY)
	}
	return &existingTap{multi: multi}, nil
}

func (p *Port) bridge(name string) (netlink.Link, error) {
	link, err := p.link.LinkByName(name)
	var missing netlink.LinkNotFoundError
	switch {
	case errors.As(err, &missing):
		return nil, fmt.Errorf("no bridge %s: make it with 'ip link add %s type bridge', or name an existing one", name, name)
	case err != nil:
		return nil, fmt.Errorf("look up bridge %s: %w", name, err)
	case link.Type() != "bridge":
		return nil, fmt.Errorf("interface %s is not a bridge but of kind %s: name a bridge", name, link.Type())
	}
	return link, nil
}

// configureLink applies opts to the interface and learns its index and MTU.
func (p *Port) configureLink(opts Options) error {
	link, err := p.link.LinkByName(p.name)
	if err != nil {
		return fmt.Errorf("look up interface: %w", err)
	}
	p.index = link.Attrs().Index
	p.mtu.Store(int64(link.Attrs().MTU))
	if opts.MTU != 0 && opts.MTU != link.Attrs().MTU {
		if err := p.setLinkMTU(opts.MTU); err != nil {
			return err
		}
	}
	if opts.Bridge != "" {
		bridge, err := p.bridge(opts.Bridge)
		if err != nil {
			return err
		}
		if link.Attrs().MasterIndex != bridge.Attrs().Index {
			if err := p.link.LinkSetMaster(link, bridge); err != nil {
				return fmt.Errorf("join bridge %s: %w", opts.Bridge, explainAdmin(err))
			}
		}
	}
	if !opts.LeaveDown && link.Attrs().RawFlags&unix.IFF_UP == 0 {
		if err := p.link.LinkSetUp(link); err != nil {
			return fmt.Errorf("bring the interface up: %w", explainAdmin(err))
		}
	}
	return nil
}

// setLinkMTU needs p.mu, except during New.
func (p *Port) setLinkMTU(mtu int) error {
	link, err := p.link.LinkByIndex(p.index)
	if err != nil {
		return fmt.Errorf("set MTU %d: %w (was the interface deleted or moved to another namespace?)", mtu, err)
	}
	if err := p.link.LinkSetMTU(link, mtu); err != nil {
		return fmt.Errorf("set MTU %d: %w", mtu, explainAdmin(err))
	}
	p.mtu.Store(int64(mtu))
	return nil
}

// hasMaster says whether the interface is part of a bridge or the like. It needs p.mu.
func (p *Port) hasMaster() bool {
	link, err := p.link.LinkByIndex(p.index)
	return err == nil && link.Attrs().MasterIndex != 0
}

func explainAdmin(err error) error {
	if errors.Is(err, unix.EPERM) || errors.Is(err, unix.EACCES) {
		return fmt.Errorf("%w (needs CAP_NET_ADMIN: grant it, or have root prepare the interface)", err)
	}
	return err
}

// Status implements [port.Port].
func (p *Port) Status() port.Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.closed:
		return port.Status{Detail: fmt.Sprintf("tap %s: closed", p.name)}
	case p.deleted.Load():
		return port.Status{Detail: p.deletedDetail()}
	}
	name, err := p.currentName()
	if err != nil {
		return port.Status{Detail: p.deletedDetail()}
	}
	link, err := p.link.LinkByIndex(p.index)
	if err != nil {
		return port.Status{Up: !p.down.Load(), Detail: fmt.Sprintf("tap %s is in another network namespace", name)}
	}
	if link.Attrs().RawFlags&unix.IFF_UP == 0 {
		return port.Status{Detail: fmt.Sprintf("tap %s is down: ip link set %s up", name, name)}
	}
	return port.Status{Up: true, Detail: "tap " + name}
}

func (p *Port) deletedDetail() string {
	return fmt.Sprintf("tap %s was deleted: remove and add the guest to make it again", p.name)
}

// currentName asks the interface itself, wherever it is. It fails if the interface is gone.
func (p *Port) currentName() (string, error) {
	request, err := unix.NewIfreq("")
	if err != nil {
		return "", err
	}
	if err := unix.IoctlIfreq(p.fds[0], unix.TUNGETIFF, request); err != nil {
		return "", err
	}
	return request.Name(), nil
}
