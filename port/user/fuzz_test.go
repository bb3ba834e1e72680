package user

import (
	"bytes"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/insomniacslk/dhcp/dhcpv4"
	"github.com/insomniacslk/dhcp/dhcpv6"
	mdns "github.com/miekg/dns"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

// repair is the bit of FuzzFrames' flags that has checksums completed, so that what lies behind them is reached.
const repair = 2

// FuzzFrames sends arbitrary frames with arbitrary marks, cut into arbitrary pieces. Nothing may panic or leak.
func FuzzFrames(f *testing.F) {
	seeds := fuzzSeeds()
	for _, s := range seeds {
		f.Add(s, byte(0), byte(0), uint16(0), uint16(0), uint16(0), uint16(0))
		f.Add(s, byte(1), byte(1), uint16(1460), uint16(34), uint16(16), uint16(14))
		f.Add(s, byte(repair), byte(0), uint16(0), uint16(0), uint16(0), uint16(60))
	}
	// No resolver of the host is asked.
	resolvers := filepath.Join(f.TempDir(), "resolv.conf")
	if err := os.WriteFile(resolvers, nil, 0o600); err != nil {
		f.Fatal(err)
	}
	// Everything is denied, so that no frame reaches the network of whoever runs this.
	p, err := NewWith(Options{Logger: quiet, Hooks: Hooks{Policy: denyAll{}}}, Services{ResolvConf: resolvers})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { p.Close() })
	rig := porttest.NewRig(f)
	q := rig.Open(f, p, 0)
	var in [port.MaxBatch]packet.Packet
	f.Fuzz(func(t *testing.T, frame []byte, flags, gso byte, size, start, offset, piece uint16) {
		if len(frame) == 0 || len(frame) > virtio.MaxFrame {
			return
		}
		hdr := virtio.NetHdr{Flags: flags & 1, GSOType: gso, GSOSize: size, CsumStart: start, CsumOffset: offset}
		if flags&repair != 0 {
			frame = repaired(frame, &hdr)
		}
		pkts := []packet.Packet{rig.Packet(t, frame, max(int(piece)%4096, len(frame)/(packet.MaxFrags-1)+1))}
		pkts[0].Hdr = hdr
		if q.Send(pkts) != 1 {
			t.Fatal("a frame was refused")
		}
		for n := q.Recv(in[:]); n > 0; n = q.Recv(in[:]) {
			for i := range in[:n] {
				if !in[i].LenCheck() {
					t.Fatal("malformed packet")
				}
			}
			rig.Release(in[:n])
		}
		if s := p.Status(); !s.Up {
			t.Fatal(s.Detail)
		}
	})
}

// repaired is the frame with the checksum of its IPv4 header put right and that of the transport left to the receiver.
func repaired(frame []byte, hdr *virtio.NetHdr) []byte {
	frame = bytes.Clone(frame)
	l4, proto := virtio.EthernetHdrLen+ipv4Len, 23
	switch {
	case len(frame) < virtio.EthernetHdrLen+ipv6Len:
		return frame
	case port16(frame[12:]) == etherIPv4:
		putSum4(frame[virtio.EthernetHdrLen:])
	default:
		l4, proto = virtio.EthernetHdrLen+ipv6Len, 20
	}
	offset := map[byte]uint16{protoTCP: 16, protoUDP: udpChecksumOffset, protoICMP: icmpChecksumOffset, protoICMPv6: icmpChecksumOffset}
	if at, ok := offset[frame[proto]]; ok {
		hdr.Flags, hdr.CsumStart, hdr.CsumOffset = virtio.HdrFNeedsCsum, uint16(l4), at
	}
	return frame
}

type denyAll struct{}

func (denyAll) Check(netip.Addr, netip.AddrPort) (bool, string) { return false, "test" }

