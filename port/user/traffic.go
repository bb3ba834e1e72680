package user

import (
	"sync/atomic"

	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
)

// Kinds of flow, as indexes of traffic.
const (
	kindTCP = iota
	kindUDP
	kindICMP
	numKinds
)

var kindNames = [numKinds]string{"tcp", "udp", "icmp"}

// traffic counts for all flows of one kind, those that have ended too. What guests' workers write stands apart from what the poller
// writes, so that they do not take the cache line from each other for every datagram.
type traffic struct {
	present                           atomic.Int64 // datagram flows; connections are counted by their tables
	opened, refused, limited, failure atomic.Uint64
	_                                 [24]byte
	up                                way
	_                                 [48]byte
	down                              way
	_                                 [48]byte
}

type way struct{ packets, bytes atomic.Uint64 }

func (w *way) add(bytes int) {
	w.packets.Add(1)
	w.bytes.Add(uint64(bytes))
}

func (k *flowKey) kind() int {
	if k.isEcho() {
		return kindICMP
	}
	return kindUDP
}

// Protocol are the counters of one protocol since the network was made. Bytes are those of payload, without headers; echo requests count
// whole messages. TCP's packets are segments as they passed between guest and network, up to 64 KiB each, retransmissions and those of
// DNS over TCP included.
type Protocol struct {
	Proto       string `json:"proto"` // tcp, udp, icmp
	Flows       int    `json:"flows"` // at present
	Opened      uint64 `json:"opened"`
	Refused     uint64 `json:"refused"` // by policy, at their beginning
	Limited     uint64 `json:"limited"` // for lack of room or descriptors
	Failed      uint64 `json:"failed"`  // the host could not connect
	FromGuest   uint64 `json:"bytes-from-guest"`
	ToGuest     uint64 `json:"bytes-to-guest"`
	PacketsFrom uint64 `json:"packets-from-guest"`
	PacketsTo   uint64 `json:"packets-to-guest"`
}

// Protocols returns the counters of TCP, UDP and echo requests, in this order.
func (p *Port) Protocols() []Protocol {
	list := make([]Protocol, numKinds)
	for i := range list {
		t := &p.traffic[i]
		list[i] = Protocol{
			Proto: kindNames[i], Flows: int(t.present.Load()), Opened: t.opened.Load(), Refused: t.refused.Load(), Limited: t.limited.Load(),
			Failed: t.failure.Load(), FromGuest: t.up.bytes.Load(), ToGuest: t.down.bytes.Load(), PacketsFrom: t.up.packets.Load(),
			PacketsTo: t.down.packets.Load(),
		}
	}
	list[kindTCP].Flows = p.tcp.present()
	if p.stack != nil {
		s := p.stack.Stats().TCP
		list[kindTCP].PacketsFrom, list[kindTCP].PacketsTo = s.ValidSegmentsReceived.Value(), s.SegmentsSent.Value()
	}
	return list
}

// present is the number of connections, those that are being made too.
func (s *tcpSide) present() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.pending) + len(s.calling) + len(s.conns)
}

// segments are those that the guest has sent and received on a connection.
func (c *conn) segments() (from, to uint64) {
	if s, ok := c.ep.Stats().(*tcp.Stats); ok {
		from, to = s.SegmentsReceived.Value(), s.SegmentsSent.Value()
	}
	return from, to
}
