package vswitch

import (
	"bytes"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"

	"github.com/vhostd/vhostd/packet"
	"github.com/vhostd/vhostd/pagemem"
	"github.com/vhostd/vhostd/port"
	"github.com/vhostd/vhostd/port/internal/waiting"
	"github.com/vhostd/vhostd/port/porttest"
	"github.com/vhostd/vhostd/virtio"
)

// TestInboxModel compares an inbox with a slice.
func TestInboxModel(t *testing.T) {
	rig := porttest.NewRig(t)
	rapid.Check(t, func(rt *rapid.T) {
		const size = 8
		var lost atomic.Uint64
		a := waiting.Account{Budget: new(Budget)}
		b, err := newInbox(size, &a, rig.Arena, &lost)
		if err != nil {
			rt.Fatal(err)
		}
		var model []uint16
		var from []uint8 // whom the packets of the model are from
		next := uint16(0)
		rt.Repeat(map[string]func(*rapid.T){
			"push": func(rt *rapid.T) {
				pkts := make([]packet.Packet, rapid.IntRange(1, size+3).Draw(rt, "n"))
				src := uint8(rapid.IntRange(0, 2).Draw(rt, "source"))
				want := min(len(pkts), size-len(model))
				for i := range pkts {
					next++
					pkts[i] = rig.Packet(t, porttest.Frame(20, 0), 2+int(next)%19)
					pkts[i].Hdr.GSOSize = next
					if i < want {
						model, from = append(model, next), append(from, src)
					}
				}
				if n, closed := b.push(pkts, src, 0); n != want || closed {
					rt.Fatalf("push = %d, %v, want %d", n, closed, want)
				}
				rig.Release(pkts[want:])
			},
			"pop": func(rt *rapid.T) {
				pkts := make([]packet.Packet, rapid.IntRange(0, size+3).Draw(rt, "n"))
				n := b.pop(pkts)
				if want := min(len(pkts), len(model)); n != want {
					rt.Fatalf("pop = %d, want %d", n, want)
				}
				for i := range pkts[:n] {
					if pkts[i].Hdr.GSOSize != model[i] || !pkts[i].LenCheck() {
						rt.Fatalf("packet %d instead of %d", pkts[i].Hdr.GSOSize, model[i])
					}
				}
				rig.Release(pkts[:n])
				model, from = model[n:], from[n:]
			},
			"": func(rt *rapid.T) {
				if b.empty() != (len(model) == 0) || b.length() != len(model) {
					rt.Fatalf("empty %v, length %d, want %d", b.empty(), b.length(), len(model))
				}
				for src := range uint8(3) {
					own := bytes.Count(from, []byte{src})
					if held := b.shares[src].Load(); int(held) != own {
						rt.Fatalf("%d packets of source %d, want %d", held, src, own)
					}
					// As much as fits so that it holds at most three times what is free.
					n := b.room(src)
					if fits := func(n int) bool { return own+n <= 3*(size-len(model)-n) }; n > 0 && !fits(n) || fits(n+1) {
						rt.Fatalf("room for %d of source %d, which has %d of %d in %d", n, src, own, len(model), size)
					}
				}
				if held := a.Held(); held != int64(len(model))*(20+waiting.FrameCost) || held != a.Budget.Held() {
					rt.Fatalf("%d and %d bytes charged for %d frames", held, a.Budget.Held(), len(model))
				}
			},
		})
		if err := b.close(0); err != nil {
			rt.Fatal(err)
		}
		if lost.Load() != uint64(len(model)) || a.Held() != 0 {
			rt.Fatalf("%d lost at the end, want %d", lost.Load(), len(model))
		}
		if n, closed := b.push(make([]packet.Packet, 1), 0, 0); n != 0 || !closed {
			rt.Fatal("a closed inbox takes packets")
		}
	})
}

// TestInboxConcurrent: with several producers every packet arrives once and each one's in order; when the consumer closes in the middle,
// what was taken is released by somebody.
func TestInboxConcurrent(t *testing.T) {
	rig := porttest.NewRig(t)
	const producers, each = 4, 5000
	for _, until := range []int{producers * each, 1000, 0} {
		var lost atomic.Uint64
		var taken atomic.Int64
		a := waiting.Account{Budget: new(Budget)}
		b, err := newInbox(256, &a, rig.Arena, &lost)
		if err != nil {
			t.Fatal(err)
		}
		page, _ := rig.Arena.Alloc(0, pagemem.NoReserve)
		var senders sync.WaitGroup
		for p := range producers {
			senders.Go(func() { taken.Add(int64(produce(b, rig.Arena, page, uint8(p), each))) })
		}
		got := consume(t, b, rig, until)
		if err := b.close(0); err != nil {
			t.Error(err)
		}
		senders.Wait()
		if n := int64(got) + int64(lost.Load()); n != taken.Load() {
			t.Errorf("%d packets taken, %d came out", taken.Load(), n)
		}
		if n := rig.Arena.RefCount(page); n != 1 || a.Held() != 0 {
			t.Errorf("%d references left, %d bytes charged", n-1, a.Held())
		}
		rig.Arena.Unref(page, 1)
	}
}

// produce pushes packets in batches of changing sizes and returns how many were taken until the inbox was closed.
func produce(b *inbox, a *pagemem.Arena, page pagemem.PageID, who uint8, n int) (taken int) {
	var pkts [port.MaxBatch]packet.Packet
	for taken < n {
		batch := pkts[:min(1+taken%37, n-taken)]
		for i := range batch {
			batch[i].Reset()
			batch[i].Hdr = virtio.NetHdr{Flags: who, GSOSize: uint16(taken + i)}
			batch[i].Append(packet.Frag{Addr: a.Addr(page), Len: 60, Page: page})
		}
		a.Retain(page, len(batch))
		k, closed := b.push(batch, who, 0)
		packet.Release(a, batch[k:], 0)
		taken += k
		if closed {
			return taken
		}
		if k == 0 {
			runtime.Gosched()
		}
	}
	return taken
}

// consume pops n packets.
func consume(t *testing.T, b *inbox, rig *porttest.Rig, n int) (got int) {
	next := map[uint8]uint16{}
	var pkts [port.MaxBatch]packet.Packet
	for got < n {
		k := b.pop(pkts[:min(len(pkts), n-got)])
		for i := range pkts[:k] {
			if h := pkts[i].Hdr; h.GSOSize != next[h.Flags] {
				t.Fatalf("producer %d: packet %d, want %d", h.Flags, h.GSOSize, next[h.Flags])
			}
			next[pkts[i].Hdr.Flags]++
		}
		rig.Release(pkts[:k])
		got += k
		if k == 0 {
			runtime.Gosched()
		}
	}
	return got
}
