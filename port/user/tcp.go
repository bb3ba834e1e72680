package user

import (
	"container/list"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"
	"gvisor.dev/gvisor/pkg/waiter"
)

const (
	// maxPending bounds the connections whose host side, or whose guest, has not answered yet.
	maxPending = 8192
	// connectLife is how long the host may take to connect: longer than the last SYN but one of a Linux guest (63 s), so that no
	// second attempt begins, and shorter than the guest waits (127 s).
	connectLife = 90 * time.Second
	// handshakeLife is how long the guest may take to acknowledge our SYN-ACK.
	handshakeLife = 15 * time.Second
	// bufferBudget is what the buffers of all connections of a port may hold, beyond minBuffer each.
	bufferBudget = 256 << 20
)

// connKey names a connection by the guest's and the other side's address.
type connKey struct{ guest, other netip.AddrPort }

// tcpSide keeps the connections of a port.
type tcpSide struct {
	port       *Port
	forwarders []*tcp.Forwarder // by the size of the receive buffer, see bufferClass
	granted    atomic.Int64     // of bufferBudget

	mu      sync.Mutex
	pending map[connKey]*pending
	dialing list.List            // of *pending that wait for the host, the oldest in front
	ghosts  map[connKey]struct{} // ended before the forwarder's goroutine came; until then it takes no other SYN of the kind
	conns   map[*conn]struct{}
	calling map[*conn]netip.AddrPort // inbound ones whose guest has not answered yet, and its address
	timer   *time.Timer              // nil while nobody waits for the host
	closed  bool
	busy    sync.WaitGroup // goroutines that hold connections
	quit    chan struct{}  // closed with closed
}

// pending is a connection whose SYN is not answered yet.
type pending struct {
	side    *tcpSide
	key     connKey
	isn     uint32 // the guest's first sequence number
	start   [8]byte
	began   time.Time
	buffer  int // granted, each way
	request *tcp.ForwarderRequest
	license license

	// Of side.mu.
	handed   bool // to a forwarder, whose goroutine will come
	answered bool // the host has answered
	fd       int  // -1 while there is none
	token    token
	place    *list.Element // in dialing
	waits    *waiter.Queue // of the handshake with the guest, if that is under way
	over     bool
}

func (s *tcpSide) init(p *Port) {
	s.port, s.pending, s.conns = p, map[connKey]*pending{}, map[*conn]struct{}{}
	s.ghosts, s.quit, s.calling = map[connKey]struct{}{}, make(chan struct{}), map[*conn]netip.AddrPort{}
}

// bufferClasses are the receive buffers that connections get, large as long as there are few.
var bufferClasses = [...]int{maxBuffer, 1 << 20, 256 << 10, 64 << 10, minBuffer}

// grant takes buffers for one connection out of the budget: no more than a fraction of what is left, so that the budget is never
// overdrawn but by the smallest buffers.
func (s *tcpSide) grant() (class int) {
	left := bufferBudget - s.granted.Load()
	for class < len(bufferClasses)-1 && int64(bufferClasses[class])*16 > left {
		class++
	}
	s.granted.Add(2 * int64(bufferClasses[class]))
	return class
}

func (s *tcpSide) giveBack(buffer int) { s.granted.Add(-2 * int64(buffer)) }

// handle sees the TCP segments that belong to no endpoint of the stack. False has the stack answer with a reset.
func (s *tcpSide) handle(id stack.TransportEndpointID, pkt *stack.PacketBuffer) (handled bool) {
	handled = true // a packet that shows a defect is not answered
	defer s.port.contain()
	h := header.TCP(pkt.TransportHeader().Slice())
	if len(h) < header.TCPMinimumSize {
		return true
	}
	key := connKey{addrPort(id.RemoteAddress, id.RemotePort), addrPort(id.LocalAddress, id.LocalPort)}
	switch flags := h.Flags(); {
	case flags.Contains(header.TCPFlagRst):
		s.cancel(key)
		return true
	case !flags.Contains(header.TCPFlagSyn) || flags.Contains(header.TCPFlagAck):
		return false
	}
	if key.guest.Port() == 0 || key.other.Port() == 0 {
		s.port.lost.add(badHeader)
		return true
	}
	return s.syn(key, id, pkt, h)
}

// syn begins a connection.
func (s *tcpSide) syn(key connKey, id stack.TransportEndpointID, pkt *stack.PacketBuffer, h header.TCP) bool {
	p := s.port
	if known := s.find(key); known != nil {
		if known.isn == h.SequenceNumber() {
			return true // the guest has become impatient
		}
		s.cancel(key)
	}
	allowed := p.license(key.guest.Addr(), key.other)
	if p.opts.Policy != nil {
		if ok, _ := p.opts.Policy.Check(key.guest.Addr(), key.other); !ok {
			p.traffic[kindTCP].refused.Add(1)
			p.lost.add(policyRefused)
			p.explain(errorAdmin, key.guest.Addr(), packetStart(key.guest.Addr(), key.other.Addr(), protoTCP, [8]byte(h[:8]), tcpMin))
			return true
		}
	}
	if _, ok := p.hostAddress(key.other); !ok {
		return false
	}
	if !s.makeRoom() {
		p.traffic[kindTCP].limited.Add(1)
		p.lost.add(flowLimit)
		return true
	}
	c := &pending{side: s, key: key, isn: h.SequenceNumber(), start: [8]byte(h[:8]), began: time.Now(), license: allowed, handed: true, fd: -1}
	class := s.grant()
	c.buffer = bufferClasses[class]
	if !s.add(c) {
		s.discard(c)
		return true
	}
	if !s.forwarders[class].HandlePacket(id, pkt) {
		s.mu.Lock()
		c.handed = false
		s.mu.Unlock()
		s.drop(c)
	}
	return true
}

