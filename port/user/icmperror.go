package user

import (
	"encoding/binary"
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"

	"github.com/vhostd/vhostd/virtio"
)

// errorKind is what an ICMP error tells.
type errorKind uint8

const (
	errorNet   errorKind = iota // no route
	errorHost                   // the address is not there
	errorPort                   // nobody listens
	errorAdmin                  // forbidden
	errorTTL                    // the packet has passed too many routers
)

// message is type and code of an error (RFC 792, RFC 1812 section 5.2.7, RFC 4443).
type message struct{ kind, code uint8 }

var (
	messages4 = [...]message{errorNet: {3, 0}, errorHost: {3, 1}, errorPort: {3, 3}, errorAdmin: {3, 13}, errorTTL: {11, 0}}
	messages6 = [...]message{errorNet: {1, 0}, errorHost: {1, 3}, errorPort: {1, 4}, errorAdmin: {1, 1}, errorTTL: {3, 0}}
)

// gatewayOf is our address in the protocol of a.
func (p *Port) gatewayOf(a netip.Addr) netip.Addr {
	if a.Is4() {
		return p.opts.Gateway
	}
	return p.opts.Gateway6
}

// sendError tells a guest, in the name of from, what became of its packet, of which original is the start: the IP header and eight bytes
// at least. An invalid from is the gateway.
func (p *Port) sendError(m message, info uint32, from, guest netip.Addr, original []byte) reason {
	if !from.IsValid() || from.Is4() != guest.Is4() {
		from = p.gatewayOf(guest)
	}
	var head [icmpLen]byte
	head[0], head[1] = m.kind, m.code
	binary.BigEndian.PutUint32(head[4:], info)
	sum, proto := uint16(0), uint8(protoICMP)
	if guest.Is6() {
		proto = protoICMPv6
		sum = pseudoSum(proto, from, guest, icmpLen+len(original))
	}
	binary.BigEndian.PutUint16(head[2:], ^checksum.Checksum(original, checksum.Checksum(head[:], sum)))
	return p.sendIP(from, guest, proto, head[:], original, virtio.NetHdr{})
}

// explain is sendError for one of the kinds.
func (p *Port) explain(kind errorKind, guest netip.Addr, original []byte) {
	m := messages4[kind]
	if guest.Is6() {
		m = messages6[kind]
	}
	p.sendError(m, 0, netip.Addr{}, guest, original)
}

// unreachable tells the sender of a frame why it does not arrive. Errors and later pieces are not answered (RFC 1122 section 3.2.2).
func (q *queue) unreachable(f *inFrame, kind errorKind) reason {
	why := badDestination
	if kind == errorAdmin {
		why = policyRefused
	}
	if f.fragment || f.n < f.l4+8 || f.isICMP() && !f.isEcho() || f.src.IsUnspecified() {
		return why
	}
	q.port.explain(kind, f.src, f.head[virtio.EthernetHdrLen:min(f.n, f.end)])
	return why
}

func (f *inFrame) isICMP() bool { return f.proto == protoICMP || f.proto == protoICMPv6 }

func (f *inFrame) isEcho() bool {
	return f.proto == protoICMP && f.head[f.l4] == echoRequest4 || f.proto == protoICMPv6 && f.head[f.l4] == echoRequest6
}

// packetStart makes the start of a packet that a guest has sent, for errors that come when it is gone: an IP header and the eight bytes of
// the transport header.
func packetStart(src, dst netip.Addr, proto uint8, transport [8]byte, length int) []byte {
	v := newIP(src, dst, proto, length, false)
	defer v.Release()
	_, _ = v.Write(transport[:])
	return append([]byte(nil), v.AsSlice()...)
}
