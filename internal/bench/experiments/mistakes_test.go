package experiments

import (
	"context"
	"strings"
	"testing"

	"github.com/vhostd/vhostd/internal/bench"
	"github.com/vhostd/vhostd/pagemem"
)

// TestHandoff passes pages in order, through a ring that is full most of the time.
func TestHandoff(t *testing.T) {
	const pages = 20000
	var got []pagemem.PageID
	c, err := startConsumer(8, 3, -1, func(ids []pagemem.PageID) { got = append(got, ids...) })
	if err != nil {
		t.Fatal(err)
	}
	for i := range pages {
		if err := c.give(context.Background(), pagemem.PageID(i)); err != nil {
			t.Fatal(err)
		}
	}
	c.stop()
	if len(got) != pages || c.taken.Load() != pages {
		t.Fatalf("%d of %d pages, %d counted", len(got), pages, c.taken.Load())
	}
	for i, id := range got {
		if int(id) != i {
			t.Fatalf("page %d at %d", id, i)
		}
	}
	h := newHandoff(3)
	for i := range 4 {
		if !h.push(pagemem.PageID(i)) {
			t.Errorf("no room for page %d of 4", i)
		}
	}
	if h.push(4) {
		t.Error("a fifth page in a ring of four")
	}
}

// TestStuckConsumer: a thread that takes nothing ends a run that is interrupted.
func TestStuckConsumer(t *testing.T) {
	c := &consumer{in: newHandoff(1)}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if err := c.give(ctx, 1); err != nil {
		t.Error(err)
	}
	if c.give(ctx, 2) == nil || c.await(ctx, 1) == nil {
		t.Error("waiting has ended without an error")
	}
}

// TestFragMistakes: fragments that are not freed, overlap or are not where they should be end E1u and E1d.
func TestFragMistakes(t *testing.T) {
	r, err := newFragRunner(fragSetting{size: 100, align: 64, n: 1024})
	if err != nil {
		t.Fatal(err)
	}
	f, err := r.bias.Alloc(100, 64)
	if err != nil {
		t.Fatal(err)
	}
	wantMistake(t, "left over", r.settle())
	wantMistake(t, "overwritten", r.verify(func() (pagemem.Frag, error) {
		r.arena.AddRef(f.Page, 1)
		return f, nil
	}))
	f.Addr++
	wantMistake(t, "not aligned", r.rounds(context.Background(), func() (pagemem.Frag, error) { return f, nil }, 1))
	// A fragment of verify was not freed because it failed before; how many is its business.
	r.arena.Unref(f.Page, r.arena.RefCount(f.Page))
	if err := r.Close(); err != nil {
		t.Error(err)
	}
}

func wantMistake(t *testing.T, want string, err error) {
	t.Helper()
	if err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("want an error with %q: %v", want, err)
	}
}

// TestSenderMistakes: a damaged fragment and a page that does not come back end E2.
func TestSenderMistakes(t *testing.T) {
	f, err := newSender(sendSetting{flows: 1, msg: 10000, bytes: 64 << 10})
	if err != nil {
		t.Fatal(err)
	}
	for _, variant := range []string{"mapped", "arena", "fragpool"} {
		if err := f.messages(variant, 3*messagesOut, &sent{}); err != nil {
			t.Fatal(err)
		}
		if err := f.check(); err != nil {
			t.Error(variant, err)
		}
		p := f.out[1][2]
		bytesOf(pagemem.Frag{Page: p.page, Addr: p.addr, Size: uint32(p.size)})[p.size-1]++
		wantMistake(t, "not what was sent", f.check())
		if err := f.drain(); err != nil {
			t.Error(err)
		}
	}
	id, _ := f.pool.Alloc()
	f.frags.Flush()
	wantMistake(t, "under way", closePool(f.pool, f.arena))
	f.pool.Put(id, 1, stranger)
	if err := f.close(); err != nil {
		t.Error(err)
	}
}

// TestCrossMistakes: a page that is lost or doubled ends E5x.
func TestCrossMistakes(t *testing.T) {
	s, err := newCrossSide(2, true, bench.Params{})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.send(context.Background(), 1000); err != nil {
		t.Fatal(err)
	}
	s.pool.Publish()
	if err := s.exact(s.pool.Stats(), 1000); err != nil {
		t.Error(err)
	}
	wantMistake(t, "allocations", s.exact(s.pool.Stats(), 1001))
	st := s.pool.Stats()
	st.Ring--
	wantMistake(t, "came back", s.exact(st, 1000))
	st.RingFull += 2
	wantMistake(t, "came back", s.exact(st, 1000))
	if err := s.close(); err != nil {
		t.Error(err)
	}
}
