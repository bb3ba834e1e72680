package user

import (
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"
)

// newSocket makes a socket that never waits and counts it. EMFILE and its like are fdErrors.
func (p *Port) newSocket(family, kind, proto int) (int, error) {
	if !p.flows.fds.take() {
		return -1, fdError{unix.EMFILE}
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, proto)
	if err != nil {
		p.flows.fds.give()
		if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOBUFS) || errors.Is(err, unix.ENOMEM) {
			return -1, fdError{err}
		}
		return -1, err
	}
	return fd, nil
}

// closeSocket closes a socket of newSocket.
func (p *Port) closeSocket(fd int) {
	_ = unix.Close(fd) // what was not delivered has been accounted for elsewhere
	p.flows.fds.give()
}

// resetOnClose has the other side told by a reset. Unix sockets have none.
func resetOnClose(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}

func familyOf(a netip.Addr) int {
	if a.Is4() {
		return unix.AF_INET
	}
	return unix.AF_INET6
}

func sockaddrOf(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is4() {
		return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
	}
	return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
}

// addrPortOf is the address of a sockaddr, without the IPv6 form of IPv4; invalid for other families.
func addrPortOf(sa unix.Sockaddr) netip.AddrPort {
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(sa.Addr).Unmap(), uint16(sa.Port))
	}
	return netip.AddrPort{}
}

// hostAddress is where a flow to dst really goes: to dst, or with the gateway's services opened, to the host's loopback. The built-in
// rule stands here too, whatever a policy says: what names the loopback itself never leaves.
func (p *Port) hostAddress(dst netip.AddrPort) (netip.AddrPort, bool) {
	a := dst.Addr()
	switch {
	case p.ours(a) && !p.opts.HostLoopback:
		return dst, false
	case p.ours(a) && a.Is4():
		return netip.AddrPortFrom(loopback4, dst.Port()), true
	case p.ours(a):
		return netip.AddrPortFrom(netip.IPv6Loopback(), dst.Port()), true
	case a.IsLoopback(), a.IsUnspecified(), a.IsMulticast(), a.Is4In6():
		return dst, false
	}
	return dst, true
}

var loopback4 = netip.AddrFrom4([4]byte{127, 0, 0, 1})

// errorFor is the ICMP error that tells a guest of a failure of the host's network; ok is false for those that are told by silence.
func errorFor(err error) (kind errorKind, ok bool) {
	switch {
	case errors.Is(err, unix.ENETUNREACH), errors.Is(err, unix.EADDRNOTAVAIL), errors.Is(err, unix.ENETDOWN), errors.Is(err, unix.EAFNOSUPPORT):
		return errorNet, true
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.EHOSTDOWN), errors.Is(err, unix.EINVAL):
		return errorHost, true
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return errorAdmin, true
	case errors.Is(err, unix.ECONNREFUSED):
		return errorPort, true
	}
	return 0, false
}
