package user

import (
	"net"
	"net/netip"
)

// Hooks are what a network asks of others. Any may be nil, and is then not asked: everything is allowed, nothing answered.
type Hooks struct {
	Policy Policy
	DHCP   DHCP
	DNS    DNS
}

// Policy judges flows when they begin. It is asked by workers and must not wait.
type Policy interface {
	// Check says whether the guest may reach dst, as the guest named it, and if not why, in words fit for a metric label. The port is 0 for
	// protocols without.
	Check(guest netip.Addr, dst netip.AddrPort) (allowed bool, reason string)
}

// DHCP answers requests for addresses. It is asked by workers and must not wait.
type DHCP interface {
	// Answer4 returns the reply to a message that station mac sent to port 67, and whom it is for: an address, or one that is no
	// unicast address for all stations, and the hardware address to use; nil if there is nothing to answer.
	Answer4(message []byte, mac [6]byte, src netip.Addr) (reply []byte, dst netip.Addr, to [6]byte)
	// Answer6 returns the reply to a message that came to port 547, or nil.
	Answer6(message []byte, src netip.Addr, mac [6]byte) (reply []byte)
}

// DNS serves port 53 of the gateway's addresses.
type DNS interface {
	// ServeDNS answers what comes on conn, or on connections of l, until they are closed. One of the two is nil. It runs on a
	// goroutine of its own.
	ServeDNS(conn net.PacketConn, l net.Listener)
}
