package attach

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/signal"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// helperArgument is what a helper is called with, enteredArgument what follows when nsenter does it, and helperSocket where its
// socket is.
const (
	helperArgument  = "attach-helper"
	enteredArgument = "entered"
	helperSocket    = 3
)

// RunHelper turns the process into the helper of an attachment if it was started as one, and then does not return. A program that
// calls [Run] calls it first thing in main.
func RunHelper() {
	if len(os.Args) < 2 || os.Args[1] != helperArgument {
		return
	}
	if kind, err := unix.GetsockoptInt(helperSocket, unix.SOL_SOCKET, unix.SO_TYPE); err != nil || kind != unix.SOCK_SEQPACKET {
		return // somebody typed it
	}
	unix.CloseOnExec(helperSocket)
	if len(os.Args) == 3 && os.Args[2] == enteredArgument {
		closeAll([]int{helperSocket + 1, helperSocket + 2, helperSocket + 3}) // what nsenter was given
	}
	if err := help(); err != nil {
		fmt.Fprintln(os.Stderr, "vhostd attach, helper in the namespace:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// help obeys orders until the attachment ends.
func help() error {
	// A terminal signals all processes of its foreground; this one ends with the attachment.
	signal.Ignore(unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT)
	if err := unix.SetNonblock(helperSocket, true); err != nil {
		return err
	}
	l := &link{file: os.NewFile(helperSocket, "attachment")}
	var first order
	if _, err := l.receive(&first); err != nil || first.Create == nil {
		return errors.Join(err, errors.New("no order"))
	}
	fds, mtu, err := create(*first.Create)
	if err != nil {
		return l.send(report{Error: err.Error()})
	}
	err = l.send(report{MTU: mtu}, fds...)
	closeAll(fds) // the interface lives as long as the attachment has it open
	if err != nil || !first.Create.Stay {
		return err
	}
	d := &dhcpClient{link: l, name: first.Create.Name, again: make(chan struct{}, 1)}
	for {
		var o order
		switch _, err := l.receive(&o); {
		case errors.Is(err, io.EOF), errors.Is(err, unix.ECONNRESET):
			return nil
		case err != nil:
			return err
		case o.Lease:
			d.ask()
		}
	}
}

// create makes the interface, configures it and returns its queues.
func create(c interfaceConfig) (fds []int, mtu int, err error) {
	defer func() {
		if err != nil {
			closeAll(fds)
			fds, err = nil, fmt.Errorf("interface %s: %w", c.Name, err)
		}
	}()
	flags := uint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR | unix.IFF_TUN_EXCL)
	if c.Queues > 1 {
		flags |= unix.IFF_MULTI_QUEUE
	}
	for range c.Queues {
		fd, err := openQueue(c.Name, flags)
		if err != nil {
			return fds, 0, err
		}
		fds = append(fds, fd)
		flags &^= unix.IFF_TUN_EXCL
	}
	for _, step := range []struct {
		what  string
		ioctl func() error
	}{
		{"length of the virtio header", func() error { return unix.IoctlSetPointerInt(fds[0], unix.TUNSETVNETHDRSZ, c.HeaderLen) }},
		{"byte order of the virtio header", func() error { return unix.IoctlSetPointerInt(fds[0], unix.TUNSETVNETLE, 1) }},
		{"offloads", func() error { return unix.IoctlSetInt(fds[0], unix.TUNSETOFFLOAD, c.Offloads) }},
	} {
		if err := step.ioctl(); err != nil {
			return fds, 0, fmt.Errorf("set %s: %w", step.what, err)
		}
	}
	mtu, err = configure(c)
	return fds, mtu, err
}

func openQueue(name string, flags uint16) (int, error) {
	const device = "/dev/net/tun"
	fd, err := unix.Open(device, unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open %s: %w (it must be there, readable and writable for this user; modprobe tun)", device, err)
	}
	request, err := unix.NewIfreq(name)
	if err == nil {
		request.SetUint16(flags)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	switch {
	case err == nil:
		return fd, nil
	case errors.Is(err, unix.EBUSY), errors.Is(err, unix.EINVAL), errors.Is(err, unix.EEXIST):
		err = fmt.Errorf("create: %w (is there an interface of that name?)", err)
	case errors.Is(err, unix.EPERM):
		err = fmt.Errorf("create: %w (this needs CAP_NET_ADMIN in the namespace: its owner needs uid 0 mapped to him, as by unshare -r)", err)
	default:
		err = fmt.Errorf("create: %w", err)
	}
	_ = unix.Close(fd)
	return -1, err
}

// configure sets the interface up.
func configure(c interfaceConfig) (mtu int, err error) {
	l, err := netlink.LinkByName(c.Name)
	if err != nil {
		return 0, err
	}
	if c.MAC != "" {
		mac, err := net.ParseMAC(c.MAC)
		if err == nil {
			err = netlink.LinkSetHardwareAddr(l, mac)
		}
		if err != nil {
			return 0, fmt.Errorf("MAC address %s: %w", c.MAC, err)
		}
	}
	if c.MTU != 0 {
		if err := netlink.LinkSetMTU(l, c.MTU); err != nil {
			return 0, fmt.Errorf("MTU %d: %w", c.MTU, err)
		}
	}
	if err := netlink.LinkSetUp(l); err != nil {
		return 0, fmt.Errorf("set up: %w", err)
	}
	if err := addAddresses(l, c); err != nil {
		return 0, err
	}
	if l, err = netlink.LinkByName(c.Name); err != nil {
		return 0, err
	}
	return l.Attrs().MTU, nil
}

func addAddresses(l netlink.Link, c interfaceConfig) error {
	for _, text := range c.Addresses {
		a, err := netlink.ParseAddr(text)
		if err == nil {
			err = netlink.AddrAdd(l, a)
		}
		if err != nil {
			return fmt.Errorf("address %s: %w", text, err)
		}
	}
	for _, text := range c.Gateways {
		a, err := netip.ParseAddr(text)
		if err == nil {
			err = defaultRoute(l, a)
		}
		if err != nil {
			return fmt.Errorf("gateway %s: %w (is it in the prefix of an --address?)", text, err)
		}
	}
	return nil
}

// errOtherRoute says that the namespace has a default route already.
var errOtherRoute = errors.New("the namespace has another default route")

// defaultRoute makes a gateway that of the default route, in place of one of this interface but of no other.
func defaultRoute(l netlink.Link, gateway netip.Addr) error {
	everything, family := &net.IPNet{IP: net.IPv4zero, Mask: net.CIDRMask(0, 32)}, netlink.FAMILY_V4
	if gateway.Is6() {
		everything, family = &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}, netlink.FAMILY_V6
	}
	route := &netlink.Route{LinkIndex: l.Attrs().Index, Dst: everything, Gw: gateway.AsSlice()}
	err := netlink.RouteAdd(route)
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	ours, err := netlink.RouteListFiltered(family, route, netlink.RT_FILTER_OIF|netlink.RT_FILTER_DST)
	switch {
	case err != nil:
		return err
	case len(ours) == 0:
		return errOtherRoute
	}
	return netlink.RouteReplace(route)
}
