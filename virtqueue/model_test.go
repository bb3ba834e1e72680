package virtqueue_test

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/guestmem"
	"github.com/vhostd/vhostd/virtio"
	"github.com/vhostd/vhostd/virtqueue"
	"github.com/vhostd/vhostd/virtqueue/driver"
)

// refChain is a chain as the model knows it.
type refChain struct {
	head    uint16
	place   uint16 // AvailIdx where it was added
	descs   int
	spans   []span
	fault   virtqueue.Fault
	written uint32
}

// model is a plain reference of a ring of either format: each list holds the
// chains in one state, oldest first, and a chain only ever moves on by one list,
// or back to available. Positions count without end, from the beginning of a
// lap of a packed ring with wrap counter 1.
type model struct {
	*sides
	packed, event, inOrder bool
	size                   int

	added     []refChain // by the driver, not published
	available []refChain // published, not peeked
	peeked    []refChain
	completed []refChain // staged by the device
	shown     []refChain // published by the device, not taken
	consumed  int        // position behind the last chain shown
	seen      int        // how many of available were delivered before
	called    bool       // NeedsCall has compared events in this life
	asked     int        // consumed at the last NeedsCall
	tables    int
}

// units is how far a chain moves the ring on.
func (m *model) units(c refChain) int {
	if m.packed {
		return c.descs
	}
	return 1
}

// word is a position as the ring says it.
func (m *model) word(position int) uint16 {
	if m.packed {
		return uint16(position%m.size) | uint16(position/m.size+1)&1<<15
	}
	return uint16(position)
}

// TestModel plays random actions of driver and device, legal and illegal ones.
func TestModel(t *testing.T) {
	t.Run("split", func(t *testing.T) { rapid.Check(t, func(rt *rapid.T) { playModel(t, rt, false) }) })
	t.Run("packed", func(t *testing.T) { rapid.Check(t, func(rt *rapid.T) { playModel(t, rt, true) }) })
}

func playModel(t *testing.T, rt *rapid.T, isPacked bool) {
	m := &model{packed: isPacked, event: rapid.Bool().Draw(rt, "event_idx"), inOrder: rapid.Bool().Draw(rt, "in_order")}
	o := rigOptions{rx: rapid.Bool().Draw(rt, "rx"), regions: chainRegions}
	for f, on := range map[virtio.Features]bool{
		packed: m.packed, eventIdx: m.event, virtio.FInOrder: m.inOrder, ind: rapid.Bool().Draw(rt, "indirect"),
	} {
		if on {
			o.features |= f
		}
	}
	sizes := []int{1, 2, 8, 64}
	if m.packed {
		sizes = []int{1, 2, 3, 7, 50}
	}
	o.size = rapid.SampledFrom(sizes).Draw(rt, "size")
	m.size = o.size
	m.sides = newSides(t, o)
	defer m.mem.Close()
	m.reset(rt)
	rt.Repeat(map[string]func(*rapid.T){
		"add":      m.add,
		"publish":  m.publish,
		"fill":     m.fill,
		"reuse":    m.reuse,
		"unfill":   m.unfill,
		"complete": m.complete,
		"show":     m.show,
		"take":     m.take,
		"arm":      m.arm,
		"serve":    m.serveSome,
		"restart":  sometimes(m.restart),
		"break":    sometimes(m.breakRing),
		"":         m.check,
	})
}

// sometimes makes an action rarer, so that what it ends may last.
func sometimes(action func(*rapid.T)) func(*rapid.T) {
	return func(rt *rapid.T) {
		if rapid.IntRange(0, 4).Draw(rt, "whether") == 0 {
			action(rt)
		}
	}
}

// serveSome is a short way of a chain from the driver and back.
func (m *model) serveSome(rt *rapid.T) {
	for _, action := range []func(*rapid.T){m.add, m.add, m.publish, m.fill, m.complete, m.show, m.take} {
		action(rt)
	}
}

// reset begins anew somewhere.
func (m *model) reset(rt *rapid.T) {
	start := rapid.SampledFrom([]int{0, 65500, 32760}).Draw(rt, "start")
	if m.packed {
		start = rapid.IntRange(0, 2*m.size-1).Draw(rt, "start of laps")
	}
	m.added, m.available, m.peeked, m.completed, m.shown = nil, nil, nil, nil, nil
	m.consumed = start
	m.drv.Reset(m.word(start))
	m.live(rt, virtqueue.Position(m.word(start)))
}

// live begins a life of the device side.
func (m *model) live(rt *rapid.T, base virtqueue.Position) {
	if m.packed && base>>16 == 0 {
		base |= base << 16
	}
	m.cfg.Base = base
	dev, err := virtqueue.New(m.cfg)
	if err != nil {
		rt.Fatal(err)
	}
	m.dev, m.called, m.asked, m.seen = dev, false, m.consumed, 0
}

