// Package stock keeps empty pages ready as a vector for readv(2), for ports that receive from a descriptor, one frame a call.
package stock

import (
	"errors"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/pool"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/virtio"
)

// Why a queue cannot receive.
var (
	ErrNoPool = errors.New("no page pool to receive into")
	ErrNoPage = errors.New("no memory: the arena is exhausted (give it more, or serve fewer queues)")
)

// Iovec is struct iovec with the address of memory outside the Go heap, which the collector need not see.
type Iovec struct {
	Base uintptr
	Len  uint64
}

const (
	// WindowPages is how many pages a read offers the kernel: more than the longest frame fills, so that a longer one shows.
	WindowPages = packet.MaxFrags
	// stockRefill is how many pages come from the pool at a time.
	stockRefill = 32
	stockPages  = WindowPages - 1 + stockRefill
)

// A window that held exactly MaxFrame bytes could not tell a longest frame from one that was cut.
const _ = uint(WindowPages*pagemem.PageSize - virtio.MaxFrame - 1)

// Stock holds the empty pages of the frames to come as a vector for readv. Its entry i+1 is page i; the entry in front of the
// first unused page is the header's, so that header and window are one slice. A frame takes pages from the front of the
// window, the next window starts behind them, and pages that the kernel did not reach are offered again untouched.
type Stock struct {
	pool  *pool.Pool
	arena *pagemem.Arena
	owner pagemem.OwnerID
	hdr   Iovec
	next  int // first unused page
	end   int // first page that is not there
	iov   [1 + stockPages]Iovec
	pages [stockPages]pagemem.PageID
}

// New makes an empty stock. hdr, a virtio_net_hdr in memory outside the Go heap, comes first in every window; 0 for none.
func New(r port.Resources, hdr uintptr) Stock {
	return Stock{pool: r.Pool, arena: r.Arena, owner: r.Owner, hdr: Iovec{Base: hdr, Len: virtio.NetHdrLen}}
}

// Fill makes sure that there is a whole window; false means that there is no memory for it.
func (s *Stock) Fill() bool {
	if s.end-s.next >= WindowPages {
		return true
	}
	left := copy(s.pages[:], s.pages[s.next:s.end])
	copy(s.iov[1:], s.iov[1+s.next:1+s.end])
	s.next, s.end = 0, left
	got := s.pool.AllocN(s.pages[left:])
	for i, page := range s.pages[left : left+got] {
		s.iov[1+left+i] = Iovec{Base: s.arena.Addr(page), Len: pagemem.PageSize}
	}
	s.end += got
	return s.end >= WindowPages
}

// Window is the vector of the header and the next WindowPages pages, valid until Take. Fill must have succeeded.
func (s *Stock) Window() []Iovec {
	pages := s.iov[s.next : s.next+1+WindowPages]
	if s.hdr.Base == 0 {
		return pages[1:]
	}
	pages[0] = s.hdr
	return pages
}

// Take moves the first size bytes of the window, 1 to virtio.MaxFrame, into p, whose header stays.
func (s *Stock) Take(p *packet.Packet, size uint32) {
	p.Len, p.NFrag, p.Flags = size, 0, 0
	for size > 0 {
		n := min(size, pagemem.PageSize)
		p.Frags[p.NFrag] = packet.Frag{Addr: s.iov[1+s.next].Base, Len: n, Page: s.pages[s.next]}
		p.NFrag++
		s.next++
		size -= n
	}
}

// GiveBack returns the unused pages to the pool. The owner is quiescent.
func (s *Stock) GiveBack() {
	s.pool.PutBulk(s.pages[s.next:s.end], s.owner)
	s.next, s.end = 0, 0
}
