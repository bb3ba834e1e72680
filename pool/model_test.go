package pool

import (
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/vhostd/vhostd/pagemem"
	"pgregory.net/rapid"
)

// poolModel keeps the cache and the ring as lists and knows which fragments are out.
type poolModel struct {
	arena *pagemem.Arena
	pool  *Pool
	cache []pagemem.PageID // newest last
	ring  []pagemem.PageID
	size  int // of the ring
	users map[pagemem.PageID]int
	split pagemem.PageID // page that AllocFrag splits
	valid bool
}

// take says where the next page must come from; known is false if it is a fresh one.
func (m *poolModel) take() (id pagemem.PageID, known bool) {
	if len(m.cache) == 0 {
		n := min(len(m.ring), CacheRefill)
		m.cache, m.ring = slices.Clone(m.ring[:n]), slices.Clone(m.ring[n:])
	}
	if len(m.cache) == 0 {
		return 0, false
	}
	id = m.cache[len(m.cache)-1]
	m.cache = m.cache[:len(m.cache)-1]
	return id, true
}

func (m *poolModel) got(t *rapid.T, id pagemem.PageID, ok bool) bool {
	want, known := m.take()
	if known && (!ok || id != want) {
		t.Fatalf("got page %d %v, want %d", id, ok, want)
	}
	if !ok {
		return false
	}
	if m.users[id] != 0 || m.valid && id == m.split {
		t.Fatalf("page %d handed out twice", id)
	}
	if !known { // what came with it from the arena
		m.cache = slices.Clone(m.pool.ctx.cache[:m.pool.ctx.n])
	}
	return true
}

// home is where a page goes whose last fragment was put.
func (m *poolModel) home(id pagemem.PageID, by pagemem.OwnerID) {
	switch {
	case by == me && len(m.cache) < CacheSize:
		m.cache = append(m.cache, id)
	case len(m.ring) < m.size:
		m.ring = append(m.ring, id)
	}
}

func (m *poolModel) put(id pagemem.PageID, n int, by pagemem.OwnerID) {
	m.users[id] -= n
	if m.users[id] == 0 {
		delete(m.users, id)
		if !m.valid || id != m.split {
			m.home(id, by)
		}
	}
}

func (m *poolModel) allocFrag(t *rapid.T) {
	size := rapid.Uint32Range(1, 4096).Draw(t, "size")
	freed := m.pool.ctx.frag // the page that this call may give up
	id, off, got, ok := m.pool.AllocFrag(size)
	if !ok {
		t.Skip("arena empty")
	}
	if got < size || off+got > pagemem.PageSize {
		t.Fatalf("asked for %d, got %d at %d", size, got, off)
	}
	switch {
	case off == 0 && got == pagemem.PageSize:
		m.got(t, id, true)
	case off == 0 && !(freed.valid && freed.page == id):
		m.valid = false
		if freed.valid && m.users[freed.page] == 0 {
			t.Fatalf("page %d without users was not used again", freed.page)
		}
		m.got(t, id, true)
		m.split, m.valid = id, true
	case !m.valid || id != m.split:
		t.Fatalf("fragment of page %d, current is %d %v", id, m.split, m.valid)
	}
	m.users[id]++
}

func (m *poolModel) out(t *rapid.T) pagemem.PageID {
	ids := make([]pagemem.PageID, 0, len(m.users))
	for id := range m.users {
		ids = append(ids, id)
	}
	if len(ids) == 0 {
		t.Skip("nothing out")
	}
	slices.Sort(ids)
	return rapid.SampledFrom(ids).Draw(t, "page")
}

func (m *poolModel) check(t *rapid.T) {
	if !slices.Equal(m.pool.ctx.cache[:m.pool.ctx.n], m.cache) {
		t.Fatalf("cache %v, want %v", m.pool.ctx.cache[:m.pool.ctx.n], m.cache)
	}
	flying := len(m.cache) + len(m.ring) + len(m.users)
	if m.valid && m.users[m.split] == 0 {
		flying++
	}
	if got := int(m.pool.InFlight()); got != flying || m.arena.InUse() != flying {
		t.Fatalf("%d in flight, %d in use, want %d", got, m.arena.InUse(), flying)
	}
}

var anyOwner = rapid.SampledFrom([]pagemem.OwnerID{me, other, 0})

func TestPoolModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, err := pagemem.NewArena(pagemem.Config{Bytes: 1 << 20})
		if err != nil {
			t.Fatal(err)
		}
		size := 1 << rapid.IntRange(0, 7).Draw(t, "log size")
		p, err := New(Config{Arena: a, Owner: me, RingSize: size})
		if err != nil {
			t.Fatal(err)
		}
		m := &poolModel{arena: a, pool: p, size: size, users: map[pagemem.PageID]int{}}
		t.Repeat(map[string]func(*rapid.T){
			"alloc": func(t *rapid.T) {
				for range rapid.IntRange(1, 80).Draw(t, "n") {
					if id, ok := p.Alloc(); m.got(t, id, ok) {
						m.users[id] = 1
					}
				}
			},
			"frag": m.allocFrag,
			"retain": func(t *rapid.T) {
				id, n := m.out(t), rapid.IntRange(1, 3).Draw(t, "n")
				a.Retain(id, n)
				m.users[id] += n
			},
			"put": func(t *rapid.T) {
				id, by := m.out(t), anyOwner.Draw(t, "by")
				n := rapid.IntRange(1, m.users[id]).Draw(t, "n")
				a.Release(id, n, by)
				m.put(id, n, by)
			},
			"bulk": func(t *rapid.T) {
				by := anyOwner.Draw(t, "by")
				var ids []pagemem.PageID
				for id := range m.users {
					ids = append(ids, id)
				}
				slices.Sort(ids)
				ids = ids[:rapid.IntRange(0, len(ids)).Draw(t, "n")]
				p.PutBulk(slices.Clone(ids), by)
				for _, id := range ids {
					m.put(id, 1, by)
				}
			},
			"": m.check,
		})
		p.Destroy()
		for id, n := range m.users {
			a.Release(id, n, other)
		}
		<-p.Done()
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestStress: an owner allocates and hands pages and fragments to others, who
// put them one by one, in bulk or back to the owner, while statistics are read.
func TestStress(t *testing.T) {
	a := newArena(t, 1024, 16)
	p := newPool(t, Config{Arena: a, RingSize: 64, UseReserve: true})
	work := make(chan pagemem.PageID, 128)
	back := make(chan pagemem.PageID, 128)
	stop := make(chan struct{})
	var workers, reader sync.WaitGroup
	for i := range 3 {
		workers.Go(func() { putter(a, p, pagemem.OwnerID(10+i), work, back) })
	}
	reader.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				if s := p.Stats(); s.InFlight < 0 {
					t.Errorf("%+v", s)
				}
			}
		}
	})
	owner(a, p, work, back)
	close(work)
	go func() { workers.Wait(); close(back) }()
	for id := range back {
		a.Release(id, 1, me)
	}
	close(stop)
	reader.Wait()
	p.Destroy()
	waitDone(t, p)
	if s := a.Stats(); s.InUse != 0 || s.Misuse != 0 {
		t.Errorf("%+v", s)
	}
}

func owner(a *pagemem.Arena, p *Pool, work chan<- pagemem.PageID, back <-chan pagemem.PageID) {
	r := rand.New(rand.NewPCG(1, 1))
	for range 20000 {
		id, ok := p.Alloc()
		if r.IntN(2) == 0 {
			if ok {
				a.Release(id, 1, me)
			}
			id, _, _, ok = p.AllocFrag(uint32(1 + r.IntN(2048)))
		}
		for ok {
			select {
			case work <- id:
				ok = false
			case id := <-back:
				a.Release(id, 1, me)
			}
		}
		p.Publish()
	}
}

func putter(a *pagemem.Arena, p *Pool, by pagemem.OwnerID, work <-chan pagemem.PageID, back chan<- pagemem.PageID) {
	var bulk []pagemem.PageID
	r := rand.New(rand.NewPCG(2, uint64(by)))
	for id := range work {
		switch r.IntN(4) {
		case 0:
			back <- id
		case 1:
			a.Retain(id, 2)
			a.Release(id, 3, by)
		case 2:
			a.Release(id, 1, by)
		default:
			bulk = append(bulk, id)
		}
		if len(bulk) > 20 {
			p.PutBulk(bulk, by)
			bulk = bulk[:0]
		}
	}
	p.PutBulk(bulk, by)
}