func (m *model) publish(rt *rapid.T) {
	if got := m.drv.Publish(); got != len(m.added) {
		rt.Fatalf("driver published %d, want %d", got, len(m.added))
	}
	m.available = append(m.available, m.added...)
	m.added = nil
}

func (m *model) fill(rt *rapid.T) {
	limit := rapid.IntRange(0, 40).Draw(rt, "max")
	n, err := m.deliver(rt, limit)
	want := min(limit, len(m.available)+n, virtqueue.MaxBatch)
	// A split ring may deliver fewer while the index that it knows of has entries.
	if err != nil || n > want || (n == 0) != (want == 0) || m.packed && n != want {
		rt.Fatalf("Fill(%d) = %d, %v, want %d", limit, n, err, want)
	}
}

// deliver fills a batch and compares it with what is available.
func (m *model) deliver(rt *rapid.T, limit int) (n int, err error) {
	m.b.Reset()
	n, err = m.dev.Fill(m.b, limit)
	if n > len(m.available) || n != m.b.N {
		rt.Fatalf("Fill(%d) = %d of %d, batch has %d", limit, n, len(m.available), m.b.N)
	}
	for i, c := range m.available[:n] {
		got := m.b.Chains[i]
		if got.Head != c.head || got.Fault != c.fault || got.Written != 0 || m.packed && int(got.Descs) != c.descs {
			rt.Fatalf("chain %+v, want %+v", got, c)
		}
		if diff := cmp.Diff(c.spans, gpaSpans(m.mem, m.b, i), cmp.AllowUnexported(span{})); diff != "" {
			rt.Fatalf("segments (-want +got):\n%s", diff)
		}
	}
	m.peeked = append(m.peeked, m.available[:n]...)
	m.available = m.available[n:]
	m.seen = max(m.seen-n, 0)
	return n, err
}

// gpaSpans is spans without complaints.
func gpaSpans(mem *guestmem.Table, b *virtqueue.Batch, i int) (spans []span) {
	for _, s := range b.ChainSegs(i) {
		for _, reg := range mem.Regions() {
			base, _ := mem.Lookup(reg.GPA, 1)
			if off := uint64(s.Host - base); off < reg.Size {
				spans = append(spans, span{reg.GPA + off, s.Len})
			}
		}
	}
	return spans
}

func (m *model) unfill(rt *rapid.T) {
	n := rapid.IntRange(0, len(m.peeked)).Draw(rt, "n")
	m.dev.Unfill(n)
	cut := len(m.peeked) - n
	m.available = append(append([]refChain{}, m.peeked[cut:]...), m.available...)
	m.peeked = m.peeked[:cut]
	m.seen += n
}

func (m *model) complete(rt *rapid.T) {
	n := rapid.IntRange(0, min(len(m.peeked), virtqueue.MaxBatch)).Draw(rt, "n")
	if rapid.Bool().Draw(rt, "batch") {
		var b virtqueue.Batch
		for i, c := range m.peeked[:n] {
			b.Chains[i] = virtqueue.Chain{Head: c.head, Written: c.written}
		}
		m.dev.CompleteBatch(&b, 0, n)
	} else {
		for _, c := range m.peeked[:n] {
			m.dev.Complete(c.head, c.written)
		}
	}
	m.completed = append(m.completed, m.peeked[:n]...)
	m.peeked = m.peeked[n:]
}

func (m *model) show(rt *rapid.T) {
	m.showSome(rt, rapid.IntRange(0, 10).Draw(rt, "lag"))
	want := m.wantsCall(rt)
	m.asked = m.consumed
	if got := m.dev.NeedsCall(); got != want {
		rt.Fatalf("NeedsCall = %v, want %v", got, want)
	}
}

// wantsCall lets the driver ask for calls, also with what makes no sense (C61), and reports whether it is to be called.
func (m *model) wantsCall(rt *rapid.T) bool {
	event := m.word(max(m.asked+rapid.IntRange(-1, m.consumed-m.asked+1).Draw(rt, "event"), 0))
	if rapid.IntRange(0, 9).Draw(rt, "garbage") == 0 {
		event = rapid.Uint16().Draw(rt, "any event")
	}
	flags := rapid.Uint16Range(0, 3).Draw(rt, "flags")
	byEvent := m.event
	switch r := m.drv.(type) {
	case *driver.Ring:
		r.PokeUsedEvent(event)
		r.PokeAvailFlags(flags)
		if !byEvent && flags&1 != 0 || m.consumed == m.asked {
			return false
		}
	case *driver.PackedRing:
		r.PokeDriverEvent(event, flags)
		if flags == driver.EventDisable || m.consumed == m.asked {
			return false
		}
		byEvent = byEvent && flags == driver.EventDesc
	}
	if !byEvent {
		return true
	}
	want := !m.called || m.packed && m.consumed-m.asked >= m.size
	for i := m.asked; i != m.consumed; i++ {
		want = want || m.word(i) == event
	}
	m.called = true
	return want
}

