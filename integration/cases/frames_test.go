package cases

import (
	"bytes"
	"encoding/binary"
	"fmt"

	"github.com/vhostd/vhostd/virtio"
)

// segment describes a TCP segment or UDP datagram in an Ethernet frame, whose checksum is left to whoever finishes it.
type segment struct {
	v6, udp  bool
	tags     int  // VLAN tags
	ext      bool // an IPv6 extension header
	tcpFlags byte
	seq      uint32
	payload  []byte
}

const (
	protoTCP  = 6
	protoUDP  = 17
	protoOpts = 60 // IPv6 destination options
	mss       = 1448
)

func (s segment) String() string {
	return fmt.Sprintf("%s v%d, %d tags, extension %v, %d bytes", map[bool]string{true: "UDP", false: "TCP"}[s.udp],
		map[bool]int{true: 6, false: 4}[s.v6], s.tags, s.ext, len(s.payload))
}

// frame builds it. The checksum field of the transport header, which begins at l4, holds the pseudo-header's sum.
func (s segment) frame() (frame []byte, l4 int) {
	b := []byte{0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1}
	for i := range s.tags {
		tpid := []byte{0x81, 0x00}
		if s.tags == 2 && i == 0 {
			tpid = []byte{0x88, 0xa8}
		}
		b = append(append(b, tpid...), 0, byte(100+i))
	}
	l4len, proto := 20, byte(protoTCP)
	if s.udp {
		l4len, proto = 8, protoUDP
	}
	l4len += len(s.payload)
	var addresses []byte
	if s.v6 {
		b, addresses = s.ipv6(b, proto, l4len)
	} else {
		b, addresses = s.ipv4(b, proto, l4len)
	}
	l4 = len(b)
	pseudo := fold(sum(addresses) + uint32(proto) + uint32(l4len))
	b = binary.BigEndian.AppendUint16(b, 1000)
	b = binary.BigEndian.AppendUint16(b, 2000)
	if s.udp {
		b = binary.BigEndian.AppendUint16(b, uint16(l4len))
		b = binary.BigEndian.AppendUint16(b, pseudo)
	} else {
		b = binary.BigEndian.AppendUint32(b, s.seq)
		b = append(b, 0, 0, 0, 7, 0x50, s.tcpFlags|0x10, 0x10, 0x00)
		b = binary.BigEndian.AppendUint16(b, pseudo)
		b = append(b, 0, 0)
	}
	return append(b, s.payload...), l4
}

func (s segment) ipv4(b []byte, proto byte, l4len int) (packet, addresses []byte) {
	b = append(b, 0x08, 0x00)
	l3 := len(b)
	b = append(b, 0x45, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(20+l4len))
	b = append(b, 0, 1, 0x40, 0, 64, proto, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2)
	binary.BigEndian.PutUint16(b[l3+10:], ^fold(sum(b[l3:])))
	return b, b[l3+12 : l3+20]
}

func (s segment) ipv6(b []byte, proto byte, l4len int) (packet, addresses []byte) {
	b = append(b, 0x86, 0xdd)
	next, payload := proto, l4len
	if s.ext {
		next, payload = protoOpts, l4len+8
	}
	b = append(b, 0x60, 0, 0, 0)
	b = binary.BigEndian.AppendUint16(b, uint16(payload))
	b = append(b, next, 64)
	at := len(b)
	b = append(b, []byte{0: 0xfd, 15: 1}...)
	b = append(b, []byte{0: 0xfd, 15: 2}...)
	if s.ext {
		b = append(b, proto, 0, 1, 4, 0, 0, 0, 0)
	}
	return b, b[at : at+32]
}

// marks is the virtio header that asks for the checksum and, with a gso_size, for segmentation.
func (s segment) marks(gsoSize int) virtio.NetHdr {
	frame, l4 := s.frame()
	h := virtio.NetHdr{Flags: virtio.HdrFNeedsCsum, CsumStart: uint16(l4), CsumOffset: s.csumOffset()}
	if gsoSize > 0 {
		h.GSOType, h.GSOSize, h.HdrLen = virtio.GSOTCPv4, uint16(gsoSize), uint16(len(frame)-len(s.payload))
		if s.v6 {
			h.GSOType = virtio.GSOTCPv6
		}
	}
	return h
}

