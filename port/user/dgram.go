package user

import (
	"container/list"
	"encoding/binary"
	"errors"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"

	"github.com/vhostd/vhostd/virtio"
)

// burst is how many datagrams of a flow are taken in a row.
const burst = 64

// dgram is a datagram flow: UDP, or the echo requests with one identifier to one address. An outbound flow has a connected socket of
// its own; an inbound one sends through the socket of the published port.
type dgram struct {
	port    *Port
	key     flowKey
	started time.Time
	via     *udpListener   // of an inbound flow
	client  netip.AddrPort // of an inbound flow, as the host sees it
	peer    unix.Sockaddr  // the same
	license license        // of an outbound flow

	last       atomic.Int64 // traffic, by flows.now
	sent, rcvd atomic.Uint64
	up, down   atomic.Uint64 // bytes

	// Of flows.mu.
	class int
	place *list.Element
	seen  int64

	mu     sync.Mutex // guards the socket
	fd     int
	token  token
	ttl    int // that was set, 0 is the host's own
	closed bool
}

// datagram sends what a guest has sent. An echo request is a whole ICMP message; ttl is what is left after this router.
func (p *Port) datagram(key flowKey, payload []byte, ttl uint8) reason {
	for range 2 {
		d := p.flows.find(key)
		if d == nil {
			var r reason
			if d, r = p.openDatagram(key); d == nil {
				return r
			}
		}
		if r := d.send(payload, ttl); r != noAnswer {
			return r
		}
	}
	return sendFailed // it was ended twice in between
}

// openDatagram makes an outbound flow.
func (p *Port) openDatagram(key flowKey) (*dgram, reason) {
	counts := &p.traffic[key.kind()]
	allowed := p.license(key.guest.Addr(), key.dst)
	if p.opts.Policy != nil {
		if ok, _ := p.opts.Policy.Check(key.guest.Addr(), key.dst); !ok {
			counts.refused.Add(1)
			p.explain(errorAdmin, key.guest.Addr(), key.start(0, 0))
			return nil, policyRefused
		}
	}
	to, ok := p.hostAddress(key.dst)
	if !ok {
		p.explain(errorPort, key.guest.Addr(), key.start(0, 0))
		return nil, badDestination
	}
	if !p.flows.admit() {
		counts.limited.Add(1)
		return nil, flowLimit
	}
	d, err := p.connectDatagram(key, to, allowed)
	var none fdError
	if errors.As(err, &none) && p.flows.evict() {
		d, err = p.connectDatagram(key, to, allowed)
	}
	if err != nil {
		p.flows.count.Add(-1)
		switch kind, tell := errorFor(err); {
		case errors.As(err, &none):
			counts.limited.Add(1)
			p.log.Warn("user network: no descriptors for more flows", "error", err)
			return nil, flowLimit
		case key.isEcho() && p.pings.forbidden(p, err):
			return nil, noAnswer
		case tell:
			p.explain(kind, key.guest.Addr(), key.start(0, 0))
		}
		counts.failure.Add(1)
		return nil, sendFailed
	}
	if d.review() {
		return nil, policyRefused
	}
	return d, accepted
}

// connectDatagram makes the flow's socket and makes the flow known.
func (p *Port) connectDatagram(key flowKey, to netip.AddrPort, allowed license) (*dgram, error) {
	proto := 0
	if key.isEcho() {
		proto = int(key.proto)
	}
	fd, err := p.newSocket(familyOf(to.Addr()), unix.SOCK_DGRAM, proto)
	if err != nil {
		return nil, err
	}
	d := &dgram{port: p, key: key, fd: fd, started: time.Now(), license: allowed}
	if to.Addr().Is4() {
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_IP, unix.IP_RECVERR, 1) // without it there are fewer errors to tell
	} else {
		_ = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_RECVERR, 1)
	}
	if err := unix.Connect(fd, sockaddrOf(to)); err != nil {
		p.closeSocket(fd)
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.token, err = p.poller.add(fd, unix.EPOLLIN, d); err != nil {
		p.closeSocket(fd)
		return nil, err
	}
	if !p.flows.add(d) {
		d.closed = true
		p.poller.forget(d.token)
		p.closeSocket(fd)
		return nil, unix.EAGAIN
	}
	return d, nil
}

