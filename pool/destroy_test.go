package pool

import (
	"bytes"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vhostd/vhostd/pagemem"
)

func isDone(p *Pool) bool {
	select {
	case <-p.Done():
		return true
	default:
		return false
	}
}

func TestDestroyIdle(t *testing.T) {
	a := newArena(t, 256, 0)
	p := newPool(t, Config{Arena: a})
	id := mustAlloc(t, p)
	p.Put(id, 1, me)
	id = mustAlloc(t, p)
	p.Put(id, 1, other)
	id, _, _, _ = p.AllocFrag(512)
	p.Put(id, 1, me)
	p.Destroy()
	if !isDone(p) || a.InUse() != 0 || p.InFlight() != 0 {
		t.Fatalf("done %v, %d in use, %d in flight", isDone(p), a.InUse(), p.InFlight())
	}
	p.Destroy()
	if _, ok := p.Alloc(); ok {
		t.Error("a destroyed pool gave a page")
	}
	if _, _, _, ok := p.AllocFrag(100); ok {
		t.Error("a destroyed pool gave a fragment")
	}
}

// TestDestroyOutstanding: pages with packets come home later, from anybody, and
// the owner's no longer go to the cache.
func TestDestroyOutstanding(t *testing.T) {
	a := newArena(t, 256, 0)
	p := newPool(t, Config{Arena: a})
	ids := make([]pagemem.PageID, 5)
	p.AllocN(ids)
	frag, _, _, _ := p.AllocFrag(512)
	p.Destroy()
	if isDone(p) || p.InFlight() != 6 || a.InUse() != 6 {
		t.Fatalf("done %v, %d in flight, %d in use", isDone(p), p.InFlight(), a.InUse())
	}
	a.Release(ids[0], 1, me)
	a.Release(ids[1], 1, other)
	p.PutBulk(ids[2:], me)
	if a.InUse() != 1 || isDone(p) {
		t.Fatalf("%d in use, done %v", a.InUse(), isDone(p))
	}
	a.Release(frag, 1, 0)
	waitDone(t, p)
	if a.InUse() != 0 {
		t.Errorf("%d pages in use", a.InUse())
	}
}

func waitDone(t *testing.T, p *Pool) {
	t.Helper()
	select {
	case <-p.Done():
	case <-time.After(5 * time.Second):
		t.Fatalf("still %d in flight", p.InFlight())
	}
}

// TestDestroyOvertakesProducer: a page that reaches the ring after Destroy has
// emptied it is found by the timer.
func TestDestroyOvertakesProducer(t *testing.T) {
	a := newArena(t, 64, 0)
	p := newPool(t, Config{Arena: a})
	p.reapEvery = 10 * time.Millisecond
	id := mustAlloc(t, p)
	p.Destroy()
	p.ring.push([]pagemem.PageID{id}) // what a producer does that saw the pool alive
	waitDone(t, p)
}

func TestDestroyWarns(t *testing.T) {
	var out lockedBuffer
	a := newArena(t, 64, 0)
	p := newPool(t, Config{Arena: a, Logger: slog.New(slog.NewTextHandler(&out, nil))})
	p.reapEvery, p.warnEvery = 5*time.Millisecond, 20*time.Millisecond
	id := mustAlloc(t, p)
	p.Destroy()
	deadline := time.Now().Add(5 * time.Second)
	for !strings.Contains(out.String(), "in_flight=1") && time.Now().Before(deadline) {
		time.Sleep(5 * time.Millisecond)
	}
	a.Release(id, 1, other)
	waitDone(t, p)
	if !strings.Contains(out.String(), "in_flight=1") {
		t.Errorf("log: %q", out.String())
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// TestManyLives makes and destroys pools with packets out, as connections do.
func TestManyLives(t *testing.T) {
	a := newArena(t, 512, 0)
	for range 1000 {
		p, err := New(Config{Arena: a, Owner: me, RingSize: 16})
		if err != nil {
			t.Fatal(err)
		}
		ids := make([]pagemem.PageID, 10)
		p.AllocN(ids)
		p.Destroy()
		for _, id := range ids {
			a.Release(id, 1, other)
		}
		waitDone(t, p)
	}
	if a.InUse() != 0 {
		t.Errorf("%d pages in use", a.InUse())
	}
}