func (s segment) csumOffset() uint16 {
	if s.udp {
		return 6
	}
	return 16
}

// finished is the frame with its checksum complete.
func (s segment) finished() []byte {
	frame, l4 := s.frame()
	return finish(frame, l4, s.csumOffset())
}

// finish completes a checksum in place as NEEDS_CSUM asks.
func finish(frame []byte, start int, offset uint16) []byte {
	c := ^fold(sum(frame[start:]))
	if c == 0 && offset == 6 {
		c = 0xffff // RFC 768: 0 means that there is none
	}
	binary.BigEndian.PutUint16(frame[start+int(offset):], c)
	return frame
}

// sum adds up 16-bit words; b is at most 64 KiB or so.
func sum(b []byte) (total uint32) {
	for ; len(b) >= 2; b = b[2:] {
		total += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		total += uint32(b[0]) << 8
	}
	return total
}

func fold(total uint32) uint16 {
	for total > 0xffff {
		total = total&0xffff + total>>16
	}
	return uint16(total)
}

// parsed is a received frame.
type parsed struct {
	proto   byte
	l3, l4  int
	seq     uint32
	csum    uint16
	payload []byte
}

// parse reads a frame of segment's kind and verifies lengths and both checksums.
func parse(frame []byte) (p parsed, err error) {
	etherType := func(at int) uint16 { return binary.BigEndian.Uint16(frame[at:]) }
	at := 12
	for etherType(at) == 0x8100 || etherType(at) == 0x88a8 {
		at += 4
	}
	p.l3 = at + 2
	l3 := frame[p.l3:]
	var pseudo uint32
	switch etherType(at) {
	case 0x0800:
		if fold(sum(l3[:20])) != 0xffff {
			return p, fmt.Errorf("wrong IPv4 header checksum % x", l3[:20])
		}
		if n := int(binary.BigEndian.Uint16(l3[2:])); n != len(l3) {
			return p, fmt.Errorf("IPv4 total length %d, the frame has %d", n, len(l3))
		}
		p.proto, p.l4, pseudo = l3[9], p.l3+20, sum(l3[12:20])
	case 0x86dd:
		if n := int(binary.BigEndian.Uint16(l3[4:])); n != len(l3)-40 {
			return p, fmt.Errorf("IPv6 payload length %d, the frame has %d", n, len(l3)-40)
		}
		p.proto, p.l4, pseudo = l3[6], p.l3+40, sum(l3[8:40])
		if p.proto == protoOpts {
			p.proto, p.l4 = l3[40], p.l4+8
		}
	default:
		return p, fmt.Errorf("EtherType %#x", etherType(at))
	}
	l4 := frame[p.l4:]
	if got := fold(pseudo + uint32(p.proto) + uint32(len(l4)) + sum(l4)); got != 0xffff {
		return p, fmt.Errorf("wrong checksum of protocol %d: the sum is %#x", p.proto, got)
	}
	if p.proto == protoUDP {
		p.csum, p.payload = binary.BigEndian.Uint16(l4[6:]), l4[8:]
	} else {
		p.seq, p.csum, p.payload = binary.BigEndian.Uint32(l4[4:]), binary.BigEndian.Uint16(l4[16:]), l4[20:]
	}
	return p, nil
}

// reassembly collects the segments of one large TCP frame.
type reassembly struct {
	of   segment
	got  []byte
	next uint32
}

// add judges a segment: right checksums, at most an MSS, the next bytes of the stream.
func (r *reassembly) add(frame []byte) error {
	p, err := parse(frame)
	switch {
	case err != nil:
		return err
	case p.seq != r.of.seq+r.next:
		return fmt.Errorf("sequence number %d, want %d", p.seq, r.of.seq+r.next)
	case len(p.payload) > mss:
		return fmt.Errorf("segment of %d bytes of payload, the MSS is %d", len(p.payload), mss)
	}
	r.got = append(r.got, p.payload...)
	r.next += uint32(len(p.payload))
	return nil
}

func (r *reassembly) complete() bool { return bytes.Equal(r.got, r.of.payload) }

// text is a payload of n bytes without a period that divides a segment.
func text(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8)
	}
	return b
}