// makeRoom counts one more flow. The oldest connect without an answer gives way where there are too many.
func (s *tcpSide) makeRoom() bool {
	s.mu.Lock()
	full := len(s.pending) >= maxPending
	s.mu.Unlock()
	if full && !s.evict() {
		return false
	}
	if s.port.flows.admit() {
		return true
	}
	return s.evict() && s.port.flows.admit()
}

// evict ends the connect that has waited longest, in silence.
func (s *tcpSide) evict() bool {
	s.mu.Lock()
	front := s.dialing.Front()
	s.mu.Unlock()
	if front == nil {
		return false
	}
	c := front.Value.(*pending)
	return s.drop(c)
}

func (s *tcpSide) find(key connKey) *pending {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pending[key]
}

func (s *tcpSide) add(c *pending) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ghost := s.ghosts[c.key]
	if s.closed || ghost || s.pending[c.key] != nil {
		return false
	}
	s.pending[c.key] = c
	c.place = s.dialing.PushBack(c)
	if s.timer == nil {
		s.timer = s.port.after(sweepTick, s.sweep)
	}
	return true
}

// sweep ends the connects that took too long.
func (s *tcpSide) sweep() {
	var late []*pending
	s.mu.Lock()
	for e := s.dialing.Front(); e != nil && time.Since(e.Value.(*pending).began) > connectLife; e = e.Next() {
		late = append(late, e.Value.(*pending))
	}
	s.timer = nil
	if !s.closed && s.dialing.Len() > len(late) {
		s.timer = s.port.after(sweepTick, s.sweep)
	}
	s.mu.Unlock()
	for _, c := range late {
		s.drop(c)
	}
}

// cancel ends a connection that the guest has given up.
func (s *tcpSide) cancel(key connKey) {
	if c := s.find(key); c != nil {
		s.drop(c)
	}
}

// take makes the caller the one who ends c. It is for the goroutine that c is with.
func (s *tcpSide) take(c *pending) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c.over {
		return false
	}
	s.forget(c)
	return true
}

// forget takes c out of the tables. The caller holds mu.
func (s *tcpSide) forget(c *pending) {
	c.over = true
	if c.place != nil {
		s.dialing.Remove(c.place)
		c.place = nil
	}
	delete(s.pending, c.key)
}

// drop ends a connect in silence, and says whether it has. One that shakes hands with the guest is left to its goroutine.
func (s *tcpSide) drop(c *pending) bool {
	s.mu.Lock()
	if c.over {
		s.mu.Unlock()
		return false
	}
	if waits := c.waits; waits != nil {
		s.mu.Unlock()
		waits.Notify(waiter.WritableEvents)
		return false
	}
	s.forget(c)
	if c.request == nil && c.handed {
		s.ghosts[c.key] = struct{}{}
	}
	s.mu.Unlock()
	s.finish(c, false)
	return true
}

// finish gives back what a pending connection holds. The caller has taken it.
func (s *tcpSide) finish(c *pending, reset bool) {
	s.mu.Lock()
	fd, request := c.fd, c.request
	c.fd = -1
	s.mu.Unlock()
	if fd >= 0 {
		s.port.poller.forget(c.token)
		resetOnClose(fd)
		s.port.closeSocket(fd)
	}
	if request != nil {
		request.Complete(reset)
	}
	s.discard(c)
}

// discard gives back what makeRoom and grant took.
func (s *tcpSide) discard(c *pending) {
	s.giveBack(c.buffer)
	s.port.flows.count.Add(-1)
}

// start begins to copy between both sides of a connection, which holds what makeRoom and grant took.
func (s *tcpSide) start(c *conn) {
	s.mu.Lock()
	closed := s.closed
	if !closed {
		s.conns[c] = struct{}{}
	}
	s.mu.Unlock()
	s.port.traffic[kindTCP].opened.Add(1)
	if closed || c.review() || !c.begin() {
		c.abort(true, true)
	}
}

// close resets all connections and waits for the goroutines that serve them.
func (s *tcpSide) close() {
	s.mu.Lock()
	s.closed = true
	close(s.quit)
	if s.timer != nil {
		s.timer.Stop()
	}
	s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		s.busy.Wait()
		close(done)
	}()
	for {
		s.endAll()
		select {
		case <-done:
			s.endAll()
			return
		case <-time.After(5 * time.Millisecond): // a handshake may not have been waiting yet when it was told
		}
	}
}

func (s *tcpSide) endAll() {
	s.mu.Lock()
	waiting := slices.Collect(maps.Values(s.pending))
	conns := slices.Collect(maps.Keys(s.conns))
	s.mu.Unlock()
	for _, c := range waiting {
		s.drop(c)
	}
	for _, c := range conns {
		c.abort(true, true)
	}
}
