package user

import (
	"errors"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/vhostd/vhostd/virtio"
)

// Echo messages (RFC 792, RFC 4443).
const (
	echoReply4   = 0
	echoRequest4 = 8
	echoRequest6 = 128
	echoReply6   = 129
)

// pingState knows whether the host lets us send echo requests.
type pingState struct{ told sync.Once }

// forbidden says whether err means that the process may not send echo requests, and logs it once.
func (s *pingState) forbidden(p *Port, err error) bool {
	if !errors.Is(err, unix.EACCES) && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EPROTONOSUPPORT) {
		return false
	}
	s.told.Do(func() {
		p.log.Warn("guests cannot ping: the host forbids echo requests to this user; put its group into the sysctl net.ipv4.ping_group_range",
			"error", err)
	})
	return true
}

// icmp takes a message that is no part of neighbor discovery: echo requests, and errors about what the stack has sent.
func (q *queue) icmp(f *inFrame) reason {
	p := q.port
	kind := f.head[f.l4]
	isError := f.proto == protoICMP && (kind == 3 || kind == 11 || kind == 12) || f.proto == protoICMPv6 && kind >= 1 && kind <= 4
	switch {
	case isError:
		return q.toStack(f, f.l4+icmpLen)
	case !f.isEcho() || f.head[f.l4+1] != 0:
		return otherProtocol
	}
	message := f.bytes(f.l4, f.end, &q.gathered)
	return p.echo(f.src, f.dst, message, f.ttl-1)
}

// echo answers for the gateway and sends other requests into the host's network. It may change the message.
func (p *Port) echo(src, dst netip.Addr, message []byte, ttl uint8) reason {
	if p.ours(dst) {
		reply := append([]byte(nil), message...)
		if reply[0] = echoReply4; src.Is6() {
			reply[0] = echoReply6
		}
		return p.sendEcho(dst, src, reply)
	}
	proto := uint8(protoICMP)
	if src.Is6() {
		proto = protoICMPv6
	}
	ident := port16(message[4:])
	return p.datagram(flowKey{proto, netip.AddrPortFrom(src, ident), netip.AddrPortFrom(dst, 0)}, message, ttl)
}

// handleEcho takes ICMP messages from the stack: echo requests that came in pieces. The stack answers none itself, whomever they were for.
func (p *Port) handleEcho(id stack.TransportEndpointID, pkt *stack.PacketBuffer) (handled bool) {
	handled = true
	defer p.contain()
	src, dst := netipOf(id.RemoteAddress), netipOf(id.LocalAddress)
	head := pkt.TransportHeader().Slice()
	if len(head) < icmpLen || head[1] != 0 || src.Is4() && head[0] != echoRequest4 || src.Is6() && head[0] != echoRequest6 {
		return true
	}
	view := pkt.Data().AsRange().ToView()
	message := append(append(make([]byte, 0, virtio.MaxFrame), head[:icmpLen]...), view.AsSlice()...)
	view.Release()
	if r := p.echo(src, dst, message, hopsOf(pkt)); r != accepted {
		p.lost.add(r)
	}
	return true
}