// fuzzSeeds are frames of every kind, with checksums that are right.
func fuzzSeeds() (list [][]byte) {
	o, _ := Options{}.Complete()
	p := &Port{opts: o, mac: o.mac(), link6: linkLocal(o.mac())}
	g := &guest{v4: o.Guest, v6: nth(o.Subnet6, 0x100), card: &card{mac: [6]byte{2, 0, 0, 0, 0, 1}, port: p}}
	for _, dst := range []netip.Addr{o.Gateway, o.Gateway6, netip.MustParseAddr(live4), netip.MustParseAddr(live6)} {
		list = append(list, g.pingFrame(dst, 1, 2, 20, 64), g.pingFrame(dst, 1, 2, 20, 1))
		for _, proto := range []uint8{protoTCP, protoUDP, protoICMP, protoICMPv6, protoFragment, 0} {
			f := g.pingFrame(dst, 1, 2, 60, 64)
			if dst.Is4() {
				f[23] = proto
				putSum4(f[14:34])
			} else {
				f[20] = proto
			}
			list = append(list, f)
		}
	}
	arp := make([]byte, 42)
	copy(arp, []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2, 0, 0, 0, 0, 1, 8, 6, 0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 1, 10, 0, 2, 15})
	copy(arp[38:], []byte{10, 0, 2, 2})
	return append(append(list, arp, []byte{1}), g.serviceSeeds(o)...)
}

// serviceSeeds are frames to what the gateway itself serves: neighbor discovery, DHCP and DNS, and datagrams in pieces.
func (g *guest) serviceSeeds(o Options) (list [][]byte) {
	p, self := g.card.port, g.v6.As16()
	for _, kind := range []byte{routerSolicit, neighborSolicit, neighborAdvert} {
		b := append([]byte{kind, 0, 0, 0, 0, 0, 0, 0}, self[:]...)
		if kind == neighborSolicit {
			gateway := o.Gateway6.As16()
			copy(b[8:], gateway[:])
		}
		f := g.transportFrame(linkLocal(g.card.mac), allNodes, protoICMPv6, append(b, optionSource, 1, 2, 0, 0, 0, 0, 1), false)
		f[virtio.EthernetHdrLen+7] = ndpHops
		list = append(list, f)
	}
	discover, _ := dhcpv4.NewDiscovery(g.card.mac[:])
	solicit, _ := dhcpv6.NewSolicit(g.card.mac[:])
	question, _ := new(mdns.Msg).SetQuestion("host.vhostd.internal.", mdns.TypeA).Pack()
	for _, gateway := range []netip.Addr{o.Gateway, o.Gateway6} {
		at := netip.AddrPortFrom(gateway, dnsPort)
		list = append(list, g.datagramFrame(1000, at, question), g.segment(1000, at, 1, flagSYN), g.segment(1000, at, 2, flagACK))
		list = append(list, g.segment(1000, at, 2, flagRST))
		list = append(list, g.pieces(1, at, g.datagram(1000, at, make([]byte, 3000)))...)
	}
	list = append(list, g.datagramFrame(dhcpClientPort, netip.AddrPortFrom(o.Gateway, dhcpServerPort), discover.ToBytes()))
	g.v6 = linkLocal(g.card.mac)
	return append(list, g.datagramFrame(dhcp6ClientPort, netip.AddrPortFrom(p.link6, dhcp6ServerPort), solicit.ToBytes()))
}

