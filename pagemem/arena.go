package pagemem

import (
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
)

const (
	// PageSize is the size of an order-0 page in bytes.
	PageSize = 4096
	// ChunkOrder is the order of a compound page, the only order besides 0.
	ChunkOrder = 3
	// ChunkPages is the number of order-0 pages in a chunk.
	ChunkPages = 1 << ChunkOrder
	// ChunkSize is the size of a chunk in bytes (PAGE_FRAG_CACHE_MAX_SIZE).
	ChunkSize = PageSize << ChunkOrder
	// MaxBytes is the largest arena.
	MaxBytes = 1 << 40
)

// PageID is the index of a 4 KiB page in its arena. A compound page is named by
// its first page, the head.
type PageID uint32

// OwnerID names the context, a worker, that may recycle pages directly into its
// own caches. 0 is nobody.
type OwnerID uint32

var lastOwner atomic.Uint32

// NewOwnerID returns an id that nobody else in the process has.
// Safe for concurrent use.
func NewOwnerID() OwnerID { return OwnerID(lastOwner.Add(1)) }

// Config describes an arena.
type Config struct {
	// Bytes is the size, reserve included, rounded up to whole chunks (with
	// huge pages: to whole ones). Ordinary memory is populated when it is first
	// touched, huge pages at once.
	Bytes uint64
	// HugePages says whether the memory comes from the kernel's pool of huge
	// pages; Stats says what became of HugeTry.
	HugePages HugePages
	// HugePageSize is the size of these in bytes, 2 MiB or 1 GiB. 0: 2 MiB.
	HugePageSize uint64
	// Node is the NUMA node that the memory comes from, 0 to MaxNode. Huge pages
	// are all of it; ordinary memory is while the node has some. Nil: no matter.
	Node *int
	// ReservePages is the number of order-0 pages, rounded up to whole chunks,
	// that only allocations with AllowReserve get, once all others are gone.
	ReservePages int
	// Name shows in /proc/PID/maps. Empty: "vhostd-arena".
	Name string
}

// Arena is a range of shared memory that is handed out in pages.
//
// All methods are safe for concurrent use unless they say otherwise. Allocating
// and freeing take a lock for a few instructions; the layers above (fragment
// cache, page pool) keep that off the path of a packet. Reference counting is
// lock-free as long as it does not free a page.
type Arena struct {
	base  uintptr
	bytes uint64
	huge  uint64 // size of the huge pages, 0 without
	why   error  // of HugeTry without
	pages []page
	// reserveStart is the first chunk of the reserve, which ends the arena.
	reserveStart uint32

	releasers registry
	misuse    atomic.Uint64

	_  [64]byte // keeps the lock's traffic off the lines that every packet reads
	mu sync.Mutex
	// All below is guarded by mu.
	chunks  []chunk
	normal  zone
	reserve zone
	inUse   int
	allocs  uint64
	failed  uint64
	closed  bool
}

// page is the metadata of one page: one cache line, so that two cores which
// count references of neighboring pages do not disturb each other.
type page struct {
	ref   Count // holders of the page; of a compound page: of the head
	frag  Count // fragments of a pool page
	idle  atomic.Bool
	head  PageID // first page of the compound page, itself for order 0
	next  PageID // in a list, of AllocList
	pool  uint16 // Releaser id, 0: none
	order uint8
	_     [64 - 31]byte
}

// NewArena maps an arena. The caller closes it when all pages are back.
func NewArena(cfg Config) (*Arena, error) {
	reserve, err := cfg.check()
	if err != nil {
		return nil, err
	}
	name := cfg.Name
	if name == "" {
		name = "vhostd-arena"
	}
	m, err := mapArena(name, &cfg)
	if err != nil {
		return nil, err
	}
	n := int(m.bytes / ChunkSize)
	a := &Arena{
		base:   m.base,
		bytes:  m.bytes,
		huge:   m.page,
		why:    m.why,
		pages:  make([]page, n*ChunkPages),
		chunks: make([]chunk, n),

		reserveStart: uint32(n - reserve),
	}
	a.normal = zone{end: a.reserveStart}
	a.reserve = zone{fresh: a.reserveStart, end: uint32(n)}
	return a, nil
}

