package guestmem

import (
	"slices"
	"sync"
)

// Arrival is the Translator of rings whose guest's memory is still on its way (postcopy migration): it
// knows pages that have arrived, and keeps a list of those that are wanted. Whoever touches a page that
// it does not know may wait for it without end, or find zeros in its place.
type Arrival struct {
	mu     sync.RWMutex
	table  *Table
	behind Translator // of the addresses; nil if they are guest physical ones
	over   bool

	parts  map[uint32]*mapping // by number
	last   uint32              // number given
	wanted []Page              // oldest first, not fetched yet
	open   map[Page]struct{}   // those, and those that are being fetched
	notify func()
}

// Page is a page of a mapping that was given a number.
type Page struct {
	Part         uint32
	Offset, Size uint64 // in the mapping, in bytes
}

// Part describes a mapping to whoever is to populate it, in bytes.
type Part struct {
	Number uint32
	Start  uint64 // in its file
	Length uint64
	Head   uint64 // from the start of the mapping to the start of the region
}

const (
	// maxWanted bounds the pages that are wanted or being fetched at a time. Rings that want more
	// try again when one has come.
	maxWanted = 2048
	// maxFetching of them are being fetched.
	maxFetching = 64
	// wantPages is how many pages of one buffer are wanted at a time.
	wantPages = 16
)

// NewArrival returns an Arrival without memory. notify is called when Next has something new to say, from
// any goroutine, with the Arrival locked; it must not block, nor call the Arrival.
func NewArrival(notify func()) *Arrival {
	return &Arrival{parts: make(map[uint32]*mapping), open: make(map[Page]struct{}), notify: notify}
}

// Await says that no page of t's region at gpa can be relied on, and that the region's mapping is known by a
// number from now on. A mapping that t shares with another table may be awaited already: then fresh is
// false. t is not in use yet.
func (a *Arrival) Await(t *Table, gpa uint64) (part Part, fresh bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := t.find(gpa)
	m := r.mapping
	state := m.arriving.Load()
	if fresh = state == nil; fresh {
		a.last++
		state = newArriving(a.last, m)
		m.arriving.Store(state)
		a.parts[a.last] = m
	}
	return Part{Number: state.number, Start: m.start, Length: uint64(m.length), Head: uint64(r.host - m.addr)}, fresh
}

// SetTable moves the Arrival to a table, nil for none.
func (a *Arrival) SetTable(t *Table) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.table = t
}

// SetBehind names what translates the addresses, nil if they are guest physical ones.
func (a *Arrival) SetBehind(t Translator) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.behind = t
}

// Drop forgets the mappings that the table does not have, and returns their numbers.
func (a *Arrival) Drop() (gone []uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	used := make(map[*mapping]bool)
	if a.table != nil {
		for i := range a.table.regions {
			used[a.table.regions[i].mapping] = true
		}
	}
	for number, m := range a.parts {
		if !used[m] {
			delete(a.parts, number)
			gone = append(gone, number)
		}
	}
	dropped := func(p Page) bool { return a.parts[p.Part] == nil }
	a.wanted = slices.DeleteFunc(a.wanted, dropped)
	for p := range a.open {
		if dropped(p) {
			delete(a.open, p)
		}
	}
	return gone
}

// End says that all pages have arrived.
func (a *Arrival) End() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.over, a.wanted = true, nil
	clear(a.open)
	for _, m := range a.parts {
		m.arriving.Store(nil)
	}
	clear(a.parts)
}

// resolve finds addr in this process, whether it has arrived or not.
func (a *Arrival) resolve(addr uint64, write bool) (Mapping, *region, Outcome) {
	if a.behind == nil {
		r := a.table.find(addr)
		if r == nil {
			return Mapping{}, nil, Unmapped
		}
		return Mapping{Addr: r.GPA, Size: r.Size, Host: r.host}, r, Mapped
	}
	m, outcome := a.behind.Translate(addr, write)
	if outcome != Mapped {
		return m, nil, outcome
	}
	r := a.table.at(m.Host + uintptr(addr-m.Addr))
	if r == nil {
		return Mapping{}, nil, Missing // the table is being replaced
	}
	return m, r, Mapped
}

