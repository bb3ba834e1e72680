package main

import (
	"errors"
	"fmt"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/guest"
)

// loss has a qdisc throw frames away that the interface sends, and another one those that it receives: there is none before the stack
// takes a frame, so that they go through an intermediate device (ifb).
func loss(args guest.LossArgs) (struct{}, error) {
	device, err := netlink.LinkByName(args.Name)
	if err != nil {
		return struct{}{}, fmt.Errorf("interface %s: %w", args.Name, err)
	}
	ingress := &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: device.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_INGRESS,
	}}
	if args.Percent == 0 {
		return struct{}{}, errors.Join(netlink.QdiscDel(losing(device, 0)), netlink.QdiscDel(ingress))
	}
	between, err := netlink.LinkByName("ifb0") // the module makes it
	if err != nil {
		return struct{}{}, fmt.Errorf("interface ifb0: %w", err)
	}
	redirect := &netlink.MatchAll{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: device.Attrs().Index, Parent: ingress.Handle, Priority: 1, Protocol: unix.ETH_P_ALL},
		Actions:     []netlink.Action{netlink.NewMirredAction(between.Attrs().Index)},
	}
	for _, step := range []func() error{
		func() error { return netlink.LinkSetUp(between) },
		func() error { return netlink.QdiscReplace(losing(between, args.Percent)) },
		func() error { return netlink.QdiscReplace(losing(device, args.Percent)) },
		func() error { return netlink.QdiscAdd(ingress) },
		func() error { return netlink.FilterAdd(redirect) },
	} {
		if err := step(); err != nil {
			return struct{}{}, fmt.Errorf("loss of %g %%: %w", args.Percent, err)
		}
	}
	return struct{}{}, nil
}

func losing(device netlink.Link, percent float32) netlink.Qdisc {
	const room = 10_000 // frames: none is lost for another reason
	return netlink.NewNetem(
		netlink.QdiscAttrs{LinkIndex: device.Attrs().Index, Handle: netlink.MakeHandle(1, 0), Parent: netlink.HANDLE_ROOT},
		netlink.NetemQdiscAttrs{Loss: percent, Limit: room},
	)
}
