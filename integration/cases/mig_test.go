package cases

import (
	"testing"
	"time"

	"github.com/vhostd/vhostd/vhostuser/frontend"
	"github.com/vhostd/vhostd/virtio"
)

// echoed sends n frames one after the other through the echo network.
func echoed(t *testing.T, p *frontend.Pair, n int) {
	t.Helper()
	for i := range n {
		if _, err := p.PostRx(1); err != nil {
			t.Fatal(err)
		}
		want := numbered(uint64(i))
		must(t, p.SendTx(virtio.NetHdr{}, want, frontend.Direct))
		expect(t, p, want)
	}
	must(t, p.DrainTx(patience))
}

// stopped demands both positions, twice, and that they are the used indexes.
func stopped(t *testing.T, c *frontend.Conn, p *frontend.Pair, want uint32) {
	t.Helper()
	for range 2 {
		for _, q := range []*frontend.Queue{p.RX, p.TX} {
			got, err := c.GetVringBase(q.Index)
			must(t, err)
			if got != want || uint32(q.Ring.PeekUsedIdx()) != want {
				t.Errorf("ring %d: position %#x, used index %#x, want %#x", q.Index, got, q.Ring.PeekUsedIdx(), want)
			}
		}
	}
}

// TestMIG01_PositionAndRest: GET_VRING_BASE answers the index of the next chain, however often, and from then on the ring is left
// alone until it is started again.
func TestMIG01_PositionAndRest(t *testing.T) {
	d := serve(t, "echo")
	mem := memory(t)
	c := d.session(mem, plain)
	p := detached(t, mem, 0, plain)
	steps(t, rings(c, p), on(c, 0, 1))
	const frames = 700
	echoed(t, p, frames)
	stopped(t, c, p, frames)
	drainEvents(t, p)
	_, err := p.PostRx(1)
	must(t, err)
	want := frameOf(60, 7)
	must(t, p.SendTx(virtio.NetHdr{}, want, frontend.Direct))
	must(t, p.TX.Kick())
	must(t, p.RX.Kick())
	must(t, enable(c, true, 0, 1))
	nothing(t, p.TX)
	nothing(t, p.RX)
	for _, q := range []*frontend.Queue{p.RX, p.TX} {
		if n := signals(t, q.CallFD); n != 0 {
			t.Errorf("ring %d: %d signals while stopped", q.Index, n)
		}
	}
	stopped(t, c, p, frames)
	for _, q := range []*frontend.Queue{p.RX, p.TX} {
		must(t, setRing(c, q, frames))
	}
	must(t, enable(c, true, 0, 1))
	expect(t, p, want)
	must(t, p.DrainTx(patience))
	if rx, tx := p.RX.Ring.PeekUsedIdx(), p.TX.Ring.PeekUsedIdx(); rx != frames+1 || tx != frames+1 {
		t.Errorf("used indexes %d and %d after one more frame, want %d", rx, tx, frames+1)
	}
	flows(t, p)
}

// TestMIG01_StopUnderTraffic: the position is exact whenever the stop comes, so that another program can go on from it.
func TestMIG01_StopUnderTraffic(t *testing.T) {
	for name, flags := range map[string][]string{
		"adaptive": nil, "block": {"--wake", "block"}, "completions held back": {"--wake", "poll", "--tx-lag", "64"},
	} {
		t.Run(name, func(t *testing.T) {
			d := serve(t, "null", flags...)
			mem := memory(t)
			c := d.session(mem, plain)
			p := detached(t, mem, 0, plain)
			steps(t, rings(c, p), on(c, 0, 1))
			for round := range rounds(50, 500) {
				for i := range 64 + round%64 {
					must(t, p.Stage(virtio.NetHdr{}, frameOf(60, byte(i)), frontend.Direct))
				}
				must(t, p.TX.Flush())
				base, err := c.GetVringBase(1)
				must(t, err)
				if used := uint32(p.TX.Ring.PeekUsedIdx()); base != used {
					t.Fatalf("round %d: position %d, used index %d", round, base, used)
				}
				must(t, setRing(c, p.TX, base))
				must(t, p.DrainTx(patience))
			}
			want := uint64(p.TX.Ring.AvailIdx())
			eventually(t, "every frame reached the network once", func() bool { return d.ring(1).Packets == want })
		})
	}
}

// TestMIG08_UsedIndexIsSettledLate: the used index is taken from memory when the ring first runs, whether the driver zeroed the ring
// before its addresses arrived, after, or not at all.
func TestMIG08_UsedIndexIsSettledLate(t *testing.T) {
	const life = 500
	for name, next := range map[string]struct {
		reset       func(p *frontend.Pair)
		late        bool // the ring is zeroed only when it was started
		base, start uint16
	}{
		"a zeroed before the addresses":  {reset: zero},
		"b zeroed before the first kick": {reset: zero, late: true},
		"c resumed":                      {reset: func(*frontend.Pair) {}, base: life, start: life},
		"base 0 although used, as DPDK":  {reset: func(*frontend.Pair) {}, start: life},
	} {
		t.Run(name, func(t *testing.T) {
			d := serve(t, "echo")
			mem := memory(t)
			c := d.session(mem, plain)
			p := detached(t, mem, 0, plain)
			steps(t, rings(c, p), on(c, 0, 1))
			echoed(t, p, life)
			stopped(t, c, p, life)
			if !next.late {
				next.reset(p)
			}
			for _, q := range []*frontend.Queue{p.RX, p.TX} {
				must(t, setRing(c, q, uint32(next.base)))
			}
			if next.late {
				time.Sleep(quiet) // a driver does not zero a ring that a device looks at
				next.reset(p)
			}
			echoed(t, p, 1)
			for _, q := range []*frontend.Queue{p.RX, p.TX} {
				if idx := q.Ring.PeekUsedIdx(); idx != next.start+1 {
					t.Errorf("ring %d: used index %d, want %d", q.Index, idx, next.start+1)
				}
			}
			echoed(t, p, 300)
		})
	}
}

func zero(p *frontend.Pair) {
	p.RX.Ring.Reset(0)
	p.TX.Ring.Reset(0)
}
