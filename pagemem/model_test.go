package pagemem

import (
	"math/rand/v2"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

// arenaModel remembers which pages are out and their references.
type arenaModel struct {
	arena *Arena
	refs  map[PageID]int64 // by head
	order map[PageID]int
	owner map[PageID]PageID // page to head
}

func (m *arenaModel) add(t *rapid.T, head PageID, order int) {
	for p := head; p < head+1<<order; p++ {
		if _, taken := m.owner[p]; taken {
			t.Fatalf("page %d handed out twice", p)
		}
		if m.arena.Head(p) != head || m.arena.Order(p) != order {
			t.Fatalf("page %d: head %d order %d, want %d %d", p, m.arena.Head(p), m.arena.Order(p), head, order)
		}
		m.owner[p] = head
	}
	m.refs[head], m.order[head] = 1, order
}

// any draws a page that is out.
func (m *arenaModel) any(t *rapid.T) PageID {
	var pages []PageID
	for p := range PageID(len(m.arena.pages)) {
		if _, out := m.owner[p]; out {
			pages = append(pages, p)
		}
	}
	if len(pages) == 0 {
		t.Skip("no page out")
	}
	return rapid.SampledFrom(pages).Draw(t, "page")
}

func (m *arenaModel) drop(t *rapid.T, p PageID, n int64) {
	head := m.owner[p]
	m.refs[head] -= n
	gone := m.refs[head] == 0
	if got := m.arena.Unref(p, n); got != gone {
		t.Fatalf("unref %d of page %d: freed %v", n, p, got)
	}
	if gone {
		for i := head; i < head+1<<m.order[head]; i++ {
			delete(m.owner, i)
		}
		delete(m.refs, head)
	}
}

func TestArenaModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, err := NewArena(Config{Bytes: 6 * ChunkSize, ReservePages: 8})
		if err != nil {
			t.Fatal(err)
		}
		m := &arenaModel{a, map[PageID]int64{}, map[PageID]int{}, map[PageID]PageID{}}
		t.Repeat(map[string]func(*rapid.T){
			"alloc": func(t *rapid.T) {
				order := rapid.SampledFrom([]int{0, ChunkOrder}).Draw(t, "order")
				if p, ok := a.Alloc(order, Flags(rapid.IntRange(0, 1).Draw(t, "flags"))); ok {
					m.add(t, p, order)
				}
			},
			"bulk": func(t *rapid.T) {
				ids := make([]PageID, rapid.IntRange(0, 20).Draw(t, "n"))
				for _, p := range ids[:a.AllocBulk(ids)] {
					m.add(t, p, 0)
				}
			},
			"list": func(t *rapid.T) {
				p, n := a.AllocList(rapid.IntRange(0, 20).Draw(t, "n"))
				for ; n > 0; n-- {
					m.add(t, p, 0)
					p = a.ListNext(p)
				}
			},
			"free many": func(t *rapid.T) {
				var ids []PageID
				for p := range PageID(len(a.pages)) {
					if m.refs[p] == 1 && rapid.Bool().Draw(t, "free") {
						ids = append(ids, p)
						for i := p; i < p+1<<m.order[p]; i++ {
							delete(m.owner, i)
						}
						delete(m.refs, p)
					}
				}
				a.FreeBulk(ids)
			},
			"ref": func(t *rapid.T) {
				p, n := m.any(t), rapid.Int64Range(1, 3).Draw(t, "n")
				a.AddRef(p, n)
				m.refs[m.owner[p]] += n
			},
			"unref": func(t *rapid.T) {
				p := m.any(t)
				m.drop(t, p, rapid.Int64Range(1, m.refs[m.owner[p]]).Draw(t, "n"))
			},
			"": func(t *rapid.T) {
				if got := a.InUse(); got != len(m.owner) {
					t.Fatalf("%d pages in use, want %d", got, len(m.owner))
				}
			},
		})
		for head, n := range m.refs {
			a.Unref(head, n)
		}
		for i := range 5 { // nothing was lost: all normal chunks are whole again
			if _, ok := a.Alloc(ChunkOrder, NoReserve); !ok {
				t.Fatalf("only %d of 5 chunks came back", i)
			}
		}
		for p := PageID(0); p < 5*ChunkPages; p += ChunkPages {
			a.Unref(p, 1)
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	})
}

// TestStress shares pages between goroutines; the race detector and the counts judge.
func TestStress(t *testing.T) {
	a := newArena(t, 16, 16)
	shared := make(chan PageID, 64)
	var wg, senders sync.WaitGroup
	for seed := range uint64(3) {
		senders.Go(func() {
			r := rand.New(rand.NewPCG(seed, 0))
			for range 3000 {
				order := ChunkOrder * r.IntN(2)
				if p, ok := a.Alloc(order, AllowReserve); ok {
					a.AddRef(p, 2)
					shared <- p
					a.Unref(p, 1)
					shared <- p
				}
			}
		})
	}
	for range 2 {
		wg.Go(func() {
			for p := range shared {
				a.Release(p, 1, 0)
			}
		})
	}
	senders.Wait()
	close(shared)
	wg.Wait()
	if s := a.Stats(); s.InUse != 0 || s.Misuse != 0 {
		t.Errorf("%+v", s)
	}
}
