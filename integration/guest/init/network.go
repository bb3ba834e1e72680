package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/guest"
)

func setLoopbackUp() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

func link(args guest.LinkArgs) (guest.Link, error) {
	device, err := netlink.LinkByName(args.Name)
	if err != nil {
		return guest.Link{}, fmt.Errorf("interface %s: %w", args.Name, err)
	}
	if args.VLAN != 0 {
		if device, err = addVLAN(device, args.VLAN); err != nil {
			return guest.Link{}, err
		}
	}
	if err := changeLink(device, args); err != nil {
		return guest.Link{}, err
	}
	return describeLink(device.Attrs().Name)
}

func addVLAN(parent netlink.Link, id int) (netlink.Link, error) {
	name := fmt.Sprintf("%s.%d", parent.Attrs().Name, id)
	device := &netlink.Vlan{LinkAttrs: netlink.LinkAttrs{Name: name, ParentIndex: parent.Attrs().Index}, VlanId: id}
	if err := netlink.LinkAdd(device); err != nil {
		return nil, fmt.Errorf("interface %s: %w", name, err)
	}
	return netlink.LinkByName(name)
}

func changeLink(device netlink.Link, args guest.LinkArgs) error {
	if args.MTU > 0 {
		if err := netlink.LinkSetMTU(device, args.MTU); err != nil {
			return fmt.Errorf("mtu %d: %w", args.MTU, err)
		}
	}
	if args.MAC != "" {
		address, err := net.ParseMAC(args.MAC)
		if err != nil {
			return err
		}
		if err := netlink.LinkSetHardwareAddr(device, address); err != nil {
			return fmt.Errorf("mac %s: %w", args.MAC, err)
		}
	}
	if args.CIDR != "" {
		address, err := netlink.ParseAddr(args.CIDR)
		if err != nil {
			return fmt.Errorf("address %q: %w", args.CIDR, err)
		}
		if err := replaceAddress(device, address); err != nil {
			return err
		}
	}
	if args.Up == nil {
		return nil
	}
	if *args.Up {
		return netlink.LinkSetUp(device)
	}
	return netlink.LinkSetDown(device)
}

func replaceAddress(device netlink.Link, address *netlink.Addr) error {
	old, err := netlink.AddrList(device, unix.AF_INET)
	if err != nil {
		return err
	}
	for i := range old {
		if err := netlink.AddrDel(device, &old[i]); err != nil {
			return err
		}
	}
	return netlink.AddrAdd(device, address)
}

func addresses(args guest.AddressArgs) (guest.Addresses, error) {
	device, err := netlink.LinkByName(args.Name)
	if err != nil {
		return nil, fmt.Errorf("interface %s: %w", args.Name, err)
	}
	if args.CIDR != "" {
		address, err := netlink.ParseAddr(args.CIDR)
		if err != nil {
			return nil, fmt.Errorf("address %q: %w", args.CIDR, err)
		}
		change := netlink.AddrAdd
		if args.Remove {
			change = netlink.AddrDel
		}
		if err := change(device, address); err != nil {
			return nil, fmt.Errorf("address %s: %w", args.CIDR, err)
		}
	}
	list, err := netlink.AddrList(device, unix.AF_INET6)
	for errors.Is(err, netlink.ErrDumpInterrupted) { // it changed meanwhile
		list, err = netlink.AddrList(device, unix.AF_INET6)
	}
	if err != nil {
		return nil, err
	}
	found := guest.Addresses{}
	for _, a := range list {
		found = append(found, guest.Address{CIDR: a.IPNet.String(), Tentative: a.Flags&unix.IFA_F_TENTATIVE != 0, Failed: a.Flags&unix.IFA_F_DADFAILED != 0})
	}
	return found, nil
}

func describeLink(name string) (guest.Link, error) {
	device, err := netlink.LinkByName(name)
	if err != nil {
		return guest.Link{}, err
	}
	attrs := device.Attrs()
	features, err := os.ReadFile(filepath.Join("/sys/class/net", name, "device/features"))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return guest.Link{}, err
	}
	return guest.Link{
		Name:     name,
		MAC:      attrs.HardwareAddr.String(),
		MTU:      attrs.MTU,
		Up:       attrs.Flags&net.FlagUp != 0,
		Carrier:  attrs.RawFlags&unix.IFF_LOWER_UP != 0,
		Features: strings.TrimSpace(string(features)),
		Counters: readCounters(filepath.Join("/sys/class/net", name, "statistics")),
	}, nil
}

func readCounters(folder string) map[string]uint64 {
	files, err := os.ReadDir(folder)
	if err != nil {
		return nil
	}
	counters := make(map[string]uint64, len(files))
	for _, file := range files {
		text, err := os.ReadFile(filepath.Join(folder, file.Name()))
		if err != nil {
			continue
		}
		if value, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 64); err == nil {
			counters[file.Name()] = value
		}
	}
	return counters
}

// driver binds or unbinds virtio_net through sysfs; the device is remembered while it has no driver.
func driver(args guest.DriverArgs) (struct{}, error) {
	const folder = "/sys/bus/virtio/drivers/virtio_net"
	device, err := networkDevice()
	if err != nil {
		return struct{}{}, err
	}
	action := "unbind"
	if args.Bind {
		action = "bind"
	}
	return struct{}{}, os.WriteFile(filepath.Join(folder, action), []byte(device), 0)
}

// networkDevice finds the first virtio device of type 1 (network), with or without a driver.
func networkDevice() (string, error) {
	types, err := filepath.Glob("/sys/bus/virtio/devices/*/device")
	if err != nil {
		return "", err
	}
	for _, path := range types {
		if text, err := os.ReadFile(path); err == nil && strings.TrimSpace(string(text)) == "0x0001" {
			return filepath.Base(filepath.Dir(path)), nil
		}
	}
	return "", errors.New("no virtio network device")
}
