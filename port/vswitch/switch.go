package vswitch

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vhostd/vhostd/pagemem"
)

// Switch is one segment. Its methods are safe for concurrent use.
type Switch struct {
	name   string
	budget *Budget
	table  *table
	view   atomic.Pointer[view]
	absent *Port        // stands for ports that are gone
	clock  func() int64 // milliseconds

	mu    sync.Mutex // guards ports and arena; view follows ports
	ports []*Port
	arena *pagemem.Arena
}

var epoch = time.Now()

func milliseconds() int64 { return time.Since(epoch).Milliseconds() }

// New makes a switch without ports. It holds nothing that has to be closed but its ports.
func New(opts Options) (*Switch, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	s := &Switch{name: opts.Name, budget: cmp.Or(opts.Budget, new(Budget)), table: newTable(cmp.Or(opts.Ageing, DefaultAgeing)),
		clock: milliseconds}
	s.absent = &Port{sw: s, index: left}
	s.absent.serving.Store(new([]*queue))
	s.view.Store(newView(nil, s.absent))
	return s, nil
}

// SetAgeing changes how long silent stations are known, at once and for those that are known already.
func (s *Switch) SetAgeing(d time.Duration) error {
	if err := (Options{Ageing: d}).Validate(); err != nil {
		return err
	}
	s.table.ageing.Store(cmp.Or(d, DefaultAgeing).Milliseconds())
	return nil
}

// Ports is the number of ports, the uplink included.
func (s *Switch) Ports() int { return len(s.view.Load().ports) }

// Stations is the number of stations that are known, pinned addresses not included.
func (s *Switch) Stations() int { return s.table.count(s.clock()) }

// NewPort adds a port.
func (s *Switch) NewPort(opts PortOptions) (*Port, error) {
	if err := opts.Validate(); err != nil {
		return nil, err
	}
	p := newPort(s, opts)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.place(p); err != nil {
		return nil, fmt.Errorf("network switch %s: %w", s.name, err)
	}
	s.ports = append(s.ports, p)
	s.publish()
	return p, nil
}

// place finds an index for a port that may join.
func (s *Switch) place(p *Port) error {
	used := make([]bool, maxIndex)
	for _, other := range s.ports {
		used[other.index] = true
		if p.isUplink() && other.isUplink() {
			return errors.New("there is an uplink already")
		}
		if p.pinned != 0 && p.pinned == other.pinned {
			return errors.New("the address is another port's, which is pinned to it")
		}
	}
	i := slices.Index(used[firstIndex:], false)
	if i < 0 {
		return fmt.Errorf("there are %d ports, as many as a switch can have", MaxPorts)
	}
	p.index = uint16(firstIndex + i)
	s.table.admit(p.index, p.stations())
	return nil
}

// remove takes out a port whose queues are closed.
func (s *Switch) remove(p *Port) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.ports, p)
	if i < 0 {
		return
	}
	s.ports = slices.Delete(s.ports, i, i+1)
	s.publish()
	s.table.retire(p.index)
	if p.pinned != 0 {
		s.table.learn(p.pinned, left, s.clock())
	}
}

// publish lets senders see the ports. The caller holds mu.
func (s *Switch) publish() { s.view.Store(newView(slices.Clone(s.ports), s.absent)) }

// useArena makes a the memory of all frames here. Pages cannot be released to another arena than their own.
func (s *Switch) useArena(a *pagemem.Arena) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.arena != nil && s.arena != a {
		return errors.New("all queues of a switch must use the same arena")
	}
	s.arena = a
	s.budget.LimitTo(a.Bytes() / budgetShare)
	return nil
}

// memory is the arena of all frames here, nil if there was no queue yet.
func (s *Switch) memory() *pagemem.Arena {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.arena
}
