package virtqueue_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// pager is a translator of guest addresses that knows nothing at first and is told page by page.
type pager struct {
	table *guestmem.Table
	page  uint64
	known map[pageKey]bool
}

type pageKey struct {
	addr  uint64
	write bool
}

func newPager(mem *guestmem.Table, page uint64) *pager {
	return &pager{mem, page, map[pageKey]bool{}}
}

func (p *pager) key(addr uint64, write bool) pageKey { return pageKey{addr &^ (p.page - 1), write} }

func (p *pager) Translate(addr uint64, write bool) (guestmem.Mapping, guestmem.Outcome) {
	k := p.key(addr, write)
	host, run := p.table.Lookup(addr, p.page-(addr-k.addr))
	switch {
	case run == 0:
		return guestmem.Mapping{}, guestmem.Unmapped
	case !p.known[k]:
		return guestmem.Mapping{}, guestmem.Missing
	}
	return guestmem.Mapping{Addr: addr, Size: run, Host: host}, guestmem.Mapped
}

func (p *pager) Want(uint64, uint64, bool) bool { return false }

// fillMissing fills b, telling the translator what is missing, and checks that a miss leaves everything as it was.
func (p *pager) fillMissing(t *testing.T, q virtqueue.Ring, b *virtqueue.Batch, want int) (misses int) {
	t.Helper()
	b.Reset()
	for b.N < want {
		chains, segs := b.N, b.NSegs
		n, err := q.Fill(b, want-b.N)
		var miss *virtqueue.MissError
		switch {
		case err == nil && n > 0:
			continue
		case !errors.As(err, &miss):
			t.Fatalf("Fill = %d chains, %v after %d of %d", n, err, chains, want)
		case n != 0 || b.N != chains || b.NSegs != segs:
			t.Fatalf("a miss left %d chains and %d segments, was %d and %d", b.N, b.NSegs, chains, segs)
		case p.known[p.key(miss.Addr, miss.Write)]:
			t.Fatalf("what is known is missing: %v", miss)
		case miss.Len == 0:
			t.Fatalf("nothing is wanted: %v", miss)
		}
		p.known[p.key(miss.Addr, miss.Write)] = true
		if misses++; misses > 1000 {
			t.Fatal("no end of misses")
		}
	}
	return misses
}

// joined puts neighbors together that are apart only because they were learnt apart.
func joined(spans []span) (all []span) {
	for _, s := range spans {
		last := len(all) - 1
		if last >= 0 && all[last].gpa+uint64(all[last].len) == s.gpa && s.gpa != seam {
			all[last].len += s.len
		} else {
			all = append(all, s)
		}
	}
	return all
}

// TestMissingChains: every chain comes out as without a translator, however little of it is known at first.
func TestMissingChains(t *testing.T) {
	for _, c := range chainCases {
		for _, page := range []uint64{16, 64, 4096} {
			t.Run(fmt.Sprintf("%s/page=%d", c.name, page), func(t *testing.T) { c.runMissing(t, page) })
		}
	}
}

func (c chainCase) runMissing(t *testing.T, page uint64) {
	if c.size == 0 {
		c.size = 16
	}
	if c.tableAt == 0 {
		c.tableAt = tableGPA
	}
	r := newRig(t, rigOptions{size: c.size, features: c.features, rx: c.rx, regions: chainRegions})
	for i, d := range c.descs {
		r.drv.PokeDesc(uint16(i), d.addr, d.len, d.flags, d.next)
	}
	r.pokeTable(t, c.tableAt, c.table)
	if c.name == "huge length" {
		page = 4096 // or it ends as too many segments
	}
	via := newPager(r.mem, page)
	r.cfg.Via = via
	r.restart(t, 0)
	for lap := range 2 {
		r.drv.PokeHead(0)
		r.drv.Publish()
		misses := via.fillMissing(t, r.dev, r.b, 1)
		if lap == 1 && misses > 0 {
			t.Errorf("%d misses although all is known", misses)
		}
		got := r.b.Chains[0]
		if got.Fault != c.fault || got.Descs != c.used || got.Head != 0 {
			t.Errorf("chain = %+v, want fault %v, %d descriptors", got, c.fault, c.used)
		}
		if diff := cmp.Diff(c.want, joined(r.spans(t, 0)), cmp.AllowUnexported(span{})); diff != "" {
			t.Errorf("segments (-want +got):\n%s", diff)
		}
		r.dev.CompleteBatch(r.b, 0, 1)
		r.dev.Publish(0)
	}
}