// check returns the number of chunks in the reserve.
func (c *Config) check() (reserve int, err error) {
	if c.Bytes == 0 || c.Bytes > MaxBytes {
		return 0, fmt.Errorf("pagemem: arena of %d bytes, accepted are 1 to %d", c.Bytes, uint64(MaxBytes))
	}
	if size := c.hugePageSize(); size != size2M && size != size1G {
		return 0, fmt.Errorf("pagemem: huge pages of %d bytes, accepted are %d and %d", size, size2M, size1G)
	}
	if c.Node != nil && (*c.Node < 0 || *c.Node > MaxNode) {
		return 0, fmt.Errorf("pagemem: NUMA node %d, accepted are 0 to %d", *c.Node, MaxNode)
	}
	chunks := roundUp(c.Bytes, ChunkSize) / ChunkSize
	if c.ReservePages < 0 || uint64(c.ReservePages) > (chunks-1)*ChunkPages {
		return 0, fmt.Errorf("pagemem: reserve of %d pages, an arena of %d bytes can spare 0 to %d",
			c.ReservePages, c.Bytes, (chunks-1)*ChunkPages)
	}
	return (c.ReservePages + ChunkPages - 1) / ChunkPages, nil
}

func (c *Config) hugePageSize() uint64 {
	if c.HugePageSize == 0 {
		return size2M
	}
	return c.HugePageSize
}

func roundUp(n, unit uint64) uint64 { return (n + unit - 1) / unit * unit }

// Base returns the host address of page 0.
func (a *Arena) Base() uintptr { return a.base }

// Bytes returns the size of the arena, reserve included.
func (a *Arena) Bytes() uint64 { return a.bytes }

// Addr returns the host address of a page. It is valid as long as the caller
// holds a reference on the page.
func (a *Arena) Addr(p PageID) uintptr { return a.base + uintptr(p)*PageSize }

// InUse returns the number of 4 KiB pages that are allocated. Pages that rest in
// the caches of pools and fragment caches count.
func (a *Arena) InUse() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.inUse
}

// ErrInUse is what Close wraps while pages are allocated.
var ErrInUse = errors.New("pages in use")

// Close unmaps the arena. While pages are in use it does nothing and returns an
// error that wraps ErrInUse: a late access to a page must never meet unmapped
// memory. Closing twice is harmless.
func (a *Arena) Close() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return nil
	}
	if a.inUse > 0 {
		return fmt.Errorf("pagemem: close: %w: %d of %d", ErrInUse, a.inUse, len(a.pages))
	}
	if err := unmapArena(a.base, a.bytes); err != nil {
		return err
	}
	a.closed = true
	a.normal, a.reserve = zone{}, zone{}
	return nil
}

// Stats is a snapshot of an arena.
type Stats struct {
	Pages        int    // 4 KiB pages, reserve included
	InUse        int    // of these allocated
	Reserve      int    // pages in the reserve
	HugePageSize uint64 // size in bytes of the pool's pages that it consists of, 0 for ordinary memory
	NoHugePages  error  // why HugeTry got none, nil otherwise
	Allocs       uint64 // successful calls of Alloc and AllocBulk
	Failed       uint64 // calls that got nothing
	Misuse       uint64 // references dropped that nobody held, double frees, stale releaser ids: bugs of this program
}

// Stats returns a snapshot.
func (a *Arena) Stats() Stats {
	a.mu.Lock()
	defer a.mu.Unlock()
	return Stats{
		Pages:        len(a.pages),
		InUse:        a.inUse,
		Reserve:      (len(a.chunks) - int(a.reserveStart)) * ChunkPages,
		HugePageSize: a.huge,
		NoHugePages:  a.why,
		Allocs:       a.allocs,
		Failed:       a.failed,
		Misuse:       a.misuse.Load(),
	}
}

// Misuse reports a bug of this program: it panics in debug builds (see Debug)
// and is counted otherwise. The caller then leaves everything as it was, which
// costs a page at worst.
func (a *Arena) Misuse(what string, which uint32) {
	a.misuse.Add(1)
	if Debug {
		panic(fmt.Sprintf("pagemem: %s %d", what, which))
	}
}
