package source

import (
	"encoding/binary"
	"net"

	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/virtio"
)

const (
	macLen  = 6
	vlanLen = 4
	ipLen   = 20
	udpLen  = 8

	// minUDP is the shortest Ethernet frame; from here on the payload has room for the marks.
	minUDP = 60
	// maxUntagged is the longest frame without a VLAN tag: a full IP packet (RFC 791) behind an Ethernet header.
	maxUntagged = virtio.EthernetHdrLen + 1<<16 - 1

	etherTypeIPv4  = 0x0800
	etherTypeVLAN  = 0x8100
	etherTypeLocal = 0x88b5 // IEEE 802, local experimental EtherType 1

	firstPort = 1024 // source port of the first flow
	sinkPort  = 9    // discard, RFC 863

	// headLen is how much of a frame's start may differ from the pattern that fills its pages.
	headLen = 64
)

// layout tells where in a frame the bytes are that change from frame to frame. They are spread such that the UDP checksum
// stays what it was: each changed 16-bit word has a complement elsewhere in the payload, and a word and its complement add
// nothing in one's complement arithmetic (RFC 1071).
type layout struct {
	marked  bool    // the frame is UDP and carries the marks
	port    uintptr // source port, 2 bytes
	seq     uintptr // sequence number, 4 bytes big endian; its complement in the 4 bytes that follow
	portNot uintptr // complement of the source port, 2 bytes
}

// layoutOf is the layout of frames of the given size. All offsets are aligned to their field and below headLen.
func layoutOf(size int) layout {
	if size < minUDP {
		return layout{}
	}
	l2 := uintptr(virtio.EthernetHdrLen)
	if size > maxUntagged {
		l2 += vlanLen
	}
	payload := l2 + ipLen + udpLen
	return layout{marked: true, port: l2 + ipLen, seq: payload + 2, portNot: payload + 10}
}

// pattern is the byte at offset i of a frame where nothing else is. Its period divides a page, so that any page of a frame
// may take any other's place.
func pattern(i int) byte { return byte(i) }

// buildFrame makes the frame with sequence number 0 of flow 0. opts must be valid and complete.
func buildFrame(opts Options) []byte {
	frame := make([]byte, opts.Size)
	for i := range frame {
		frame[i] = pattern(i)
	}
	dst := opts.MAC
	if len(dst) == 0 {
		dst = net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	}
	copy(frame, dst)
	copy(frame[macLen:], net.HardwareAddr{0x02, 0, 0, 0, 0, 0x01})
	l := layoutOf(opts.Size)
	if !l.marked {
		binary.BigEndian.PutUint16(frame[2*macLen:], etherTypeLocal)
		return frame
	}
	ip := frame[virtio.EthernetHdrLen:]
	if opts.Size > maxUntagged {
		binary.BigEndian.PutUint16(frame[2*macLen:], etherTypeVLAN)
		binary.BigEndian.PutUint16(frame[2*macLen+2:], 0) // priority tag: no VLAN, priority 0
		ip = frame[virtio.EthernetHdrLen+vlanLen:]
	}
	binary.BigEndian.PutUint16(frame[len(frame)-len(ip)-2:], etherTypeIPv4)
	binary.BigEndian.PutUint16(frame[l.port:], firstPort)
	binary.BigEndian.PutUint16(frame[l.portNot:], ^uint16(firstPort))
	binary.BigEndian.PutUint32(frame[l.seq:], 0)
	binary.BigEndian.PutUint32(frame[l.seq+4:], ^uint32(0))
	fillIPv4(ip)
	return frame
}

// fillIPv4 writes the headers, with right checksums, of a packet whose UDP source port and payload are in place. The addresses
// are of the range for benchmarks (RFC 2544).
func fillIPv4(ip []byte) {
	clear(ip[:ipLen])
	ip[0] = 0x45 // version 4, five words of header
	binary.BigEndian.PutUint16(ip[2:], uint16(len(ip)))
	ip[6] = 0x40 // do not fragment
	ip[8] = 64   // hops
	ip[9] = 17   // UDP
	copy(ip[12:], []byte{198, 18, 0, 1})
	copy(ip[16:], []byte{198, 18, 0, 2})
	binary.BigEndian.PutUint16(ip[10:], ^checksum(ip[:ipLen], 0))
	udp := ip[ipLen:]
	binary.BigEndian.PutUint16(udp[2:], sinkPort)
	binary.BigEndian.PutUint16(udp[4:], uint16(len(udp)))
	binary.BigEndian.PutUint16(udp[6:], 0)
	pseudo := checksum(ip[12:ipLen], uint32(ip[9])+uint32(len(udp)))
	sum := ^checksum(udp, uint32(pseudo))
	if sum == 0 {
		sum = 0xffff // RFC 768: zero would mean that there is none
	}
	binary.BigEndian.PutUint16(udp[6:], sum)
}

// checksum is the one's complement sum of b, not yet complemented, on top of start. b is at most 64 KiB.
func checksum(b []byte, start uint32) uint16 {
	sum := start
	for ; len(b) >= 2; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum > 0xffff {
		sum = sum&0xffff + sum>>16
	}
	return uint16(sum)
}

// pagesOf is the number of pages that a frame of the given size takes.
func pagesOf(size int) int { return (size + pagemem.PageSize - 1) / pagemem.PageSize }

// colorsOf is how many places, headLen apart, a frame can have within its page, rounded down to a power of two. Frames of
// successive pages start at different places, since lines that lie a page apart compete for the same few ways of the
// processor's first-level cache.
func colorsOf(size int) uintptr {
	if size > pagemem.PageSize {
		return 1
	}
	places := uintptr(pagemem.PageSize-size)/headLen + 1
	colors := uintptr(1)
	for colors*2 <= places {
		colors *= 2
	}
	return colors
}
