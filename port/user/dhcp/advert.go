package dhcp

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/mdlayher/ndp"
)

// Advert is what a router advertisement tells.
type Advert struct {
	MAC      MAC          // the router's Ethernet address
	Prefix   netip.Prefix // on link; guests make addresses in it if Autonomous
	Lifetime time.Duration
	// Autonomous lets guests make addresses of their own (SLAAC), which takes a prefix of 64 bits. Managed says that DHCPv6 gives
	// addresses, Other that it gives the rest.
	Autonomous, Managed, Other bool
	MTU                        int // 0 tells none
	DNS                        []netip.Addr
	Search                     []string
}

// MaxRouterLifetime is the longest that RFC 4861 lets a router stay the default one without saying so again.
const MaxRouterLifetime = 9000 * time.Second

// prefixTimes are how many times Lifetime a guest's address stays preferred and valid.
const preferredTimes, validTimes = 8, 48

// Marshal returns the ICMPv6 message with its checksum for a packet from src, the router's link-local address, to dst: all nodes or
// who has asked. Its hop limit must be 255. A zero Lifetime is a good-bye: guests stop using router, prefix and resolvers.
func (a *Advert) Marshal(src, dst netip.Addr) ([]byte, error) {
	if a.Lifetime < 0 || a.Lifetime > MaxRouterLifetime {
		return nil, fmt.Errorf("router advertisement: lifetime %v is not accepted (accepted: 0 to %v)", a.Lifetime, MaxRouterLifetime)
	}
	if a.Autonomous && a.Prefix.Bits() != 64 {
		return nil, fmt.Errorf("router advertisement: addresses cannot be made in %v, that takes 64 bits", a.Prefix)
	}
	if err := validateNames(a.DNS, a.Search, func(addr netip.Addr) bool { return addr.Is6() && !addr.Is4In6() }); err != nil {
		return nil, fmt.Errorf("router advertisement: %w", err)
	}
	m := &ndp.RouterAdvertisement{
		CurrentHopLimit:      64,
		ManagedConfiguration: a.Managed,
		OtherConfiguration:   a.Other,
		RouterLifetime:       a.Lifetime,
		Options: []ndp.Option{
			&ndp.LinkLayerAddress{Direction: ndp.Source, Addr: a.MAC[:]},
			&ndp.PrefixInformation{
				PrefixLength: uint8(a.Prefix.Bits()), Prefix: a.Prefix.Addr(), OnLink: true, AutonomousAddressConfiguration: a.Autonomous,
				PreferredLifetime: preferredTimes * a.Lifetime, ValidLifetime: validTimes * a.Lifetime,
			},
		},
	}
	if a.MTU != 0 {
		m.Options = append(m.Options, ndp.NewMTU(uint32(a.MTU)))
	}
	if len(a.DNS) > 0 {
		m.Options = append(m.Options, &ndp.RecursiveDNSServer{Lifetime: a.Lifetime, Servers: a.DNS})
	}
	if len(a.Search) > 0 {
		m.Options = append(m.Options, &ndp.DNSSearchList{Lifetime: a.Lifetime, DomainNames: plain(a.Search)})
	}
	b, err := ndp.MarshalMessageChecksum(m, src, dst)
	if err != nil {
		return nil, fmt.Errorf("router advertisement: %w", err)
	}
	return b, nil
}

// IsSolicitation says whether message, an ICMPv6 message whose checksum and hop limit were verified, asks for a router advertisement. It
// judges like RFC 4861, 6.1.1: src is the packet's source address, and who has none yet gives no link-layer address either.
func IsSolicitation(message []byte, src netip.Addr) bool {
	const codeOffset = 1
	if len(message) > MaxMessage || len(message) <= codeOffset || message[codeOffset] != 0 {
		return false
	}
	m, err := ndp.ParseMessage(message)
	if err != nil {
		return false
	}
	s, ok := m.(*ndp.RouterSolicitation)
	if !ok {
		return false
	}
	for _, o := range s.Options {
		if l, ok := o.(*ndp.LinkLayerAddress); ok && l.Direction == ndp.Source && src.IsUnspecified() {
			return false
		}
	}
	return true
}
