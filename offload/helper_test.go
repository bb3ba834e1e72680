package offload_test

import (
	"bytes"
	"encoding/binary"
	"net"
	"testing"

	"github.com/gopacket/gopacket"
	"github.com/gopacket/gopacket/layers"

	"github.com/vhostd/vhostd/offload"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/virtio"
)

const guestAll = virtio.FNetGuestCSum | virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6 | virtio.FNetGuestECN |
	virtio.FNetGuestUSO4 | virtio.FNetGuestUSO6

// fataler is what testing.TB and rapid.T have in common.
type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}

// rig is a Finisher on an arena, with an allocator that can run dry.
type rig struct {
	arena *pagemem.Arena
	left  int // buffers that the allocator still has
	page  pagemem.PageID
	used  uint32 // bytes of page
	live  bool
	f     offload.Finisher
	out   []packet.Packet
}

func newRig(t testing.TB) *rig {
	t.Helper()
	a, err := pagemem.NewArena(pagemem.Config{Bytes: 16 << 20})
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{arena: a, left: 1 << 30, out: make([]packet.Packet, offload.MaxSegments)}
	r.f = offload.Finisher{Arena: a, Alloc: r}
	t.Cleanup(func() {
		r.settled(t)
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// AllocBuf packs buffers into pages as a fragment cache does.
func (r *rig) AllocBuf(size uint32) (packet.Frag, bool) {
	if size == 0 || size > offload.BufSize || r.left == 0 {
		return packet.Frag{}, false
	}
	r.left--
	if !r.live || r.used+size > pagemem.PageSize {
		r.dropPage()
		if r.page, r.live = r.arena.Alloc(0, pagemem.NoReserve); !r.live {
			return packet.Frag{}, false
		}
		r.used = 0
	}
	f := packet.Frag{Addr: r.arena.Addr(r.page) + uintptr(r.used), Len: size, Page: r.page}
	r.arena.Retain(r.page, 1)
	r.used += size
	return f, true
}

func (r *rig) dropPage() {
	if r.live {
		r.arena.Unref(r.page, 1)
		r.live = false
	}
}

// settled verifies that nothing holds a page any more.
func (r *rig) settled(t fataler) {
	t.Helper()
	r.dropPage()
	if s := r.arena.Stats(); s.InUse != 0 || s.Misuse != 0 {
		t.Fatalf("%d pages in use, %d references dropped that nobody held", s.InUse, s.Misuse)
	}
}

// packet puts frame into chunks, with a fragment ending at each cut.
func (r *rig) packet(t fataler, h virtio.NetHdr, frame []byte, cuts ...int) packet.Packet {
	t.Helper()
	p := packet.Packet{Hdr: h}
	for start := 0; start < len(frame); {
		end := min(len(frame), start+pagemem.ChunkSize)
		for len(cuts) > 0 && cuts[0] <= start {
			cuts = cuts[1:]
		}
		if len(cuts) > 0 {
			end = min(end, cuts[0])
		}
		page, ok := r.arena.Alloc(pagemem.ChunkOrder, pagemem.NoReserve)
		if !ok {
			t.Fatalf("the arena is empty")
		}
		f := packet.Frag{Addr: r.arena.Addr(page), Len: uint32(end - start), Page: page}
		copy(f.Bytes(), frame[start:end])
		if !p.Append(f) {
			t.Fatalf("too many fragments")
		}
		start = end
	}
	return p
}

// share makes a second holder of p's fragments.
func (r *rig) share(p *packet.Packet) packet.Packet {
	for _, f := range p.Frags[:p.NFrag] {
		r.arena.Retain(f.Page, 1)
	}
	return *p
}

// finish passes a shared packet through Finish and returns the frames that came
// out. It verifies that the other holder's bytes did not change, that every
// frame is well formed and carries no marks that rx may not see, and releases
// everything.
func (r *rig) finish(t fataler, p packet.Packet, rx virtio.Features) ([][]byte, []virtio.NetHdr, offload.Reason) {
	t.Helper()
	other := r.share(&p)
	before := gather(&other)
	n, reason := r.f.Finish(&p, rx, r.out)
	if p.NFrag != 0 {
		t.Fatalf("Finish left fragments in its input")
	}
	if (n == 0) != (reason != offload.OK) {
		t.Fatalf("%d frames, reason %v", n, reason)
	}
	var frames [][]byte
	var hdrs []virtio.NetHdr
	for i := range r.out[:n] {
		q := &r.out[i]
		if !q.LenCheck() {
			t.Fatalf("frame %d is malformed: length %d, %d fragments", i, q.Len, q.NFrag)
		}
		if offload.Needs(q, rx) {
			t.Fatalf("frame %d still has marks: %+v", i, q.Hdr)
		}
		frames = append(frames, gather(q))
		hdrs = append(hdrs, q.Hdr)
	}
	packet.Release(r.arena, r.out[:n], 0)
	if !bytes.Equal(before, gather(&other)) {
		t.Fatalf("a shared fragment was changed")
	}
	other.Release(r.arena, 0)
	return frames, hdrs, reason
}

func gather(p *packet.Packet) []byte {
	b := make([]byte, p.Len)
	return b[:p.CopyTo(b, 0)]
}

// spec describes a frame.
type spec struct {
	v6, udp  bool
	tags     int
	ipOpts   int // bytes: IPv4 options, or IPv6 extension headers
	tcpOpts  int // bytes
	tcpFlags byte
	payload  []byte
}

const (
	flagFIN = 0x01
	flagPSH = 0x08
	flagACK = 0x10
	flagCWR = 0x80
)

var (
	srcMAC = net.HardwareAddr{0x52, 0x54, 0, 0, 0, 1}
	dstMAC = net.HardwareAddr{0x52, 0x54, 0, 0, 0, 2}
)

// build makes the frame with all checksums right.
func (s spec) build(t fataler) []byte {
	t.Helper()
	etherType := layers.EthernetTypeIPv4
	if s.v6 {
		etherType = layers.EthernetTypeIPv6
	}
	proto := layers.IPProtocolTCP
	if s.udp {
		proto = layers.IPProtocolUDP
	}
	stack := s.link(etherType)
	var network gopacket.NetworkLayer
	if s.v6 {
		ip := &layers.IPv6{Version: 6, HopLimit: 64, NextHeader: proto,
			SrcIP: net.ParseIP("fd00::1"), DstIP: net.ParseIP("fd00::2")}
		stack = append(stack, ip)
		if s.ipOpts > 0 {
			ip.NextHeader = layers.IPProtocolIPv6HopByHop
			stack = append(stack, gopacket.Payload(extensions(s.ipOpts, byte(proto))))
		}
		network = ip
	} else {
		ip := &layers.IPv4{Version: 4, TTL: 64, Protocol: proto, Id: 0xfffe, Flags: layers.IPv4DontFragment,
			SrcIP: net.IPv4(10, 0, 0, 1), DstIP: net.IPv4(10, 0, 0, 2)}
		for range s.ipOpts {
			ip.Options = append(ip.Options, layers.IPv4Option{OptionType: 1, OptionLength: 1})
		}
		stack = append(stack, ip)
		network = ip
	}
	stack = append(stack, s.transport(network), gopacket.Payload(s.payload))
	buf := gopacket.NewSerializeBuffer()
	if err := gopacket.SerializeLayers(buf, gopacket.SerializeOptions{FixLengths: true, ComputeChecksums: true}, stack...); err != nil {
		t.Fatalf("building %+v: %v", s, err)
	}
	return buf.Bytes()[:s.end()+len(s.payload)] // without padding
}

func (s spec) link(etherType layers.EthernetType) []gopacket.SerializableLayer {
	eth := &layers.Ethernet{SrcMAC: srcMAC, DstMAC: dstMAC, EthernetType: etherType}
	stack := []gopacket.SerializableLayer{eth}
	for i := range s.tags {
		tag := &layers.Dot1Q{VLANIdentifier: uint16(100 + i), Type: etherType}
		if i < s.tags-1 {
			tag.Type = layers.EthernetTypeDot1Q
		}
		stack = append(stack, tag)
	}
	switch s.tags {
	case 1:
		eth.EthernetType = layers.EthernetTypeDot1Q
	case 2:
		eth.EthernetType = layers.EthernetTypeQinQ
	}
	return stack
}

func (s spec) transport(network gopacket.NetworkLayer) gopacket.SerializableLayer {
	if s.udp {
		udp := &layers.UDP{SrcPort: 5001, DstPort: 5002}
		_ = udp.SetNetworkLayerForChecksum(network)
		return udp
	}
	f := s.tcpFlags
	tcp := &layers.TCP{SrcPort: 5001, DstPort: 5002, Seq: 0xfffff000, Ack: 7, Window: 1000,
		FIN: f&flagFIN != 0, PSH: f&flagPSH != 0, ACK: f&flagACK != 0, CWR: f&flagCWR != 0}
	for range s.tcpOpts {
		tcp.Options = append(tcp.Options, layers.TCPOption{OptionType: layers.TCPOptionKindNop, OptionLength: 1})
	}
	_ = tcp.SetNetworkLayerForChecksum(network)
	return tcp
}

// extensions makes n bytes (a multiple of 8) of a hop-by-hop header, followed by
// destination options when there are more than 8.
func extensions(n int, next byte) []byte {
	pad := func(b []byte) {
		b[2], b[3] = 1, byte(len(b)-4) // PadN
	}
	b := make([]byte, n)
	b[0] = next
	if n > 8 {
		b[0] = 60
		b[8], b[9] = next, byte(n/8-2)
		pad(b[8:])
	}
	pad(b[:8])
	return b
}

func (s spec) l3() int { return 14 + 4*s.tags }

func (s spec) l4() int {
	if s.v6 {
		return s.l3() + 40 + s.ipOpts
	}
	return s.l3() + 20 + (s.ipOpts+3)&^3
}

func (s spec) end() int {
	if s.udp {
		return s.l4() + 8
	}
	return s.l4() + 20 + (s.tcpOpts+3)&^3
}

func (s spec) csumOffset() int {
	if s.udp {
		return 6
	}
	return 16
}

// partial makes the frame as a sender hands it over that leaves the checksum to
// the device: the field holds the sum over the pseudo header.
func (s spec) partial(t fataler) ([]byte, virtio.NetHdr) {
	t.Helper()
	frame := s.build(t)
	field := frame[s.l4()+s.csumOffset():]
	binary.BigEndian.PutUint16(field, s.pseudo(frame))
	return frame, virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: uint16(s.l4()), CsumOffset: uint16(s.csumOffset())}
}

// pseudo is the pseudo-header sum, computed word by word.
func (s spec) pseudo(frame []byte) uint16 {
	addrs := frame[s.l3()+12 : s.l3()+20]
	if s.v6 {
		addrs = frame[s.l3()+8 : s.l3()+40]
	}
	proto := uint32(6)
	if s.udp {
		proto = 17
	}
	sum := proto + uint32(len(frame)-s.l4())
	return ^gopacket.FoldChecksum(gopacket.ComputeChecksum(addrs, sum))
}

// gso makes the frame with a request to segment it.
func (s spec) gso(t fataler, size int) ([]byte, virtio.NetHdr) {
	t.Helper()
	frame, h := s.partial(t)
	h.HdrLen = uint16(s.end())
	h.GSOSize = uint16(size)
	switch {
	case s.udp:
		h.GSOType = virtio.GSOUDPL4
	case s.v6:
		h.GSOType = virtio.GSOTCPv6
	default:
		h.GSOType = virtio.GSOTCPv4
	}
	if s.tcpFlags&flagCWR != 0 {
		h.GSOType |= virtio.GSOECN
	}
	return frame, h
}

// verify decodes a frame and fails unless every length and checksum is right.
func verify(t fataler, frame []byte) gopacket.Packet {
	t.Helper()
	p := gopacket.NewPacket(frame, layers.LayerTypeEthernet, gopacket.Default)
	if e := p.ErrorLayer(); e != nil {
		t.Fatalf("decoding: %v\n%x", e.Error(), frame)
	}
	if p.Metadata().Truncated {
		t.Fatalf("a length field exceeds the frame\n%x", frame)
	}
	if l, ok := p.TransportLayer().(interface {
		SetNetworkLayerForChecksum(gopacket.NetworkLayer) error
	}); ok {
		_ = l.SetNetworkLayerForChecksum(p.NetworkLayer())
	}
	err, bad := p.VerifyChecksums()
	if err != nil {
		t.Fatalf("verifying: %v", err)
	}
	for _, m := range bad {
		t.Fatalf("checksum of %v is %#x, want %#x", m.Layer.LayerType(), m.Actual, m.Correct)
	}
	return p
}

// pattern is n bytes that differ from place to place.
func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	return b
}
