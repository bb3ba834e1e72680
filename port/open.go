package port

import (
	"errors"
	"fmt"
	"sync"

	"github.com/vhostd/vhostd/virtio"
)

// MaxQueues is the largest number of queue pairs that a port can serve.
const MaxQueues = 128

// QueueSet holds the open queues of a port, at most one a queue pair. The zero value is ready. All methods are safe for
// concurrent use.
type QueueSet struct {
	mu     sync.Mutex
	shut   bool
	queues [MaxQueues]Queue
}

// Open opens pair i with the queue that create makes.
func (s *QueueSet) Open(i int, create func() (Queue, error)) (Queue, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.shut:
		return nil, fmt.Errorf("open queue pair %d: %w", i, ErrClosed)
	case i < 0 || i >= MaxQueues:
		return nil, fmt.Errorf("open queue pair %d: accepted are 0 to %d", i, MaxQueues-1)
	case s.queues[i] != nil:
		return nil, fmt.Errorf("open queue pair %d: it is open already", i)
	}
	q, err := create()
	if err != nil {
		return nil, fmt.Errorf("open queue pair %d: %w", i, err)
	}
	s.queues[i] = q
	return q, nil
}

// Remove forgets pair i. The queue's Close calls it, once.
func (s *QueueSet) Remove(i int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queues[i] = nil
}

// Close closes the queues that are still open; no queue can be opened afterwards.
func (s *QueueSet) Close() error {
	s.mu.Lock()
	s.shut = true
	left := s.queues
	s.mu.Unlock()
	var errs []error
	for _, q := range left {
		if q != nil {
			errs = append(errs, q.Close())
		}
	}
	return errors.Join(errs...)
}

// offloads are the features whose work happens in the network, so that a port must know about them.
const offloads = virtio.FNetCSum | virtio.FNetHostTSO4 | virtio.FNetHostTSO6 | virtio.FNetHostECN | virtio.FNetHostUFO |
	virtio.FNetGuestCSum | virtio.FNetGuestTSO4 | virtio.FNetGuestTSO6 | virtio.FNetGuestECN | virtio.FNetGuestUFO

// CheckOffloads returns an error if acked holds an offload that a port of this kind did not offer. Other features are not a
// port's business and pass.
func CheckOffloads(kind string, offered, acked virtio.Features) error {
	if extra := acked & offloads &^ offered; extra != 0 {
		return fmt.Errorf("network %s: offloads %v were not offered (offered: %v)", kind, extra, offered)
	}
	return nil
}
