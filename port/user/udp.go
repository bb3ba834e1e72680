package user

import (
	"net/netip"

	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"
)

// udpOf is the datagram of a frame: its flow, its payload, which stays the frame's or the queue's, and the hops that it has left.
func (q *queue) udpOf(f *inFrame) (key flowKey, payload []byte, ttl uint8) {
	b := f.head[f.l4:]
	key = flowKey{protoUDP, netip.AddrPortFrom(f.src, port16(b)), netip.AddrPortFrom(f.dst, port16(b[2:]))}
	return key, f.bytes(f.l4+udpLen, f.end, &q.gathered), f.ttl - 1
}

// serving53 says whether a datagram for the gateway is for our DNS.
func (p *Port) serving53(f *inFrame) bool {
	return p.opts.DNS != nil && port16(f.head[f.l4+2:]) == dnsPort
}

// handleUDP takes the datagrams that no endpoint of the stack wants: those that came in pieces. False has the stack answer that nobody
// listens.
func (p *Port) handleUDP(id stack.TransportEndpointID, pkt *stack.PacketBuffer) (handled bool) {
	handled = true
	defer p.contain()
	src, dst := addrPort(id.RemoteAddress, id.RemotePort), addrPort(id.LocalAddress, id.LocalPort)
	h := header.UDP(pkt.TransportHeader().Slice())
	if len(h) < udpLen || dst.Port() == 0 {
		return true
	}
	body := pkt.Data()
	length := int(h.Length()) - udpLen
	if length < 0 || length > body.Size() {
		p.lost.add(badHeader)
		return true
	}
	payload := make([]byte, body.Size())
	view := body.AsRange().ToView()
	copy(payload, view.AsSlice())
	view.Release()
	payload = payload[:length]
	if h.Checksum() != 0 && checksum.Checksum(payload, checksum.Checksum(h, pseudoSum(protoUDP, src.Addr(), dst.Addr(), udpLen+length))) != 0xffff {
		p.lost.add(badChecksum)
		return true
	}
	if r := p.datagram(flowKey{protoUDP, src, dst}, payload, hopsOf(pkt)); r != accepted {
		p.lost.add(r)
	}
	return true
}

// hopsOf is what is left of a packet's hop limit behind this router.
func hopsOf(pkt *stack.PacketBuffer) uint8 {
	b := pkt.NetworkHeader().Slice()
	at := 8
	if pkt.NetworkProtocolNumber == header.IPv6ProtocolNumber {
		at = 7
	}
	if len(b) <= at || b[at] == 0 {
		return 1
	}
	return b[at] - 1
}
