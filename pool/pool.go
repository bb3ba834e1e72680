package pool

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"

	"github.com/vhostd/vhostd/pagemem"
)

// Sizes and times of the kernel's page_pool.
const (
	CacheSize   = 128 // PP_ALLOC_CACHE_SIZE
	CacheRefill = 64  // PP_ALLOC_CACHE_REFILL
	BulkSize    = 16  // XDP_BULK_QUEUE_SIZE
	DefaultRing = 1024
	MaxRing     = 16384

	reapEvery = time.Second      // DEFER_TIME
	warnEvery = 60 * time.Second // DEFER_WARN_INTERVAL

	// biasMax is the fragment count of the page that AllocFrag splits, BIAS_MAX.
	biasMax = math.MaxInt64 >> 1
	// fragAlign keeps two fragments off one cache line.
	fragAlign = 64
)

// Config describes a pool.
type Config struct {
	Arena *pagemem.Arena
	// Owner is the only context that allocates and recycles directly, not 0.
	Owner pagemem.OwnerID
	// RingSize is the capacity of the return ring, rounded up to a power of two
	// and clamped to MaxRing. 0: DefaultRing. Pages that wait elsewhere, such as
	// a port's backlog, should fit with the cache, or the ring overflows.
	RingSize int
	// Init, if set, is called by the owner for each page that enters the pool,
	// with its host address and size in bytes.
	Init func(addr uintptr, n int)
	// Refill is how pages come from the arena when neither cache nor ring has any.
	Refill Refill
	// Order of the pages: 0, or pagemem.ChunkOrder for pages of 32 KiB, which come one at a time.
	Order int
	// UseReserve lets the pool take single pages of the arena's reserve when
	// nothing else is left. They are given back instead of being recycled.
	UseReserve bool
	// Logger gets the warning about pages that do not come back after Destroy.
	// nil: slog.Default().
	Logger *slog.Logger
}

// Refill is a form of the arena's bulk allocation. The kernel's page_pool took pages one by one, then 64 as a list, then, which is
// what stayed, 64 into an array; all are here so that they can be compared.
type Refill uint8

// RefillArray is the default.
const (
	RefillArray Refill = iota
	RefillList
	RefillSingle
)

// String names the form as the benchmarks do.
func (r Refill) String() string { return [...]string{"array", "list", "single"}[r%3] }

// Pool keeps pages ready. The comment of each method says who may call it: the owner, or anybody. The owner's allocations come
// from a context of its own, to which the methods of the same names belong.
type Pool struct {
	// Written by New only.
	arena      *pagemem.Arena
	owner      pagemem.OwnerID
	id         uint16
	useReserve bool
	refill     Refill
	order      int
	size       uint32 // bytes of a page
	init       func(uintptr, int)
	log        *slog.Logger
	ring       *ring
	done       chan struct{} // closed when the pool is gone
	wake       chan struct{} // tells the reaper that a page came home
	reapEvery  time.Duration
	warnEvery  time.Duration

	_ [64]byte
	// Written by the owner only.
	destroyed bool
	ctx       Context

	_ [64]byte
	// Written by anybody, on the rare ways.
	release  atomic.Uint32 // pages that left the pool
	dying    atomic.Bool   // puts go to the arena
	ringFull atomic.Uint64
	shared   atomic.Uint64

	mu          sync.Mutex // guards what follows
	contexts    []*Context // private ones that are open
	retired     ownStats   // of those that were closed
	retiredHold uint32
}

// New makes an empty pool and registers it with the arena, which refers to it
// until Destroy has finished.
func New(cfg Config) (*Pool, error) {
	if cfg.Arena == nil {
		return nil, errors.New("pool: no arena")
	}
	if cfg.Owner == 0 {
		return nil, errors.New("pool: owner 0 is nobody, a pool needs the id of a worker")
	}
	if cfg.RingSize < 0 {
		return nil, fmt.Errorf("pool: ring of %d entries, accepted are 0 (default) and more", cfg.RingSize)
	}
	if cfg.Order != 0 && cfg.Order != pagemem.ChunkOrder {
		return nil, fmt.Errorf("pool: pages of order %d, accepted are 0 and %d", cfg.Order, pagemem.ChunkOrder)
	}
	if cfg.Refill > RefillSingle {
		return nil, fmt.Errorf("pool: refill %d, accepted are %d to %d", cfg.Refill, RefillArray, RefillSingle)
	}
	p := &Pool{
		arena:      cfg.Arena,
		owner:      cfg.Owner,
		useReserve: cfg.UseReserve,
		refill:     cfg.Refill,
		order:      cfg.Order,
		size:       pagemem.PageSize << cfg.Order,
		init:       cfg.Init,
		log:        cfg.Logger,
		ring:       newRing(ringSize(cfg.RingSize)),
		done:       make(chan struct{}),
		wake:       make(chan struct{}, 1),
		reapEvery:  reapEvery,
		warnEvery:  warnEvery,
	}
	p.ctx = Context{pool: p, owner: p.owner}
	if p.log == nil {
		p.log = slog.Default()
	}
	if p.id = p.arena.Register(p); p.id == 0 {
		return nil, errors.New("pool: all 65535 pool ids of the arena are taken")
	}
	return p, nil
}

func ringSize(n int) int {
	switch {
	case n == 0:
		return DefaultRing
	case n >= MaxRing:
		return MaxRing
	default:
		return 1 << bits.Len(uint(n-1))
	}
}

// PageBytes is the size of the pool's pages.
func (p *Pool) PageBytes() int { return int(p.size) }

// InFlight returns the pages that entered the pool and did not leave it: with
// packets, in caches and in the ring. Anybody may ask; while others work it
// is a moment's view.
func (p *Pool) InFlight() int32 {
	// Loading release first errs towards a page too many, never towards too few.
	release := p.release.Load()
	p.mu.Lock()
	defer p.mu.Unlock()
	hold := p.ctx.hold.Load() + p.retiredHold
	for _, c := range p.contexts {
		hold += c.hold.Load()
	}
	return int32(hold - release)
}
