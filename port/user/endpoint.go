package user

import (
	"net/netip"
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"github.com/vhostd/vhostd/virtio"
)

// gsoMax is the longest packet that the stack makes: with its Ethernet header it must be a frame.
const gsoMax = 65435

// link joins the stack and the port. It implements [stack.LinkEndpoint] without a link layer of its own: where guests are is the port's
// knowledge.
type link struct {
	port       *Port
	dispatcher atomic.Pointer[stack.NetworkDispatcher]
}

var (
	_ stack.LinkEndpoint = (*link)(nil)
	_ stack.GSOEndpoint  = (*link)(nil)
)

// inject hands a packet from a guest to the stack. The caller keeps its reference.
func (l *link) inject(protocol tcpip.NetworkProtocolNumber, pkt *stack.PacketBuffer) {
	if d := l.dispatcher.Load(); d != nil {
		(*d).DeliverNetworkPacket(protocol, pkt)
	}
}

// WritePackets is called under locks of the stack and never waits: a full ring is an error, by which the stack knows of the loss.
func (l *link) WritePackets(list stack.PacketBufferList) (n int, err tcpip.Error) {
	err = &tcpip.ErrAborted{} // unless it comes to another end
	defer l.port.contain()
	for _, pkt := range list.AsSlice() {
		if r := l.write(pkt); r != accepted {
			return n, &tcpip.ErrNoBufferSpace{}
		}
		n++
	}
	return n, nil
}

func (l *link) write(pkt *stack.PacketBuffer) reason {
	p := l.port
	network := pkt.NetworkHeader().Slice()
	var dst netip.Addr
	etherType := uint16(etherIPv4)
	if pkt.NetworkProtocolNumber == header.IPv4ProtocolNumber {
		dst = netip.AddrFrom4([4]byte(network[16:20]))
	} else {
		dst, etherType = netip.AddrFrom16([16]byte(network[24:40])), etherIPv6
	}
	mac, ok := p.neighbors.lookup(dst)
	if !ok {
		p.lost.add(unknown)
		p.ask(dst)
		return unknown
	}
	f := outFrame{pkt: pkt.IncRef()}
	if gso := &pkt.GSOOptions; gso.Type != stack.GSONone {
		f.hdr.HdrLen = uint16(virtio.EthernetHdrLen + pkt.HeaderSize())
		if gso.NeedsCsum {
			f.hdr.Flags = virtio.HdrFNeedsCsum
			f.hdr.CsumStart, f.hdr.CsumOffset = virtio.EthernetHdrLen+gso.L3HdrLen, gso.CsumOffset
		}
		if pkt.Data().Size() > int(gso.MSS) {
			f.hdr.GSOSize = gso.MSS
			if f.hdr.GSOType = virtio.GSOTCPv4; gso.Type == stack.GSOTCPv6 {
				f.hdr.GSOType = virtio.GSOTCPv6
			}
		} else {
			f.hdr.HdrLen = 0
		}
	}
	p.frame(mac, etherType, &f)
	return p.deliver(&f, packetHash(network, pkt.TransportHeader().Slice()))
}

// packetHash is flowHash for headers that lie apart.
func packetHash(network, transport []byte) uint32 {
	var b [ipv6Len + 4]byte
	n := copy(b[:], network)
	copy(b[min(n, ipv6Len):], transport)
	return flowHash(b[:])
}

// MTU implements [stack.LinkEndpoint], as the methods below do.
func (l *link) MTU() uint32 { return uint32(l.port.MTU()) }

// SetMTU does nothing: the port's MTU is set by control.
func (*link) SetMTU(uint32) {}

// MaxHeaderLength is that of the link layer, which is put in front elsewhere.
func (*link) MaxHeaderLength() uint16 { return 0 }

// LinkAddress is none.
func (*link) LinkAddress() tcpip.LinkAddress { return "" }

// SetLinkAddress does nothing.
func (*link) SetLinkAddress(tcpip.LinkAddress) {}

// Capabilities say that received checksums need no look, because the port has looked; outgoing checksums are finished by the stack or
// marked by GSO, since nothing else would mark them.
func (*link) Capabilities() stack.LinkEndpointCapabilities {
	return stack.CapabilityRXChecksumOffload
}

// GSOMaxSize is the longest packet.
func (*link) GSOMaxSize() uint32 { return gsoMax }

// SupportedGSO says that the guest, or the device for it, segments.
func (*link) SupportedGSO() stack.SupportedGSO { return stack.HostGSOSupported }

// Attach keeps the stack's side; nil detaches.
func (l *link) Attach(d stack.NetworkDispatcher) {
	if d == nil {
		l.dispatcher.Store(nil)
		return
	}
	l.dispatcher.Store(&d)
}

// IsAttached implements [stack.LinkEndpoint].
func (l *link) IsAttached() bool { return l.dispatcher.Load() != nil }

// Wait has nothing to wait for.
func (*link) Wait() {}

// ARPHardwareType is that of links without addresses.
func (*link) ARPHardwareType() header.ARPHardwareType { return header.ARPHardwareNone }

// AddHeader adds nothing.
func (*link) AddHeader(*stack.PacketBuffer) {}

// ParseHeader has nothing to parse.
func (*link) ParseHeader(*stack.PacketBuffer) bool { return true }

// Close has nothing to close.
func (*link) Close() {}

// SetOnCloseAction does nothing.
func (*link) SetOnCloseAction(func()) {}
