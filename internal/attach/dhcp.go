package attach

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"time"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv4/nclient4"
	"github.com/vishvananda/netlink"
)

// Pauses of the DHCP client.
const (
	dhcpAnswer  = 2 * time.Second
	dhcpTries   = 3
	dhcpPause   = 5 * time.Second  // after a fruitless round
	dhcpSoonest = 10 * time.Second // between renewals, whatever a server says
	dhcpLatest  = 24 * time.Hour
)

// dhcpClient keeps an IPv4 address by DHCP (RFC 2131), in the helper.
type dhcpClient struct {
	link    *link
	name    string
	started bool
	again   chan struct{} // asks at once
	lease   *nclient4.Lease
	address *netlink.Addr // that is set
}

// ask begins, or asks anew.
func (d *dhcpClient) ask() {
	select {
	case d.again <- struct{}{}:
	default:
	}
	if !d.started {
		d.started = true
		go d.run()
	}
}

// run ends with the process.
func (d *dhcpClient) run() {
	<-d.again
	warned := false
	for {
		pause, err := d.acquire()
		if err != nil {
			pause = dhcpPause
			if !warned {
				_ = d.link.send(report{Warning: "DHCP: " + err.Error()})
			}
		}
		warned = err != nil
		select {
		case <-d.again:
		case <-time.After(pause):
		}
	}
}

// acquire gets a lease or renews it, and returns when that is to be done next.
func (d *dhcpClient) acquire() (next time.Duration, err error) {
	// The socket of a client gets a copy of every frame, so it is open only for this.
	client, err := nclient4.New(d.name, nclient4.WithTimeout(dhcpAnswer), nclient4.WithRetry(dhcpTries))
	if err != nil {
		return 0, err
	}
	defer client.Close()
	ctx := context.Background()
	old := d.lease
	if old != nil {
		if d.lease, err = client.Renew(ctx, old); err != nil {
			d.lease = nil // asked for as a new one: the network behind the socket may be another
		}
	}
	if d.lease == nil {
		d.lease, err = client.Request(ctx, dhcpv4.WithRequestedOptions(dhcpv4.OptionSubnetMask, dhcpv4.OptionRouter,
			dhcpv4.OptionDomainNameServer, dhcpv4.OptionDomainName, dhcpv4.OptionInterfaceMTU))
		if err != nil {
			return 0, err
		}
	}
	text, detail, err := d.apply(d.lease.ACK)
	if err != nil {
		d.lease = nil
		return 0, err
	}
	if err := d.link.send(report{Lease: text, Detail: detail}); err != nil {
		return 0, err
	}
	return min(max(leaseTime(d.lease.ACK)/2, dhcpSoonest), dhcpLatest), nil
}

func leaseTime(m *dhcpv4.DHCPv4) time.Duration { return m.IPAddressLeaseTime(time.Hour) }

// apply sets the interface's address and default route as a server says.
func (d *dhcpClient) apply(m *dhcpv4.DHCPv4) (text, detail string, err error) {
	ones, bits := m.SubnetMask().Size()
	ip, ok := netip.AddrFromSlice(m.YourIPAddr.To4())
	if !ok || bits != 32 || ones == 0 || !ip.IsGlobalUnicast() && !ip.IsLinkLocalUnicast() {
		return "", "", fmt.Errorf("the server offers the address %v with the mask %v", m.YourIPAddr, m.SubnetMask())
	}
	text = netip.PrefixFrom(ip, ones).String()
	l, err := netlink.LinkByName(d.name)
	if err != nil {
		return "", "", err
	}
	seconds := int(min(leaseTime(m), 100*365*24*time.Hour) / time.Second)
	a := &netlink.Addr{IPNet: &net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(ones, 32)}, ValidLft: seconds, PreferedLft: seconds}
	if d.address != nil && !d.address.Equal(*a) {
		_ = netlink.AddrDel(l, d.address) // it may have expired
	}
	if err := netlink.AddrReplace(l, a); err != nil {
		return "", "", fmt.Errorf("address %s: %w", text, err)
	}
	d.address = a
	var gateways []string
	for _, router := range m.Router() {
		gateway, ok := netip.AddrFromSlice(router.To4())
		if !ok || !gateway.IsGlobalUnicast() {
			continue
		}
		switch err := defaultRoute(l, gateway); {
		case errors.Is(err, errOtherRoute):
			gateways = append(gateways, gateway.String()+" (not used: "+err.Error()+")")
		case err != nil:
			return "", "", fmt.Errorf("gateway %v: %w", gateway, err)
		default:
			gateways = append(gateways, gateway.String())
		}
		break
	}
	return text, fmt.Sprintf("gateway %v, DNS %v, lease %v", gateways, m.DNS(), leaseTime(m)), d.lowerMTU(l, m)
}

// lowerMTU follows option 26 where it is less than the interface's MTU.
func (d *dhcpClient) lowerMTU(l netlink.Link, m *dhcpv4.DHCPv4) error {
	value, err := dhcpv4.GetUint16(dhcpv4.OptionInterfaceMTU, m.Options)
	if err != nil || value < MinMTU || int(value) >= l.Attrs().MTU {
		return nil // most servers leave it out
	}
	if err := netlink.LinkSetMTU(l, int(value)); err != nil {
		return fmt.Errorf("MTU %d: %w", value, err)
	}
	return nil
}
