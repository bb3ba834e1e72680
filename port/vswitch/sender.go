package vswitch

import (
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/virtio"
)

// floodCopies bounds the copies of frames for several receivers that a sender makes within a millisecond, so that a guest which sends
// groups without end on a switch with many ports does not take the worker from the others. It does not limit the first of them.
const floodCopies = 4096

// sender brings frames from one source into the switch. It belongs to one goroutine at a time.
type sender struct {
	port  *Port
	arena *pagemem.Arena
	owner pagemem.OwnerID
	drops *drops

	// What the last frame of the batch was told, for those of the same kind behind it.
	src, dst uint64
	behind   *Port // dst's, nil if that is not known

	held int // bytes that wait at the receiver of the last frames, on another worker

	copies    int   // flooded in this window
	window    int64 // its millisecond
	receivers []*queue
	spare     [1]packet.Packet // a copy that finds no room
	scratch   [maxHeader]byte
}

// send takes over at most port.MaxBatch frames.
func (s *sender) send(pkts []packet.Packet) {
	v, now := s.port.sw.view.Load(), s.port.sw.clock()
	const none = 0 // is no station's address
	s.src, s.dst = none, none
	s.held = 0
	first := 0 // of a run of frames for one receiver
	var run *queue
	for i := range pkts {
		to, verdict, header := s.route(v, &pkts[i], now)
		if to != run {
			s.deliver(run, pkts[first:i])
			first, run = i, to
		}
		if to != nil {
			continue
		}
		first = i + 1
		if verdict >= numReasons {
			verdict = s.flood(v, &pkts[i], header, verdict == unknown, now)
		}
		if verdict < numReasons {
			s.drops.add(verdict, 1)
			pkts[i].Release(s.arena, s.owner)
		}
	}
	s.deliver(run, pkts[first:])
}

// deliver hands a run of frames to their receiver.
func (s *sender) deliver(to *queue, pkts []packet.Packet) {
	if len(pkts) == 0 {
		return
	}
	if to.sender.owner != s.owner {
		s.held = max(s.held, to.inbox.length()*meanLen(pkts))
	}
	n := to.accept(pkts, s.port, s.owner)
	for i := range pkts[:n] {
		pkts[i].Reset()
	}
	packet.Release(s.arena, pkts[n:], s.owner)
}

// meanLen is the mean length of the frames, of which there is one at least.
func meanLen(pkts []packet.Packet) int {
	sum := 0
	for i := range pkts {
		sum += int(pkts[i].Len)
	}
	return sum / len(pkts)
}

// route returns the only receiver of a frame, else a verdict: the reason why it is lost, or flooded or unknown for all ports.
func (s *sender) route(v *view, p *packet.Packet, now int64) (to *queue, verdict reason, header []byte) {
	if p.Len < virtio.EthernetHdrLen {
		return nil, tooShort, nil
	}
	header = headerOf(p, &s.scratch)
	dst, src := addresses(header)
	if src != s.src || src == 0 {
		if verdict = s.admit(v, src, now); verdict != accepted {
			return nil, verdict, nil
		}
		s.src = src
	}
	if isGroup(dst) {
		if isLinkLocal(dst) {
			return nil, linkLocal, nil
		}
		return nil, flooded, header
	}
	if dst != s.dst || dst == 0 {
		s.dst, s.behind = dst, s.lookUp(v, dst, now)
	}
	switch s.behind {
	case nil:
		return nil, unknown, header
	case s.port:
		return nil, samePort, nil
	}
	if to = s.behind.receiver(header); to == nil && v.uplink != nil && v.uplink != s.port {
		to = v.uplink.receiver(header)
	}
	return to, stationDown, nil
}

// admit judges a source address and learns it.
func (s *sender) admit(v *view, src uint64, now int64) reason {
	switch {
	case badSource(src):
		return invalidSource
	case s.port.pinned != 0:
		if src != s.port.pinned {
			return foreignSource
		}
	case v.ownerOf(src) != nil:
		return stolenSource
	default:
		s.port.sw.table.learn(src, s.port.index, now)
	}
	return accepted
}

// lookUp returns the port behind which a station is, nil if that is not known.
func (s *sender) lookUp(v *view, dst uint64, now int64) *Port {
	if p := v.ownerOf(dst); p != nil {
		return p
	}
	if index := s.port.sw.table.find(dst, now); index != nobody {
		return v.at(index)
	}
	return nil
}

// flood gives a frame to every other port once. If the frame is lost as a whole, and still the caller's, it returns why.
func (s *sender) flood(v *view, p *packet.Packet, header []byte, unknown bool, now int64) reason {
	s.receivers = s.receivers[:0]
	for _, other := range v.ports {
		if other == s.port || unknown && other.pinned != 0 {
			continue
		}
		if q := other.receiver(header); q != nil {
			s.receivers = append(s.receivers, q)
		}
	}
	n := len(s.receivers)
	if n == 0 {
		return noReceiver
	}
	if now != s.window {
		s.window, s.copies = now, 0
	}
	if s.copies > 0 && s.copies+n > floodCopies {
		return floodLimit
	}
	s.copies += n
	s.retain(p, n-1)
	p.Flags = 0
	for _, q := range s.receivers {
		copyOf(&s.spare[0], p)
		if q.accept(s.spare[:], s.port, s.owner) == 0 {
			packet.Release(s.arena, s.spare[:], s.owner)
		}
	}
	p.Reset()
	return accepted
}

// retain takes n more references for each fragment.
func (s *sender) retain(p *packet.Packet, n int) {
	if n == 0 {
		return
	}
	frags := p.Frags[:p.NFrag]
	for i := 0; i < len(frags); {
		same := 1
		for i+same < len(frags) && frags[i+same].Page == frags[i].Page {
			same++
		}
		s.arena.Retain(frags[i].Page, n*same)
		i += same
	}
}

// copyOf makes dst the same frame as p, without references of its own.
func copyOf(dst, p *packet.Packet) {
	dst.Hdr, dst.Len, dst.NFrag, dst.Flags = p.Hdr, p.Len, p.NFrag, 0
	copy(dst.Frags[:p.NFrag], p.Frags[:p.NFrag])
}