func (m *model) showSome(rt *rapid.T, lag int) {
	n := max(len(m.completed)-lag, 0)
	if got := m.dev.Publish(lag); got != n {
		rt.Fatalf("Publish(%d) = %d, want %d", lag, got, n)
	}
	for _, c := range m.completed[:n] {
		m.consumed += m.units(c)
	}
	m.shown = append(m.shown, m.completed[:n]...)
	m.completed = m.completed[n:]
}

func (m *model) take(rt *rapid.T) {
	for _, c := range m.shown {
		want := c.written
		if m.inOrder && !m.cfg.DeviceWrites {
			want = 0
		}
		head, n, ok := m.drv.GetUsed()
		if !ok || head != c.head || n != want {
			rt.Fatalf("used head %d, %d bytes, %v, want %+v; %v", head, n, ok, c, m.drv.Err())
		}
	}
	m.shown = nil
	if _, _, ok := m.drv.GetUsed(); ok || m.drv.Err() != nil {
		rt.Fatalf("used a chain too many, or %v", m.drv.Err())
	}
}

func (m *model) arm(rt *rapid.T) {
	if got := m.dev.EnableKicks(); got != (len(m.available) > 0) {
		rt.Fatalf("EnableKicks = %v with %d available", got, len(m.available))
	}
	if got := m.dev.EnableKicksForMore(); got != (len(m.available) > m.seen) {
		rt.Fatalf("EnableKicksForMore = %v with %d available, %d seen", got, len(m.available), m.seen)
	}
	m.dev.DisableKicks()
}

// restart ends the device's life without a word, or as GET_VRING_BASE does.
// What was not published is delivered again.
func (m *model) restart(rt *rapid.T) {
	if rapid.Bool().Draw(rt, "drained") {
		m.dev.Unfill(len(m.peeked))
		m.available, m.peeked = append(m.peeked, m.available...), nil
		m.showSome(rt, 0)
	}
	m.available = append(append(m.completed, m.peeked...), m.available...)
	m.completed, m.peeked = nil, nil
	// What the front-end knows of the available position does not matter.
	base := virtqueue.Position(rapid.SampledFrom([]uint16{m.word(m.consumed), m.drv.AvailIdx()}).Draw(rt, "base"))
	if m.packed {
		base |= virtqueue.Position(m.word(m.consumed)) << 16
		if base>>16 == 0 {
			base = 0
		}
	}
	m.live(rt, base)
}

func (m *model) check(rt *rapid.T) {
	if got := m.dev.Staged(); got != len(m.completed) {
		rt.Fatalf("Staged = %d, want %d", got, len(m.completed))
	}
	if got := m.dev.Empty(); got != (len(m.available) == 0) {
		rt.Fatalf("Empty = %v with %d available", got, len(m.available))
	}
	if got := m.dev.MoreAvailable(); got != (len(m.available) > m.seen) {
		rt.Fatalf("MoreAvailable = %v with %d available, %d seen", got, len(m.available), m.seen)
	}
	want := virtqueue.Position(m.word(m.consumed))
	if m.packed {
		want |= want << 16
	} else {
		want = virtqueue.Position(m.word(m.consumed + len(m.completed)))
		if got := m.drv.(*driver.Ring).PeekUsedIdx(); got != m.word(m.consumed) {
			rt.Fatalf("used index %d in memory, want %d", got, m.word(m.consumed))
		}
	}
	if got := m.dev.Position(); got != want {
		rt.Fatalf("Position = %#x, want %#x", got, want)
	}
	if n := len(m.added) + len(m.available) + len(m.peeked) + len(m.completed) + len(m.shown); m.drv.Outstanding() != n {
		rt.Fatalf("driver has %d chains outstanding, want %d", m.drv.Outstanding(), n)
	}
	if got := m.drv.HasUsed(); got != (len(m.shown) > 0) {
		rt.Fatalf("HasUsed = %v with %d used", got, len(m.shown))
	}
}

// broken demands that Fill finds the ring broken once it has delivered what was before, and finds it again.
func (m *model) broken(rt *rapid.T, what string) {
	for found := 0; found < 2; {
		n, err := m.deliver(rt, virtqueue.MaxBatch)
		var broken *virtqueue.BrokenError
		switch {
		case n == 0 && errors.As(err, &broken):
			found++
		case n == 0 || err != nil:
			rt.Fatalf("%s: Fill = %d, %v", what, n, err)
		}
	}
}
