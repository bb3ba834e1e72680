package main

import (
	"context"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/vhostd/vhostd/integration/guest"
)

// dhcpRetry is how long an answer of a DHCP server may take before the question is asked again.
const dhcpRetry = 2 * time.Second

// dhcp gets a lease and puts it into force.
func dhcp(args guest.DHCPArgs) (guest.Lease, error) {
	device, err := netlink.LinkByName(args.Name)
	if err != nil {
		return guest.Lease{}, fmt.Errorf("interface %s: %w", args.Name, err)
	}
	conn, err := dhcpSocket(args.Name)
	if err != nil {
		return guest.Lease{}, err
	}
	defer conn.Close()
	// The library asks for random numbers without waiting, over and over, and only who waits makes the kernel gather entropy.
	if _, err := unix.Getrandom(make([]byte, 1), 0); err != nil {
		return guest.Lease{}, err
	}
	end := time.Now().Add(args.Timeout)
	// A station without an address gets what is sent to everybody only.
	discover, err := dhcpv4.NewDiscovery(device.Attrs().HardwareAddr, dhcpv4.WithBroadcast(true),
		dhcpv4.WithRequestedOptions(dhcpv4.OptionInterfaceMTU, dhcpv4.OptionDNSDomainSearchList))
	if err != nil {
		return guest.Lease{}, err
	}
	offer, err := askDHCP(conn, discover, dhcpv4.MessageTypeOffer, end)
	if err != nil {
		return guest.Lease{}, err
	}
	request, err := dhcpv4.NewRequestFromOffer(offer, dhcpv4.WithBroadcast(true),
		dhcpv4.WithRequestedOptions(dhcpv4.OptionInterfaceMTU, dhcpv4.OptionDNSDomainSearchList))
	if err != nil {
		return guest.Lease{}, err
	}
	ack, err := askDHCP(conn, request, dhcpv4.MessageTypeAck, end)
	if err != nil {
		return guest.Lease{}, err
	}
	lease := leaseOf(ack)
	return lease, apply(device, lease)
}

func dhcpSocket(name string) (net.PacketConn, error) {
	config := net.ListenConfig{Control: func(_, _ string, raw syscall.RawConn) (err error) {
		if control := raw.Control(func(fd uintptr) { err = unix.BindToDevice(int(fd), name) }); control != nil {
			return control
		}
		return err
	}}
	return config.ListenPacket(context.Background(), "udp4", fmt.Sprint(":", dhcpv4.ClientPort))
}

// askDHCP sends a message until its answer has come.
func askDHCP(conn net.PacketConn, message *dhcpv4.DHCPv4, want dhcpv4.MessageType, end time.Time) (*dhcpv4.DHCPv4, error) {
	to := &net.UDPAddr{IP: net.IPv4bcast, Port: dhcpv4.ServerPort}
	buffer := make([]byte, 2048)
	for time.Now().Before(end) {
		if _, err := conn.WriteTo(message.ToBytes(), to); err != nil {
			return nil, fmt.Errorf("dhcp: %w", err)
		}
		for retry := time.Now().Add(dhcpRetry); ; {
			if err := conn.SetReadDeadline(retry); err != nil {
				return nil, err
			}
			n, _, err := conn.ReadFrom(buffer)
			if err != nil {
				break
			}
			answer, err := dhcpv4.FromBytes(buffer[:n])
			if err != nil || answer.TransactionID != message.TransactionID {
				continue
			}
			if kind := answer.MessageType(); kind != want {
				return nil, fmt.Errorf("dhcp: the server answered %v: %s", kind, answer.Message())
			}
			return answer, nil
		}
	}
	return nil, fmt.Errorf("dhcp: no %v", want)
}

func leaseOf(ack *dhcpv4.DHCPv4) guest.Lease {
	lease := guest.Lease{For: ack.IPAddressLeaseTime(0)}
	lease.CIDR = (&net.IPNet{IP: ack.YourIPAddr, Mask: ack.SubnetMask()}).String()
	if routers := ack.Router(); len(routers) > 0 {
		lease.Gateway = routers[0].String()
	}
	for _, server := range ack.DNS() {
		lease.DNS = append(lease.DNS, server.String())
	}
	if search := ack.DomainSearch(); search != nil {
		lease.Search = search.Labels
	}
	if mtu, err := dhcpv4.GetUint16(dhcpv4.OptionInterfaceMTU, ack.Options); err == nil {
		lease.MTU = int(mtu)
	}
	return lease
}

// apply puts address, route, MTU and resolver into force.
func apply(device netlink.Link, lease guest.Lease) error {
	address, err := netlink.ParseAddr(lease.CIDR)
	if err != nil {
		return fmt.Errorf("dhcp: address %q: %w", lease.CIDR, err)
	}
	if err := replaceAddress(device, address); err != nil {
		return err
	}
	if lease.MTU > 0 {
		if err := netlink.LinkSetMTU(device, lease.MTU); err != nil {
			return fmt.Errorf("dhcp: mtu %d: %w", lease.MTU, err)
		}
	}
	if lease.Gateway != "" {
		route := &netlink.Route{LinkIndex: device.Attrs().Index, Gw: net.ParseIP(lease.Gateway)}
		if err := netlink.RouteReplace(route); err != nil {
			return fmt.Errorf("dhcp: route over %s: %w", lease.Gateway, err)
		}
	}
	text := ""
	for _, server := range lease.DNS {
		text += "nameserver " + server + "\n"
	}
	if len(lease.Search) > 0 {
		text += "search " + strings.Join(lease.Search, " ") + "\n"
	}
	if err := os.MkdirAll("/etc", 0o755); err != nil {
		return err
	}
	return os.WriteFile("/etc/resolv.conf", []byte(text), 0o644)
}
