package port

import "encoding/binary"

// RARPLen is the length of the frame that [RARP] makes: the shortest Ethernet frame, without its check sequence.
const RARPLen = 60

// RARP is the frame by which a machine that moved tells the switches where it is now: a broadcast reverse-ARP request (RFC
// 903) in which mac asks for its own protocol address. QEMU sends the same after a migration.
func RARP(mac [6]byte) [RARPLen]byte {
	const (
		etherTypeRARP = 0x8035
		etherTypeIPv4 = 0x0800
		hwEthernet    = 1
		opRequest     = 3 // RFC 903: request reverse
	)
	var frame [RARPLen]byte
	for i := range 6 {
		frame[i] = 0xff
	}
	copy(frame[6:], mac[:])
	binary.BigEndian.PutUint16(frame[12:], etherTypeRARP)
	binary.BigEndian.PutUint16(frame[14:], hwEthernet)
	binary.BigEndian.PutUint16(frame[16:], etherTypeIPv4)
	frame[18], frame[19] = 6, 4 // lengths of a hardware and of a protocol address
	binary.BigEndian.PutUint16(frame[20:], opRequest)
	copy(frame[22:], mac[:]) // sender; its protocol address stays zero
	copy(frame[32:], mac[:]) // target
	return frame
}