// TestNAT23_CraftedPackets are lengths and offsets that contradict each other.
func TestNAT23_CraftedPackets(t *testing.T) {
	p := newPort(t, Options{})
	rig := porttest.NewRig(t)
	q := rig.Open(t, p, 0)
	try := func(name string, frame []byte, hdr virtio.NetHdr) {
		before := porttest.DropCount(q, "")
		pkts := []packet.Packet{rig.Packet(t, frame, 0)}
		pkts[0].Hdr = hdr
		q.Send(pkts)
		if porttest.DropCount(q, "") != before+1 {
			t.Errorf("%s: not dropped and counted", name)
		}
	}
	edit := func(v6 bool, change func(ip []byte)) []byte {
		dst := p.opts.Gateway
		if v6 {
			dst = p.opts.Gateway6
		}
		g := &guest{v4: p.opts.Guest, v6: nth(p.opts.Subnet6, 0x100), card: &card{mac: [6]byte{2, 0, 0, 0, 0, 1}, port: p}}
		f := g.pingFrame(dst, 1, 2, 60, 64)
		change(f[14:])
		if !v6 {
			putSum4(f[14:34])
		}
		return f
	}
	for name, change := range map[string]func(ip []byte){
		"version 5":               func(b []byte) { b[0] = 0x55 },
		"IHL 4":                   func(b []byte) { b[0] = 0x44 },
		"IHL 15":                  func(b []byte) { b[0] = 0x4f },
		"total length 19":         func(b []byte) { b[2], b[3] = 0, 19 },
		"total length beyond":     func(b []byte) { b[2], b[3] = 0xff, 0xff },
		"UDP length 0":            func(b []byte) { b[9] = protoUDP; b[24], b[25] = 0, 0 },
		"UDP length 7":            func(b []byte) { b[9] = protoUDP; b[24], b[25] = 0, 7 },
		"UDP longer than IP":      func(b []byte) { b[9] = protoUDP; b[24], b[25] = 1, 0 },
		"TCP data offset 0":       func(b []byte) { b[9] = protoTCP; b[32] = 0 },
		"TCP data offset 15":      func(b []byte) { b[9] = protoTCP; b[32] = 0xf0; b[2], b[3] = 0, 60 },
		"ICMPv6 over IPv4":        func(b []byte) { b[9] = protoICMPv6 },
		"source is the gateway":   func(b []byte) { copy(b[12:16], b[16:20]) },
		"source is the loopback":  func(b []byte) { copy(b[12:], []byte{127, 0, 0, 1}) },
		"to the loopback":         func(b []byte) { copy(b[16:], []byte{127, 0, 0, 1}) },
		"to 0.0.0.0":              func(b []byte) { copy(b[16:], []byte{0, 0, 0, 0}) },
		"to a group":              func(b []byte) { copy(b[16:], []byte{224, 0, 0, 1}) },
		"to the subnet broadcast": func(b []byte) { copy(b[16:], []byte{10, 0, 2, 255}) },
		"GRE":                     func(b []byte) { b[9] = 47 },
	} {
		try(name, edit(false, change), virtio.NetHdr{})
	}
	for name, change := range map[string]func(ip []byte){
		"version 4":           func(b []byte) { b[0] = 0x40 },
		"payload beyond":      func(b []byte) { b[4], b[5] = 0xff, 0xff },
		"payload 3":           func(b []byte) { b[4], b[5] = 0, 3 },
		"hop-by-hop":          func(b []byte) { b[6] = 0 },
		"routing header":      func(b []byte) { b[6] = 43 },
		"fragment of TCP":     func(b []byte) { b[6] = protoFragment; b[40] = protoTCP },
		"to ::1":              func(b []byte) { clear(b[24:40]); b[39] = 1 },
		"to ::":               func(b []byte) { clear(b[24:40]) },
		"to a mapped address": func(b []byte) { clear(b[24:34]); copy(b[34:], []byte{0xff, 0xff, 127, 0, 0, 1}) },
		"ND from afar":        func(b []byte) { b[40] = neighborSolicit },
	} {
		try("IPv6, "+name, edit(true, change), virtio.NetHdr{})
	}
	try("checksum beyond", edit(false, func(b []byte) { b[9] = protoUDP; b[24], b[25] = 0, 20 }), virtio.NetHdr{Flags: 1, CsumStart: 60000, CsumOffset: 60000})
	if !p.Status().Up {
		t.Error(p.Status().Detail)
	}
}
