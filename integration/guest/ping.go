package guest

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"time"
)

// PingArgs describes echo requests sent one after another. Size is the payload, as ping -s counts it.
type PingArgs struct {
	Dst      string        `json:"dst"`
	Size     int           `json:"size"`
	Count    int           `json:"count"`
	Interval time.Duration `json:"interval,omitempty"`
	Timeout  time.Duration `json:"timeout"` // for each
}

// PingResult counts the answers. Corrupt ones are not counted as received.
type PingResult struct {
	Sent     int           `json:"sent"`
	Received int           `json:"received"`
	Corrupt  int           `json:"corrupt"`
	FirstAt  time.Duration `json:"first_at"` // from the start to the first answer
	Longest  time.Duration `json:"longest"`  // longest time without an answer
	MeanRTT  time.Duration `json:"mean_rtt"`
}

const icmpHeader = 8

// Types of echo messages (RFC 792, RFC 4443).
const (
	echoReply4, echoRequest4 = 0, 8
	echoReply6, echoRequest6 = 129, 128
)

// Pinger owns a raw ICMP socket of the network namespace it was opened in.
type Pinger struct {
	conn           *net.IPConn
	dst            netip.Addr
	ident          uint16
	request, reply byte // types of messages
}

// OpenPinger opens one for an address. It needs CAP_NET_RAW.
func OpenPinger(dst string) (*Pinger, error) {
	p := &Pinger{ident: uint16(rand.Uint32()), request: echoRequest4, reply: echoReply4}
	var err error
	if p.dst, err = netip.ParseAddr(dst); err != nil {
		return nil, fmt.Errorf("ping: %w", err)
	}
	network := "ip4:icmp"
	if p.dst.Is6() {
		network, p.request, p.reply = "ip6:ipv6-icmp", echoRequest6, echoReply6
	}
	if p.conn, err = net.ListenIP(network, nil); err != nil {
		return nil, err
	}
	return p, nil
}

// Close closes the socket.
func (p *Pinger) Close() error { return p.conn.Close() }

// Run sends args.Count requests to the address that the Pinger was opened for. Lost answers are no error; a send error is counted as a
// lost answer.
func (p *Pinger) Run(args PingArgs) (PingResult, error) {
	var result PingResult
	var total time.Duration
	start := time.Now()
	last := start
	answer := make([]byte, 65536)
	for seq := range args.Count {
		if seq > 0 {
			time.Sleep(args.Interval)
		}
		result.Sent++
		sent := time.Now()
		message := p.message(uint16(seq), args.Size)
		if _, err := p.conn.WriteToIP(message, &net.IPAddr{IP: p.dst.AsSlice(), Zone: p.dst.Zone()}); err != nil {
			time.Sleep(args.Timeout / 10)
		}
		ok, corrupt := p.await(message, answer, sent.Add(args.Timeout))
		now := time.Now()
		result.Longest = max(result.Longest, now.Sub(last))
		if corrupt {
			result.Corrupt++
		}
		if ok {
			if result.Received == 0 {
				result.FirstAt = now.Sub(start)
			}
			result.Received++
			total += now.Sub(sent)
			last = now
		}
	}
	if result.Received > 0 {
		result.MeanRTT = total / time.Duration(result.Received)
	}
	return result, nil
}

// message builds an echo request whose payload depends on the sequence number. The kernel sums those of IPv6 itself.
func (p *Pinger) message(seq uint16, size int) []byte {
	message := make([]byte, icmpHeader+size)
	message[0] = p.request
	binary.BigEndian.PutUint16(message[4:], p.ident)
	binary.BigEndian.PutUint16(message[6:], seq)
	for i := range size {
		message[icmpHeader+i] = byte(i*7 + int(seq)*13)
	}
	binary.BigEndian.PutUint16(message[2:], checksum(message))
	return message
}

// await reads until the answer to request has come or the deadline has passed.
func (p *Pinger) await(request, buffer []byte, deadline time.Time) (ok, corrupt bool) {
	for {
		if err := p.conn.SetReadDeadline(deadline); err != nil {
			return false, corrupt
		}
		n, _, err := p.conn.ReadFromIP(buffer)
		if os.IsTimeout(err) || err != nil && !time.Now().Before(deadline) {
			return false, corrupt
		}
		answer := buffer[:n]
		if err != nil || n < icmpHeader || answer[0] != p.reply || !bytes.Equal(answer[4:8], request[4:8]) {
			continue
		}
		if bytes.Equal(answer[icmpHeader:], request[icmpHeader:]) {
			return true, corrupt
		}
		corrupt = true
	}
}

// checksum is the Internet checksum (RFC 1071).
func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(b[i])<<8 | uint32(b[i+1])
	}
	if len(b)%2 == 1 {
		sum += uint32(b[len(b)-1]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}