// TestMissingPackedChains is TestMissingChains for packed rings, across the end of the ring too.
func TestMissingPackedChains(t *testing.T) {
	for _, c := range packedCases {
		for _, start := range []uint16{fresh, fresh | 8, 3} {
			t.Run(fmt.Sprintf("%s/start=%#x", c.name, start), func(t *testing.T) { c.runMissing(t, start) })
		}
	}
}

func (c packedCase) runMissing(t *testing.T, start uint16) {
	if c.tableAt == 0 {
		c.tableAt = tableGPA
	}
	r := newPackedRig(t, rigOptions{size: 9, features: c.features, rx: c.rx, regions: chainRegions, start: start})
	page := uint64(64)
	if c.name == "huge length" {
		page = 4096 // or it ends as too many segments
	}
	via := newPager(r.mem, page)
	r.cfg.Via = via
	r.restart(t, uint32(start))
	pokeTable(t, r.mem, c.tableAt, c.table)
	for _, d := range c.descs {
		r.drv.PokeChain(d.addr, d.len, d.next, d.flags)
	}
	r.drv.Publish()
	for lap := range 2 {
		misses := via.fillMissing(t, r.dev, r.b, 1)
		if lap == 1 && misses > 0 {
			t.Errorf("%d misses although all is known", misses)
		}
		got := r.b.Chains[0]
		if got.Fault != c.fault || int(got.Descs) != len(c.descs) {
			t.Errorf("chain = %+v, want fault %v, %d descriptors", got, c.fault, len(c.descs))
		}
		if diff := cmp.Diff(c.want, joined(spans(t, r.mem, r.b, 0)), cmp.AllowUnexported(span{})); diff != "" {
			t.Errorf("segments (-want +got):\n%s", diff)
		}
		r.dev.Unfill(1)
	}
}

// TestMissingBehindGoodChains delivers the chains before the one that has to wait, then says so without an allocation, and
// SetMemory makes the ring ask again for what it knew.
func TestMissingBehindGoodChains(t *testing.T) {
	for _, write := range []bool{false, true} {
		r := newRig(t, rigOptions{size: 64, rx: write})
		via := newPager(r.mem, 4096)
		via.known[via.key(bufGPA, write)] = true
		r.cfg.Via = via
		r.restart(t, 0)
		for i := range 20 {
			addr := uint64(bufGPA)
			if i == 7 {
				addr += 4096
			}
			if _, err := r.drv.AddDirect(driver.Buf{Addr: addr, Len: 100, Write: write}); err != nil {
				t.Fatal(err)
			}
		}
		r.drv.Publish()
		if n := r.fill(t, virtqueue.MaxBatch); n != 7 {
			t.Fatalf("%d chains before the one that is not known, want 7", n)
		}
		miss := func() {
			n, err := r.dev.Fill(r.b, virtqueue.MaxBatch)
			if e, ok := err.(*virtqueue.MissError); n != 0 || !ok || *e != (virtqueue.MissError{Addr: bufGPA + 4096, Len: 100, Write: write}) {
				t.Fatalf("Fill = %d, %v", n, err)
			}
		}
		miss()
		if allocs := testing.AllocsPerRun(100, miss); allocs != 0 {
			t.Errorf("a miss allocates %v times", allocs)
		}
		via.known[via.key(bufGPA+4096, write)] = true
		if n, err := r.dev.Fill(r.b, virtqueue.MaxBatch); n != 13 || err != nil {
			t.Fatalf("Fill = %d, %v, want the other 13", n, err)
		}
		r.dev.Unfill(20)
		clear(via.known)
		r.dev.SetMemory(r.mem, r.cfg.Desc, r.cfg.Avail, r.cfg.Used)
		r.b.Reset()
		if n, err := r.dev.Fill(r.b, 1); n != 0 || err == nil {
			t.Errorf("after SetMemory Fill = %d, %v, want a miss", n, err)
		}
	}
}

// TestMissingIsForOneAccess: what may be read is not known to be writable.
func TestMissingIsForOneAccess(t *testing.T) {
	r := newRig(t, rigOptions{size: 16, rx: true})
	via := newPager(r.mem, 4096)
	via.known[via.key(bufGPA, false)] = true
	r.cfg.Via = via
	r.restart(t, 0)
	r.add(t, 1)
	r.b.Reset()
	var miss *virtqueue.MissError
	if _, err := r.dev.Fill(r.b, 1); !errors.As(err, &miss) || !miss.Write {
		t.Errorf("a buffer to write to in a page that may be read: %v", err)
	}
}
