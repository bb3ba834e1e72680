package virtionet

import (
	"fmt"
	"strings"
	"time"

	"github.com/vhostd/vhostd/fragalloc"
	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/pool"
)

// TxAlloc names the allocator of the buffers that frames of the guest are copied into.
type TxAlloc uint8

// TxFrag is the page-fragment cache, whose fragments cost no atomic operation until they are freed. TxFragPool takes the
// pages of such fragments from the worker's page pool, to which they return (pfrag_pool). TxRefPage counts a reference for each fragment
// (the kernel's page_frag before the cache) and is there to be compared with.
const (
	TxFrag TxAlloc = iota
	TxFragPool
	TxRefPage
)

var txAllocNames = [...]string{TxFrag: "frag", TxFragPool: "fragpool", TxRefPage: "refpage"}

// TxAllocs lists what [ParseTxAlloc] accepts.
func TxAllocs() []string { return txAllocNames[:] }

// String returns the name that [ParseTxAlloc] accepts.
func (a TxAlloc) String() string {
	if int(a) < len(txAllocNames) {
		return txAllocNames[a]
	}
	return fmt.Sprintf("TxAlloc(%d)", uint8(a))
}

// ParseTxAlloc turns a name of [TxAllocs] into a TxAlloc.
func ParseTxAlloc(s string) (TxAlloc, error) {
	for a, name := range txAllocNames {
		if s == name {
			return TxAlloc(a), nil
		}
	}
	return TxFrag, fmt.Errorf("%q: accepted are %s", s, strings.Join(txAllocNames[:], ", "))
}

// shrinkAfter is how long a pair is idle before its allocator gives back what it keeps ready.
const shrinkAfter = time.Second

// txAllocator is where a pair's transmit buffers come from. It belongs to the pair's worker. Most fragments are taken from the window
// without a call; alloc is for the others.
type txAllocator interface {
	window() *pagemem.Window
	// alloc takes size bytes at a cache line's start; size is a multiple of a line's.
	alloc(size uint32) (pagemem.Frag, bool)
	// idle says that the worker is about to sleep and returns after which time it wants to hear that again, 0: not at all.
	idle() time.Duration
	publish()
	drain()
}

// newTxAllocator makes an allocator and says whether each fragment that is taken from its window is still to be counted.
func (p *pair) newTxAllocator(kind TxAlloc) (a txAllocator, counted bool) {
	switch kind {
	case TxFragPool:
		f := &fragPoolAlloc{FragPool: pool.NewFragPool(p.arena, p.owner, p.dev.budget), fallback: fragalloc.NewCache(p.arena)}
		f.Follow(&p.dev.recyclers, p.owner)
		return f, false
	case TxRefPage:
		return refPageAlloc{fragalloc.NewRefPage(p.arena)}, true
	}
	return fragAlloc{fragalloc.NewCache(p.arena)}, false
}

// setTxAlloc changes the allocator between two turns. Frames under way hold references of their own on the old one's pages.
func (p *pair) setTxAlloc(kind TxAlloc) {
	if p.alloc != nil {
		p.alloc.drain()
	}
	p.alloc, p.counted = p.newTxAllocator(kind)
	p.win = p.alloc.window()
}

// AllocBuf lets offload build its frames with the pair's allocator, whichever that is then.
func (p *pair) AllocBuf(size uint32) (packet.Frag, bool) {
	f, ok := p.alloc.alloc(lineAligned(size))
	return packet.Frag{Addr: f.Addr, Len: size, Page: f.Page}, ok
}

// SetTxAlloc changes the allocator of transmit buffers, also while rings run, and returns when all workers use it.
// It is safe from any goroutine.
func (d *Device) SetTxAlloc(kind TxAlloc) {
	d.control.Lock()
	defer d.control.Unlock()
	if kind == d.txAllocator() {
		return
	}
	d.mu.Lock()
	d.txAlloc = kind
	d.mu.Unlock()
	for _, p := range d.pairs {
		if p != nil {
			p.loop.Do(func() { p.setTxAlloc(kind) })
		}
	}
}

func (d *Device) txAllocator() TxAlloc {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.txAlloc
}

type fragAlloc struct{ *fragalloc.Cache }

func (a fragAlloc) window() *pagemem.Window { return a.Window() }
func (fragAlloc) idle() time.Duration       { return 0 }
func (fragAlloc) publish()                  {}
func (a fragAlloc) drain()                  { a.Drain() }

func (a fragAlloc) alloc(size uint32) (pagemem.Frag, bool) {
	f, err := a.Alloc(size, fragalloc.Line)
	return f, err == nil
}

type refPageAlloc struct{ *fragalloc.RefPage }

func (a refPageAlloc) window() *pagemem.Window { return a.Window() }
func (refPageAlloc) idle() time.Duration       { return 0 }
func (refPageAlloc) publish()                  {}
func (a refPageAlloc) drain()                  { a.Drain() }

func (a refPageAlloc) alloc(size uint32) (pagemem.Frag, bool) {
	f, err := a.Alloc(size, fragalloc.Line)
	return f, err == nil
}

// fragPoolAlloc is a FragPool with what stands in for it when it has no page, as sk_page_frag does for a socket.
type fragPoolAlloc struct {
	*pool.FragPool
	fallback *fragalloc.Cache
	used     bool      // since idle looked last
	since    time.Time // of the first idle moment without use in between
}

func (a *fragPoolAlloc) window() *pagemem.Window { return a.Window() }

func (a *fragPoolAlloc) alloc(size uint32) (pagemem.Frag, bool) {
	a.used = true // each page passes through here
	if f, ok := a.Alloc(size, fragalloc.Line); ok {
		return f, true
	}
	f, err := a.fallback.Alloc(size, fragalloc.Line)
	return f, err == nil
}

func (a *fragPoolAlloc) idle() time.Duration {
	now := time.Now()
	if a.used {
		a.used, a.since = false, now
	}
	if a.Resting() == 0 {
		return 0
	}
	if left := shrinkAfter - now.Sub(a.since); left > 0 {
		return left
	}
	a.Trim()
	return 0
}

func (a *fragPoolAlloc) publish() { a.Publish() }

func (a *fragPoolAlloc) drain() {
	a.Flush()
	a.fallback.Drain()
}
