package vhostuser

import (
	"errors"
	"fmt"
	"sync/atomic"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/internal/uffd"
)

// PostcopyHelper turns the process into one that populates guests' memory, if it was started
// for that, and then does not return. A program that sets Options.Postcopy calls it first thing in main.
func PostcopyHelper() { uffd.RunHelper() }

// PreparePostcopy starts the process that starts those helpers, for a program that cannot start any later
// because it confines itself. stop ends it.
func PreparePostcopy() (stop func(), err error) { return uffd.Prelaunch() }

// ProbePostcopy says why Options.Postcopy has no effect here, nil if it has.
func ProbePostcopy() error { return uffd.Probe() }

// postcopy is a migration in which the guest runs here before its memory is here. The front-end
// announces it (POSTCOPY_ADVISE), from POSTCOPY_LISTEN on shares memory that is still to arrive, and says when
// all has (POSTCOPY_END). A helper process touches the pages that are wanted, which has the front-end
// bring them; nothing here touches one before.
type postcopy struct {
	helper    *uffd.Helper
	arrival   *guestmem.Arrival
	listening bool
	asked     exchange
	bases     map[uint32]uint64 // where the helper has each part

	wake chan struct{}
	quit chan struct{}
	news atomic.Bool // pages have arrived since the rings were told

	fetched atomic.Uint64 // pages
}

// offerPostcopy is the bit, where Options ask for it and it works.
func (s *Session) offerPostcopy(opts Options) ProtocolFeatures {
	if !opts.Postcopy {
		return 0
	}
	if err := uffd.Probe(); err != nil {
		s.logger.Debug("postcopy migration is not offered", "reason", err)
		return 0
	}
	return ProtoPagefault
}

// maxAdvised is how many helpers one connection gets, one after another. A guest arrives once.
const maxAdvised = 4

// postcopyAdvise starts the helper and answers its userfaultfd. An answer without
// one tells the front-end that it cannot be had.
func (s *Session) postcopyAdvise(m *message) error {
	if s.post != nil || s.advised == maxAdvised {
		s.once.log("POSTCOPY_ADVISE", "one POSTCOPY_ADVISE more is answered without a userfaultfd", "before", s.advised, "present", s.post != nil)
		return nil
	}
	s.advised++
	p := &postcopy{bases: make(map[uint32]uint64), wake: make(chan struct{}, 1), quit: make(chan struct{})}
	p.arrival = guestmem.NewArrival(p.poke)
	helper, err := uffd.Start(func(a uffd.Arrival) { s.arrived(p, a) })
	if err != nil {
		s.once.log("POSTCOPY_ADVISE", "no userfaultfd for the front-end", "err", err)
		return nil
	}
	p.helper = helper
	m.replyFD = ownFD(helper.TakeFD())
	s.post = p
	s.helpers.Go(func() { s.follow(p) })
	return nil
}

// postcopyListen has the memory that is shared from now on arrive page by page.
func (s *Session) postcopyListen(*message) error {
	switch {
	case s.post == nil:
		return errors.New("POSTCOPY_ADVISE must come first")
	case s.post.listening:
		return errors.New("it has been said already")
	case s.mem.Len() > 0:
		return fmt.Errorf("%d memory regions are shared already, and what is missing from them is not known", s.mem.Len())
	}
	for _, r := range s.rings {
		if r != nil && r.started { // it waits for memory to return, and would not ask for pages
			return fmt.Errorf("ring %d is started", r.index)
		}
	}
	s.post.listening, s.arrival = true, s.post.arrival
	s.logger.Info("a guest arrives before its memory does", "peer", s.peer)
	return nil
}

// postcopyEnd lets the helper go: all pages have arrived.
func (s *Session) postcopyEnd(*message) error {
	if s.post == nil || !s.post.listening {
		return errors.New("POSTCOPY_LISTEN must come first")
	}
	s.logger.Info("all memory of the guest has arrived", "peer", s.peer, "pages-awaited", s.post.fetched.Load())
	s.endPostcopy()
	s.arrival.End()
	s.dev.Retry()
	s.startReady()
	return s.unpark()
}

// endPostcopy ends the helper whatever it waits for, and drops memory that the front-end did not confirm.
func (s *Session) endPostcopy() {
	p := s.post
	close(p.quit)
	p.helper.Close()
	s.closeTable(p.asked.table)
	p.asked = exchange{}
	s.post = nil
}

// abandonPostcopy is endPostcopy for the end of the session.
func (s *Session) abandonPostcopy() {
	s.mu.Lock()
	if s.post != nil {
		s.endPostcopy()
	}
	s.mu.Unlock()
	s.helpers.Wait()
}

// viaArrival is what translates the addresses of descriptors while memory arrives.
func (s *Session) viaArrival() guestmem.Translator {
	if !s.post.listening {
		if s.iotlb == nil {
			return nil
		}
		return s.iotlb
	}
	if s.iotlb == nil {
		s.arrival.SetBehind(nil)
	} else {
		s.arrival.SetBehind(s.iotlb)
	}
	return s.arrival
}

// arrived takes what the helper says of a page. It runs on the helper's goroutine.
func (s *Session) arrived(p *postcopy, a uffd.Arrival) {
	if a.Err != nil {
		s.fail(fmt.Errorf("a page of the guest's memory cannot be had: %w", a.Err))
		return
	}
	if !p.arrival.Arrived(guestmem.Page{Part: a.Region, Offset: a.Offset, Size: a.Size}, a.Chunk) {
		return // nothing that a front-end which has taken the helper over makes up keeps workers busy
	}
	p.fetched.Add(1)
	p.news.Store(true) // once it can be found: follow may be at it
	p.poke()
}

// fail ends the connection from another goroutine than Serve's.
func (s *Session) fail(err error) {
	s.failure.CompareAndSwap(nil, &err)
	s.transport.interrupt()
}

// poke has follow look for work. It never blocks.
func (p *postcopy) poke() {
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

// follow has wanted pages fetched, and the rings try again when some have arrived.
func (s *Session) follow(p *postcopy) {
	for {
		select {
		case <-p.quit:
			return
		case <-p.helper.Done():
			select {
			case <-p.quit:
			default:
				s.fail(errors.New("the process that populates the guest's memory has ended"))
			}
			return
		case <-p.wake:
		}
		if p.news.Swap(false) {
			s.resume(p)
		}
		for {
			page, ok := p.arrival.Next()
			if !ok {
				break
			}
			if err := p.helper.Fetch(page.Part, page.Offset, page.Size); err != nil {
				s.fail(fmt.Errorf("the process that populates the guest's memory does not listen: %w", err))
				return
			}
		}
	}
}

// resume has rings go on that waited for pages, as far as those have come.
func (s *Session) resume(p *postcopy) {
	s.dev.Retry()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.post != p {
		return
	}
	s.startReady()
	if err := s.unpark(); err != nil {
		s.once.log("ring not resumed", "rings whose memory has arrived cannot go on", "err", err)
	}
	s.publish()
}

// dropArrived has the helper forget memory that left the table.
func (s *Session) dropArrived() {
	if s.arrival == nil {
		return
	}
	for _, number := range s.arrival.Drop() {
		if s.post != nil {
			_ = s.post.helper.Unmap(number) // that the helper has failed is noticed elsewhere
		}
	}
}
