package user

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Layout of struct sock_extended_err (include/uapi/linux/errqueue.h), behind which the sockaddr of whoever told of the error follows.
const (
	extendedErrLen = 16
	originLocal    = 1
	originICMP     = 2
	originICMP6    = 3
)

// errors tells the guest of the errors that its datagrams met.
func (d *dgram) errors() {
	var oob [512]byte
	buf := make([]byte, 64) // the start of what was sent
	for range burst {
		n, control, err := d.nextError(buf, oob[:])
		if err != nil {
			return
		}
		list, err := unix.ParseSocketControlMessage(control)
		if err != nil {
			continue
		}
		for _, m := range list {
			if m.Header.Level == unix.IPPROTO_IP && m.Header.Type == unix.IP_RECVERR ||
				m.Header.Level == unix.IPPROTO_IPV6 && m.Header.Type == unix.IPV6_RECVERR {
				d.tell(m.Data, buf[:n])
			}
		}
	}
}

func (d *dgram) nextError(buf, oob []byte) (n int, control []byte, err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return 0, nil, unix.EBADF
	}
	n, k, _, _, err := unix.Recvmsg(d.fd, buf, oob, unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT)
	if err != nil {
		_, _ = unix.GetsockoptInt(d.fd, unix.SOL_SOCKET, unix.SO_ERROR) // what the queue had no room for
		return 0, nil, err
	}
	return n, oob[:k], nil
}

// tell passes one error on. sent is the start of the payload, or of the echo request, that met it.
func (d *dgram) tell(b, sent []byte) {
	if len(b) < extendedErrLen {
		return
	}
	guest, seq := d.key.guest.Addr(), uint16(0)
	if d.key.isEcho() {
		seq = sequence(sent)
	}
	original := d.key.start(len(sent), seq)
	switch origin := b[4]; {
	case origin == originICMP && guest.Is4(), origin == originICMP6 && guest.Is6():
		d.port.sendError(message{b[5], b[6]}, binary.NativeEndian.Uint32(b[8:]), offender(b[extendedErrLen:]), guest, original)
	case origin == originLocal:
		if kind, ok := errorFor(unix.Errno(binary.NativeEndian.Uint32(b))); ok {
			d.port.explain(kind, guest, original)
		}
	}
}

// offender is the address in a sockaddr, invalid if it is one that no guest should see.
func offender(b []byte) (a netip.Addr) {
	if len(b) < 8 {
		return a
	}
	switch family := binary.NativeEndian.Uint16(b); {
	case family == unix.AF_INET:
		a = netip.AddrFrom4([4]byte(b[4:8]))
	case family == unix.AF_INET6 && len(b) >= 24:
		a = netip.AddrFrom16([16]byte(b[8:24])).Unmap()
	}
	if a.IsLoopback() || a.IsUnspecified() {
		return netip.Addr{}
	}
	return a
}
