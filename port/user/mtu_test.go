package user

import (
	"bytes"
	"encoding/binary"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"

	"github.com/vhostd/vhostd/virtio"
)

// transportFrame is a frame of the guest around a transport header and its payload.
func (g *guest) transportFrame(src, dst netip.Addr, proto uint8, segment []byte, piece bool) []byte {
	v := newIP(src, dst, proto, len(segment), piece)
	defer v.Release()
	_, _ = v.Write(segment)
	frame := append(append(append([]byte(nil), g.card.port.mac[:]...), g.card.mac[:]...), 0x08, 0x00)
	if dst.Is6() {
		frame[12], frame[13] = 0x86, 0xdd
	}
	return append(frame, v.AsSlice()...)
}

func (g *guest) addrFor(dst netip.Addr) netip.Addr {
	if dst.Is6() {
		return g.v6
	}
	return g.v4
}

// datagram is a UDP header with its payload.
func (g *guest) datagram(from uint16, to netip.AddrPort, payload []byte) []byte {
	b := make([]byte, udpLen, udpLen+len(payload))
	binary.BigEndian.PutUint16(b, from)
	binary.BigEndian.PutUint16(b[2:], to.Port())
	binary.BigEndian.PutUint16(b[4:], uint16(udpLen+len(payload)))
	b = append(b, payload...)
	sum := ^checksum.Checksum(b, pseudoSum(protoUDP, g.addrFor(to.Addr()), to.Addr(), len(b)))
	if sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(b[udpChecksumOffset:], sum)
	return b
}

// datagramFrame is a datagram in one piece.
func (g *guest) datagramFrame(from uint16, to netip.AddrPort, payload []byte) []byte {
	return g.transportFrame(g.addrFor(to.Addr()), to.Addr(), protoUDP, g.datagram(from, to, payload), false)
}

// pieces are the frames of a datagram in fragments that fit the MTU of 1500.
func (g *guest) pieces(id uint16, to netip.AddrPort, datagram []byte) (frames [][]byte) {
	return g.piecesOf(id, to.Addr(), protoUDP, datagram)
}

func (g *guest) piecesOf(id uint16, to netip.Addr, proto uint8, message []byte) (frames [][]byte) {
	const room = 1440
	for at := 0; at < len(message); at += room {
		n := min(room, len(message)-at)
		more := at+n < len(message)
		f := g.transportFrame(g.addrFor(to), to, proto, message[at:at+n], to.Is6())
		if b := f[virtio.EthernetHdrLen:]; to.Is4() {
			field := uint16(at / 8)
			if more {
				field |= 0x2000
			}
			binary.BigEndian.PutUint16(b[4:], id)
			binary.BigEndian.PutUint16(b[6:], field)
			putSum4(b[:ipv4Len])
		} else {
			field := uint16(at)
			if more {
				field |= 1
			}
			binary.BigEndian.PutUint16(b[ipv6Len+2:], field)
			binary.BigEndian.PutUint32(b[ipv6Len+4:], uint32(id))
		}
		frames = append(frames, f)
	}
	return frames
}

func pattern(size int, seed byte) []byte {
	b := make([]byte, size)
	for i := range b {
		b[i] = byte(i*7)>>1 + byte(i>>8) + seed
	}
	return b
}

// TestMTU03_DatagramsInPieces: datagrams of any length come back byte for byte, in pieces where they are longer than the MTU, in whatever
// order the pieces arrive; the empty ones too. What has lost a piece is not delivered.
func TestMTU03_DatagramsInPieces(t *testing.T) {
	p := newPort(t, Options{})
	g := newGuest(t, p)
	const longest = 65535 - ipv4Len - udpLen
	for _, host := range []string{live4, live6} {
		at, _ := listenUDP(t, net.JoinHostPort(host, "0"))
		c := g.dialUDP(at)
		for i, size := range []int{0, 1, 64, 1452, 1472, 1473, 3000, 8192, 20_000, longest} {
			sent := pattern(size, byte(i))
			if _, err := c.Write(sent); err != nil {
				t.Fatalf("%s, %d bytes: %v", host, size, err)
			}
			got := make([]byte, 1<<16)
			_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
			n, err := c.Read(got)
			if err != nil || !bytes.Equal(got[:n], sent) {
				t.Errorf("%s, %d bytes: came back as %d, %v", host, size, n, err)
			}
		}
		g.reversed(t, netip.MustParseAddrPort(at))
	}
}

// reversed sends pieces from the last to the first, and before that a datagram without its middle.
func (g *guest) reversed(t *testing.T, server netip.AddrPort) {
	t.Helper()
	got := make(chan []byte, 8)
	c, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(server.Addr(), 0)))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	go func() {
		for buf := make([]byte, 1<<16); ; {
			n, err := c.Read(buf)
			if err != nil {
				close(got)
				return
			}
			got <- bytes.Clone(buf[:n])
		}
	}()
	to := c.LocalAddr().(*net.UDPAddr).AddrPort()
	holed := g.pieces(1, to, g.datagram(6000, to, pattern(6000, 1)))
	for i, f := range holed {
		if i != 2 {
			g.card.send(f, virtio.NetHdr{})
		}
	}
	want := pattern(9000, 2)
	frames := g.pieces(2, to, g.datagram(6000, to, want))
	slices.Reverse(frames)
	for _, f := range frames {
		g.card.send(f, virtio.NetHdr{})
	}
	select {
	case b := <-got:
		if !bytes.Equal(b, want) {
			t.Errorf("%v: %d bytes arrived, want the %d of the datagram in reverse order", to, len(b), len(want))
		}
	case <-time.After(20 * time.Second):
		t.Errorf("%v: the pieces in reverse order did not arrive", to)
	}
}
