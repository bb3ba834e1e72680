package fragalloc

import (
	"testing"

	"github.com/vhostd/vhostd/pagemem"
	"pgregory.net/rapid"
)

// cacheModel says what a cache must answer, from the rules alone: it keeps every
// fragment that is out and knows nothing of biases.
type cacheModel struct {
	arena *pagemem.Arena
	cache *Cache

	page    pagemem.PageID
	size    uint32 // 0: no current page
	offset  uint32
	reserve bool
	out     []Frag // with a reference each
	last    *Frag  // what Abort may undo: the newest of out
}

func (m *cacheModel) outOn(page pagemem.PageID) (n int) {
	for _, f := range m.out {
		if f.Page == page {
			n++
		}
	}
	return n
}

// expect checks an answer to a request for min bytes and follows a page change.
func (m *cacheModel) expect(t *rapid.T, f Frag, min, align uint32, room uint32) {
	off := (m.offset + align - 1) / align * align
	if m.size == 0 || off+min > m.size {
		stay := m.size != 0 && m.outOn(m.page) == 0 && !m.reserve
		if stay && f.Page != m.page {
			t.Fatalf("left page %d, which has no fragments", m.page)
		}
		if !stay && m.size != 0 && f.Page == m.page && m.outOn(m.page) > 0 {
			t.Fatalf("reused page %d, which has fragments", m.page)
		}
		m.page = f.Page
		m.size = pagemem.PageSize << m.arena.Order(f.Page)
		m.reserve = m.arena.IsReserve(f.Page)
		m.offset, off = 0, 0
	}
	if f.Page != m.page || f.Off != off || f.Addr != m.arena.Addr(f.Page)+uintptr(off) {
		t.Fatalf("got %+v, want page %d offset %d", f, m.page, off)
	}
	if room != 0 && f.Size != room || room == 0 && f.Size != m.size-off {
		t.Fatalf("got %+v, page has %d bytes", f, m.size)
	}
}

// add records a fragment with a reference.
func (m *cacheModel) add(t *rapid.T, f Frag) {
	for _, g := range m.out {
		if g.Page == f.Page && f.Off < g.Off+g.Size && g.Off < f.Off+f.Size {
			t.Fatalf("fragment %+v overlaps %+v", f, g)
		}
	}
	m.offset = f.Off + f.Size
	m.out = append(m.out, f)
	m.last = &f
}

func (m *cacheModel) release(i int) {
	m.arena.Release(m.out[i].Page, 1, 0)
	m.out = append(m.out[:i], m.out[i+1:]...)
	m.last = nil
}

func (m *cacheModel) failed(t *rapid.T, err error) {
	if err != ErrNoMem {
		t.Fatal(err)
	}
	*m = cacheModel{arena: m.arena, cache: m.cache, out: m.out}
}

func (m *cacheModel) check(t *rapid.T) {
	if m.cache.IsReserve() != m.reserve {
		t.Fatalf("reserve %v, want %v", m.cache.IsReserve(), m.reserve)
	}
	if m.size == 0 {
		return
	}
	if got := m.arena.RefCount(m.page); got != int64(m.cache.win.Refs)+int64(m.outOn(m.page)) {
		t.Fatalf("page %d: %d references, bias %d, %d fragments out", m.page, got, m.cache.win.Refs, m.outOn(m.page))
	}
}

func (m *cacheModel) alloc(t *rapid.T) {
	size, align := drawRequest(t)
	f, err := m.cache.Alloc(size, align)
	if err != nil {
		m.failed(t, err)
		return
	}
	m.expect(t, f, size, align, size)
	m.add(t, f)
}

func (m *cacheModel) prepare(t *rapid.T) {
	min, align := drawRequest(t)
	f, err := m.cache.Prepare(min, align)
	if err != nil {
		m.failed(t, err)
		return
	}
	m.expect(t, f, min, align, 0)
	m.last = nil
	if g, ok := m.cache.Probe(min, align); !ok || g != f {
		t.Fatalf("prepared %+v, probed %+v %v", f, g, ok)
	}
	used := rapid.Uint32Range(0, f.Size).Draw(t, "used")
	if used == 0 {
		return // not to commit is allowed
	}
	before := m.offset
	f.Size = used
	if continues := len(m.out) > 0 && m.continues(f); continues && rapid.Bool().Draw(t, "noref") {
		prepared, _ := m.cache.Probe(min, align)
		if got := m.cache.CommitNoRef(prepared, used); got != used {
			t.Fatalf("true size %d, want %d", got, used)
		}
		m.out[len(m.out)-1].Size += used
		m.offset += used
		return
	}
	prepared, _ := m.cache.Probe(min, align)
	if got := m.cache.Commit(prepared, used); got != f.Off+used-before {
		t.Fatalf("true size %d, want %d", got, f.Off+used-before)
	}
	m.add(t, f)
}

func (m *cacheModel) continues(f Frag) bool {
	g := m.out[len(m.out)-1]
	return g.Page == f.Page && g.Off+g.Size == f.Off && f.Off == m.offset
}

func drawRequest(t *rapid.T) (size, align uint32) {
	return rapid.Uint32Range(1, MaxSize).Draw(t, "size"), 1 << rapid.IntRange(0, 12).Draw(t, "shift")
}

func TestCacheModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		a, err := pagemem.NewArena(pagemem.Config{Bytes: 5 * pagemem.ChunkSize, ReservePages: 8})
		if err != nil {
			t.Fatal(err)
		}
		m := &cacheModel{arena: a, cache: NewCache(a)}
		var hogs []pagemem.PageID // others who use the arena
		t.Repeat(map[string]func(*rapid.T){
			"alloc":   m.alloc,
			"prepare": m.prepare,
			"abort": func(t *rapid.T) {
				if m.last == nil {
					t.Skip("nothing to abort")
				}
				m.cache.Abort(m.last.Size)
				m.offset -= m.last.Size
				m.out = m.out[:len(m.out)-1]
				m.last = nil
			},
			"release": func(t *rapid.T) {
				if len(m.out) == 0 {
					t.Skip("nothing out")
				}
				m.release(rapid.IntRange(0, len(m.out)-1).Draw(t, "i"))
			},
			"drain": func(t *rapid.T) {
				m.cache.Drain()
				*m = cacheModel{arena: a, cache: m.cache, out: m.out}
			},
			"hog": func(t *rapid.T) {
				if p, ok := a.Alloc(pagemem.ChunkOrder*rapid.IntRange(0, 1).Draw(t, "order"), pagemem.NoReserve); ok {
					hogs = append(hogs, p)
				}
			},
			"unhog": func(t *rapid.T) {
				if len(hogs) > 0 {
					a.Unref(hogs[0], 1)
					hogs = hogs[1:]
				}
			},
			"": m.check,
		})
		for len(m.out) > 0 {
			m.release(0)
		}
		for _, p := range hogs {
			a.Unref(p, 1)
		}
		m.cache.Drain()
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
	})
}
