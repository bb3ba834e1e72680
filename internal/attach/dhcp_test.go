package attach

import (
	"net"
	"strings"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"
)

// TestBadLeases: an address that no interface may have is refused before anything is changed.
func TestBadLeases(t *testing.T) {
	for name, modifiers := range map[string][]dhcpv4.Modifier{
		"no address":  {dhcpv4.WithNetmask(net.CIDRMask(24, 32))},
		"no mask":     {dhcpv4.WithYourIP(net.IPv4(10, 0, 2, 15))},
		"mask of all": {dhcpv4.WithYourIP(net.IPv4(10, 0, 2, 15)), dhcpv4.WithNetmask(net.CIDRMask(0, 32))},
		"odd mask":    {dhcpv4.WithYourIP(net.IPv4(10, 0, 2, 15)), dhcpv4.WithNetmask(net.IPv4Mask(255, 0, 255, 0))},
		"multicast":   {dhcpv4.WithYourIP(net.IPv4(224, 0, 0, 1)), dhcpv4.WithNetmask(net.CIDRMask(24, 32))},
		"loopback":    {dhcpv4.WithYourIP(net.IPv4(127, 0, 0, 1)), dhcpv4.WithNetmask(net.CIDRMask(8, 32))},
		"broadcast":   {dhcpv4.WithYourIP(net.IPv4bcast), dhcpv4.WithNetmask(net.CIDRMask(24, 32))},
	} {
		m, err := dhcpv4.New(modifiers...)
		if err != nil {
			t.Fatal(err)
		}
		d := &dhcpClient{name: "no-such-link"}
		if _, _, err := d.apply(m); err == nil || !strings.Contains(err.Error(), "the server offers the address") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
