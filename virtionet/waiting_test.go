package virtionet

import (
	"sync"
	"testing"
	"time"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/port/echo"
	"github.com/vhostd/vhostd/vhostuser"
)

// pager is a translator that learns a page at a time, of guest addresses.
type pager struct {
	page uint64
	late bool // Want finds that the answer came in the meantime

	mu     sync.Mutex
	table  *guestmem.Table
	known  map[pageKey]bool
	wanted []pageKey
	asked  int

	losePage uint64 // is forgotten when it is looked for the second time after it was learnt
	seen     int
}

type pageKey struct {
	addr  uint64
	write bool
}

func newPager(page uint64) *pager { return &pager{page: page, known: map[pageKey]bool{}} }

// use is for a new memory table.
func (p *pager) use(t *guestmem.Table) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.table = t
}

func (p *pager) key(addr uint64, write bool) pageKey { return pageKey{addr &^ (p.page - 1), write} }

func (p *pager) Translate(addr uint64, write bool) (guestmem.Mapping, guestmem.Outcome) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k := p.key(addr, write)
	host, run := p.table.Lookup(addr, p.page-(addr-k.addr))
	switch {
	case run == 0:
		return guestmem.Mapping{}, guestmem.Unmapped
	case !p.known[k]:
		return guestmem.Mapping{}, guestmem.Missing
	case k.addr == p.losePage:
		if p.seen++; p.seen == 2 {
			p.losePage = 0
			delete(p.known, k)
			return guestmem.Mapping{}, guestmem.Missing
		}
	}
	return guestmem.Mapping{Addr: addr, Size: run, Host: host}, guestmem.Mapped
}

func (p *pager) Want(addr, _ uint64, write bool) (now bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.asked++
	if p.late {
		p.known[p.key(addr, write)] = true
		return true
	}
	p.wanted = append(p.wanted, p.key(addr, write))
	return false
}

// answer learns what is wanted and says whether that was anything.
func (p *pager) answer() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range p.wanted {
		p.known[k] = true
	}
	answered := len(p.wanted) > 0
	p.wanted = nil
	return answered
}

// untilAnswered does f on the worker's thread until no ring waits any more.
func (r *rig) untilAnswered(f func()) {
	for {
		r.loop.Do(f)
		if r.o.via == nil || !r.o.via.answer() {
			return
		}
		r.dev.Retry()
	}
}

// forget has the translator know nothing and the rings relearn it, as a front-end does that invalidates everything.
func (r *rig) forget() {
	r.o.via.forgetAll()
	var live []vhostuser.RingAddrs
	for i := range 2 {
		if r.running[i] {
			live = append(live, r.addrs(r.table, i))
		}
	}
	if err := r.dev.SetMemory(r.table, live); err != nil {
		r.t.Error(err)
	}
}

// TestPairModelMissing has the same outcome as TestPairModel although nothing is known at first and again and again.
func TestPairModelMissing(t *testing.T) { pairModelTest(t, true) }

// TestWaitingRing: a ring whose answer does not come leaves the other one and the worker alone, and can be stopped and started.
func TestWaitingRing(t *testing.T) {
	for _, features := range formats(baseFeatures) {
		p, via := newFakePort(), newPager(4096)
		r := newRig(t, p, rigOptions{features: features, via: via})
		want := plain(60, 1)
		chains := []rxBuffer{r.offer(2000)}
		p.feed(want)
		r.run()
		r.wantReceived(chains, want)

		via.mu.Lock()
		clear(via.known)
		via.known[via.key(r.bufs+1<<16, true)] = true
		via.mu.Unlock()
		r.forgetCursors()
		head := r.send(plain(100, 2)) // waits
		r.kick(1)
		waitFor(t, "a question", func() bool { return len(via.questions()) == 1 })
		r.next = 1 << 16
		chains = []rxBuffer{r.offer(2000)}
		p.feed(want)
		r.kick(0)
		waitFor(t, "a frame beside the ring that waits", r.rx.HasUsed)
		r.wantReceived(chains, want)
		turns := r.idleTurns(t)
		if turns > 5 {
			t.Errorf("the worker made %d turns while a ring waits", turns)
		}
		if r.tx.HasUsed() || len(p.take()) > 0 {
			t.Fatal("a frame was sent from memory that is not known")
		}
		via.answer()
		via.forgetAll()
		r.stop(1) // the answer came and went, nobody retried
		r.start(1)
		r.run()
		r.wantUsed(1, head)
		wantSent(t, p, plain(100, 2))
		r.finishEarly()
	}
}