// send returns noAnswer if the flow has ended.
func (d *dgram) send(payload []byte, ttl uint8) reason {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return noAnswer
	}
	d.last.Store(d.port.flows.now.Load())
	d.sent.Add(1)
	d.up.Add(uint64(len(payload)))
	d.port.traffic[d.key.kind()].up.add(len(payload))
	if d.via != nil {
		return d.via.reply(payload, d.peer)
	}
	d.limit(ttl)
	err := unix.Send(d.fd, payload, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL)
	if err != nil && !errors.Is(err, unix.EAGAIN) {
		err = unix.Send(d.fd, payload, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL) // the first may have told of an earlier datagram
	}
	if err == nil {
		return accepted
	}
	if kind, tell := errorFor(err); tell && !errors.Is(err, unix.ECONNREFUSED) {
		d.port.explain(kind, d.key.guest.Addr(), d.key.start(len(payload), sequence(payload)))
	}
	return sendFailed
}

// shortWay is the hop limit below which somebody wants to know the way. Others get the host's own.
const shortWay = 32

// limit sets the hop limit of the next datagram. The caller holds mu.
func (d *dgram) limit(ttl uint8) {
	want := 0
	if ttl < shortWay {
		want = int(ttl)
	}
	if want == d.ttl {
		return
	}
	d.ttl = want
	if want == 0 {
		want = -1 // the host's own
	}
	if d.key.guest.Addr().Is4() {
		_ = unix.SetsockoptInt(d.fd, unix.IPPROTO_IP, unix.IP_TTL, want) // a way that is not told is no loss
	} else {
		_ = unix.SetsockoptInt(d.fd, unix.IPPROTO_IPV6, unix.IPV6_UNICAST_HOPS, want)
	}
}

// ready implements [source]: the host has answers, or errors.
func (d *dgram) ready(events uint32) {
	if events&unix.EPOLLERR != 0 {
		d.errors()
	}
	buf := d.port.poller.buf
	for range burst {
		n, err := d.receive(buf)
		if err != nil {
			return
		}
		d.last.Store(d.port.flows.now.Load())
		d.rcvd.Add(1)
		d.down.Add(uint64(n))
		d.port.traffic[d.key.kind()].down.add(n)
		d.deliver(buf[:n])
	}
}

func (d *dgram) receive(buf []byte) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return 0, unix.EBADF
	}
	return unix.Read(d.fd, buf)
}

// deliver sends an answer to the guest.
func (d *dgram) deliver(b []byte) {
	if !d.key.isEcho() {
		d.port.sendUDP(d.key.dst, d.key.guest, b)
		return
	}
	if len(b) < icmpLen || b[0] != echoReply4 && b[0] != echoReply6 {
		return
	}
	binary.BigEndian.PutUint16(b[4:], d.key.guest.Port())
	d.port.sendEcho(d.key.dst.Addr(), d.key.guest.Addr(), b)
}

// sendEcho completes and sends an ICMP message to a guest.
func (p *Port) sendEcho(src, guest netip.Addr, b []byte) reason {
	sum, proto := uint16(0), uint8(protoICMP)
	if guest.Is6() {
		proto = protoICMPv6
		sum = pseudoSum(proto, src, guest, len(b))
	}
	b[2], b[3] = 0, 0
	binary.BigEndian.PutUint16(b[2:], ^checksum.Checksum(b, sum))
	return p.sendIP(src, guest, proto, b[:icmpLen], b[icmpLen:], virtio.NetHdr{})
}

// close closes the socket. The flow is in no table any more.
func (d *dgram) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		return
	}
	d.closed = true
	if d.via == nil {
		d.port.poller.forget(d.token)
		d.port.closeSocket(d.fd)
	} else {
		d.via.forget(d)
	}
}

// isLong says whether the traffic was more than a question and its answer.
func (d *dgram) isLong() bool {
	s, r := d.sent.Load(), d.rcvd.Load()
	return s >= 3 && r >= 3 || s+r >= longAfter
}

func (k *flowKey) isEcho() bool { return k.proto != protoUDP }

// start is the beginning of a packet of the flow, as the guest has sent it, with length bytes of payload.
func (k *flowKey) start(length int, seq uint16) []byte {
	var b [8]byte
	if k.isEcho() {
		if b[0] = echoRequest4; k.proto == protoICMPv6 {
			b[0] = echoRequest6
		}
		binary.BigEndian.PutUint16(b[4:], k.guest.Port())
		binary.BigEndian.PutUint16(b[6:], seq)
		return packetStart(k.guest.Addr(), k.dst.Addr(), k.proto, b, max(length, icmpLen))
	}
	binary.BigEndian.PutUint16(b[:], k.guest.Port())
	binary.BigEndian.PutUint16(b[2:], k.dst.Port())
	binary.BigEndian.PutUint16(b[4:], uint16(udpLen+length))
	return packetStart(k.guest.Addr(), k.dst.Addr(), k.proto, b, udpLen+length)
}

// sequence is the number of an echo request.
func sequence(message []byte) uint16 {
	if len(message) < icmpLen {
		return 0
	}
	return binary.BigEndian.Uint16(message[6:])
}
