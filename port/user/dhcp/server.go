package dhcp

import (
	"net/netip"
	"sync"
	"time"
)

// server is what servers of both protocols have.
type server[C Config | Config6] struct {
	dropped counters
	now     func() time.Time

	mu     sync.Mutex // guards what follows
	config C
	leases *table
}

func (s *server[C]) init(store Store) { s.now, s.leases = time.Now, newTable(store) }

// follow puts a configuration that was judged in force.
func (s *server[C]) follow(config C, first, last netip.Addr, pins []Pin, gateway netip.Addr) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.config = config
	s.leases.first, s.leases.last, s.leases.pins = first, last, pins
	s.leases.taken = []netip.Addr{gateway}
}

// Leases lists the leases in the order of their addresses.
func (s *server[C]) Leases() []Lease {
	s.mu.Lock()
	leases := s.leases.list(s.now())
	s.mu.Unlock()
	return byAddr(leases)
}

// Drops visits the number of messages without an answer for each reason. The reasons are constant strings fit for a metric label.
func (s *server[C]) Drops(visit func(reason string, n uint64)) { s.dropped.visit(visit) }