func (p *pager) questions() []pageKey {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]pageKey(nil), p.wanted...)
}

func (p *pager) forgetAll() {
	p.mu.Lock()
	defer p.mu.Unlock()
	clear(p.known)
}

func (r *rig) forgetCursors() {
	if err := r.dev.SetMemory(r.table, []vhostuser.RingAddrs{r.addrs(r.table, 0), r.addrs(r.table, 1)}); err != nil {
		r.t.Error(err)
	}
}

// idleTurns counts the pair's turns in a moment without traffic.
func (r *rig) idleTurns(t *testing.T) (n int) {
	count := func() (n int) { r.loop.Do(func() { n = r.pair().emptyTurns }); return n }
	time.Sleep(20 * time.Millisecond)
	before := count()
	time.Sleep(50 * time.Millisecond)
	return count() - before
}

// TestWaitingFrameIsKept: a frame for a ring that waits is not taken for one that never fits.
func TestWaitingFrameIsKept(t *testing.T) {
	p, via := newFakePort(), newPager(4096)
	r := newRig(t, p, rigOptions{features: baseFeatures, via: via})
	chains := []rxBuffer{r.offer(2000)}
	p.feed(plain(60, 1))
	waitFor(t, "a question", func() bool { return len(via.questions()) == 1 })
	time.Sleep(stuckFrame + 100*time.Millisecond)
	if !untouched(r.content(chains[0])) {
		t.Error("the buffer was written to")
	}
	r.run()
	r.wantReceived(chains, plain(60, 1))
	r.wantDrops(0, nil)
}

// TestMissingInsideAFrame: a frame over many chains waits until the last of them is known, and nothing of it is written
// before, with few chains and with more than a batch.
func TestMissingInsideAFrame(t *testing.T) {
	for _, features := range formats(baseFeatures) {
		for _, size := range []int{1000, 9000, 60000} {
			p, via := newFakePort(), newPager(1024)
			r := newRig(t, p, rigOptions{features: features, via: via})
			var chains []rxBuffer
			for range size/1024 + 2 {
				chains = append(chains, r.offer(1024))
			}
			p.feed(plain(size, 3))
			for questions := 0; ; questions++ {
				r.loop.Do(func() {
					for r.pair().Run() {
					}
				})
				if r.rx.HasUsed() {
					r.wantReceived(chains, plain(size, 3))
					break
				}
				for i, c := range chains {
					if !untouched(r.content(c)) {
						t.Fatalf("%d bytes: buffer %d was written to although another is not known", size, i)
					}
				}
				if !via.answer() || questions > 200 {
					t.Fatalf("%d bytes: no frame, no question after %d", size, questions)
				}
				r.dev.Retry()
			}
			r.wantDrops(0, nil)
			r.finishEarly()
		}
	}
}

// TestMissingWhileCopying takes a page away between the two passes over the chains of a large frame.
func TestMissingWhileCopying(t *testing.T) {
	for _, features := range formats(baseFeatures) {
		p, via := newFakePort(), newPager(1024)
		r := newRig(t, p, rigOptions{features: features, via: via})
		r.next = 0
		var chains []rxBuffer
		for range 50 {
			chains = append(chains, r.offer(1024))
		}
		p.feed(plain(40000, 2))
		via.mu.Lock()
		via.losePage = r.bufs + 35*1024
		via.mu.Unlock()
		r.run()
		r.wantReceived(chains, plain(40000, 2))
		r.wantDrops(0, nil)
		if via.losePage != 0 {
			t.Error("no page was taken away")
		}
		r.finishEarly()
	}
}

// TestLateAnswers finds what was missing as soon as it asks.
func TestLateAnswers(t *testing.T) {
	via := newPager(4096)
	via.late = true
	r := newRig(t, must(echo.New(echo.Options{})), rigOptions{features: baseFeatures, via: via})
	var chains []rxBuffer
	for range 4 {
		chains = append(chains, r.offer(2000))
		r.kick(0)
	}
	for i := range 4 {
		r.send(plain(60, i))
		r.kick(1)
	}
	waitFor(t, "frames", func() bool { return r.done(0) == 4 })
	for i := range 4 {
		f, _, rest := r.received(chains)
		if len(f.data) != 60 {
			t.Errorf("frame %d has %d bytes", i, len(f.data))
		}
		chains = rest
	}
	via.mu.Lock()
	defer via.mu.Unlock()
	if via.asked == 0 {
		t.Error("nothing was missing")
	}
}
