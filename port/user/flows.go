package user

import (
	"container/list"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

// Lifetimes of datagram flows without traffic. A flow is short until it has seen traffic that no single question and answer is.
const (
	shortLife = 8 * time.Second
	longLife  = 120 * time.Second
	// longAfter is how many datagrams make a flow a long one: either both ways and more than one question, or many one way.
	longAfter = 8
	sweepTick = time.Second
)

// flowKey names a flow by protocol and addresses; echo requests have their identifier in place of the guest's port, and no other port.
type flowKey struct {
	proto      uint8
	guest, dst netip.AddrPort
}

// flows are the datagram flows of a port. Each is known under its key, and stands in the list of its class, the one with the oldest
// traffic in front, as far as the sweeper or the last eviction have seen it.
type flows struct {
	port  *Port
	fds   share
	count atomic.Int64 // of flows of all kinds, TCP's too
	most  atomic.Int64 // that there may be
	now   atomic.Int64 // seconds since the start, as the sweeper saw it last; read for each datagram
	start time.Time
	ahead atomic.Int64 // seconds by which tests have the clock run ahead

	mu      sync.Mutex
	byKey   map[flowKey]*dgram
	classes [2]list.List // short, long
	timer   *time.Timer  // nil while there is nothing to sweep
	closed  bool
}

func (s *flows) init(p *Port) {
	s.port, s.byKey, s.start = p, map[flowKey]*dgram{}, time.Now()
	s.fds.budget = &descriptors
	s.most.Store(int64(p.opts.MaxFlows))
}

// clock is the time in seconds since the start.
func (s *flows) clock() int64 { return int64(time.Since(s.start)/time.Second) + s.ahead.Load() }

// find returns the flow, or nil.
func (s *flows) find(key flowKey) *dgram {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byKey[key]
}

// admit counts one more flow of any kind. With every place taken a datagram flow gives way, if there is one.
func (s *flows) admit() bool {
	if s.count.Add(1) <= s.most.Load() {
		return true
	}
	if s.evict() {
		return true
	}
	s.count.Add(-1)
	return false
}

// add makes the flow known. False means that another one was faster, or that the port is closed.
func (s *flows) add(d *dgram) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.byKey[d.key] != nil {
		return false
	}
	s.byKey[d.key] = d
	d.seen = s.clock()
	d.last.Store(d.seen)
	d.place = s.classes[0].PushBack(d)
	counts := &s.port.traffic[d.key.kind()]
	counts.present.Add(1)
	counts.opened.Add(1)
	if s.timer == nil {
		s.now.Store(s.clock())
		s.timer = s.port.after(sweepTick, s.sweep)
	}
	return true
}

// evict ends the flow with the oldest traffic of the short class, else of the long one.
func (s *flows) evict() bool {
	s.mu.Lock()
	var d *dgram
	for class := range s.classes {
		if d = s.oldest(class); d != nil {
			break
		}
	}
	if d != nil {
		s.forget(d)
	}
	s.mu.Unlock()
	if d == nil {
		return false
	}
	d.close()
	return true
}

// oldest is the first flow of a class that had no traffic since it was put there; after a few that had, any will do.
func (s *flows) oldest(class int) *dgram {
	const tries = 8
	l := &s.classes[class]
	for range tries {
		front := l.Front()
		if front == nil {
			return nil
		}
		d := front.Value.(*dgram)
		last := d.last.Load()
		if last <= d.seen {
			return d
		}
		d.seen = last
		l.MoveToBack(front)
	}
	return l.Front().Value.(*dgram)
}

// forget takes a flow out of the table. The caller holds mu and closes the flow afterwards, without mu.
func (s *flows) forget(d *dgram) {
	if d.place == nil {
		return
	}
	delete(s.byKey, d.key)
	s.classes[d.class].Remove(d.place)
	d.place = nil
	s.port.traffic[d.key.kind()].present.Add(-1)
	s.count.Add(-1)
}

// sweep ends the flows without traffic. The lists are in the order of the last look, so that it stops at the first that is young.
func (s *flows) sweep() {
	now := s.clock()
	s.now.Store(now)
	var dead []*dgram
	s.mu.Lock()
	dead = s.expired(0, now-int64(shortLife/time.Second), dead)
	dead = s.expired(1, now-int64(longLife/time.Second), dead)
	s.timer = nil
	if !s.closed && len(s.byKey) > 0 {
		s.timer = s.port.after(sweepTick, s.sweep)
	}
	s.mu.Unlock()
	for _, d := range dead {
		d.close()
	}
}

// expired takes the flows of a class out whose last traffic is older than limit. Those that have become long move on.
func (s *flows) expired(class int, limit int64, dead []*dgram) []*dgram {
	l := &s.classes[class]
	for range l.Len() {
		front := l.Front()
		d := front.Value.(*dgram)
		if d.seen > limit {
			break
		}
		last := d.last.Load()
		switch {
		case class == 0 && d.isLong():
			l.Remove(front)
			d.class, d.seen = 1, last
			d.place = s.classes[1].PushBack(d)
		case last > limit:
			d.seen = last
			l.MoveToBack(front)
		default:
			s.forget(d)
			dead = append(dead, d)
		}
	}
	return dead
}

func (s *flows) close() {
	s.mu.Lock()
	s.closed = true
	if s.timer != nil {
		s.timer.Stop()
	}
	all := make([]*dgram, 0, len(s.byKey))
	for _, d := range s.byKey {
		all = append(all, d)
	}
	for _, d := range all {
		s.forget(d)
	}
	s.mu.Unlock()
	for _, d := range all {
		d.close()
	}
}
