package user

import (
	"errors"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// udpListener is a published UDP port. It implements [source].
type udpListener struct {
	port *Port
	what Publication

	mu      sync.Mutex
	fd      int
	token   token
	closed  bool
	clients map[netip.AddrPort]*dgram // the flow of each client
	last    uint16                    // gateway's port that was given to a client
}

func (p *Port) watchUDP(fd int, what Publication) (listener, error) {
	l := &udpListener{port: p, what: what, fd: fd, clients: map[netip.AddrPort]*dgram{}}
	l.mu.Lock()
	defer l.mu.Unlock()
	var err error
	if l.token, err = p.poller.add(fd, unix.EPOLLIN, l); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	return l, nil
}

// ready implements [source].
func (l *udpListener) ready(uint32) {
	buf := l.port.poller.buf
	for range burst {
		n, from, err := l.receive(buf)
		switch {
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EBADF):
			return
		case err != nil:
			continue // an error that one of the clients caused
		}
		if r := l.forward(buf[:n], addrPortOf(from), from); r != accepted {
			l.port.lost.add(r)
		}
	}
}

func (l *udpListener) receive(buf []byte) (int, unix.Sockaddr, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return 0, nil, unix.EBADF
	}
	return unix.Recvfrom(l.fd, buf, unix.MSG_DONTWAIT)
}

// forward sends a client's datagram to the guest.
func (l *udpListener) forward(b []byte, client netip.AddrPort, peer unix.Sockaddr) reason {
	l.mu.Lock()
	d := l.clients[client]
	l.mu.Unlock()
	if d == nil {
		var r reason
		if d, r = l.newClient(client, peer); d == nil {
			return r
		}
	}
	d.last.Store(l.port.flows.now.Load())
	d.rcvd.Add(1)
	d.down.Add(uint64(len(b)))
	l.port.traffic[kindUDP].down.add(len(b))
	l.port.sendUDP(d.key.dst, d.key.guest, b)
	return accepted // what does not reach the guest is counted there
}

// newClient makes the flow of a client.
func (l *udpListener) newClient(client netip.AddrPort, peer unix.Sockaddr) (*dgram, reason) {
	p := l.port
	guest, ok := p.target(l.what, client.Addr())
	if !ok {
		return nil, unknown
	}
	if !p.flows.admit() {
		p.traffic[kindUDP].limited.Add(1)
		return nil, flowLimit
	}
	d := &dgram{port: p, started: time.Now(), via: l, peer: peer, client: client, fd: -1}
	d.key = flowKey{protoUDP, netip.AddrPortFrom(guest, l.what.GuestPort), client}
	added := p.keeps(client.Addr(), guest) && p.flows.add(d)
	for i := 0; !added && i < aliasTries; i++ {
		d.key.dst = netip.AddrPortFrom(p.gatewayOf(guest), l.alias())
		added = p.flows.add(d)
	}
	if !added {
		p.flows.count.Add(-1)
		return nil, flowLimit
	}
	l.mu.Lock()
	l.clients[client] = d
	closed := l.closed
	l.mu.Unlock()
	d.mu.Lock()
	gone := d.closed
	d.mu.Unlock()
	if closed || gone { // between the datagram's arrival and now
		p.flows.end(d)
		l.forget(d)
		return nil, sendFailed
	}
	return d, accepted
}

const (
	firstAlias = 49152 // the dynamic ports (RFC 6335)
	aliasTries = 64
)

// alias is the next port of the gateway that may stand for a client.
func (l *udpListener) alias() uint16 {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.last++; l.last < firstAlias {
		l.last = firstAlias
	}
	return l.last
}

// reply sends a guest's answer to a client.
func (l *udpListener) reply(payload []byte, peer unix.Sockaddr) reason {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || unix.Sendto(l.fd, payload, unix.MSG_DONTWAIT|unix.MSG_NOSIGNAL, peer) != nil {
		return sendFailed
	}
	return accepted
}

// forget is called when a client's flow has ended.
func (l *udpListener) forget(d *dgram) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.clients[d.client] == d {
		delete(l.clients, d.client)
	}
}

// close ends the flows of its clients too: they have no other socket.
func (l *udpListener) close() {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return
	}
	l.closed = true
	l.port.poller.forget(l.token)
	_ = unix.Close(l.fd)
	clients := slices.Collect(maps.Values(l.clients))
	l.mu.Unlock()
	for _, d := range clients {
		l.port.flows.end(d)
	}
}