// at returns the region in which a host address lies.
func (t *Table) at(host uintptr) *region {
	if t == nil {
		return nil
	}
	for i := range t.regions {
		if r := &t.regions[i]; uint64(host-r.host) < r.Size {
			return r
		}
	}
	return nil
}

// Translate implements Translator.
func (a *Arrival) Translate(addr uint64, write bool) (Mapping, Outcome) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	m, r, outcome := a.resolve(addr, write)
	if outcome != Mapped {
		return m, outcome
	}
	state := r.mapping.arriving.Load()
	if state == nil {
		return m, Mapped
	}
	host := m.Host + uintptr(addr-m.Addr)
	first, end := state.run(uint64(host-r.mapping.addr) >> state.shift)
	if first == end {
		return Mapping{}, Missing
	}
	// What has arrived and what is mapped around addr, where they meet.
	low := max(m.Host, r.mapping.addr+uintptr(first<<state.shift))
	high := min(m.Host+uintptr(m.Size), r.mapping.addr+uintptr(end<<state.shift))
	return Mapping{Addr: m.Addr + uint64(low-m.Host), Size: uint64(high - low), Host: low}, Mapped
}

// Want implements Translator. Of many pages the first few are wanted.
func (a *Arrival) Want(addr, n uint64, write bool) (now bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	m, r, outcome := a.resolve(addr, write)
	switch {
	case outcome == Missing && a.behind != nil:
		return a.behind.Want(addr, n, write)
	case outcome != Mapped:
		return true // it will be found to be unmapped
	}
	off := addr - m.Addr
	first, _ := a.want(r, m.Host+uintptr(off), min(n, m.Size-off), wantPages)
	return first
}

// Holds reports whether n > 0 bytes at a host address of the table have arrived; what has not is wanted.
func (a *Arrival) Holds(host uintptr, n uint64) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.table.at(host)
	if r == nil {
		return false
	}
	_, all := a.want(r, host, n, maxWanted)
	return all
}

// want looks at up to limit pages of n > 0 bytes of r, asks for those that have not arrived, and reports
// whether the first of them has, and whether all have.
func (a *Arrival) want(r *region, host uintptr, n uint64, limit uint64) (first, all bool) {
	state := r.mapping.arriving.Load()
	if state == nil {
		return true, true
	}
	off := uint64(host - r.mapping.addr)
	begin, last := off>>state.shift, (off+(n-1))>>state.shift
	first, all = state.has(begin), true
	for p := begin; p <= min(last, begin+limit-1); p++ {
		if !state.has(p) {
			all = false
			a.ask(Page{Part: state.number, Offset: p << state.shift, Size: 1 << state.shift})
		}
	}
	return first, all
}

func (a *Arrival) ask(p Page) {
	if _, known := a.open[p]; known || len(a.open) == maxWanted {
		return
	}
	a.open[p] = struct{}{}
	a.wanted = append(a.wanted, p)
	a.notify()
}

// Next returns the page that is to be fetched next, which the caller does now. Pages that have come with another
// one need not be.
func (a *Arrival) Next() (p Page, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for len(a.wanted) > 0 && len(a.open)-len(a.wanted) < maxFetching {
		p = a.wanted[0]
		a.wanted = slices.Delete(a.wanted, 0, 1)
		if state := a.parts[p.Part].arriving.Load(); !state.has(p.Offset >> state.shift) {
			return p, true
		}
		delete(a.open, p)
	}
	return Page{}, false
}

// Arrived says that a page came that Next returned. around has a bit for each page of the aligned 512 that it
// is one of: those that are known to be there, too. Of pages that nobody fetches it says false and ignores
// them; otherwise the caller has the rings try again.
func (a *Arrival) Arrived(p Page, around [8]uint64) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if _, known := a.open[p]; !known {
		return false
	}
	delete(a.open, p)
	a.wanted = slices.DeleteFunc(a.wanted, func(w Page) bool { return w == p })
	if m := a.parts[p.Part]; m != nil {
		state := m.arriving.Load()
		state.add(p.Offset>>state.shift, around)
	}
	a.notify()
	return true
}
