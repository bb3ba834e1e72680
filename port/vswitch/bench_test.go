package vswitch

import (
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
)

const batch = 32

// load fills a batch with frames of the given size that share a page, as a sender's page-frag cache packs them.
func load(g *segment, page pagemem.PageID, pkts []packet.Packet, size uint32) {
	for i := range pkts {
		pkts[i].Reset()
		pkts[i].Append(packet.Frag{Addr: g.rig.Arena.Addr(page), Len: size, Page: page})
	}
	g.rig.Arena.Retain(page, len(pkts))
}

// newPage is a page with a header from a to dst.
func (g *segment) newPage(t testing.TB, f []byte) pagemem.PageID {
	page, ok := g.rig.Arena.Alloc(0, pagemem.NoReserve)
	if !ok {
		t.Fatal("no page")
	}
	frag := packet.Frag{Addr: g.rig.Arena.Addr(page), Len: pagemem.PageSize, Page: page}
	copy(frag.Bytes(), f)
	t.Cleanup(func() { g.rig.Arena.Unref(page, 1) })
	return page
}

func TestNoAllocations(t *testing.T) {
	for name, dst := range map[string][]byte{"learnt": mac(2), "group": broadcast, "several queues": mac(3)} {
		t.Run(name, func(t *testing.T) {
			g := newSegment(t, Options{})
			g.budget.SetLimit(1 << 40)
			a := g.guest(t, 1, PortOptions{})
			others := []*guest{g.guest(t, 1, PortOptions{MAC: mac(2)}), g.guest(t, 3, PortOptions{MAC: mac(3)})}
			page := g.newPage(t, udp(dst, mac(1), 1))
			var out, in [batch]packet.Packet
			allocations := testing.AllocsPerRun(100, func() {
				load(g, page, out[:], 64)
				a.queues[0].Send(out[:])
				for _, o := range others {
					for _, q := range o.queues {
						g.rig.Release(in[:q.Recv(in[:])])
						q.Arm()
					}
				}
			})
			if allocations != 0 {
				t.Errorf("%v allocations a batch", allocations)
			}
		})
	}
}

// BenchmarkTwoPorts moves batches from one port to another, both on the same thread or each on its own.
func BenchmarkTwoPorts(b *testing.B) {
	for _, size := range []uint32{64, 1500} {
		b.Run(fmt.Sprintf("same/%d", size), func(b *testing.B) {
			g, a, c, page := benchRig(b)
			var out, in [batch]packet.Packet
			for n := 0; n < b.N; n += batch {
				load(g, page, out[:], size)
				a.Send(out[:])
				g.rig.Release(in[:c.Recv(in[:])])
			}
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pps")
		})
		b.Run(fmt.Sprintf("two/%d", size), func(b *testing.B) {
			g, a, c, page := benchRig(b)
			var receiver sync.WaitGroup
			receiver.Go(func() { receiveAll(g, c, b.N) })
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			var out [batch]packet.Packet
			for n := 0; n < b.N; n += batch {
				for c.(*queue).inbox.length() > DefaultBacklog-batch { // nothing is lost
					runtime.Gosched()
				}
				k := min(batch, b.N-n)
				load(g, page, out[:k], size)
				a.Send(out[:k])
			}
			receiver.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pps")
		})
	}
}

func receiveAll(g *segment, q port.Queue, n int) {
	runtime.LockOSThread()
	var in [batch]packet.Packet
	for n > 0 {
		k := q.Recv(in[:])
		g.rig.Release(in[:k])
		if n -= k; k == 0 {
			runtime.Gosched()
		}
	}
}

func benchRig(b *testing.B) (g *segment, from, to port.Queue, page pagemem.PageID) {
	g = newSegment(b, Options{})
	g.budget.SetLimit(1 << 40)
	from, to = g.guest(b, 1, PortOptions{}).queues[0], g.guest(b, 1, PortOptions{MAC: mac(2)}).queues[0]
	return g, from, to, g.newPage(b, udp(mac(2), mac(1), 1))
}

// BenchmarkBroadcast gives each frame to seven others.
func BenchmarkBroadcast(b *testing.B) {
	g := newSegment(b, Options{})
	g.budget.SetLimit(1 << 40)
	a := g.guest(b, 1, PortOptions{})
	var others []port.Queue
	for range 7 {
		others = append(others, g.guest(b, 1, PortOptions{}).queues[0])
	}
	page := g.newPage(b, udp(broadcast, mac(1), 1))
	var out, in [batch]packet.Packet
	for n := 0; n < b.N; n += batch {
		g.now++ // no flood limit
		load(g, page, out[:], 64)
		a.queues[0].Send(out[:])
		for _, q := range others {
			g.rig.Release(in[:q.Recv(in[:])])
		}
	}
}
